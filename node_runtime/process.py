"""The life of a process: its loop, its signals, its end.

Invariant: after the first SIGTERM or SIGINT the process ends within shutdown_grace_s, orderly or not, even when its
loop hangs; a second signal ends it at once; every end has an exit code and, unless orderly, one sentence on stderr.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final

from node_runtime import logs
from node_runtime.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, NodeError
from node_runtime.runtime_settings import RuntimeSettings

_PR_SET_PDEATHSIG: Final = 1
# What a cancelled main gets for its finally blocks before the process ends under it.
_CANCEL_GRACE_S: Final = 1.0

log = logs.get_logger("node_runtime.process")


class Lifetime:
    """What main() knows of its process. `stopping` is set by the first signal: stop taking work, finish, return."""

    def __init__(self, runtime: RuntimeSettings, process: str) -> None:
        self.stopping = asyncio.Event()
        self.runtime = runtime
        self.process = process

    def ready(self, **info: Any) -> None:
        """Prints the ready line on stdout, once: {"ready": true, "port": ..., "metrics_port": ...}."""
        sys.stdout.write(json.dumps({"ready": True, "process": self.process, "pid": os.getpid(), **info}) + "\n")
        sys.stdout.flush()


def run(main: Callable[[Lifetime], Awaitable[None]], runtime: RuntimeSettings, *, process: str | None = None) -> int:
    """Runs `main` on uvloop until it returns; the exit code for sys.exit().

    `process` names it in logs (default: main's package). NodeError becomes its sentence and code; any other exception
    is logged with its traceback and becomes one sentence and EXIT_FAILED.
    """
    name = process or (main.__module__.split(".")[0] if main.__module__ != "__main__" else "fermata")
    logs.configure(runtime, name)
    try:
        if runtime.exit_with_parent:
            exit_with_parent(runtime.parent_pid)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_supervise(main, runtime, name))
    except NodeError as error:
        _say(name, str(error))
        return error.exit_code
    except Exception as error:
        log.error("the process failed", exc_info=error)
        _say(
            name,
            f"failed with {type(error).__name__}: {' '.join(str(error).split())[:300]} (the log has the traceback)",
        )
        return EXIT_FAILED


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return None
    return uvloop.new_event_loop


async def _supervise(main: Callable[[Lifetime], Awaitable[None]], runtime: RuntimeSettings, name: str) -> int:
    lifetime = Lifetime(runtime, name)
    loop = asyncio.get_running_loop()
    watchdog = _Watchdog(runtime.shutdown_grace_s, name)

    def on_signal(number: int, _frame: object) -> None:
        if not watchdog.begin():
            _exit_now(name, "interrupted twice, ended at once", EXIT_INTERRUPTED)
        loop.call_soon_threadsafe(_stop, lifetime, number)

    # Python's own handlers, not the loop's: they run even while the loop is kept busy.
    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return await _main_until_stopped(main, lifetime, runtime.shutdown_grace_s)
    finally:
        watchdog.end()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(lifetime: Lifetime, number: int) -> None:
    log.info("stopping", signal=signal.Signals(number).name)
    lifetime.stopping.set()


async def _main_until_stopped(main: Callable[[Lifetime], Awaitable[None]], lifetime: Lifetime, grace_s: float) -> int:
    work = asyncio.ensure_future(main(lifetime))
    stopped = asyncio.ensure_future(lifetime.stopping.wait())
    try:
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await asyncio.wait((work,), timeout=grace_s)
        if work.done():
            await work
            return EXIT_OK
        work.cancel()
        await asyncio.wait((work,), timeout=_CANCEL_GRACE_S)
    finally:
        stopped.cancel()
    # Tasks and threads that did not end in time may hold the interpreter too: leave without them.
    _exit_now(lifetime.process, _too_slow(grace_s), EXIT_FAILED)
    return EXIT_FAILED


def _too_slow(grace_s: float) -> str:
    return (
        f"did not stop within {grace_s:g} s of the signal and was ended: "
        "raise runtime.shutdown_grace_s if it needs more"
    )


class _Watchdog:
    """Ends the process from a thread when the loop cannot: the bound of last resort."""

    def __init__(self, grace_s: float, process: str) -> None:
        self._grace_s = grace_s
        self._process = process
        self._timer: threading.Timer | None = None

    def begin(self) -> bool:
        """False where it had begun already."""
        if self._timer is not None:
            return False
        self._timer = threading.Timer(self._grace_s + 2 * _CANCEL_GRACE_S, self._bite)
        self._timer.daemon = True
        self._timer.start()
        return True

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _bite(self) -> None:
        _exit_now(self._process, _too_slow(self._grace_s), EXIT_FAILED)


def _say(process: str, text: str) -> None:
    for line in text.splitlines():
        sys.stderr.write(f"{process}: {line}\n")
    sys.stderr.flush()


def _exit_now(process: str, sentence: str, code: int) -> None:
    os.write(2, f"{process}: {sentence}\n".encode())
    os._exit(code)


def exit_with_parent(parent_pid: int | None = None) -> None:
    """From now on the kernel sends SIGTERM when the thread that started this process ends, be it by kill -9 (Linux).

    `parent_pid` closes the gap before this call: a parent that is gone already raises NodeError. Elsewhere than on
    Linux this does nothing.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        log.warning(f"exit_with_parent has no effect: {os.strerror(ctypes.get_errno())}")
    if parent_pid is not None and os.getppid() != parent_pid:
        raise NodeError(f"the process {parent_pid} that started this one has ended: nothing is left to do")
