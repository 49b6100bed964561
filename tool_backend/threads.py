"""Threads for sync tools: bounded, reused, and never waited for.

Invariant: a job is either refused at once or has a thread of its own at once; nothing queues here. The threads are
daemons, because a tool that never returns must not keep the process from ending (the standard executor joins its
threads at exit).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any

from node_runtime.logs import get_logger

_log = get_logger(__name__)
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]", contextvars.Context]


class ThreadPool:
    """Up to ``size`` jobs at once. To be used from one event loop."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._busy = 0
        self._threads = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # never longer than the number of idle threads

    def make_ready(self) -> bool:
        """See to it that a thread is there for the next job. False: ``submit`` may not be called."""
        if self._busy >= self._size:
            return False
        if self._threads > self._busy:
            return True
        loop = asyncio.get_running_loop()
        try:
            threading.Thread(target=self._work, args=(loop,), name=f"tool-{self._threads + 1}", daemon=True).start()
        except RuntimeError as error:  # the machine, or a limit on this process, has no thread left
            _log.warning("a thread could not be started", threads=self._threads, why=str(error))
            return False
        self._threads += 1
        return True

    @property
    def busy(self) -> int:
        """Threads in which a function runs, those that nobody waits for any more among them."""
        return self._busy

    def submit(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run ``function`` in a thread; the future holds what it returned or raised, also where nobody waits for it."""
        if not self.make_ready():
            raise RuntimeError("no thread is free; ask make_ready first")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._busy += 1
        self._jobs.put((function, future, contextvars.copy_context()))
        return future

    def close(self) -> None:
        """Let the idle threads end."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (job := self._jobs.get()) is not None:
            function, future, context = job
            value: Any = None
            error: BaseException | None = None
            try:
                value = context.run(function)
            except BaseException as raised:  # noqa: BLE001  (it is handed to whoever waits)
                error = raised
            # The loop may be gone by now: then nobody is left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._ended, future, value, error)
            del job, function, future, context, value, error

    def _ended(self, future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        self._busy -= 1
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            wrapped = RuntimeError(f"the thread's function raised {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            future.set_exception(wrapped)
