"""Who waits for the engine, and in which order they go in.

Invariants: returning trajectories go before new ones, then the trainer's order decides; a trajectory that waits for a
weight version holds up nobody; whoever left the books is skipped, never begun.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable

from node_runtime.segments import Version
from rollout_node.admission import AdmissionPolicy, EngineView, Verdict
from rollout_node.trajectory import State, Trajectory

_RECHECK_LEAST = 256


class ReadyQueue:
    def __init__(self, policy: AdmissionPolicy, alive: Callable[[Trajectory], bool]) -> None:
        self._policy = policy
        self._alive = alive
        self._heap: list[tuple[int, int, Trajectory]] = []  # (priority, arrival, trajectory)
        self._for_version: list[Trajectory] = []
        self._arrivals = itertools.count()
        self._checked: Version | None = None  # the version that `_for_version` was last compared with
        self._recheck_at = _RECHECK_LEAST

    @property
    def waits_for_version(self) -> bool:
        return bool(self._for_version)

    def push(self, trajectory: Trajectory) -> None:
        priority = self._policy.priority(trajectory.spec.order, returning=trajectory.returning)
        heapq.heappush(self._heap, (priority, next(self._arrivals), trajectory))

    def waits_for(self, trajectory: Trajectory, served: Version) -> str:
        """What keeps a queued trajectory, in words."""
        wanted = trajectory.spec.min_version
        if served.at_least(wanted):
            return "the engine"
        return f"weight version {wanted.lineage}/{wanted.number} (served: {served.lineage or 'none'}/{served.number})"

    def pop_all(self, served: Version, view: Callable[[], EngineView]) -> list[Trajectory]:
        """Everybody who may go in now, in order. `view` is asked once, and only where it matters."""
        self._recheck(served)
        admitted: list[Trajectory] = []
        seen: EngineView | None = None
        while self._heap:
            trajectory = self._heap[0][2]
            if trajectory.state is not State.QUEUED or not self._alive(trajectory):
                heapq.heappop(self._heap)
                continue
            if not trajectory.returning:
                if not served.at_least(trajectory.spec.min_version):
                    self._for_version.append(heapq.heappop(self._heap)[2])
                    continue
                seen = seen or view()
                size = len(trajectory.columns)
                if self._policy.admit_new(seen, size, max(0, trajectory.max_tokens())) is Verdict.HOLD:
                    break
                seen = dataclasses.replace(seen, in_engine=seen.in_engine + 1, live_tokens=seen.live_tokens + size)
            heapq.heappop(self._heap)
            admitted.append(trajectory)
        return admitted

    def _recheck(self, served: Version) -> None:
        # Nothing changes for those who wait until the version does; the list is gone through for the dead now and then.
        if served == self._checked and len(self._for_version) < self._recheck_at:
            return
        waiting, self._for_version = self._for_version, []
        for trajectory in waiting:
            if trajectory.state is not State.QUEUED or not self._alive(trajectory):
                continue
            if served.at_least(trajectory.spec.min_version):
                self.push(trajectory)
            else:
                self._for_version.append(trajectory)
        self._checked = served
        self._recheck_at = 2 * len(self._for_version) + _RECHECK_LEAST
