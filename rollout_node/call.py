"""One tool call as the node holds it: from the closing token to the answer the model reads.

Invariant: a call is settled once; what the model may see of it follows the outcome table and nothing else (a final that
blames the infrastructure is never turned into an answer).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2

from node_runtime import outcomes
from node_runtime.keys import args_sha256
from rollout_node.turn.records import ToolAnswer

if TYPE_CHECKING:
    from fermata.v1.tool_pb2 import Final


@dataclass(slots=True)
class Call:
    """`first_at` and `deadline_at` are on the node's monotonic clock; `first_at` is before this process' own time for a
    call taken over from a snapshot. `sent`: it went to a gateway (and not only into the answers)."""

    key: str
    ordinal: int
    tool: str
    args_json: bytes
    first_at: float
    deadline_at: float
    sent: bool = False
    instance_id: str = ""
    last_attempt: int = 0
    result: Final | None = None
    attempts: int = 0
    wait_us: int = 0
    run_us: int = 0

    def settle(self, final: Final, now: float, *, attempts: int = 0, run_us: int = 0) -> None:
        assert self.result is None, f"call {self.key} is settled already"
        self.result = final
        self.attempts, self.run_us = attempts, run_us
        self.wait_us = round((now - self.first_at) * 1e6) if self.sent else 0

    def to_answer(self) -> ToolAnswer:
        """What the model is shown. Only for outcomes the table shows to the model; the turn's format adds the fixed
        sentence of the outcome."""
        assert self.result is not None, f"call {self.key} has no result yet"
        assert outcomes.shown_to_model(self.result.outcome, self.result.fault), f"{self.key} is not for the model"
        data = b"".join(part.text for part in self.result.parts if part.WhichOneof("body") == "text")
        if not data and self.result.structured_json:
            data = self.result.structured_json
        total = self.result.total_bytes if self.result.truncated else 0
        return ToolAnswer(self.key, data, self.result.outcome, total, self.tool)

    def without_content(self) -> Call:
        """For the summary of an ended turn: the answer's text is in the tokens now, the arguments in the model's."""
        self.args_json = b""
        if self.result is not None:
            self.result = tool_pb2.Final(outcome=self.result.outcome, fault=self.result.fault)
        return self

    def summary(self) -> pb.CallSummary:
        """A call without a result was cut off by the end of its trajectory: CANCELLED, by us."""
        outcome = tool_pb2.OUTCOME_CANCELLED if self.result is None else self.result.outcome
        fault = tool_pb2.FAULT_UNSPECIFIED if self.result is None else self.result.fault
        return pb.CallSummary(
            key=self.key,
            tool=self.tool,
            outcome=outcome,
            fault=outcomes.fault_of(outcome, fault),
            attempts=self.attempts,
            wait_us=self.wait_us,
            run_us=self.run_us,
        )

    def to_pending(self, now: float) -> pb.PendingCall:
        pending = pb.PendingCall(
            key=self.key,
            tool=self.tool,
            ordinal=self.ordinal,
            args_json=self.args_json,
            args_sha256=args_sha256(self.args_json),
            remaining_ms=max(0, round((self.deadline_at - now) * 1000)),
            age_ms=max(0, round((now - self.first_at) * 1000)),
            instance_id=self.instance_id,
            last_attempt=self.last_attempt,
        )
        if self.result is not None:
            pending.result.CopyFrom(self.result)
        return pending

    @classmethod
    def from_pending(cls, pending: pb.PendingCall, now: float, held_s: float) -> Call:
        """Taken over: times shrink by what the snapshot lay still."""
        call = cls(
            key=pending.key,
            ordinal=pending.ordinal,
            tool=pending.tool,
            args_json=pending.args_json,
            first_at=now - held_s - pending.age_ms / 1000,
            deadline_at=now + pending.remaining_ms / 1000 - held_s,
            instance_id=pending.instance_id,
            last_attempt=pending.last_attempt,
        )
        if pending.HasField("result"):
            call.result = pending.result
        else:
            call.sent = True
        return call
