"""One running call in memory: what was asked, when it must end, and where it stands. No I/O.

Invariant: `deadline_at` is set once, at the first acceptance, and never moves.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fermata.v1 import gateway_pb2, tool_pb2

from node_runtime.keys import CallKey, InvalidKey, args_sha256
from tool_gateway.backends import Backend
from tool_gateway.catalogue import Tool
from tool_gateway.ledger import AttemptRecord, CallRecord
from tool_gateway.metrics import CALLS_IN_FLIGHT
from tool_gateway.policy import ToolTraits
from tool_gateway.settings import LimitSettings, TimeoutSettings

CallStart = gateway_pb2.ClientFrame.CallStart


@dataclass(slots=True, eq=False)
class Call:
    """A call that this gateway drives to its outcome."""

    key: CallKey
    start: CallStart
    digest: bytes
    received_at: float
    stamped_after: float
    """The client stamped `start.age_ms` after this: the call may have lain in the stream since."""
    deadline_at: float
    tenant: str
    session_id: str
    """The session that owns the call now."""
    task: asyncio.Task[None] | None = None
    tool: Tool | None = None
    at: Backend | None = None
    """Where an attempt is on its way."""
    disturbed: bool = False
    """The connection to the attempt was lost, and has not ended in a result since."""
    attempts: int = 0
    """Number of the last attempt, counted over all gateways."""
    instance_id: str = ""
    queued_s: float = 0.0
    run_s: float = 0.0
    counted_as: str | None = None
    """The label under which the call counts as in flight now."""
    waiting_for: str = ""
    cancelled: str | None = None
    release_when_done: bool = False
    finished: bool = False
    started: tool_pb2.Started = tool_pb2.STARTED_NO
    """What is known of the tool having begun, by any attempt."""
    unproven: bool = False
    """An attempt, ours or one of another gateway, ended without proof that it had not started."""
    only: tuple[str, str] | None = field(default=None)
    """After a takeover or a recovery: the one (address, instance) where the call may start."""
    recorded: tuple[AttemptRecord, ...] = ()
    """Attempts of an earlier gateway, from the ledger."""
    foreign: bool | None = None
    """Of a call that was in the ledger: whether it may have been started before it came there."""

    @property
    def traits(self) -> ToolTraits:
        return ToolTraits.of(self.tool.spec) if self.tool is not None else ToolTraits()

    @property
    def tool_label(self) -> str:
        """For metrics: a name the model made up must not become a label."""
        return self.tool.spec.name if self.tool is not None else "unknown"

    def count_in_flight(self, label: str | None) -> None:
        """Count the call under this label (None: no longer), and not under the one before."""
        if self.counted_as is not None:
            CALLS_IN_FLIGHT.labels(tool=self.counted_as).dec()
        self.counted_as = label
        if label is not None:
            CALLS_IN_FLIGHT.labels(tool=label).inc()

    @property
    def resent(self) -> bool:
        """An attempt that the ledger does not hold may have started the call, or it must not be started at all."""
        sent_before = self.start.resend if self.foreign is None else self.foreign
        return sent_before or self.start.mode == CallStart.MODE_JOIN_ONLY

    @property
    def generation(self) -> int:
        """The generation that owns the trajectory, as the caller sees it."""
        return max(self.start.generation, self.key.generation)

    def resume(self, record: CallRecord) -> None:
        """Go on where the ledger says that an earlier gateway was: with its deadline and its attempts."""
        self.received_at, self.deadline_at = record.received_at, record.deadline_at
        self.stamped_after = min(self.stamped_after, record.received_at)
        self.recorded, self.foreign = record.attempts, record.foreign
        self.attempts = max((attempt.number for attempt in record.attempts), default=0)
        if record.attempts:
            self.instance_id = record.attempts[-1].instance_id

    def record(self, session_id: str) -> CallRecord:
        return CallRecord(
            key=self.start.key,
            run_id=self.key.run_id,
            trajectory_id=self.key.trajectory_id,
            key_generation=self.key.generation,
            generation=self.generation,
            session_id=session_id,
            tool=self.start.tool,
            args_sha256=self.digest,
            received_at=self.received_at,
            deadline_at=self.deadline_at,
            request_bytes=self.start.ByteSize(),
            foreign=self.resent,
        )


def read_start(
    start: CallStart, *, run_id: str, limits: LimitSettings
) -> tuple[CallKey, bytes] | tuple[tool_pb2.Outcome, str]:
    """The key and the digest, or what is wrong with the request as a message (an outcome and a sentence)."""
    try:
        key = CallKey.parse(start.key)
    except InvalidKey as error:
        return tool_pb2.OUTCOME_PROTOCOL, str(error)
    if key.run_id != run_id:
        return tool_pb2.OUTCOME_PERMISSION, f"the call {start.key} is not of this stream's run {run_id}"
    if len(start.args_json) > limits.max_args_bytes:
        return (
            tool_pb2.OUTCOME_INVALID_ARGS,
            f"arguments have {len(start.args_json)} bytes, at most {limits.max_args_bytes} are allowed: send less",
        )
    digest = args_sha256(start.args_json)
    if start.args_sha256 and start.args_sha256 != digest:
        return tool_pb2.OUTCOME_PROTOCOL, f"the call {start.key} carries a digest that is not of its arguments"
    return key, digest


def total_timeout_s(start: CallStart, tool: Tool | None, timeouts: TimeoutSettings) -> float:
    """The time from acceptance to the deadline: the caller's, else the tool's, else the gateway's default."""
    if start.HasField("total_timeout_ms"):
        asked = start.total_timeout_ms / 1000
    elif tool is not None and tool.spec.default_timeout_ms > 0:
        asked = tool.spec.default_timeout_ms / 1000
    else:
        asked = timeouts.default_call_s
    return max(0.0, min(asked, timeouts.max_call_s))


def attempt_timeout_s(
    start: CallStart, tool: Tool, remaining_s: float, timeouts: TimeoutSettings
) -> tuple[float, bool]:
    """Time for one attempt, and whether it is the deadline that bounds it."""
    most = remaining_s - margin_s(remaining_s, timeouts)
    asked = start.attempt_timeout_ms if start.HasField("attempt_timeout_ms") else tool.spec.default_timeout_ms
    bounds = [ms / 1000 for ms in (asked, tool.spec.max_timeout_ms) if ms > 0]
    if bounds and min(bounds) < most:
        return min(bounds), False
    return max(0.001, most), True


def margin_s(remaining_s: float, timeouts: TimeoutSettings) -> float:
    """What this hop keeps back of the remaining time."""
    return min(timeouts.margin_max_s, max(0.0, remaining_s) * timeouts.margin)
