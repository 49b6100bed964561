"""One trajectory: its packed columns, the calls of its turn and what may happen next. Pure: time in, steps out.

Invariants: ids are append-only from the first prompt to the end; a call that may run is handed out exactly once, at its
closing token; answers go in by call order, whatever order they came in; a parked trajectory is this object and nothing
else (no request, no task, no lock); it ends exactly once.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2
from fermata.v1.tool_pb2 import Fault, Final, Outcome

from node_runtime import outcomes
from node_runtime.keys import CallKey
from node_runtime.segments import MODEL, PROMPT, TOOL, Columns, Version, VersionLike
from rollout_node.call import Call
from rollout_node.ports import Offer, TurnFormat
from rollout_node.turn.records import BudgetExceeded, ParsedCall, ParsedTurn

# Outcomes that say the model wrote something that could not be run.
INVALID = frozenset({tool_pb2.OUTCOME_INVALID_ARGS, tool_pb2.OUTCOME_UNKNOWN_TOOL, tool_pb2.OUTCOME_PARSE_ERROR})


ANY_VERSION = Version("", 0)


class State(enum.StrEnum):
    QUEUED = "queued"
    GENERATING = "generating"
    PARKED = "parked"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        return self in (State.FINISHED, State.FAILED)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of one trajectory with the node's defaults filled in."""

    max_turns: int
    max_context_tokens: int
    max_calls_per_turn: int
    max_consecutive_invalid_calls: int
    max_calls: int
    max_tokens_per_turn: int
    min_turn_tokens: int
    call_deadline_s: float


@dataclass(frozen=True, slots=True)
class Spec:
    """What the trainer asked for, without the messages."""

    run_id: str
    trajectory_id: str
    generation: int
    order: int
    bounds: Bounds
    offer: Offer
    sampling: pb.Sampling
    min_version: Version = ANY_VERSION
    group_id: str = ""
    grader: str = ""
    tenant: str = ""
    traceparent: str = ""
    context: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generate:
    """The next turn may be sampled."""


@dataclass(frozen=True, slots=True)
class Park:
    """Calls are pending: nothing to do until the last result."""


@dataclass(frozen=True, slots=True)
class Finish:
    reason: pb.FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    fault: Fault
    outcome: Outcome
    reason: str
    tool: str = ""


Step = Generate | Park | Finish | Fail


class PrefixChanged(Exception):
    """The ids last submitted are not the beginning of those to be submitted now: append-only was broken."""


