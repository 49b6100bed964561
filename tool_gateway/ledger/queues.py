"""Keys in order of a number, oldest first. Pure.

Invariant: ``first`` is the key with the lowest number of those that still have it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

_SPARE: Final = 1024


class KeyQueue:
    """A key leaves by no longer having the number under which it was added: nothing is searched for, and what was taken
    back may be added again at its old number."""

    def __init__(self, number_of: Callable[[str], float | None]) -> None:
        """`number_of` a key now; None or 0 where it has none."""
        self._number_of = number_of
        self._heap: list[tuple[float, str]] = []
        self._sort_out_at = _SPARE

    def add(self, number: float, key: str) -> None:
        heapq.heappush(self._heap, (number, key))
        if len(self._heap) >= self._sort_out_at:
            self._heap = sorted({item for item in self._heap if self._number_of(item[1]) == item[0]})
            self._sort_out_at = 2 * len(self._heap) + _SPARE

    def first(self) -> str | None:
        while self._heap:
            number, key = self._heap[0]
            if self._number_of(key) == number:
                return key
            heapq.heappop(self._heap)
        return None
