"""The client's side of the attach stream as a state machine. Pure: events and times in, events and results out.

Invariants: each submitted call is resolved exactly once, by a result, by its own deadline or by a final close; every
unresolved call is sent on every connection; a result is acknowledged only after it was handed over.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass
from typing import Final

from fermata.v1 import gateway_pb2, tool_pb2

from node_runtime.outcomes import make_final
from tool_gateway.client.types import ClientOptions, Notice, Pending, Result

ClientEvent = gateway_pb2.ClientFrame.Event
CallStart = gateway_pb2.ClientFrame.CallStart
ServerEvent = gateway_pb2.ServerFrame.Event
PROTOCOL_MINOR: Final = 1
MISSED_PINGS: Final = 3
MAX_CONTROL: Final = 65_536
SPARE_TIMERS: Final = 1024
_OVERHEAD: Final = 16
"""Bytes an event costs in its frame beyond its own."""


@dataclass(slots=True, eq=False)
class _Call:
    start: CallStart
    deadline_at: float
    first_sent_at: float | None
    trajectory: tuple[str, int]
    instance_id: str = ""
    attempt: int = 0
    sent: bool = False
    """On this connection."""
    accepted: bool = False
    sent_only_in: int | None = None
    """Epoch of the connection on which the call was sent first, by anybody."""
    unrefused: int = 0
    """Sendings that were not refused."""
    queued: bool = False
    cancelled: bool = False
    cancel_reason: str = ""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The call's one result."""

    key: str
    result: Result


@dataclass(frozen=True, slots=True)
class Noticed:
    """Something was said of a running call."""

    key: str
    notice: Notice


@dataclass(frozen=True, slots=True)
class CatalogueChanged:
    tools: dict[str, tool_pb2.ToolSpec]


@dataclass(frozen=True, slots=True)
class Ended:
    """The gateway ends the stream. `final`: another stream has taken the session; do not come back."""

    detail: str
    final: bool
    reconnect_in_s: float


Effect = Resolved | Noticed | CatalogueChanged | Ended


