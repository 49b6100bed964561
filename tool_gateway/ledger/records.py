"""Records of the ledger: immutable snapshots, so that a reader never sees a record change under it.

Invariant: of a call's arguments a record holds the digest and the size, never the arguments. Outputs go with their
record: by release, or by the end of their retention.

Times are seconds of the gateway's monotonic clock, also where a store keeps them in other terms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fermata.v1 import gateway_pb2, tool_pb2


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One committed attempt → instance."""

    number: int
    instance_id: str
    address: str
    started_at: float
    outcome: tool_pb2.Outcome = tool_pb2.OUTCOME_UNSPECIFIED
    started: tool_pb2.Started = tool_pb2.STARTED_UNKNOWN
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """The terminal part of a record."""

    final: tool_pb2.Final
    queue_us: int = 0
    run_us: int = 0
    instance_id: str = ""
    attempts: int = 0
    stored_bytes: int = 0
    """Not 0: `final` is a head without the output, which the store holds in so many bytes."""

    @property
    def size(self) -> int:
        return self.stored_bytes or self.final.ByteSize()

    def to_head(self) -> Ending:
        """The same without the output."""
        final = self.final
        head = tool_pb2.Final(outcome=final.outcome, fault=final.fault, started=final.started, detail=final.detail)
        size = max(1, final.ByteSize())
        return Ending(head, self.queue_us, self.run_us, self.instance_id, self.attempts, size)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """All that is known of one key."""

    key: str
    run_id: str
    trajectory_id: str
    key_generation: int
    generation: int
    """The generation of the owner that asked last; never lower than the trajectory's fence."""
    session_id: str
    tool: str
    args_sha256: bytes
    received_at: float
    deadline_at: float
    attempts: tuple[AttemptRecord, ...] = ()
    outcome: Ending | None = None
    finished_at: float = 0.0
    acked: bool = False
    request_bytes: int = 0
    """Size of the request, which is held for as long as the call runs."""
    foreign: bool = False
    """It may have been started before it was recorded here: that no attempt is recorded proves nothing."""

    @property
    def done(self) -> bool:
        return self.outcome is not None

    @property
    def cost_bytes(self) -> int:
        """What the record is counted as against the store's bound."""
        return 512 + (self.outcome.size if self.outcome is not None else self.request_bytes)

    def with_attempt(self, attempt: AttemptRecord) -> CallRecord:
        return self._with((*self.attempts, attempt), self.outcome, self.finished_at)

    def with_attempt_ended(
        self, number: int, outcome: tool_pb2.Outcome, started: tool_pb2.Started, detail: str
    ) -> CallRecord:
        attempts = tuple(
            replace(attempt, outcome=outcome, started=started, detail=detail) if attempt.number == number else attempt
            for attempt in self.attempts
        )
        return self._with(attempts, self.outcome, self.finished_at)

    def with_outcome(self, outcome: Ending, finished_at: float) -> CallRecord:
        """Finished; an attempt that is still open has ended with the call."""
        attempts = self.attempts
        if attempts and attempts[-1].outcome == tool_pb2.OUTCOME_UNSPECIFIED:
            final = outcome.final
            last = replace(attempts[-1], outcome=final.outcome, started=final.started, detail=final.detail)
            attempts = (*attempts[:-1], last)
        return self._with(attempts, outcome, finished_at)

    def _with(self, attempts: tuple[AttemptRecord, ...], outcome: Ending | None, finished_at: float) -> CallRecord:
        """As ``dataclasses.replace`` at half its price: each call has this done several times."""
        return CallRecord(
            self.key,
            self.run_id,
            self.trajectory_id,
            self.key_generation,
            self.generation,
            self.session_id,
            self.tool,
            self.args_sha256,
            self.received_at,
            self.deadline_at,
            attempts,
            outcome,
            finished_at,
            self.acked,
            self.request_bytes,
            self.foreign,
        )

    def to_result(self) -> gateway_pb2.ServerFrame.Result:
        """The Result event without its seq, which belongs to a session. Only for a record that is done.

        Given again it is the same result: `from_cache` is for what another key's execution answered.
        """
        if self.outcome is None:
            raise ValueError(f"the call {self.key} has no outcome yet")
        if self.outcome.stored_bytes:
            raise ValueError(f"the output of the call {self.key} is in the store: load the record")
        return gateway_pb2.ServerFrame.Result(
            key=self.key,
            tool=self.tool,
            attempts=self.outcome.attempts,
            queue_us=self.outcome.queue_us,
            run_us=self.outcome.run_us,
            instance_id=self.outcome.instance_id,
            final=self.outcome.final,
        )
