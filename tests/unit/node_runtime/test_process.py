"""The life of a process, in real processes: ready, signals, grace, exit codes, the parent's death."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node_runtime.errors import EXIT_CHECK_FAILED, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNAVAILABLE, EXIT_USAGE
from node_runtime.process import Lifetime
from node_runtime.runtime_settings import RuntimeSettings

PRELUDE = """
import asyncio, os, sys, threading, time
from node_runtime import process
from node_runtime.errors import NodeError
from node_runtime.runtime_settings import RuntimeSettings
runtime = RuntimeSettings(shutdown_grace_s={grace})
async def main(life):
{body}
sys.exit(process.run(main, runtime, process="node"))
"""


def program(body: str, grace: float = 10.0) -> list[str]:
    indented = "\n".join("    " + line for line in body.strip("\n").splitlines())
    return [sys.executable, "-c", PRELUDE.format(body=indented, grace=grace)]


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert json.loads(child.stdout.readline())["ready"] is True
            yield child
        finally:
            child.kill()


def end(child: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = child.communicate(timeout=40)
    return child.returncode, err


def finished(command: list[str]) -> tuple[int, str, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_main_that_returns_is_ok_and_ready_is_one_line_of_json() -> None:
    code, out, err = finished(
        program("import uvloop\nlife.ready(port=7, loop=type(asyncio.get_running_loop()).__module__)")
    )
    assert code == 0
    told = json.loads(out)
    assert (told["ready"], told["port"], told["process"]) == (True, 7, "node")
    assert told["loop"].startswith("uvloop")
    assert err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_in_order(number: signal.Signals) -> None:
    body = "life.ready()\nawait life.stopping.wait()\nprint('stopped in order')"
    with started(program(body)) as child:
        child.send_signal(number)
        out, err = child.communicate(timeout=40)
        assert child.returncode == 0
        assert out == "stopped in order\n"
        assert "Traceback" not in err


def test_a_node_error_is_its_sentence_and_its_code() -> None:
    code, _, err = finished(program("raise NodeError('the port 1 is in use: choose another', 3)"))
    assert (code, err) == (EXIT_UNAVAILABLE, "node: the port 1 is in use: choose another\n")


def test_node_errors_of_a_task_group() -> None:
    body = """
async def fail(n):
    raise NodeError(f'part {n} failed', 1)
async with asyncio.TaskGroup() as group:
    group.create_task(fail(1))
    group.create_task(fail(2))
"""
    code, _, err = finished(program(body))
    assert (code, err) == (EXIT_CHECK_FAILED, "node: part 1 failed\nnode: part 2 failed\n")


def test_an_unexpected_exception_is_logged_whole_and_told_in_one_sentence() -> None:
    code, _, err = finished(program("{}['missing']"))
    assert code == EXIT_FAILED
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1] == "node: failed with KeyError: 'missing' (the log above has the traceback)"


def test_a_main_that_ignores_the_signal_is_ended_after_its_grace() -> None:
    with started(program("life.ready()\nawait asyncio.Event().wait()", grace=0.2)) as child:
        child.terminate()
        code, err = end(child)
    assert code == EXIT_FAILED
    assert "node: did not stop within 0.2 s of the signal and was ended" in err


def test_a_loop_that_hangs_is_ended_too() -> None:
    with started(program("life.ready()\ntime.sleep(1000)", grace=0.2)) as child:
        child.terminate()
        code, err = end(child)
    assert code == EXIT_FAILED
    assert "did not stop within 0.2 s" in err


def test_a_second_signal_ends_at_once() -> None:
    body = "life.ready()\nawait life.stopping.wait()\nprint('first', flush=True)\nawait asyncio.Event().wait()"
    with started(program(body, grace=1000)) as child:
        child.send_signal(signal.SIGINT)
        assert child.stdout is not None
        assert child.stdout.readline() == "first\n"
        child.send_signal(signal.SIGINT)
        code, err = end(child)
    assert code == EXIT_INTERRUPTED
    assert err.endswith("node: interrupted twice, ended at once\n")


def test_a_second_signal_ends_a_hanging_loop() -> None:
    body = "life.ready()\nprint('hangs', flush=True)\nwhile True: time.sleep(0.05)"
    with started(program(body, grace=1000)) as child:
        child.send_signal(signal.SIGINT)
        assert child.stdout is not None
        # Two signals in one moment are one: send until it is gone.
        deadline = time.monotonic() + 30
        while child.poll() is None and time.monotonic() < deadline:
            child.send_signal(signal.SIGINT)
            select.select([], [], [], 0.05)
        code, _ = end(child)
    assert code == EXIT_INTERRUPTED


def test_threads_that_hang_do_not_keep_the_process() -> None:
    body = """
