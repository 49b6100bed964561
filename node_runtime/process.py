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
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self

from node_runtime import logs
from node_runtime.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, NodeError
from node_runtime.interrupts import exit_now
from node_runtime.process_health import ProcessHealth
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
        self.health = ProcessHealth(runtime.liveness_s)

    def ready(self, **info: Any) -> None:
        """Prints the ready line on stdout, once: {"ready": true, "port": ..., "metrics_port": ...}."""
        self.health.ready()  # first: who reads the line may ask a probe at once
        sys.stdout.write(json.dumps({"ready": True, "process": self.process, "pid": os.getpid(), **info}) + "\n")
        sys.stdout.flush()


def run(main: Callable[[Lifetime], Awaitable[None]], runtime: RuntimeSettings, *, process: str | None = None) -> int:
    """Runs `main` on uvloop until it returns; the exit code for sys.exit().

    `process` names it in logs (default: main's package). NodeError becomes its sentence and code; any other exception
    is logged with its traceback and becomes one sentence and EXIT_FAILED.
    """
    name = process or (main.__module__.split(".")[0] if main.__module__ != "__main__" else "fermata")
    logs.configure(runtime, name)
    threads_before = set(threading.enumerate())
    ending = _Ending(runtime.shutdown_grace_s, name)
    try:
        if runtime.exit_with_parent:
            exit_with_parent(runtime.parent_pid)
        with ending, asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code = runner.run(_supervise(main, runtime, name, ending))
    except NodeError as error:
        _say(name, str(error))
        code = error.exit_code
    except asyncio.CancelledError:
        _say(name, "main was cancelled from within")
        code = EXIT_FAILED
    except ModuleNotFoundError as error:
        log.debug("an import failed", exc_info=error)
        _say(name, f"needs the Python package {error.name}, which is not installed: install fermata-rl[cpu] or [gpu]")
        code = EXIT_USAGE
    except Exception as error:
        told = _node_errors(error)
        if told:
            _say(name, "\n".join(dict.fromkeys(map(str, told))))
            return _leave_threads(threads_before, name, told[0].exit_code)
        log.error("the process failed", exc_info=error)
        text = " ".join(str(error).split())[:300]
        _say(name, f"failed with {type(error).__name__}: {text} (the log above has the traceback)")
        code = EXIT_FAILED
    return _leave_threads(threads_before, name, code)


def _node_errors(error: BaseException) -> list[NodeError]:
    """The NodeErrors of a task group, where it holds nothing else."""
    if isinstance(error, NodeError):
        return [error]
    if not isinstance(error, BaseExceptionGroup):
        return []
    parts = [_node_errors(part) for part in error.exceptions]
    return [found for part in parts for found in part] if all(parts) else []


def _leave_threads(before: set[threading.Thread], name: str, code: int) -> int:
    """Python waits for threads at its end, a hanging tool's for ever: leave without those that main left behind."""
    deadline = time.monotonic() + _CANCEL_GRACE_S
    left = [t for t in threading.enumerate() if t not in before and not t.daemon]
    for thread in left:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
    hanging = [thread.name for thread in left if thread.is_alive()]
    if hanging:
        exit_now(name, f"ended without waiting for {len(hanging)} hanging threads ({', '.join(hanging[:3])})", code)
    return code


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return None
    return uvloop.new_event_loop


async def _supervise(
    main: Callable[[Lifetime], Awaitable[None]], runtime: RuntimeSettings, name: str, ending: _Ending
) -> int:
    lifetime = Lifetime(runtime, name)
    loop = asyncio.get_running_loop()
    lifetime.health.beat_on(loop)
    ending.on_first_signal(lambda number: loop.call_soon_threadsafe(_stop, lifetime, number))
    try:
        return await _main_until_stopped(main, lifetime, runtime.shutdown_grace_s)
    finally:
        ending.begin()


def _stop(lifetime: Lifetime, number: int) -> None:
    log.info("stopping", signal=signal.Signals(number).name)
    lifetime.health.stopping()
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
    exit_now(lifetime.process, _too_slow(grace_s), EXIT_FAILED)
    return EXIT_FAILED


def _too_slow(grace_s: float) -> str:
    return (
        f"did not stop within {grace_s:g} s of the signal and was ended: "
        "raise runtime.shutdown_grace_s if it needs more"
    )


class _Ending:
    """The signals of the process, and the bound of last resort: a thread that ends it when the loop cannot."""

    def __init__(self, grace_s: float, process: str) -> None:
        self._grace_s = grace_s
        self._process = process
        self._signalled = False
        self._tell: Callable[[int], object] | None = None
        self._timer: threading.Timer | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python's own handlers, not the loop's: they run even while the loop is kept busy.
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def on_first_signal(self, tell: Callable[[int], object]) -> None:
        self._tell = tell

    def begin(self) -> None:
        """From here the process has its grace, and a little for cancelling, before it is ended."""
        if self._timer is None:
            self._timer = threading.Timer(self._grace_s + 2 * _CANCEL_GRACE_S, self._bite)
            self._timer.daemon = True
            self._timer.start()

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._signalled:
            exit_now(self._process, "interrupted twice, ended at once", EXIT_INTERRUPTED)
        self._signalled = True
        self.begin()
        if self._tell is not None:
            try:
                self._tell(number)
            except RuntimeError:  # the loop is closed: the process is ending anyway
                return

    def _bite(self) -> None:
        exit_now(self._process, _too_slow(self._grace_s), EXIT_FAILED)


def _say(process: str, text: str) -> None:
    for line in text.splitlines():
        sys.stderr.write(f"{process}: {line}\n")
    sys.stderr.flush()


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
