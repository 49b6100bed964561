"""How much memory a run takes: the whole process tree, looked at again and again.

Invariant: the peak is of one moment, summed over all processes then alive. Pages that processes share are counted in
each, so the figure is never too low.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from fermata_cli import proc


class MemoryWatch:
    """Call `look` every so often; `peak_bytes` is None where nothing could be seen."""

    def __init__(self, root: int | None = None) -> None:
        self._root = root if root is not None else os.getpid()
        self.peak_bytes: int | None = None
        self.high_water_bytes: dict[str, int] = {}

    def look(self, groups: Iterable[tuple[str, int]] = ()) -> None:
        """`groups`: name and process group of each process of the cluster."""
        named = dict(groups)
        processes = proc.snapshot()
        members = proc.tree(self._root, processes, named.values())
        resident = sum(member.rss_bytes for member in members)
        if members:
            self.peak_bytes = max(self.peak_bytes or 0, resident)
        self._note("fermata", proc.high_water_bytes(self._root))
        for name, group in named.items():
            peaks = [proc.high_water_bytes(member.pid) or 0 for member in members if member.group == group]
            self._note(name, sum(peaks) or None)

    def _note(self, name: str, high_water: int | None) -> None:
        if high_water is not None:
            self.high_water_bytes[name] = max(self.high_water_bytes.get(name, 0), high_water)
