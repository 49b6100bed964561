"""All sessions: who may attach, which stream is fenced, and which session is forgotten. Pure but for the wake-ups.

Invariant: a session has at most one stream, the one with the highest epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fermata.v1 import gateway_pb2, tool_pb2

from node_runtime.keys import MAX_KEY_LENGTH
from tool_gateway.session import Session
from tool_gateway.settings import GatewaySettings
from tool_gateway.signal import Signal

Goodbye = gateway_pb2.ServerFrame.Goodbye


@dataclass(slots=True)
class Attached:
    """A session together with what reaches its present stream."""

    session: Session
    wake: Callable[[], None] = lambda: None
    """Something may have become ready to send."""
    end: Callable[[Goodbye], None] = lambda goodbye: None
    """End the present stream with this."""
    welcomed_at: float = 0.0
    """When Welcome was handed to the present stream: what the client stamps on it, it stamps later (loop time)."""
    unaccepted: int = 0
    streaming: bool = False
    calls: set[str] = field(default_factory=set)
    """Keys that run for this session."""

    def say(self, event: gateway_pb2.ServerFrame.Event) -> None:
        """Control for the present stream. A client that does not read loses its stream, and may come back."""
        if not self.streaming:
            return
        if self.session.add_control(event):
            self.wake()
        else:
            self.end(goodbye(tool_pb2.OUTCOME_OVERLOADED, "too many events wait for the client, which does not read"))


class SessionHub:
    """Sessions by id."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self.sessions: dict[str, Attached] = {}
        self.acked = Signal()
        """Raised whenever results were acknowledged or a stream ended."""

    def attach(
        self,
        hello: gateway_pb2.ClientFrame.Hello,
        wake: Callable[[], None],
        end: Callable[[Goodbye], None],
    ) -> tuple[Attached, bool] | Goodbye:
        """The session and whether it was known, or why there is none. An older stream is ended FENCED."""
        if refusal := self._refuse(hello):
            return refusal
        known = self.sessions.get(hello.session_id)
        window = min(hello.window_bytes or self._settings.limits.window_bytes, self._settings.limits.window_bytes)
        if known is None:
            session = Session(hello.session_id, hello.run_id, hello.node_id, hello.tenant, window)
            known = self.sessions[hello.session_id] = Attached(session)
            resumed = False
        else:
            resumed = True
            if known.streaming:
                known.end(
                    goodbye(
                        tool_pb2.OUTCOME_FENCED,
                        f"the session {hello.session_id} was attached again with epoch {hello.epoch}",
                    )
                )
        known.session.attach(hello.epoch, window)
        known.wake, known.end, known.streaming, known.unaccepted = wake, end, True, 0
        return known, resumed

    def detach(self, attached: Attached, epoch: int, now: float) -> None:
        """The stream of this epoch has ended."""
        if attached.session.epoch == epoch and attached.streaming:
            attached.streaming = False
            attached.wake = lambda: None
            attached.end = lambda goodbye: None
            attached.session.detached_at = now
            self.acked.raise_()

    def forget(self, session_id: str) -> None:
        self.sessions.pop(session_id, None)

    def expire(self, now: float) -> list[str]:
        """Forget sessions whose resume window is over; their calls run on to their own ends, in the ledger."""
        old = [
            session_id
            for session_id, attached in self.sessions.items()
            if attached.session.detached_at is not None
            and now - attached.session.detached_at >= self._settings.resume_window_s
        ]
        for session_id in old:
            self.forget(session_id)
        return old

    @property
    def streams(self) -> list[Attached]:
        return [attached for attached in self.sessions.values() if attached.streaming]

    def _refuse(self, hello: gateway_pb2.ClientFrame.Hello) -> Goodbye | None:
        for name in ("run_id", "node_id", "session_id"):
            if not getattr(hello, name):
                return goodbye(tool_pb2.OUTCOME_PROTOCOL, f"Hello.{name} is empty: set it")
        for name in ("run_id", "node_id", "session_id", "tenant"):
            if (length := len(getattr(hello, name))) > MAX_KEY_LENGTH:
                return goodbye(
                    tool_pb2.OUTCOME_PROTOCOL,
                    f"Hello.{name} has {length} characters, at most {MAX_KEY_LENGTH} are allowed",
                )
        known = self.sessions.get(hello.session_id)
        if known is None:
            if len(self.sessions) >= self._settings.limits.max_sessions:
                return goodbye(
                    tool_pb2.OUTCOME_OVERLOADED,
                    f"the gateway holds {len(self.sessions)} sessions, its limit: raise gateway.limits.max_sessions",
                )
            return None
        if known.session.run_id != hello.run_id:
            return goodbye(
                tool_pb2.OUTCOME_PERMISSION,
                f"the session {hello.session_id} belongs to another run: choose a session id of your own",
            )
        if hello.epoch <= known.session.epoch:
            return goodbye(
                tool_pb2.OUTCOME_FENCED,
                f"the session {hello.session_id} is at epoch {known.session.epoch}, this stream came with "
                f"{hello.epoch}: raise the epoch at each connection",
            )
        return None


def goodbye(outcome: tool_pb2.Outcome, detail: str) -> Goodbye:
    """Why a stream ends; only one that is overloaded may come back to the same."""
    return Goodbye(
        outcome=outcome,
        fault=tool_pb2.FAULT_INFRA,
        detail=detail,
        reconnect=outcome == tool_pb2.OUTCOME_OVERLOADED,
        reconnect_in_ms=1000 if outcome == tool_pb2.OUTCOME_OVERLOADED else 0,
    )
