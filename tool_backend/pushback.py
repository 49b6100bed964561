"""How long a refused caller should wait: about the time in which a slot of that tool becomes free."""

from __future__ import annotations

SHORTEST_MS = 50
LONGEST_MS = 5_000
_WEIGHT = 0.2  # of the newest call in the mean


class Pushback:
    """A moving mean of each tool's run time. Pure: durations are handed in."""

    def __init__(self) -> None:
        self._mean_s: dict[str, float] = {}

    def ended(self, tool: str, seconds: float) -> None:
        """Take note of how long a call ran."""
        mean = self._mean_s.get(tool, seconds)
        self._mean_s[tool] = mean + _WEIGHT * (seconds - mean)

    def retry_after_ms(self, tool: str) -> int:
        """Milliseconds before another try is worth it; bounded below and above."""
        return int(min(max(self._mean_s.get(tool, 0.0) * 1000, SHORTEST_MS), LONGEST_MS))
