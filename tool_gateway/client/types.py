"""What a caller of the gateway client sees: results, notices of a running call, and the client's options.

Plain data only. Invariant: a ``Result`` always carries an outcome together with the fault that says what may follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fermata.v1 import gateway_pb2, tool_pb2

Notice = (
    gateway_pb2.ServerFrame.Accepted
    | gateway_pb2.ServerFrame.Started
    | gateway_pb2.ServerFrame.Progress
    | gateway_pb2.ServerFrame.Chunk
)
"""What ``on_event`` is called with, on the event loop, before the call's result: it must not block."""

OnEvent = Callable[[Notice], None]


@dataclass(frozen=True, slots=True)
class Result:
    """The one end of a call, as the caller may rely on it: every ``ToolGateway.call`` returns exactly one."""

    key: str
    tool: str
    final: tool_pb2.Final
    attempts: int = 0
    queue_us: int = 0
    run_us: int = 0
    instance_id: str = ""
    from_cache: bool = False

    @property
    def outcome(self) -> tool_pb2.Outcome:
        return self.final.outcome

    @property
    def fault(self) -> tool_pb2.Fault:
        """Who is to blame. Only results with fault NONE or MODEL may reach the model or the reward."""
        return self.final.fault

    @property
    def parts(self) -> tuple[tool_pb2.ContentPart, ...]:
        return tuple(self.final.parts)

    @property
    def text(self) -> bytes:
        """All text parts, joined: what the model is to see (UTF-8 where ``final.invalid_utf8`` is false)."""
        return b"".join(part.text for part in self.final.parts if part.WhichOneof("body") == "text")


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a snapshot knows of a call that was sent before this process owned it (``PendingCall`` of rollout.proto)."""

    age_s: float
    """Time since the key was first sent to any gateway, counting the time the snapshot was held."""
    instance_id: str = ""
    """The instance in the last Started heard, or empty."""
    attempt: int = 0
    """The highest attempt heard of in a Started."""


@dataclass(frozen=True, slots=True)
class Pending:
    """An unresolved call as a snapshot needs it (see ``ToolGateway.pending``). All times are durations."""

    key: str
    tool: str
    age_s: float
    remaining_s: float
    instance_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The rarer fields of a call. Times are seconds remaining; None leaves the choice to the tool's own declaration."""

    call_id: str = ""
    generation: int | None = None
    """The generation that owns the trajectory now, where the key was made by an older one. None: the key's own."""
    join_only: bool = False
    """Never start the tool: join a running call or take its stored result, else INDETERMINATE."""
    earlier: Earlier | None = None
    """Set for a call restored from a snapshot: it may have been started already."""
    queue_timeout_s: float | None = None
    attempt_timeout_s: float | None = None
    heartbeat_timeout_s: float | None = None
    max_output_bytes: int = 0
    priority: int = 0
    weight_version: int = 0
    group_id: str = ""
    cache_scope: str = ""
    grader: bool = False
    traceparent: str = ""
    session: tool_pb2.SessionRef | None = None
    context: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Bounds and times of one client. The defaults suit a rollout node."""

    tenant: str = ""
    window_bytes: int = 8 * 1024 * 1024
    """Bytes of unacknowledged results this client is ready to hold."""
    max_frame_bytes: int = 4 * 1024 * 1024
    max_calls: int = 65_536
    """Unresolved calls this client holds; more are answered OVERLOADED at once."""
    accept_timeout_s: float = 1.0
    """A call not accepted within this time is sent again."""
    hello_timeout_s: float = 5.0
    reconnect_base_s: float = 0.1
    reconnect_max_s: float = 2.0
    heartbeat_interval_s: float = 5.0
    """Until the gateway's Welcome names its own."""
    deadline_margin: float = 0.05
    """Share of the remaining time (at most one second) kept back, so that the gateway's own verdict arrives in time."""
