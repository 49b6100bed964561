"""One running call: its end, its progress, and whoever watches it.

Invariant: a call ends exactly once, and everybody who watches it sees that one end; who watches, or stops watching,
does not touch the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from fermata.v1 import tool_pb2

from tool_backend.context import ToolContext
from tool_backend.tool import Tool

_HEARTBEAT = tool_pb2.CallEvent(heartbeat=tool_pb2.CallEvent.Heartbeat())


class Call:
    """A call in progress. Lives on one event loop; ``report`` may be called from any thread."""

    def __init__(self, *, key: str, tool: Tool, started_at: float) -> None:
        self.key = key
        self.tool = tool
        self.started_at = started_at
        self.context: ToolContext | None = None
        self.work: asyncio.Future[tool_pb2.Final] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.stop_as: tool_pb2.Final | None = None
        """The end this call is to have because it is being stopped; None while it may end by itself."""
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[tool_pb2.Final] = self._loop.create_future()
        self._progress: tool_pb2.CallEvent.Progress | None = None
        self._publishing = False
        self._progress_count = 0
        self._watchers: set[asyncio.Event] = set()

    @property
    def ended(self) -> bool:
        """Whether the call has its end."""
        return self._end.done()

    def end(self, final: tool_pb2.Final) -> None:
        """Give the call its one end."""
        self._end.set_result(final)
        if self.timer is not None:
            self.timer.cancel()
        self._wake()

    async def wait(self) -> tool_pb2.Final:
        """The end of the call. Cancelling whoever waits leaves the call alone."""
        return await asyncio.shield(self._end)

    def report(self, fraction: float | None, message: str) -> None:
        """Take note of progress; only the latest is kept, however fast it comes."""
        progress = tool_pb2.CallEvent.Progress(fraction=fraction, message=message.encode("utf-8", "replace")[:4096])
        self._progress = progress
        if not self._publishing and not self._loop.is_closed():
            self._publishing = True
            self._loop.call_soon_threadsafe(self._publish)

    def _publish(self) -> None:
        self._publishing = False
        self._progress_count += 1
        self._wake()

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()

    async def events(self, heartbeat_s: float | None) -> AsyncGenerator[tool_pb2.CallEvent, None]:
        """Progress and heartbeats as they come, then the Final. With ``heartbeat_s``, never silent for longer."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        seen = 0
        try:
            while True:
                changed.clear()
                if self._progress is not None and self._progress_count > seen:
                    seen = self._progress_count
                    yield tool_pb2.CallEvent(progress=self._progress)
                if self._end.done():
                    yield tool_pb2.CallEvent(final=self._end.result())
                    return
                try:
                    async with asyncio.timeout(heartbeat_s):
                        await changed.wait()
                except TimeoutError:
                    yield _HEARTBEAT
        finally:
            self._watchers.discard(changed)
