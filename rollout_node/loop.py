"""The node's loop: lets trajectories into the engine, hands their calls out and takes results in.

Invariants: a task exists per turn being sampled and per unresolved call, none per parked trajectory; nothing here waits
for a tool, so no trajectory waits for another's (P1); a trajectory waits for nothing longer than its deadline (P5).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2

from node_runtime import outcomes
from node_runtime.logs import get_logger
from node_runtime.segments import Version
from node_runtime.spans import SpanWriter
from rollout_node import metrics, snapshots
from rollout_node.admission import AdmissionPolicy, EngineView
from rollout_node.books import Books, Handle, handle_of
from rollout_node.call import Call
from rollout_node.desk import CallDesk
from rollout_node.engine import EngineError
from rollout_node.intake import Intake, Refused
from rollout_node.outbox import Outbox
from rollout_node.ports import Engine, TurnFormat
from rollout_node.queueing import ReadyQueue
from rollout_node.sampler import TurnSampler
from rollout_node.settings import RolloutSettings
from rollout_node.trajectory import Fail, Finish, Generate, Park, PrefixChanged, State, Step, Trajectory
from tool_gateway.client import Result

_TICK_S = 0.25  # what depends on time alone: missing tools, admission, gauges
_VERSION_TICK_S = 0.02  # while somebody waits for a weight version

log = get_logger("rollout_node.loop")

Request = pb.RunRequest.Start | pb.RunRequest.Resume


@dataclass(slots=True)
class _Waiting:
    """A Start or Resume that names a tool nobody serves yet."""

    request: Request
    until: float


@dataclass(slots=True)
class Stream:
    """The trainer's stream in use: its number and the run it is for."""

    number: int = 0
    run_id: str = ""
    connected: bool = False


def start_of(request: Request) -> pb.RunRequest.Start:
    return request if isinstance(request, pb.RunRequest.Start) else request.start