threading.Thread(target=time.sleep, args=(1000,), name="stuck").start()
life.ready()
"""
    code, _, err = finished(program(body))
    assert code == 0
    assert err == "node: ended without waiting for 1 hanging threads (stuck)\n"


def test_an_executor_that_hangs_is_ended_after_the_grace() -> None:
    body = (
        "life.ready()\nasyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)\nawait life.stopping.wait()"
    )
    with started(program(body, grace=0.2)) as child:
        child.terminate()
        code, err = end(child)
    assert code == EXIT_FAILED
    assert "did not stop within 0.2 s" in err


def test_a_process_ends_with_its_parent_even_by_kill_9(tmp_path: Path) -> None:
    child_file, gone = tmp_path / "child.py", tmp_path / "gone"
    child_file.write_text(
        "import os, sys, pathlib\n"
        "from node_runtime import process\n"
        "from node_runtime.runtime_settings import RuntimeSettings\n"
        "async def main(life):\n"
        "    life.ready()\n"
        "    await life.stopping.wait()\n"
        f"    pathlib.Path({str(gone)!r}).write_text('stopped')\n"
        "runtime = RuntimeSettings(exit_with_parent=True, parent_pid=os.getppid())\n"
        "sys.exit(process.run(main, runtime, process='child'))\n"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, {str(child_file)!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as outer:
        assert outer.stdout is not None
        pid = json.loads(outer.stdout.readline())["pid"]
        watched = os.pidfd_open(pid)
        try:
            outer.kill()
            readable, _, _ = select.select([watched], [], [], 30)
            assert readable, "the child outlived its parent"
        finally:
            os.close(watched)
    assert gone.read_text() == "stopped"


def test_a_parent_that_is_gone_already_is_noticed() -> None:
    body = "life.ready()"
    command = program(body)
    command[2] = command[2].replace("RuntimeSettings(", "RuntimeSettings(exit_with_parent=True, parent_pid=2**22, ")
    code, out, err = finished(command)
    assert code == EXIT_FAILED
    assert out == ""
    assert err == "node: the process 4194304 that started this one has ended: nothing is left to do\n"


def test_ctrl_c_during_the_imports_is_one_sentence() -> None:
    source = (
        "from node_runtime import interrupts\n"
        "interrupts.interruptible_start('node')\n"
        "print('{\"ready\": true}', flush=True)\n"
        "import time\n"
        "time.sleep(1000)\n"
    )
    with started([sys.executable, "-c", source]) as child:
        child.send_signal(signal.SIGINT)
        assert end(child) == (EXIT_INTERRUPTED, "node: interrupted while starting\n")


def test_a_process_is_ready_for_its_probes_before_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    lifetime = Lifetime(RuntimeSettings(), "demo")
    seen: list[str | None] = []
    monkeypatch.setattr(sys.stdout, "write", lambda _line: seen.append(lifetime.health.why_not_started()))
    lifetime.ready(port=1)
    assert seen == [None]


def test_a_package_that_is_not_installed_is_one_sentence() -> None:
    done = subprocess.run(program("import no_such_engine"), capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == EXIT_USAGE
    said = "node: needs the Python package no_such_engine, which is not installed: install fermata-rl[cpu] or [gpu]"
    assert done.stderr.splitlines() == [said]
