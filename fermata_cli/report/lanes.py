"""Chooses what a timeline shows: a window of time around a call that was slow, and trajectories in it. Pure.

Invariant: what is chosen shows the slow call from before its trajectory stopped to after it went on, beside others that
were open in that time.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

from node_runtime.spans import Span

ROWS = 26
# A call is slow if its tool took this long; where none did, the longest wait stands in for it.
SLOW_S = 0.25
_MARGIN = 0.5  # of the slow call's length, before and after it
_LEAST_MARGIN_S = 0.4


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """One trajectory: its spans by time."""

    trajectory: str
    generations: tuple[Span, ...]
    tools: tuple[Span, ...]
    queues: tuple[Span, ...]

    @property
    def start(self) -> float:
        return min(span.start for span in (*self.generations, *self.tools, *self.queues))

    @property
    def end(self) -> float:
        return max(span.end for span in (*self.generations, *self.tools, *self.queues))


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    start: float
    end: float
    lanes: tuple[Lane, ...]
    syncs: tuple[Span, ...]
    trainings: tuple[Span, ...]
    slow: Span | None
    turns_meanwhile: int  # turns that other trajectories finished while the slow call was held


def choose_scene(spans: Iterable[Span], *, rows: int = ROWS) -> Scene | None:
    """None where no trajectory was recorded."""
    spans = list(spans)
    lanes = _lanes(spans)
    if not lanes:
        return None
    slow = _slow_call(lanes)
    if slow is None:
        begin = min(lane.start for lane in lanes)
        start, end = begin, begin + 2.0
    else:
        margin = max(_LEAST_MARGIN_S, (slow.end - slow.start) * _MARGIN)
        start, end = slow.start - margin, slow.end + margin
    seen = [lane for lane in lanes if lane.start < end and lane.end > start]
    # Those that did most in the window say most about what went on meanwhile.
    seen.sort(key=lambda lane: -_busy(lane, start, end))
    chosen = [lane for lane in seen if slow is not None and lane.trajectory == slow.trajectory]
    chosen += [lane for lane in seen if lane not in chosen][: rows - len(chosen)]
    chosen.sort(key=lambda lane: (slow is None or lane.trajectory != slow.trajectory, lane.start))
    return Scene(
        start=start,
        end=end,
        lanes=tuple(chosen),
        syncs=tuple(_between(spans, "weight-sync", start, end)),
        trainings=tuple(_between(spans, "train", start, end)),
        slow=slow,
        turns_meanwhile=_turns_meanwhile(lanes, slow),
    )


def _lanes(spans: Sequence[Span]) -> list[Lane]:
    kinds: dict[str, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        # A call is told by the node that waits and by the gateway; the node's view is the trajectory's own.
        if span.trajectory and (span.kind != "tool-run" or span.attributes.get("seen_from") == "node"):
            kinds[span.trajectory][span.kind].append(span)
    return [
        Lane(
            trajectory,
            tuple(sorted(found["generate"], key=_start)),
            tuple(sorted(found["tool-run"], key=_start)),
            tuple(sorted(found["queue"], key=_start)),
        )
        for trajectory, found in sorted(kinds.items())
        if found["generate"] or found["tool-run"]
    ]


def is_slow(call: Span) -> bool:
    """Whether the tool itself took long; a busy machine makes every wait long."""
    return _tool_seconds(call) >= SLOW_S


def _tool_seconds(call: Span) -> float:
    run_us = call.attributes.get("run_us")
    return run_us / 1e6 if isinstance(run_us, int) else call.end - call.start


def _start(span: Span) -> float:
    return span.start


def _slow_call(lanes: Sequence[Lane]) -> Span | None:
    """A slow call during which others did much, one whose trajectory went on afterwards before one whose did not."""
    calls = [(span, lane) for lane in lanes for span in lane.tools]
    if not calls:
        return None
    slow = [pair for pair in calls if is_slow(pair[0])]
    if not slow:
        return max(calls, key=lambda pair: pair[0].end - pair[0].start)[0]

    def worth(pair: tuple[Span, Lane]) -> tuple[bool, int, float]:
        span, lane = pair
        went_on = any(turn.start >= span.end for turn in lane.generations)
        # Of like ones, that which was held for the tool's sake alone.
        overhead_s = span.end - span.start - _tool_seconds(span)
        return went_on, min(ROWS, _turns_meanwhile(lanes, span)), -overhead_s

    return max(slow, key=worth)[0]


def _turns_meanwhile(lanes: Sequence[Lane], slow: Span | None) -> int:
    if slow is None:
        return 0
    return sum(
        slow.start < turn.end < slow.end
        for lane in lanes
        if lane.trajectory != slow.trajectory
        for turn in lane.generations
    )


def _busy(lane: Lane, start: float, end: float) -> float:
    return sum(max(0.0, min(span.end, end) - max(span.start, start)) for span in (*lane.generations, *lane.tools))


def _between(spans: Iterable[Span], kind: str, start: float, end: float) -> list[Span]:
    """Spans of the trainer and the nodes that belong to no trajectory."""
    return [
        span for span in spans if span.kind == kind and not span.trajectory and span.start < end and span.end > start
    ]