class Trajectory:
    __slots__ = (
        "answer", "boundary", "calls_made", "columns", "deadline_at", "done", "generate_s", "invalid_in_row",
        "last_version", "open_calls", "over_calls", "owner", "proof", "queue_s", "resumed_at", "returning", "since",
        "snapshots", "spec", "state", "tool_wait_s", "turn",
    )  # fmt: skip

    def __init__(self, spec: Spec, *, now: float, deadline_at: float) -> None:
        self.spec = spec
        self.columns = Columns()
        self.state = State.QUEUED
        self.deadline_at = deadline_at
        self.turn = 0  # turns finished
        self.open_calls: list[Call] = []  # of the turn being sampled or just ended, in order
        self.done: list[Call] = []  # of earlier turns
        self.calls_made = 0
        self.invalid_in_row = 0
        self.over_calls = False  # the model asked for more than max_calls
        self.answer = ""
        self.returning = False
        self.boundary = 0  # segments up to the last point a snapshot may speak of
        self.proof: tuple[int, bytes] = (0, b"")  # length and digest of the ids last submitted
        self.since = now  # of the present state
        self.resumed_at: float | None = None  # the last result came in; cleared by the first token
        self.queue_s = self.generate_s = self.tool_wait_s = 0.0
        self.snapshots = SnapshotBook()
        self.last_version: Version | None = None
        self.owner: object | None = None  # the edge's own handle (task, timer); not this module's business

    # -- the prompt and the turn ------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.spec.trajectory_id

    def set_prompt(self, ids: Sequence[int]) -> None:
        self.columns.append(PROMPT, ids)
        self.boundary = len(self.columns.segments)

    def max_tokens(self) -> int:
        """Tokens the next turn may sample; below 1 the context is full."""
        room = self.spec.bounds.max_context_tokens - len(self.columns)
        wanted = self.spec.sampling.max_tokens_per_turn or self.spec.bounds.max_tokens_per_turn
        return min(room, wanted)

    def begin_turn(self, now: float) -> None:
        """Into the engine. Proves that the ids last submitted are the beginning of those submitted now."""
        length, digest = self.proof
        if _digest(self.columns, length) != digest:
            raise PrefixChanged(f"the first {length} ids of {self.id} are not those that were submitted before")
        self.proof = (len(self.columns), _digest(self.columns, len(self.columns)))
        self.answer = ""
        self._enter(State.GENERATING, now)

    def sampled(
        self, ids: Sequence[int], logprobs: Sequence[float], version: VersionLike, *, kv_kept: bool = False
    ) -> None:
        mode = pb.KV_MODE_KEPT if kv_kept else pb.KV_MODE_RECOMPUTED
        self.last_version = Version.of(version)
        self.columns.append(MODEL, ids, logprobs=logprobs, version=self.last_version, turn=self.turn, kv_mode=mode)

    def call_closed(self, parsed: ParsedCall, now: float) -> Call | None:
        """A call of the running turn, at its closing token. Returns it where it is to be sent, once."""
        bounds, spec = self.spec.bounds, self.spec
        key = str(CallKey(spec.run_id, spec.trajectory_id, spec.generation, self.turn, parsed.ordinal))
        name = parsed.name or ""
        call = Call(key, parsed.ordinal, name, parsed.args_json or b"", now, self._call_deadline(name, now))
        self.open_calls.append(call)
        if parsed.outcome != tool_pb2.OUTCOME_OK:
            call.settle(outcomes.make_final(parsed.outcome, text=parsed.message), now)
        elif parsed.ordinal >= bounds.max_calls_per_turn:
            sentence = (
                f"this turn already has {bounds.max_calls_per_turn} calls, the most one turn may have: call again"
            )
            call.settle(outcomes.make_final(tool_pb2.OUTCOME_INVALID_ARGS, text=sentence), now)
        elif self.calls_made >= bounds.max_calls or self.turn + 1 >= bounds.max_turns:
            # No turn will follow that could read the answer.
            self.over_calls = self.over_calls or self.calls_made >= bounds.max_calls
            call.settle(outcomes.make_final(tool_pb2.OUTCOME_CANCELLED, detail="no turn follows this one"), now)
        else:
            self.calls_made += 1
            call.sent = True
            return call
        return None

    def end_turn(self, parsed: ParsedTurn, now: float) -> tuple[Step, list[Call]]:
        """The engine's request is over. Returns what follows, and calls that only the end of the turn closed and that
        are to be sent. A call cut by the token limit is not among `parsed.calls` and never runs."""
        seen = {call.ordinal for call in self.open_calls}
        late = [self.call_closed(call, now) for call in parsed.calls if call.ordinal not in seen]
        self.open_calls.sort(key=lambda call: call.ordinal)
        self.turn += 1
        self.answer = parsed.text
        self.boundary = len(self.columns.segments)
        self._leave(now)
        if parsed.finish == "length":
            return Finish(pb.FINISH_REASON_LENGTH), []
        if not self.open_calls:
            return Finish(pb.FINISH_REASON_STOP), []
        if self.over_calls:
            return Finish(pb.FINISH_REASON_MAX_CALLS), []
        if self.turn >= self.spec.bounds.max_turns:
            return Finish(pb.FINISH_REASON_MAX_TURNS), []
        self.state = State.PARKED
        return Generate() if self.all_answered else Park(), [call for call in late if call is not None]

    # -- answers ----------------------------------------------------------------------------------------------------

    @property
    def all_answered(self) -> bool:
        return all(call.result is not None for call in self.open_calls)

    def answered(self, key: str, final: Final, now: float, *, attempts: int = 0, run_us: int = 0) -> Step | None:
        """A result came in. `Fail` where it must not reach the model, `Generate` where it was the last one waited for
        by a parked trajectory; None where nothing follows yet, or the call is not open here (any more)."""
        call = next((c for c in self.open_calls if c.key == key), None)
        if self.state.over or call is None or call.result is not None:
            return None
        call.settle(final, now, attempts=attempts, run_us=run_us)
        self.snapshots.answered.append(key)
        if not outcomes.shown_to_model(final.outcome, final.fault):
            name = outcomes.outcome_name(final.outcome)
            reason = f"call {key} of tool {call.tool!r} ended {name}" + (f": {final.detail}" if final.detail else "")
            return Fail(outcomes.fault_of(final.outcome, final.fault), final.outcome, reason, call.tool)
        if final.outcome == tool_pb2.OUTCOME_UNKNOWN_TOOL:
            # It was offered, from the gateway's own catalogue: that it is gone now is not the model's mistake.
            reason = (
                f"call {key} of tool {call.tool!r} ended UNKNOWN_TOOL, though the tool was served when it was offered"
            )
            return Fail(tool_pb2.FAULT_INFRA, final.outcome, reason, call.tool)
        return Generate() if self.state is State.PARKED and self.all_answered else None

    def take_answers(self, turns: TurnFormat, now: float) -> Step:
        """Render the answers of the ended turn after the sampled ids; Generate, or Finish where a limit is met."""
        for call in self.open_calls:
            assert call.result is not None, f"{call.key} has no result yet"
            blamed = outcomes.fault_of(call.result.outcome, call.result.fault) == tool_pb2.FAULT_MODEL
            invalid = blamed and call.result.outcome in INVALID
            self.invalid_in_row = self.invalid_in_row + 1 if invalid else 0
            if self.invalid_in_row >= self.spec.bounds.max_consecutive_invalid_calls:
                return Finish(pb.FINISH_REASON_INVALID_CALLS)
        budget = self.spec.bounds.max_context_tokens - len(self.columns) - self.spec.bounds.min_turn_tokens
        try:
            rendered = turns.render_results(self.columns.ids, [call.to_answer() for call in self.open_calls], budget)
        except BudgetExceeded:
            return Finish(pb.FINISH_REASON_LENGTH)
        for answer in rendered:
            self.columns.append(TOOL, answer.token_ids, turn=self.turn, call_key=answer.call_key)
        self.done.extend(call.without_content() for call in self.open_calls)
        self.open_calls = []
        self.boundary = len(self.columns.segments)
        self._enter(State.QUEUED, now)
        self.returning, self.resumed_at = True, now
        return Generate()

    # -- ends -------------------------------------------------------------------------------------------------------

    def grader_call(self, now: float) -> Call:
        """The call that grades the last turn: its text as `answer`, under the key of the turn that does not follow."""
        spec = self.spec
        key = str(CallKey(spec.run_id, spec.trajectory_id, spec.generation, self.turn, 0))
        args = json.dumps({"answer": self.answer}, ensure_ascii=False).encode("utf-8", "replace")
        self._enter(State.PARKED, now)
        return Call(key, 0, spec.grader, args, now, self._call_deadline(spec.grader, now), sent=True)

    def end(self, state: State, now: float) -> list[Call]:
        """Over, once; returns the calls that still run and are to be cancelled."""
        assert state.over, f"{state} is no end"
        assert not self.state.over, f"{self.id} ends as {state} after {self.state}"
        self._enter(state, now)
        self.boundary = len(self.columns.segments)
        return self.unanswered()

    def unanswered(self) -> list[Call]:
        return [call for call in self.open_calls if call.sent and call.result is None]

    def give_up_turn(self, now: float) -> list[Call]:
        """Back to the last boundary: the turn being sampled is dropped (its tokens were never shown to anybody), and
        its calls returned, which a new generation will not name."""
        if self.state is not State.GENERATING:
            return []
        self.columns.cut(self.boundary)
        dropped, self.open_calls = self.open_calls, []
        self.calls_made -= sum(call.sent for call in dropped)
        self._enter(State.QUEUED, now)
        return [call for call in dropped if call.sent and call.result is None]

    def summaries(self) -> list[pb.CallSummary]:
        return [call.summary() for call in (*self.done, *self.open_calls)]

    def _call_deadline(self, tool: str, now: float) -> float:
        longest = max(self.spec.bounds.call_deadline_s, self.spec.offer.declared_s.get(tool, 0.0))
        return min(self.deadline_at, now + longest)

    def _leave(self, now: float) -> None:
        spent = max(0.0, now - self.since)
        if self.state is State.QUEUED:
            self.queue_s += spent
        elif self.state is State.GENERATING:
            self.generate_s += spent
        elif self.state is State.PARKED:
            self.tool_wait_s += spent
        self.since = now

    def _enter(self, state: State, now: float) -> None:
        self._leave(now)
        self.state = state


@dataclass(slots=True)
class SnapshotBook:
    """Which snapshots were made, what the trainer acknowledged, and which results each holds."""

    seq: int = 0
    acked: tuple[int, int, int] = (0, 0, 0)  # snapshot_seq, tokens, segments
    marks: list[tuple[int, int, int, tuple[str, ...]]] = field(default_factory=list)  # unacknowledged or not stored
    answered: list[str] = field(default_factory=list)  # keys answered since the last snapshot

    @property
    def unacknowledged(self) -> bool:
        return self.seq > self.acked[0]

    def acknowledge(self, seq: int, *, stored: bool) -> tuple[str, ...]:
        """The trainer holds snapshots up to `seq`. Returns the keys whose results it has durably stored."""
        keys: list[str] = []
        for number, tokens, segments, held in self.marks:
            if number <= seq and number > self.acked[0]:
                self.acked = (number, tokens, segments)
            if number <= seq and stored:
                keys.extend(held)
        if stored:
            self.marks = [mark for mark in self.marks if mark[0] > seq]
        return tuple(keys)


def _digest(columns: Columns, length: int) -> bytes:
    return hashlib.blake2b(memoryview(columns.ids)[:length], digest_size=16).digest() if length else b""