class ClientState:
    """One session, over as many connections as it takes."""

    def __init__(
        self, *, run_id: str, node_id: str, session_id: str, options: ClientOptions, rng: random.Random | None = None
    ) -> None:
        self.session_id = session_id
        self._run_id = run_id
        self._node_id = node_id
        self._options = options
        self._rng = rng or random.Random()
        self.epoch = 0
        self.welcomed = False
        self.draining = False
        self.closed = False
        self.gateway_id = ""
        self._incarnation = ""
        self._seq = 0
        self._acked = 0
        self._credits = 0
        self._heartbeat_s = options.heartbeat_interval_s
        self._frame_bytes = 64 * 1024
        self._calls: dict[str, _Call] = {}
        self._to_send: deque[str] = deque()
        self._timers: list[tuple[float, int, str, str]] = []
        self._timer_count = 0
        self._sort_out_at = SPARE_TIMERS
        self._control: deque[ClientEvent] = deque()
        self._unconfirmed: deque[tuple[int, ClientEvent]] = deque()
        self._nonce = 1
        self._ping_at = 0.0
        self._heard_at = 0.0

    # -- what callers ask for ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, key: str) -> bool:
        return key in self._calls

    def same_call(self, start: CallStart) -> bool:
        """Whether the call in flight under this key asks for the same."""
        held = self._calls[start.key].start
        return held.tool == start.tool and held.args_sha256 == start.args_sha256

    def adopt(self, key: str, generation: int) -> None:
        """A newer generation of the trajectory waits for the call in flight: sent again, it is sent as that one's."""
        call = self._calls[key]
        if generation > call.trajectory[1]:
            call.trajectory = (call.trajectory[0], generation)
            call.start.generation = generation

    def submit(
        self, start: CallStart, deadline_at: float, trajectory: tuple[str, int], first_sent_at: float | None = None
    ) -> None:
        """Take a call that is not in flight. `first_sent_at` is set for one that an earlier owner may have sent;
        its last instance and attempt stand in `start`."""
        key = start.key
        if key in self._calls:
            raise ValueError(f"the call {key} is in flight")
        call = _Call(start, deadline_at, first_sent_at, trajectory, start.last_instance_id, start.last_attempt)
        self._calls[key] = call
        self._at(deadline_at, "deadline", key)
        self._queue(key, call)

    def cancel(self, key: str, reason: str) -> list[Effect]:
        """Ask for the call's end. One that was never sent is resolved at once."""
        call = self._calls.get(key)
        if call is None or call.cancelled:
            return []
        call.cancelled, call.cancel_reason = True, reason
        if call.first_sent_at is None:
            return [self._resolve_locally(key, tool_pb2.OUTCOME_CANCELLED, reason or "cancelled before it was sent")]
        self._say(ClientEvent(cancel=gateway_pb2.ClientFrame.Cancel(key=key, reason=reason)))
        return []

    def forget(self, key: str, reason: str) -> None:
        """Nobody waits for the call any more: cancel it; whatever still comes is acknowledged and dropped."""
        self.cancel(key, reason)
        self._calls.pop(key, None)

    def release(self, keys: list[str]) -> None:
        for at in range(0, len(keys), 256):
            self._say(ClientEvent(release=gateway_pb2.ClientFrame.Release(keys=keys[at : at + 256])))

    def release_trajectory(self, trajectory_id: str, generation: int) -> None:
        release = gateway_pb2.ClientFrame.Release(trajectory_id=trajectory_id, generation=generation)
        self._say(ClientEvent(release=release))

    def fence(self, trajectory_id: str, generation: int, keep_keys: list[str]) -> None:
        fence = gateway_pb2.ClientFrame.FenceTrajectory(
            run_id=self._run_id, trajectory_id=trajectory_id, generation=generation, keep_keys=keep_keys
        )
        self._say(ClientEvent(fence_trajectory=fence))

    def pending(self, now: float, trajectory_id: str | None = None) -> list[Pending]:
        return [
            Pending(
                key=key,
                tool=call.start.tool,
                age_s=now - call.first_sent_at if call.first_sent_at is not None else 0.0,
                remaining_s=max(0.0, call.deadline_at - now),
                instance_id=call.instance_id,
                attempt=call.attempt,
            )
            for key, call in self._calls.items()
            if trajectory_id is None or call.trajectory[0] == trajectory_id
        ]

    def close(self, outcome: tool_pb2.Outcome, detail: str) -> list[Effect]:
        """No call will be answered any more."""
        self.closed = True
        return [self._resolve_locally(key, outcome, detail) for key in list(self._calls)]

    # -- connections -------------------------------------------------------------------------------------------------

    def connect(self, now: float) -> ClientEvent:
        """A new connection: its Hello."""
        self.epoch += 1
        self.welcomed = False
        self.draining = False
        self._heard_at = now
        hello = gateway_pb2.ClientFrame.Hello(
            protocol_minor=PROTOCOL_MINOR,
            run_id=self._run_id,
            node_id=self._node_id,
            tenant=self._options.tenant,
            session_id=self.session_id,
            epoch=self.epoch,
            resume_from_seq=self._seq,
            incarnation=self._incarnation,
            max_frame_bytes=self._options.max_frame_bytes,
            window_bytes=self._options.window_bytes,
        )
        return ClientEvent(hello=hello)

    def disconnected(self) -> None:
        """The connection is gone: nothing sent on it is taken as received."""
        self.welcomed = False
        while self._unconfirmed:
            self._control.appendleft(self._unconfirmed.pop()[1])
        self._to_send.clear()
        for key, call in self._calls.items():
            call.sent = call.accepted = call.queued = False
            self._queue(key, call)

    @property
    def may_leave(self) -> bool:
        """The gateway drains and holds no call of ours: another one is better."""
        return self.draining and not any(call.sent for call in self._calls.values())

    @property
    def dead_at(self) -> float:
        """When the connection is to be given up, unless something is heard: three pings missed, or no Welcome."""
        return self._heard_at + (MISSED_PINGS * self._heartbeat_s if self.welcomed else self._options.hello_timeout_s)

    # -- what the gateway says ---------------------------------------------------------------------------------------

    def receive(self, event: ServerEvent, now: float) -> list[Effect]:
        self._heard_at = now
        match event.WhichOneof("event"):
            case "welcome":
                self._welcome(event.welcome, now)
            case "accepted":
                self._accepted(event.accepted.key)
                return self._notice(event.accepted.key, event.accepted)
            case "started":
                if (call := self._calls.get(event.started.key)) is not None:
                    call.instance_id = event.started.instance_id
                    call.attempt = max(call.attempt, event.started.attempt)
                return self._notice(event.started.key, event.started)
            case "progress":
                return self._notice(event.progress.key, event.progress)
            case "chunk":
                return self._notice(event.chunk.key, event.chunk)
            case "result":
                return self._result(event.result, now)
            case "catalogue":
                return [CatalogueChanged({entry.spec.name: entry.spec for entry in event.catalogue.tools})]
            case "drain":
                self.draining = True
            case "pong":
                while self._unconfirmed and self._unconfirmed[0][0] <= event.pong.nonce:
                    self._unconfirmed.popleft()
            case "goodbye":
                bye = event.goodbye
                fenced = bye.outcome == tool_pb2.OUTCOME_FENCED
                return [Ended(bye.detail, fenced, bye.reconnect_in_ms / 1000)]
            case _:
                pass  # an event of a newer gateway
        return []

    def _welcome(self, welcome: gateway_pb2.ServerFrame.Welcome, now: float) -> None:
        self.welcomed = True
        self.gateway_id = welcome.gateway_id
        if welcome.incarnation != self._incarnation:
            self._incarnation = welcome.incarnation
            self._seq = self._acked = 0
        self._credits = max(1, welcome.credits)
        if welcome.heartbeat_interval_ms > 0:
            self._heartbeat_s = welcome.heartbeat_interval_ms / 1000
        if welcome.max_frame_bytes > 0:
            self._frame_bytes = welcome.max_frame_bytes
        self._ping_at = now

    def _accepted(self, key: str) -> None:
        call = self._calls.get(key)
        if call is not None and call.sent and not call.accepted:
            call.accepted = True
            self._credits += 1

    def _result(self, result: gateway_pb2.ServerFrame.Result, now: float) -> list[Effect]:
        if result.seq <= self._seq:
            return []  # seen before this connection
        self._seq = result.seq
        call = self._calls.get(result.key)
        if call is None:
            return []  # its deadline was quicker, or nobody waits any more
        self._accepted(result.key)
        if _is_pushback(result) and not call.cancelled:
            call.sent = call.accepted = False
            call.unrefused = max(0, call.unrefused - 1)
            if call.unrefused == 0 and call.sent_only_in == self.epoch:
                # Each sending was refused: nobody has the call. On a later connection a refusal proves nothing, it may
                # be an older one that is said again.
                call.first_sent_at = None
            wait_s = result.final.retry_after_ms / 1000 if result.final.HasField("retry_after_ms") else 0.5
            self._at(now + wait_s * self._rng.uniform(1.0, 1.5), "send", result.key)
            return []
        del self._calls[result.key]
        return [
            Resolved(
                result.key,
                Result(
                    key=result.key,
                    tool=result.tool or call.start.tool,
                    final=result.final,
                    attempts=result.attempts,
                    queue_us=result.queue_us,
                    run_us=result.run_us,
                    instance_id=result.instance_id,
                    from_cache=result.from_cache,
                ),
            )
        ]

    def _notice(self, key: str, notice: Notice) -> list[Effect]:
        return [Noticed(key, notice)] if key in self._calls else []

    # -- time --------------------------------------------------------------------------------------------------------

    @property
    def tick_at(self) -> float:
        """When ``tick`` next has something to do."""
        return self._timers[0][0] if self._timers else float("inf")

    @property
    def ping_at(self) -> float:
        """When ``take`` next has a ping."""
        return self._ping_at if self.welcomed else float("inf")

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._timers and self._timers[0][0] <= now:
            _, _, kind, key = heapq.heappop(self._timers)
            call = self._calls.get(key)
            if call is None:
                continue
            if kind == "deadline" and call.deadline_at <= now:
                if call.first_sent_at is not None and not call.cancelled:
                    cancel = gateway_pb2.ClientFrame.Cancel(key=key, reason="the caller's deadline is over")
                    self._say(ClientEvent(cancel=cancel))
                detail = "the call's deadline is over, and no gateway has answered"
                effects.append(self._resolve_locally(key, tool_pb2.OUTCOME_DEADLINE_EXCEEDED, detail))
            elif (kind == "accept" and call.sent and not call.accepted) or (kind == "send" and not call.sent):
                self._queue(key, call)
        return effects

    # -- what is to be sent ------------------------------------------------------------------------------------------

    def take(self, now: float) -> list[ClientEvent]:
        """The events of the next frame: signs of life and acknowledgements first, then control, then calls."""
        if not self.welcomed:
            return []
        events: list[ClientEvent] = []
        room = self._frame_bytes
        if now >= self._ping_at:
            events.append(ClientEvent(ping=gateway_pb2.ClientFrame.Ping(nonce=self._nonce)))
            self._nonce += 1
            self._ping_at = now + self._heartbeat_s
        if self._seq > self._acked:
            self._acked = self._seq
            events.append(ClientEvent(result_ack=gateway_pb2.ClientFrame.ResultAck(seq=self._seq)))
        while self._control and room > 0:
            event = self._control.popleft()
            self._unconfirmed.append((self._nonce, event))
            events.append(event)
            room -= event.ByteSize() + _OVERHEAD
        while self._to_send and not self.draining:
            key = self._to_send[0]
            call = self._calls.get(key)
            if call is None or not call.queued:
                self._to_send.popleft()
                continue
            if not call.sent and self._credits <= 0:
                break
            size = call.start.ByteSize() + _OVERHEAD
            if events and size > room:
                break
            self._to_send.popleft()
            events.append(self._send(key, call, now))
            room -= size
            if call.cancelled:  # whoever is sent the call does not know yet, and must not start it
                cancel = gateway_pb2.ClientFrame.Cancel(key=key, reason=call.cancel_reason)
                events.append(ClientEvent(cancel=cancel))
        return events

    def _send(self, key: str, call: _Call, now: float) -> ClientEvent:
        if not call.sent:
            self._credits -= 1
        event = ClientEvent()
        start = event.call_start
        start.CopyFrom(call.start)
        left_s = max(0.0, call.deadline_at - now)
        left_s -= min(1.0, left_s * self._options.deadline_margin)
        start.total_timeout_ms = max(1, int(left_s * 1000))
        if call.first_sent_at is None:
            call.first_sent_at = now
            if call.sent_only_in is None:
                call.sent_only_in = self.epoch
        else:
            start.resend = True
            start.age_ms = max(0, int((now - call.first_sent_at) * 1000)) + 1
            start.last_instance_id = call.instance_id
            start.last_attempt = call.attempt
        call.sent, call.queued = True, False
        call.unrefused += 1
        self._at(now + self._options.accept_timeout_s, "accept", key)
        return event

    # -- small parts -------------------------------------------------------------------------------------------------

    def _queue(self, key: str, call: _Call) -> None:
        if not call.queued:
            call.queued = True
            self._to_send.append(key)

    def _say(self, event: ClientEvent) -> None:
        self._control.append(event)
        if len(self._control) > MAX_CONTROL:
            self._control.popleft()  # retention and deadlines end at the gateway what this would have ended sooner

    def _at(self, when: float, kind: str, key: str) -> None:
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, kind, key))
        if len(self._timers) >= self._sort_out_at:
            # A call that has ended would leave its deadline here until then.
            self._timers = [timer for timer in self._timers if timer[3] in self._calls]
            heapq.heapify(self._timers)
            self._sort_out_at = 2 * len(self._timers) + SPARE_TIMERS

    def _resolve_locally(self, key: str, outcome: tool_pb2.Outcome, detail: str) -> Resolved:
        call = self._calls.pop(key)
        if call.sent and not call.accepted:
            self._credits += 1
        started = tool_pb2.STARTED_NO if call.first_sent_at is None else tool_pb2.STARTED_UNKNOWN
        final = make_final(outcome, detail=detail, started=started)
        return Resolved(key, Result(key, call.start.tool, final, call.attempt, instance_id=call.instance_id))


def _is_pushback(result: gateway_pb2.ServerFrame.Result) -> bool:
    """Refused by the gateway itself, before any attempt: the same call may be sent again, here or elsewhere."""
    return (
        result.final.outcome == tool_pb2.OUTCOME_OVERLOADED
        and result.final.started == tool_pb2.STARTED_NO
        and result.attempts == 0
    )
