"""Whether this process is alive and ready: written by its event loop, read by the thread that answers probes.

Invariant: reading never waits for the loop, so a loop that hangs is seen to hang.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable
from typing import Final

_BEAT_S: Final = 0.5
_LAG_BEATS: Final = 30  # so many beats back the lag is told: between two looks at it none should be missed


class ProcessHealth:
    """One per process. Its attributes are replaced whole, or copied in one step, so that no lock is needed."""

    def __init__(self, liveness_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`liveness_s`: a loop that has not turned for so long is dead."""
        self._liveness_s = liveness_s
        self._clock = clock
        self._beat_at: float | None = None
        self._lags: collections.deque[float] = collections.deque(maxlen=_LAG_BEATS)
        self._ready = False
        self._stopping = False
        self._waits_for = ""
        self._out_of_service: str | None = None

    def beat_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on the loop leaves its mark every half second, until it ends."""
        now = self._clock()
        if self._beat_at is not None:
            self._lags.append(max(0.0, now - self._beat_at - _BEAT_S))
        self._beat_at = now
        loop.call_later(_BEAT_S, self.beat_on, loop)

    def lag_s(self) -> float:
        """How late the loop was at worst, in the last 15 seconds or at present; 0 before it runs."""
        beat_at = self._beat_at
        at_present = self._clock() - beat_at - _BEAT_S if beat_at is not None else 0.0
        return max(0.0, at_present, *tuple(self._lags))

    def waiting(self, sentence: str) -> None:
        """What the start waits for at present ("waiting for a tool gateway at …")."""
        self._waits_for = sentence

    def ready(self) -> None:
        """The process has begun to serve."""
        self._ready = True

    def stopping(self) -> None:
        """The process was asked to stop and takes no new work."""
        self._stopping = True

    def serving(self, why_not: str | None) -> None:
        """None: it serves; else why it serves nothing for now ("its weights failed the proof")."""
        self._out_of_service = why_not

    def why_dead(self) -> str | None:
        """None while alive; a process that has not yet said that it is ready may import and load for long."""
        beat_at = self._beat_at
        if beat_at is None or not self._ready:
            return None
        silent_s = self._clock() - beat_at
        if silent_s <= self._liveness_s:
            return None
        return (
            f"the event loop has not turned for {silent_s:.0f} s, more than runtime.liveness_s ({self._liveness_s:g})"
        )

    def why_not_started(self) -> str | None:
        """None once it has begun to serve, whatever has become of it since: whoever waits for a start waits no more."""
        if self._ready:
            return None
        return f"the process is starting: {self._waits_for}" if self._waits_for else "the process is starting"

    def why_not_ready(self) -> str | None:
        """None where new work is welcome."""
        if self._stopping:
            return "the process is stopping"
        if (starting := self.why_not_started()) is not None:
            return starting
        return self.why_dead() or self._out_of_service
