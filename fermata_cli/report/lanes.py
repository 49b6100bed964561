"""Chooses what a timeline shows: a window of time around a call that was slow, and trajectories in it. Pure.

Invariant: what is chosen shows the slow call from before its trajectory stopped to after it went on, beside others that
were open in that time.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from node_runtime.spans import Span

ROWS = 26
# A call is slow if its tool took this long; where none did, the longest wait stands in for it.
SLOW_S = 0.25
_MARGIN = 0.5  # of the slow call's length, before and after it
_LEAST_MARGIN_S = 0.4


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """One trajectory: its spans by time. `tools` are its waits for calls, `runs` when the tool of each ran, by key."""

    trajectory: str
    generations: tuple[Span, ...]
    tools: tuple[Span, ...]
    queues: tuple[Span, ...]
    runs: Mapping[str, tuple[float, float]]

    def run_of(self, call: Span) -> tuple[float, float]:
        """When the tool itself ran, within the wait for it: the result's way and a busy node make waits longer."""
        return self.runs.get(call.call_key or "", (call.start, call.end))

    def is_slow(self, call: Span) -> bool:
        """Whether the tool itself took long; a busy machine makes every wait long."""
        return self.tool_seconds(call) >= SLOW_S

    def tool_seconds(self, call: Span) -> float:
        start, end = self.run_of(call)
        return end - start

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
    # Those whose turns ended while the call was held say most about what went on meanwhile.
    seen.sort(key=lambda lane: (-_turns_meanwhile([lane], slow), -_busy(lane, start, end)))
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
    told: dict[str, Span] = {}  # the last attempt at each call, as the gateway saw it
    for span in sorted(spans, key=_start):
        if span.kind == "tool-run" and span.call_key and span.attributes.get("seen_from") != "node":
            told[span.call_key] = span
        # A call is told by the node that waits and by the gateway; the node's view is the trajectory's own.
        if span.trajectory and (span.kind != "tool-run" or span.attributes.get("seen_from") == "node"):
            kinds[span.trajectory][span.kind].append(span)
    return [
        Lane(
            trajectory,
            tuple(found["generate"]),
            tuple(found["tool-run"]),
            tuple(found["queue"]),
            {call.call_key: _run(call, told.get(call.call_key)) for call in found["tool-run"] if call.call_key},
        )
        for trajectory, found in sorted(kinds.items())
        if found["generate"] or found["tool-run"]
    ]


def _run(wait: Span, told: Span | None) -> tuple[float, float]:
    """Clocks of two machines may differ: what lies outside the wait is no guide."""
    if told is not None and told.start < wait.end and told.end > wait.start:
        return max(told.start, wait.start), min(told.end, wait.end)
    run_us, queue_us = wait.attributes.get("run_us"), wait.attributes.get("queue_us")
    if not isinstance(run_us, int):
        return wait.start, wait.end
    start = min(wait.start + (queue_us / 1e6 if isinstance(queue_us, int) else 0.0), wait.end)
    return start, min(start + run_us / 1e6, wait.end)


def _start(span: Span) -> float:
    return span.start


def _slow_call(lanes: Sequence[Lane]) -> Span | None:
    """A slow call during which others did much, one whose trajectory went on afterwards before one whose did not."""
    calls = [(span, lane) for lane in lanes for span in lane.tools]
    if not calls:
        return None
    slow = [pair for pair in calls if pair[1].is_slow(pair[0])]
    if not slow:
        return max(calls, key=lambda pair: pair[0].end - pair[0].start)[0]

    def worth(pair: tuple[Span, Lane]) -> tuple[bool, int, float]:
        span, lane = pair
        went_on = any(turn.start >= span.end for turn in lane.generations)
        # Of like ones, that which was held for the tool's sake alone.
        overhead_s = span.end - span.start - lane.tool_seconds(span)
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
