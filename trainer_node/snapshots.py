"""What the trainer holds of trajectories that are still under way, and what became of every call they made.

Invariants: a snapshot is acknowledged only after it is held here; each call key is counted once, with its first
terminal outcome; a call seen dispatched that never got one is counted as lost, never forgotten.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2

from node_runtime.segments import merge


@dataclasses.dataclass(slots=True)
class Held:
    """One stored snapshot, merged (base 0), and when it was stored."""

    snapshot: pb.Snapshot
    since: float


class SnapshotStore:
    """Merged snapshots by trajectory, in memory."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, trajectory_id: str, delta: pb.Snapshot, now: float) -> pb.Snapshot:
        """Merge a delta and hold the result. Raises SegmentError where it does not build on what is held."""
        held = self._held.get(trajectory_id)
        merged = merge(held.snapshot if held is not None else None, delta)
        self._held[trajectory_id] = Held(merged, now)
        return merged

    def get(self, trajectory_id: str) -> Held | None:
        return self._held.get(trajectory_id)

    def drop(self, trajectory_id: str) -> None:
        self._held.pop(trajectory_id, None)


def outcome_name(outcome: int) -> str:
    """`OUTCOME_TOOL_ERROR` → `TOOL_ERROR`; an outcome this build does not know keeps its number."""
    try:
        return tool_pb2.Outcome.Name(outcome).removeprefix("OUTCOME_")
    except ValueError:
        return f"OUTCOME_{outcome}"


# A call whose answer is in the trajectory, at an owner that died before it could name the outcome.
UNREPORTED = "UNREPORTED"


class CallTally:
    """Calls by outcome over a run, deduplicated by key over generations and nodes."""

    def __init__(self) -> None:
        self.by_outcome: Counter[str] = Counter()
        self.by_tool: Counter[tuple[str, str]] = Counter()  # (tool, outcome)
        self.lost: list[str] = []  # keys, the first hundred
        self.lost_total = 0
        self._dispatched: dict[str, dict[str, str]] = {}  # trajectory → key seen pending → tool
        self._ended: dict[str, dict[str, tuple[str, str]]] = {}  # trajectory → key → (tool, outcome)

    def seen(self, trajectory_id: str, snapshot: pb.Snapshot) -> None:
        """Calls that a snapshot names were dispatched; some it already has an answer for."""
        for call in snapshot.pending:
            self._dispatched.setdefault(trajectory_id, {})[call.key] = call.tool
            if call.HasField("result") and call.result.outcome != tool_pb2.OUTCOME_UNSPECIFIED:
                ended = self._ended.setdefault(trajectory_id, {})
                ended.setdefault(call.key, (call.tool, outcome_name(call.result.outcome)))

    def ended(self, trajectory_id: str, calls: Iterable[pb.CallSummary]) -> None:
        """Terminal outcomes as the trajectory's last event tells them."""
        for call in calls:
            if call.outcome != tool_pb2.OUTCOME_UNSPECIFIED:
                ended = self._ended.setdefault(trajectory_id, {})
                ended.setdefault(call.key, (call.tool, outcome_name(call.outcome)))

    def close(self, trajectory_id: str, snapshot: pb.Snapshot | None) -> None:
        """Nothing more will be heard of this trajectory: what has neither outcome nor answer by now is lost."""
        ended = self._ended.pop(trajectory_id, {})
        dispatched = self._dispatched.pop(trajectory_id, {})
        for segment in snapshot.segments if snapshot is not None else ():
            if segment.call_key in dispatched:
                ended.setdefault(segment.call_key, (dispatched[segment.call_key], UNREPORTED))
        for tool, outcome in ended.values():
            self.by_outcome[outcome] += 1
            self.by_tool[tool, outcome] += 1
        missing = sorted(dispatched.keys() - ended.keys())
        self.lost_total += len(missing)
        self.lost.extend(missing[: max(0, 100 - len(self.lost))])
