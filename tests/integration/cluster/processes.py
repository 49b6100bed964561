"""`fermata` commands as real processes, and a count of every process they leave behind.

Invariant: nothing started here outlives the test; a process is recognised by a mark in its environment, whatever became
of its parent or group.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

REPOSITORY = Path(__file__).resolve().parents[3]
T = TypeVar("T")
_MARK = "C_TEST_MARK"


class Fermata:
    """One `fermata` command. Use as a context manager: what is left at its end is killed."""

    program: Sequence[str] = ("-m", "fermata_cli")

    def __init__(self, *arguments: str, folder: Path, env: dict[str, str] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self._err = folder / f"stderr-{self.mark[:8]}.txt"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FERMATA_")}
        with self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *self.program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                cwd=REPOSITORY,
                env=clean | {_MARK: self.mark} | (env or {}),
                start_new_session=True,
            )

    def __enter__(self) -> Fermata:
        return self

    def __exit__(self, *_exc: object) -> None:
        for pid in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def finish(self, within_s: float) -> tuple[int, str]:
        """(exit code, stdout)."""
        out, _ = self.process.communicate(timeout=within_s)
        return self.process.returncode, out.decode(errors="replace")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def left(self) -> list[int]:
        """Living processes that this command started, itself included."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            return False
        return f"{_MARK}={self.mark}".encode() in environ.split(b"\0") and state not in "ZX"

    def until_said(self, words: str, within_s: float) -> None:
        """Until `words` stand in what it wrote to stderr."""
        self.until(lambda: words in self.err, within_s, f"it never said {words!r}")

    def until(self, holds: Callable[[], T], within_s: float, otherwise: str) -> T:
        """Looks at a fact outside this process until it holds; ends early where the command has ended."""
        deadline = time.monotonic() + within_s
        while True:
            found = holds()
            if found:
                return found
            if self.process.poll() is not None:
                raise AssertionError(f"{otherwise}; it ended with {self.process.returncode}:\n{self.err}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{otherwise} within {within_s} s:\n{self.err}")
            time.sleep(0.05)


def run(*arguments: str, folder: Path, within_s: float = 60, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command, after making sure that it left no process."""
    with Fermata(*arguments, folder=folder, env=env) as command:
        code, out = command.finish(within_s)
        assert command.left() == []
        return code, out, command.err


@contextlib.contextmanager
def services() -> Iterator[Callable[..., dict[str, Any]]]:
    """`start(package, *arguments, log=...)` starts a process and gives its ready line; at the end all are stopped."""
    stack: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, log: IO[bytes] | int = subprocess.DEVNULL) -> dict[str, Any]:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=REPOSITORY,
            env={name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"},  # as people start it
        )
        stack.append(process)
        assert process.stdout is not None
        return json.loads(process.stdout.readline())

    try:
        yield start
    finally:
        for process in stack:
            process.terminate()
        for process in stack:
            process.wait(20)
            assert process.stdout is not None
            process.stdout.close()


def cluster_of(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The processes of a run by name, as its cluster.json tells them; empty while there is none."""
    try:
        rows = json.loads((run_dir / "cluster.json").read_text())["processes"]
    except FileNotFoundError:
        return {}
    return {row["name"]: row for row in rows}


def scraped(run_dir: Path) -> set[str]:
    """The processes of a run that its targets.json sends Prometheus to."""
    return {target["labels"]["node"] for target in json.loads((run_dir / "targets.json").read_text())}


def sets(*pairs: str) -> Sequence[str]:
    """`--set` flags."""
    return [word for pair in pairs for word in ("--set", pair)]
