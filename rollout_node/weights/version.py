"""Weight versions as labels, and which tokens each version made.

Invariant: label and version translate into each other without loss of identity (lineage and number); spans cover the
tokens asked for exactly, in order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from fermata.v1.weights_pb2 import WeightVersion


def version_label(version: WeightVersion) -> str:
    """The name vLLM carries for a version: "lineage/number"."""
    return f"{version.lineage}/{version.number}"


@functools.lru_cache(maxsize=256)
def parse_label(label: str) -> WeightVersion:
    """The version of a label. The message is shared: do not change it."""
    lineage, _, number = label.rpartition("/")
    return WeightVersion(lineage=lineage, number=int(number))


def spans_of(starts: Sequence[tuple[str, int]], position: int, count: int) -> list[tuple[str, int, int]]:
    """Cuts `count` tokens from `position` on at the starts of versions.

    `starts` holds (label, index of its first token in the whole output), ascending. Returns (label, begin, end)
    relative to `position`; for no tokens one empty span under the latest version; nothing where no version is known.
    """
    if not starts:
        return []
    if count == 0:
        return [(starts[-1][0], 0, 0)]
    pieces = []
    for (label, start), following in zip(starts, [*(s for _, s in starts[1:]), position + count], strict=True):
        begin, end = max(start, position), min(following, position + count)
        if begin < end:
            pieces.append((label, begin - position, end - position))
    return pieces