class NodeLoop:
    def __init__(
        self,
        settings: RolloutSettings,
        engine: Engine,
        turns: TurnFormat,
        outbox: Outbox,
        spans: SpanWriter,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._turns = turns
        self._clock = clock
        self.outbox = outbox
        identity = snapshots.Identity(engine.model_hash, turns.tokenizer_hash, turns.template_hash)
        self.desk = CallDesk(self._spawn, self._on_result, spans, clock)
        self.books = Books(identity, outbox, self.desk, spans, clock)
        self.stream = Stream()
        self._intake = Intake(settings, engine, turns, identity)
        self._policy = AdmissionPolicy(settings.admission.busy_requests, settings.admission.max_trajectories)
        self._kv_tokens = settings.admission.kv_tokens or engine.kv_tokens
        self._ready = ReadyQueue(self._policy, self.books.has)
        self._sampler = TurnSampler(engine, turns, self._policy, self.desk.send, clock)
        self._missing_tools: dict[str, _Waiting] = {}
        self._has_served = engine.serving
        self._drain_at: float | None = None
        self._wake = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    # -- life of the loop -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled. Everything the loop starts is a task of this call and ends with it."""
        self._engine.on_serving.append(self._on_serving)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                try:
                    await self._housekeeping()
                finally:
                    self._group = None
        finally:
            self._engine.on_serving.remove(self._on_serving)

    async def _housekeeping(self) -> None:
        while True:
            self._retry_missing_tools()
            self._schedule()
            metrics.WEIGHT_VERSION.set(self._engine.version.number)
            metrics.show_states(self.books.counts())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_VERSION_TICK_S if self._ready.waits_for_version else _TICK_S):
                    await self._wake.wait()
            self._wake.clear()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        if self._group is None:
            work.close()
            raise RuntimeError("the node loop is not running: nothing can be started")
        return self._group.create_task(work, name=name)

    # -- what the trainer says --------------------------------------------------------------------------------------

    def take_in(self, request: Request) -> None:
        """A Start or Resume: Accepted or Rejected follows, for a tool that is not there yet after a bounded wait."""
        start = start_of(request)
        try:
            if self._said_before(start):
                return
            self._intake.check(start, self.stream.run_id)
            self._require_room(start.trajectory_id)
            caller = self.desk.caller(start.run_id)
            catalogue = caller.catalogue if caller is not None else {}
            now = self._clock()
            if isinstance(request, pb.RunRequest.Resume):
                trajectory = self._intake.resumed(request, catalogue, now)
            else:
                trajectory = self._intake.new(start, catalogue, now)
        except Refused as refused:
            if not (refused.tools_missing and self._wait_for_tools(request)):
                self._missing_tools.pop(start.trajectory_id, None)
                self.books.reject(start, str(refused), refused.retry_after_s)
            return
        self._missing_tools.pop(start.trajectory_id, None)
        self._accept(trajectory, fence=isinstance(request, pb.RunRequest.Resume) or start.generation > 0)

    def cancel(self, trajectory_id: str, reason: str) -> None:
        sentence = f"cancelled by the trainer: {reason or 'no reason given'}"
        why = Fail(tool_pb2.FAULT_CALLER, tool_pb2.OUTCOME_CANCELLED, sentence)
        waiting = self._missing_tools.pop(trajectory_id, None)
        if waiting is not None:
            self.books.tell_failed(trajectory_id, start_of(waiting.request).generation, why)
        trajectory = self.books.open.get(trajectory_id)
        if trajectory is not None:
            self.books.fail(trajectory, why)
            self._wake.set()

    def acknowledge(self, ack: pb.RunRequest.AckSnapshot) -> None:
        trajectory = self.books.open.get(ack.trajectory_id)
        if trajectory is not None and trajectory.spec.generation == ack.generation:
            handle_of(trajectory).claim = self.stream.number
            keys = trajectory.snapshots.acknowledge(ack.snapshot_seq, stored=ack.stored)
            caller = self.desk.caller(trajectory.spec.run_id)
            if keys and caller is not None:
                caller.release(keys)
            return
        ended = self.outbox.acknowledge(ack.trajectory_id, ack.generation, ack.snapshot_seq)
        caller = self.desk.caller(self.stream.run_id)
        if ended is not None and ended.HasField("finished") and ack.stored and caller is not None:
            caller.release_trajectory(ack.trajectory_id, ack.generation)

    def _said_before(self, start: pb.RunRequest.Start) -> bool:
        """A trainer that is not sure asks again: the same generation is answered as before and not begun twice."""
        ended = self.outbox.end_of(start.trajectory_id, start.generation)
        if ended is not None:
            self.outbox.put(ended)
            return True
        known = self.books.open.get(start.trajectory_id)
        if known is None or known.spec.generation < start.generation:
            return False
        if known.spec.generation > start.generation:
            raise Refused(
                f"generation {start.generation} of trajectory {start.trajectory_id} is over: "
                f"generation {known.spec.generation} is open here"
            )
        handle_of(known).claim = self.stream.number
        self.books.tell_accepted(known)
        if known.state is State.PARKED and known.snapshots.unacknowledged and handle_of(known).grading is None:
            self.books.tell_parked(known)
        return True

    def _require_room(self, trajectory_id: str) -> None:
        retry_s = self._settings.admission.retry_after_s
        if self._drain_at is not None:
            raise Refused("this node is leaving: ask another", retry_s)
        count = len(self.books) + len(self._missing_tools)
        known = trajectory_id in self.books.open or trajectory_id in self._missing_tools
        if not known and not self._policy.has_room(count):
            raise Refused(
                f"{count} trajectories are open here, the most this node takes: try again later, or ask another",
                self._policy.retry_after_s(count, retry_s),
            )
        if self._has_served and not self._engine.serving:
            raise Refused(f"this node does not serve now: {self._engine.why_not}", retry_s)

    def _wait_for_tools(self, request: Request) -> bool:
        """Whether there is time left to wait for a tool to appear."""
        key = start_of(request).trajectory_id
        waiting = self._missing_tools.get(key)
        if waiting is None or waiting.request is not request:
            waiting = _Waiting(request, self._clock() + self._settings.catalogue_wait_s)
            self._missing_tools[key] = waiting
        return self._clock() < waiting.until

    def _retry_missing_tools(self) -> None:
        for waiting in list(self._missing_tools.values()):
            self.take_in(waiting.request)

    def _accept(self, trajectory: Trajectory, *, fence: bool) -> None:
        spec = trajectory.spec
        self.books.enter(trajectory, self.stream.number, self._on_deadline)
        if fence and (caller := self.desk.caller(spec.run_id)) is not None:
            caller.fence(spec.trajectory_id, spec.generation, [call.key for call in trajectory.open_calls if call.sent])
        self.books.tell_accepted(trajectory)
        if trajectory.state is State.QUEUED:
            metrics.TOKENS.labels("prompt").inc(len(trajectory.columns))
            self._queue(trajectory)
        elif waiting := trajectory.unanswered():
            for call in waiting:
                self.desk.send(trajectory, call, rejoin=True)
        else:
            self._follow(trajectory, Generate())

    # -- the queue --------------------------------------------------------------------------------------------------

    def _queue(self, trajectory: Trajectory) -> None:
        if self._drain_at is not None:
            self.books.hand_over(trajectory)
            return
        self._ready.push(trajectory)
        self._schedule()

    def _schedule(self) -> None:
        """Let in whoever may go in now."""
        if self._engine.serving:
            waited = self._ready.waits_for_version
            for trajectory in self._ready.pop_all(Version.of(self._engine.version), self._view):
                self._begin(trajectory)
            if self._ready.waits_for_version and not waited:
                self._wake.set()  # housekeeping looks more often from now on

    def _view(self) -> EngineView:
        if not self._kv_tokens:
            return EngineView(len(self.books.in_engine), 0, 0, 0)
        live = sum(len(t.columns) for t in self.books.in_engine.values())
        parked = sum(len(t.columns) for t in self.books.in_state(State.PARKED))
        return EngineView(len(self.books.in_engine), live, parked, self._kv_tokens)

    # -- one turn ---------------------------------------------------------------------------------------------------

    def _begin(self, trajectory: Trajectory) -> None:
        if trajectory.max_tokens() < 1:
            self._follow(trajectory, Finish(pb.FINISH_REASON_LENGTH))
            return
        now = self._clock()
        self.books.record(trajectory, "queue", now - trajectory.since, turn=trajectory.turn)
        try:
            trajectory.begin_turn(now)
        except PrefixChanged as error:
            log.error("ids are not append-only", trajectory=trajectory.id)
            self._follow(trajectory, Fail(tool_pb2.FAULT_INFRA, tool_pb2.OUTCOME_INTERNAL, str(error)))
            return
        self.books.in_engine[trajectory.id] = trajectory
        handle_of(trajectory).task = self._spawn(self._turn(trajectory), f"turn {trajectory.id}")

    async def _turn(self, trajectory: Trajectory) -> None:
        began, before, turn = self._clock(), len(trajectory.columns), trajectory.turn
        step: Step
        late: list[Call] = []
        try:
            step, late = await self._sampler.sample(trajectory)
        except EngineError as error:
            step = Fail(error.fault, error.outcome, str(error))
        except Exception as error:
            # One trajectory must not end the others: it is masked, and the log has the traceback.
            log.exception("a turn failed", trajectory=trajectory.id)
            step = Fail(tool_pb2.FAULT_INFRA, tool_pb2.OUTCOME_INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            self.books.left_engine(trajectory)
            sampled = max(0, len(trajectory.columns) - before)
            self.books.record(trajectory, "generate", self._clock() - began, turn=turn, tokens=sampled)
        if not self.books.has(trajectory):
            return
        handle_of(trajectory).task = None
        for call in late:
            self.desk.send(trajectory, call)
        self._follow(trajectory, step)
        self._schedule()

    # -- what follows -----------------------------------------------------------------------------------------------

    def _follow(self, trajectory: Trajectory, step: Step) -> None:
        """Do what the trajectory's state says is next. What goes wrong in doing it costs this trajectory alone."""
        try:
            self._do(trajectory, step)
        except Exception as error:
            log.exception("a step failed", trajectory=trajectory.id)
            if self.books.has(trajectory):
                sentence = f"the step {type(step).__name__} failed: {type(error).__name__}: {error}"
                self.books.fail(trajectory, Fail(tool_pb2.FAULT_INFRA, tool_pb2.OUTCOME_INTERNAL, sentence))

    def _do(self, trajectory: Trajectory, step: Step) -> None:
        match step:
            case Park() if self._drain_at is not None:
                self.books.hand_over(trajectory)
            case Park():
                self.books.tell_parked(trajectory)
            case Generate():
                self._go_on(trajectory)
            case Finish(reason):
                self._finish(trajectory, reason)
            case Fail():
                self.books.fail(trajectory, step)

    def _go_on(self, trajectory: Trajectory) -> None:
        """Every answer is there: render them and ask for the next turn."""
        before = len(trajectory.columns)
        step = trajectory.take_answers(self._turns, self._clock())
        if not isinstance(step, Generate):
            self._do(trajectory, step)
            return
        metrics.TOKENS.labels("tool").inc(len(trajectory.columns) - before)
        if self._engine.serving or not self._has_served:
            self._queue(trajectory)
        else:
            self.books.fail(trajectory, self._not_serving())

    def _on_result(self, trajectory: Trajectory, key: str, result: Result) -> None:
        if not self.books.has(trajectory):
            return
        handle = handle_of(trajectory)
        if handle.grading is not None:
            if handle.grading.key == key:
                self._graded(trajectory, handle, result)
            return
        step = trajectory.answered(key, result.final, self._clock(), attempts=result.attempts, run_us=result.run_us)
        if step is not None:
            self._follow(trajectory, step)

    def _finish(self, trajectory: Trajectory, reason: pb.FinishReason) -> None:
        """Finished, or first to the grader: a tool called after the last turn, off everybody's path."""
        handle = handle_of(trajectory)
        if not trajectory.spec.grader or reason == pb.FINISH_REASON_DEADLINE:
            self.books.finish(trajectory, reason)
            return
        self.desk.cancel(trajectory.spec.run_id, trajectory.unanswered(), "the trajectory is over")
        handle.reason = reason
        handle.grading = trajectory.grader_call(self._clock())
        self.desk.send(trajectory, handle.grading, grader=True)

    def _graded(self, trajectory: Trajectory, handle: Handle, result: Result) -> None:
        if outcomes.shown_to_model(result.outcome, result.fault):
            self.books.finish(trajectory, handle.reason, result.final)
            return
        name = outcomes.outcome_name(result.outcome)
        sentence = f"grader {trajectory.spec.grader!r} ended {name}: {result.final.detail or 'no detail'}"
        fault = outcomes.fault_of(result.outcome, result.fault)
        self.books.fail(trajectory, Fail(fault, result.outcome, sentence, trajectory.spec.grader))

    def _on_deadline(self, trajectory: Trajectory) -> None:
        """Cut while it is sampled: the model's own length. Cut while it waits: nothing the model should answer for."""
        if not self.books.has(trajectory):
            return
        if trajectory.state is State.GENERATING:
            self.books.finish(trajectory, pb.FINISH_REASON_DEADLINE)
            return
        if trajectory.state is State.PARKED:
            waited_for = ", ".join(sorted({call.tool for call in trajectory.unanswered()})) or trajectory.spec.grader
        elif self._engine.serving:
            waited_for = self._ready.waits_for(trajectory, Version.of(self._engine.version))
        else:
            waited_for = f"the engine ({self._engine.why_not})"
        sentence = f"the trajectory's time ran out while it waited for {waited_for}"
        self.books.fail(trajectory, Fail(tool_pb2.FAULT_INFRA, tool_pb2.OUTCOME_DEADLINE_EXCEEDED, sentence))

    # -- the engine, the trainer's stream, and leaving --------------------------------------------------------------

    def _on_serving(self, serving: bool, why_not: str) -> None:
        if serving:
            self._has_served = True
            self._wake.set()
        elif self._has_served:
            # What is being sampled hears it from the engine; what is parked may find it serving again.
            for trajectory in self.books.in_state(State.QUEUED):
                self.books.fail(trajectory, self._not_serving())

    def _not_serving(self) -> Fail:
        sentence = f"the node stopped serving: {self._engine.why_not}"
        return Fail(tool_pb2.FAULT_INFRA, tool_pb2.OUTCOME_INTERNAL, sentence)

    def new_stream(self, run_id: str, *, same_trainer: bool) -> None:
        """A trainer's stream begins. The same trainer process is told again what it has not acknowledged; for another
        one nothing is open here: what it wants of its predecessor's it resumes, and the calls run on until then."""
        if self.stream.connected:
            self.stream_lost()  # the older one was pushed out before its end was seen
        self.stream = Stream(self.stream.number + 1, run_id, True)
        if not same_trainer:
            for trajectory in self.books.all():
                self.books.drop(trajectory, "another trainer has taken the run over")
            self._missing_tools.clear()
            self.outbox.clear()
            return
        self.outbox.replay()
        for trajectory in self.books.in_state(State.PARKED):
            if trajectory.snapshots.unacknowledged and handle_of(trajectory).grading is None:
                self.books.tell_parked(trajectory)

    def stream_lost(self) -> None:
        """Trajectories go on for the reconnect window; whoever no new stream has spoken of until then ends."""
        self.stream.connected = False
        window, number = self._settings.reconnect_window_s, self.stream.number
        asyncio.get_running_loop().call_later(window, self._end_unclaimed, number)

    def _end_unclaimed(self, number: int) -> None:
        window = self._settings.reconnect_window_s
        sentence = f"the trainer's stream was lost and nobody spoke of the trajectory within {window:g} s"
        why = Fail(tool_pb2.FAULT_INFRA, tool_pb2.OUTCOME_CANCELLED, sentence)
        for trajectory in [t for t in self.books.all() if handle_of(t).claim <= number]:
            # While a trainer is here the calls may be another node's by now: its fence decides about them.
            self.books.fail(trajectory, why, cancel_calls=not self.stream.connected)
        if not self.stream.connected:
            self._missing_tools.clear()

    @property
    def draining(self) -> bool:
        return self._drain_at is not None

    def drain(self, deadline_s: float) -> None:
        """Take nothing new. Turns being sampled may end until the deadline; everything else is handed over now."""
        at = self._clock() + deadline_s
        if self._drain_at is not None and self._drain_at <= at:
            return
        self._drain_at = at
        for waiting in self._missing_tools.values():
            self.books.reject(
                start_of(waiting.request), "this node is leaving: ask another", self._settings.admission.retry_after_s
            )
        self._missing_tools.clear()
        for trajectory in self.books.in_state(State.QUEUED, State.PARKED):
            if handle_of(trajectory).grading is None:
                self.books.hand_over(trajectory)
        asyncio.get_running_loop().call_later(max(0.0, deadline_s), self._end_drain)

    def _end_drain(self) -> None:
        for trajectory in self.books.all():
            if handle_of(trajectory).grading is None:
                self.books.hand_over(trajectory)
            else:
                sentence = "the node left while the trajectory was being graded"
                self.books.fail(trajectory, Fail(tool_pb2.FAULT_INFRA, tool_pb2.OUTCOME_CANCELLED, sentence))

    def load(self) -> pb.RunResponse.Load:
        states = self.books.counts()
        stats = self._engine.stats()
        return pb.RunResponse.Load(
            kv_used=stats.kv_used,
            live=states[State.GENERATING],
            parked=states[State.PARKED],
            queued=states[State.QUEUED] + len(self._missing_tools),
            versions=[self._engine.version] if self._engine.serving else [],
            generated_tokens=stats.generated_tokens,
            draining=self.draining,
            serving=self._engine.serving,
            detail=self._engine.why_not,
        )
