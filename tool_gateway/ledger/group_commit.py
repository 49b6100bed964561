"""One thread that commits the steps of many callers together: what waits while a transaction runs goes into the next.

Invariant: a step's caller hears of it after its transaction was committed, or that nothing of it counts; steps take
effect in the order in which they were given, and the event loop never waits for the medium.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from node_runtime.logs import get_logger
from tool_gateway.ledger.store import LedgerUnavailable

_log = get_logger(__name__)
_T = TypeVar("_T")
MAX_STEPS: Final = 1024
MAX_WEIGHT: Final = 32 << 20
"""Bounds of one transaction; a step that is heavier goes alone."""


class Medium(Protocol):
    """What the steps work on. Every method is called on the one thread."""

    def open(self) -> None: ...

    def commit(self) -> None:
        """Make the steps since the last commit last. Raises where that cannot be done."""
        ...

    def undo(self) -> None:
        """Be as after the last commit."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Step:
    run: Callable[[], Any]
    future: asyncio.Future[Any]
    weight: int
    value: Any = None
    error: Exception | None = None


class GroupCommit:
    """Belongs to the event loop it was started on."""

    def __init__(self, medium: Medium, name: str) -> None:
        self._medium = medium
        self._name = name
        self._queue: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._left_over: _Step | None = None
        self._waiting: set[_Step] = set()
        self._closed: str | None = "it has not been opened"
        self._thread: threading.Thread | None = None
        self._lost: asyncio.Future[str] | None = None

    @property
    def waiting(self) -> int:
        """Steps given and not yet answered."""
        return len(self._waiting)

    async def open(self) -> None:
        """Raises what the medium's ``open`` does."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._lost = loop.create_future()
        self._thread = threading.Thread(target=self._work, args=(loop, opened), name=self._name, daemon=True)
        self._thread.start()
        try:
            await opened
        except BaseException:
            self._queue.put(None)
            self._thread.join()
            raise

    async def do(self, run: Callable[[], _T], weight: int = 0) -> _T:
        """The step's value, once it is committed. Raises what it, or the commit, raised."""
        if self._closed is not None:
            raise LedgerUnavailable(f"the ledger cannot be written: {self._closed}")
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        step = _Step(run, future, weight)
        self._waiting.add(step)
        self._queue.put(step)
        return await future

    async def lost(self) -> str:
        """Returns, with the reason, if the thread ends before it was closed: no step will ever be committed again."""
        assert self._lost is not None
        return await asyncio.shield(self._lost)

    async def close(self, within_s: float) -> None:
        """Commit what waits and end the thread."""
        if self._thread is None:
            return
        self._closed = "it was closed"
        self._queue.put(None)
        try:
            async with asyncio.timeout(within_s):
                await asyncio.shield(self._ended)
        except TimeoutError:
            _log.error("the ledger was not closed in time", within_s=within_s, steps=len(self._waiting))
            return
        self._thread.join()
        self._thread = None

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _work(self, loop: asyncio.AbstractEventLoop, opened: asyncio.Future[None]) -> None:
        why = "it was closed"
        try:
            try:
                self._medium.open()
            except BaseException as error:
                _tell(loop, _fail, opened, error)
                raise
            try:
                _tell(loop, self._begin, opened)
                while steps := self._next():
                    self._commit(steps)
                    _tell(loop, self._answer, steps)
            finally:
                self._medium.close()
        except BaseException as error:  # noqa: BLE001 (told to whoever waits: nobody else hears of a thread's end)
            why = f"its thread ended with {type(error).__name__}: {error}"
        _tell(loop, self._end, why)

    def _next(self) -> list[_Step]:
        """What waits, at least one step, within the bounds of a transaction; empty at the end."""
        first, self._left_over = self._left_over or self._queue.get(), None
        if first is None:
            return []
        steps, weight = [first], first.weight
        while len(steps) < MAX_STEPS:
            try:
                step = self._queue.get_nowait()
            except queue.Empty:
                break
            if step is None:
                self._queue.put(None)  # the last there is
                break
            weight += step.weight
            if weight > MAX_WEIGHT:
                self._left_over = step
                break
            steps.append(step)
        return steps

    def _commit(self, steps: list[_Step]) -> None:
        """All together; where that fails in halves, so that what fails alone takes nothing with it."""
        try:
            for step in steps:
                step.value = step.run()
            self._medium.commit()
        except Exception as error:  # noqa: BLE001 (told to the one whose step it was)
            self._medium.undo()
            if len(steps) == 1:
                steps[0].error = error
                return
            half = len(steps) // 2
            self._commit(steps[:half])
            self._commit(steps[half:])

    # -- on the loop -------------------------------------------------------------------------------------------------

    def _begin(self, opened: asyncio.Future[None]) -> None:
        self._closed = None
        if not opened.done():
            opened.set_result(None)

    def _answer(self, steps: list[_Step]) -> None:
        for step in steps:
            self._waiting.discard(step)
            if step.future.done():
                continue  # its caller was cancelled
            if step.error is None:
                step.future.set_result(step.value)
            else:
                step.future.set_exception(step.error)

    def _end(self, why: str) -> None:
        if self._closed is None and self._lost is not None:
            _log.error(f"the ledger is lost: {why}")
            self._lost.set_result(why)
        self._closed = why
        steps = list(self._waiting)
        for step in steps:
            step.error = LedgerUnavailable(f"the ledger cannot be written: {why}")
        self._answer(steps)
        if not self._ended.done():
            self._ended.set_result(None)


def _fail(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        return  # the loop is closed, and with it everybody who waited
