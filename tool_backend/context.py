"""What a tool may know of the call it serves: key, time left, whether to stop, and a way to report progress.

A tool that wants it takes a parameter annotated ``ToolContext``; it is not part of the schema. One context belongs to
one call. It is safe to use from the thread of a sync tool: flags are only ever set, and progress is handed to the
call's own event loop by whoever made the context.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

ProgressHandler = Callable[[float | None, str], None]


class ToolContext:
    """The call as the tool sees it."""

    __slots__ = ("_cancelled", "_on_progress", "_stop", "attempt", "context", "deadline", "key", "tool")

    def __init__(
        self,
        *,
        key: str,
        tool: str,
        deadline: float,
        attempt: int = 1,
        context: Mapping[str, str] | None = None,
        on_progress: ProgressHandler | None = None,
    ) -> None:
        self.key = key
        """run/trajectory/generation/turn/ordinal; the same for every attempt of the call."""
        self.tool = tool
        """The name under which the tool was called."""
        self.deadline = deadline
        """When the call ends whatever happens, in seconds of ``time.monotonic()``."""
        self.attempt = attempt
        """From 1, counted over all backends."""
        self.context: Mapping[str, str] = MappingProxyType(dict(context or {}))
        """What the trainer passes through to tools; never written by the model."""
        self._on_progress = on_progress
        self._cancelled = False
        self._stop: threading.Event | None = None  # made by the first who waits for it

    def remaining(self) -> float:
        """Seconds left until the deadline, never below 0."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def cancelled(self) -> bool:
        """Whether the call was cancelled or ran out of time; a sync tool looks at it now and then and returns."""
        return self._cancelled

    def wait_cancelled(self, seconds: float) -> bool:
        """Wait up to ``seconds`` (in a sync tool's thread, never in an async tool); True as soon as it is cancelled."""
        stop = self._stop = self._stop or threading.Event()
        # Looked at after the event is in place: whoever cancels from now on sets it.
        return self._cancelled or stop.wait(seconds)

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        """Say how far the work is: ``fraction`` from 0 to 1, or None where that is unknown. Only the latest is kept."""
        if fraction is not None and not 0.0 <= fraction <= 1.0:
            raise ValueError(f"progress takes a fraction from 0 to 1, got {fraction}")
        if self._on_progress is not None:
            self._on_progress(fraction, message)

    def _cancel(self) -> None:
        """Set by the call's owner; never by the tool."""
        self._cancelled = True
        if self._stop is not None:
            self._stop.set()
