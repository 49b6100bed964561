"""The open trajectories and how each of them ends.

Invariant: a trajectory that was accepted leaves the books by exactly one of finish, fail, hand_over and drop, and takes
its timer, its turn task (and with it the engine request) and its claim on results along; each but drop is told once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2

from node_runtime import outcomes
from node_runtime.logs import get_logger
from node_runtime.spans import Span, SpanWriter
from rollout_node import metrics, snapshots
from rollout_node.call import Call
from rollout_node.desk import CallDesk
from rollout_node.outbox import Outbox
from rollout_node.trajectory import Fail, State, Trajectory

log = get_logger("rollout_node.books")

Event = pb.RunResponse.Event


@dataclass(slots=True)
class Handle:
    """What is held of an open trajectory beside its data."""

    claim: int  # number of the trainer's stream that last spoke of it
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None  # of the turn being sampled
    grading: Call | None = None
    reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED  # while it is graded


def handle_of(trajectory: Trajectory) -> Handle:
    assert isinstance(trajectory.owner, Handle), f"{trajectory.id} was never entered"
    return trajectory.owner


class Books:
    def __init__(
        self,
        identity: snapshots.Identity,
        outbox: Outbox,
        desk: CallDesk,
        spans: SpanWriter,
        clock: Callable[[], float],
    ) -> None:
        self.identity = identity
        self.outbox = outbox
        self.open: dict[str, Trajectory] = {}
        self.in_engine: dict[str, Trajectory] = {}
        self._desk = desk
        self._spans = spans
        self._clock = clock
        self._none_open = asyncio.Event()
        self._none_open.set()

    def __len__(self) -> int:
        return len(self.open)

    def has(self, trajectory: Trajectory) -> bool:
        return not trajectory.state.over and self.open.get(trajectory.id) is trajectory

    def all(self) -> list[Trajectory]:
        return list(self.open.values())

    def in_state(self, *states: State) -> list[Trajectory]:
        return [t for t in self.open.values() if t.state in states]

    def counts(self) -> Counter[State]:
        return Counter(t.state for t in self.open.values())

    async def none_open(self) -> None:
        """Unbounded by itself: whoever drains has set a deadline after which nothing is open."""
        await self._none_open.wait()

    # -- in ---------------------------------------------------------------------------------------------------------

    def enter(self, trajectory: Trajectory, claim: int, on_deadline: Callable[[Trajectory], None]) -> None:
        older = self.open.get(trajectory.id)
        if older is not None:
            self.drop(older, "a newer generation was begun here")
        self.outbox.forget(trajectory.id)
        self.open[trajectory.id] = trajectory
        self._none_open.clear()
        delay = max(0.0, trajectory.deadline_at - self._clock())
        timer = asyncio.get_running_loop().call_later(delay, on_deadline, trajectory)
        trajectory.owner = Handle(claim, timer)

    # -- news -------------------------------------------------------------------------------------------------------

    def tell_accepted(self, trajectory: Trajectory) -> None:
        accepted = pb.RunResponse.Accepted(trajectory_id=trajectory.id, generation=trajectory.spec.generation)
        self.outbox.put(Event(accepted=accepted))

    def tell_parked(self, trajectory: Trajectory) -> None:
        parked = pb.RunResponse.Parked(
            trajectory_id=trajectory.id,
            generation=trajectory.spec.generation,
            snapshot=snapshots.take(trajectory, self.identity, self._clock()),
        )
        self.outbox.put(Event(parked=parked))

    def reject(self, start: pb.RunRequest.Start, reason: str, retry_after_s: float) -> None:
        rejected = pb.RunResponse.Rejected(
            trajectory_id=start.trajectory_id,
            generation=start.generation,
            reason=reason,
            retry_after_ms=-1 if retry_after_s < 0 else round(retry_after_s * 1000),
        )
        metrics.ENDED.labels("rejected").inc()
        self.outbox.put(Event(rejected=rejected))

    # -- out --------------------------------------------------------------------------------------------------------

    def finish(self, trajectory: Trajectory, reason: pb.FinishReason, grade: tool_pb2.Final | None = None) -> None:
        now = self._clock()
        self._close(trajectory, State.FINISHED, now)
        finished = pb.RunResponse.Finished(
            trajectory_id=trajectory.id,
            generation=trajectory.spec.generation,
            snapshot=snapshots.take(trajectory, self.identity, now),
            reason=reason,
            answer=trajectory.answer.encode("utf-8", "replace"),
            calls=trajectory.summaries(),
            generate_us=round(trajectory.generate_s * 1e6),
            tool_wait_us=round(trajectory.tool_wait_s * 1e6),
            queue_us=round(trajectory.queue_s * 1e6),
            grade=grade,
        )
        metrics.ENDED.labels("finished").inc()
        self.outbox.put(Event(finished=finished))

    def fail(self, trajectory: Trajectory, why: Fail, *, cancel_calls: bool = True) -> None:
        """Nothing of it may be scored. `cancel_calls` False: its calls may be another owner's by now."""
        self._close(trajectory, State.FAILED, self._clock(), cancel_calls=cancel_calls)
        self.tell_failed(trajectory.id, trajectory.spec.generation, why, trajectory.summaries())

    def tell_failed(
        self, trajectory_id: str, generation: int, why: Fail, calls: list[pb.CallSummary] | None = None
    ) -> None:
        failed = pb.RunResponse.Failed(
            trajectory_id=trajectory_id,
            generation=generation,
            fault=why.fault,
            outcome=why.outcome,
            reason=why.reason,
            tool=why.tool,
            calls=calls or [],
        )
        metrics.ENDED.labels("failed").inc()
        log.info("trajectory failed", trajectory=trajectory_id, fault=outcomes.fault_name(why.fault), why=why.reason)
        self.outbox.put(Event(failed=failed))

    def hand_over(self, trajectory: Trajectory) -> None:
        """The node leaves: the last boundary goes to the trainer, calls that it names run on for the next owner."""
        now = self._clock()
        dropped = trajectory.give_up_turn(now)
        handed = pb.RunResponse.HandedOver(
            trajectory_id=trajectory.id,
            generation=trajectory.spec.generation,
            snapshot=snapshots.take(trajectory, self.identity, now),
        )
        self._remove(trajectory)
        self._desk.cancel(trajectory.spec.run_id, dropped, "the node leaves in the middle of the turn")
        self._desk.let_go(trajectory)
        metrics.ENDED.labels("handed_over").inc()
        self.outbox.put(Event(handed_over=handed))

    def drop(self, trajectory: Trajectory, reason: str) -> None:
        """Gone without a word: another owner speaks for it now. Its calls are left to that owner's fence."""
        dropped = trajectory.give_up_turn(self._clock())
        self._remove(trajectory)
        self._desk.cancel(trajectory.spec.run_id, dropped, reason)
        self._desk.let_go(trajectory)
        metrics.ENDED.labels("superseded").inc()

    def _close(self, trajectory: Trajectory, state: State, now: float, *, cancel_calls: bool = True) -> None:
        calls = trajectory.end(state, now)
        grading = handle_of(trajectory).grading
        self._remove(trajectory)
        if cancel_calls:
            self._desk.cancel(
                trajectory.spec.run_id, calls if grading is None else [*calls, grading], "the trajectory is over"
            )
        else:
            self._desk.let_go(trajectory)

    def _remove(self, trajectory: Trajectory) -> None:
        handle = handle_of(trajectory)
        if handle.timer is not None:
            handle.timer.cancel()
        if handle.task is not None and handle.task is not asyncio.current_task():
            handle.task.cancel()  # closes the engine's iterator, which aborts the request
        if self.open.get(trajectory.id) is trajectory:
            del self.open[trajectory.id]
        self.left_engine(trajectory)
        if not self.open:
            self._none_open.set()

    # -- the engine -------------------------------------------------------------------------------------------------

    def left_engine(self, trajectory: Trajectory) -> None:
        if self.in_engine.get(trajectory.id) is trajectory:
            del self.in_engine[trajectory.id]

    def record(
        self, trajectory: Trajectory, kind: str, seconds: float, *, turn: int, tokens: int | None = None
    ) -> None:
        """A span of `kind` that ends now."""
        end = time.time()
        version = trajectory.last_version if tokens is not None else None
        self._spans.record(
            Span(
                kind=kind,
                node=self._spans.node,
                start=end - max(0.0, seconds),
                end=end,
                trajectory=trajectory.id,
                generation=trajectory.spec.generation,
                turn=turn,
                tokens=tokens,
                weight_version=version.number if version is not None else None,
            )
        )
