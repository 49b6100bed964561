"""Who did what and when: in a control that notes it down itself, or in Fermata, whose processes write spans.

Invariant: both are told in the same terms, so that the same picture and the same figures can be made of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

from node_runtime.spans import Span, read_spans
from trainer_node.trajectory import Trajectory


@dataclasses.dataclass
class Record:
    """By trajectory, the times in which it generated or had a tool run: (kind, start, end), Unix seconds."""

    stretches: defaultdict[str, list[tuple[str, float, float]]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )

    @contextlib.contextmanager
    def during(self, trajectory: str, kind: str) -> Iterator[None]:
        """Notes how long the block took. `kind`: generate or tool."""
        start = time.time()
        yield
        self.stretches[trajectory].append((kind, start, time.time()))

    @classmethod
    def of_spans(cls, spans: Iterable[Span]) -> Self:
        record = cls()
        for span in spans:
            if span.kind == "generate":
                record.stretches[span.trajectory].append(("generate", span.start, span.end))
            elif span.kind == "tool-run" and span.attributes.get("seen_from") == "node":
                record.stretches[span.trajectory].append(("tool", span.start, span.end))
        return record

    @property
    def start(self) -> float:
        return min(start for rows in self.stretches.values() for _, start, _ in rows)

    @property
    def seconds(self) -> float:
        return max(end for rows in self.stretches.values() for _, _, end in rows) - self.start

    @property
    def busy_share(self) -> float:
        """Share of the time in which the engine had something to generate."""
        generating = [row for rows in self.stretches.values() for row in rows if row[0] == "generate"]
        busy, until = 0.0, self.start
        for _, start, end in sorted(generating, key=lambda row: row[1]):
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        return busy / self.seconds

    def all_stretches(self) -> Iterator[tuple[str, float, float]]:
        """With the gaps between a trajectory's own stretches as kind `others`: it could go on, and does not."""
        for rows in self.stretches.values():
            rows = sorted(rows, key=lambda row: row[1])
            yield from rows
            for (_, _, before), (_, after, _) in itertools.pairwise(rows):
                if after > before:
                    yield "others", before, after


async def spans_of(folder: Path, trajectories: Sequence[Trajectory], within_s: float = 15.0) -> list[Span]:
    """All spans of these trajectories. Processes write them about once a second, so the last ones are waited for."""
    wanted = {trajectory.trajectory_id for trajectory in trajectories}
    turns = sum(trajectory.turns for trajectory in trajectories)
    calls = sum(call.attempts > 0 for trajectory in trajectories for call in trajectory.calls)
    due = Counter({"generate": turns, "tool at the node": calls, "tool at the gateway": calls})
    deadline = time.monotonic() + within_s
    while True:
        spans = [span for span in read_spans(folder) if span.trajectory in wanted]
        missing = due - Counter(map(_teller, spans))
        if not missing:
            return spans
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder}: after {within_s:g} s these spans are still missing: {dict(missing)}")
        await asyncio.sleep(0.1)


def _teller(span: Span) -> str:
    if span.kind != "tool-run":
        return span.kind
    return "tool at the node" if span.attributes.get("seen_from") == "node" else "tool at the gateway"
