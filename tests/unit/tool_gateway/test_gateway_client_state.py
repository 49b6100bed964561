"""The client's state machine against a model gateway: drops, duplicates, restarts, refusals, on virtual time."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

from fermata.v1 import gateway_pb2, tool_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from node_runtime.keys import args_sha256
from node_runtime.outcomes import make_final
from tool_gateway.client.state import (
    SPARE_TIMERS,
    CallStart,
    CatalogueChanged,
    ClientEvent,
    ClientState,
    Effect,
    Ended,
    Noticed,
    Resolved,
    ServerEvent,
)
from tool_gateway.client.types import ClientOptions

Server = gateway_pb2.ServerFrame


def state(**options: Any) -> ClientState:
    return ClientState(
        run_id="run", node_id="n", session_id="s", options=ClientOptions(**options), rng=random.Random(1)
    )


def welcome(incarnation: str = "i1", credits_: int = 256, **fields: Any) -> ServerEvent:
    return ServerEvent(
        welcome=Server.Welcome(incarnation=incarnation, credits=credits_, heartbeat_interval_ms=1000, **fields)
    )


def call(n: int, args: bytes = b"{}") -> CallStart:
    return CallStart(key=f"run/t/0/0/{n}", tool="echo", args_json=args, args_sha256=args_sha256(args))


def result(n: int, seq: int, final: tool_pb2.Final | None = None, **fields: Any) -> ServerEvent:
    final = final or make_final(tool_pb2.OUTCOME_OK, text=str(n))
    return ServerEvent(result=Server.Result(key=f"run/t/0/0/{n}", seq=seq, final=final, **fields))


def connected(**options: Any) -> ClientState:
    made = state(**options)
    made.connect(0.0)
    made.receive(welcome(), 0.0)
    made.take(0.0)
    return made


def starts(events: list[ClientEvent]) -> list[CallStart]:
    return [event.call_start for event in events if event.WhichOneof("event") == "call_start"]


def kinds(events: list[ClientEvent]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]


def submit(made: ClientState, n: int, deadline_at: float = 60.0, **fields: Any) -> None:
    made.submit(call(n), deadline_at, ("t", 0), **fields)


def test_nothing_is_sent_before_the_welcome_and_everything_after() -> None:
    made = state()
    submit(made, 0)
    hello = made.connect(0.0).hello
    assert (hello.epoch, hello.resume_from_seq, hello.session_id) == (1, 0, "s")
    assert made.take(0.0) == []
    made.receive(welcome(), 0.0)
    events = made.take(0.5)
    assert kinds(events) == ["ping", "call_start"]
    first = starts(events)[0]
    assert (first.resend, first.age_ms, first.total_timeout_ms) == (False, 0, 58_500)


def test_credits_bound_unaccepted_calls_and_come_back_with_accepted_or_a_result() -> None:
    made = state()
    made.connect(0.0)
    made.receive(welcome(credits_=2), 0.0)
    for n in range(5):
        submit(made, n)
    assert len(starts(made.take(0.0))) == 2
    assert starts(made.take(0.0)) == []
    made.receive(ServerEvent(accepted=Server.Accepted(key="run/t/0/0/0")), 0.1)
    made.receive(ServerEvent(accepted=Server.Accepted(key="run/t/0/0/0")), 0.1)  # said twice, counted once
    assert len(starts(made.take(0.1))) == 1
    made.receive(result(1, seq=1), 0.2)
    assert len(starts(made.take(0.2))) == 1


def test_a_call_that_is_not_accepted_within_a_second_is_sent_again_with_its_age() -> None:
    made = connected()
    submit(made, 0)
    made.take(1.0)
    assert made.tick(1.9) == []
    assert starts(made.take(1.9)) == []
    made.tick(2.0)
    again = starts(made.take(2.0))[0]
    assert (again.resend, again.age_ms) == (True, 1001)
    made.receive(ServerEvent(accepted=Server.Accepted(key="run/t/0/0/0")), 2.1)
    made.tick(5.0)
    assert starts(made.take(5.0)) == []


def test_after_a_reconnect_every_unresolved_call_is_sent_again_with_what_was_heard() -> None:
    made = connected()
    submit(made, 0)
    submit(made, 1)
    made.take(0.0)
    made.receive(ServerEvent(started=Server.Started(key="run/t/0/0/0", attempt=2, instance_id="i7")), 0.1)
    made.receive(result(1, seq=1), 0.2)
    made.disconnected()
    hello = made.connect(3.0).hello
    assert (hello.epoch, hello.resume_from_seq, hello.incarnation) == (2, 1, "i1")
    made.receive(welcome("i2"), 3.0)
    (again,) = starts(made.take(3.0))
    assert (again.key, again.resend, again.last_instance_id, again.last_attempt) == ("run/t/0/0/0", True, "i7", 2)
    assert again.age_ms == 3001
    # Another incarnation numbers from 1.
    (resolved,) = made.receive(result(0, seq=1), 3.1)
    assert isinstance(resolved, Resolved)


def test_a_deadline_ends_the_call_here_and_tells_the_gateway() -> None:
    made = connected()
    submit(made, 0, deadline_at=2.0)
    made.take(0.0)
    (resolved,) = made.tick(2.0)
    assert isinstance(resolved, Resolved)
    assert resolved.result.outcome == tool_pb2.OUTCOME_DEADLINE_EXCEEDED
    assert resolved.result.fault == tool_pb2.FAULT_INFRA
    assert kinds(made.take(2.0)) == ["ping", "cancel"]
    assert made.receive(result(0, seq=1), 2.5) == []
    assert kinds(made.take(2.5)) == ["result_ack"]


def test_cancel_before_sending_ends_at_once_and_after_it_asks_the_gateway() -> None:
    made = state()
    submit(made, 0)
    (resolved,) = made.cancel("run/t/0/0/0", "no")
    assert isinstance(resolved, Resolved)
    assert resolved.result.outcome == tool_pb2.OUTCOME_CANCELLED
    made = connected()
    submit(made, 0)
    made.take(0.0)
    assert made.cancel("run/t/0/0/0", "no") == []
    assert made.cancel("run/t/0/0/0", "again") == []
    assert kinds(made.take(0.1)) == ["cancel"]
    assert isinstance(made.receive(result(0, seq=1), 0.2)[0], Resolved)


def test_control_is_repeated_on_a_new_connection_until_a_pong_confirms_it() -> None:
    made = connected()
    made.release(["run/t/0/0/0"])
    made.fence("t", 1, ["run/t/0/0/1"])
    assert kinds(made.take(0.5)) == ["release", "fence_trajectory"]
    made.disconnected()
    made.connect(1.0)
    made.receive(welcome(), 1.0)
    events = made.take(1.0)
    assert kinds(events) == ["ping", "release", "fence_trajectory"]
    later = made.take(2.1)
    assert kinds(later) == ["ping"]
    made.receive(ServerEvent(pong=Server.Pong(nonce=later[0].ping.nonce)), 2.2)
    made.disconnected()
    made.connect(3.0)
    made.receive(welcome(), 3.0)
    assert kinds(made.take(3.0)) == ["ping"]


def test_a_gateways_own_refusal_is_sent_again_later_and_a_backends_is_the_result() -> None:
    made = connected()
    submit(made, 0)
    submit(made, 1)
    made.take(0.0)
    refused = make_final(tool_pb2.OUTCOME_OVERLOADED, started=tool_pb2.STARTED_NO, retry_after_ms=1000)
    assert made.receive(result(0, seq=1, final=refused), 0.1) == []
    assert isinstance(made.receive(result(1, seq=2, final=refused, attempts=3), 0.1)[0], Resolved)
    made.tick(1.0)
    assert starts(made.take(0.9)) == []
    made.tick(1.7)
    assert [start.key for start in starts(made.take(1.7))] == ["run/t/0/0/0"]


def refused(n: int, seq: int) -> ServerEvent:
    return result(n, seq, make_final(tool_pb2.OUTCOME_OVERLOADED, started=tool_pb2.STARTED_NO, retry_after_ms=1000))


def test_a_call_whose_every_sending_was_refused_starts_plainly_and_any_other_is_sent_as_sent_before() -> None:
    made = connected()
    submit(made, 0)
    submit(made, 1, first_sent_at=-1.0)  # by an earlier owner
    assert [start.resend for start in starts(made.take(0.0))] == [False, True]
    for seq, n in ((1, 0), (2, 1)):
        made.receive(refused(n, seq), 0.1)
    made.tick(2.0)
    assert {start.key[-1]: start.resend for start in starts(made.take(2.0))} == {"0": False, "1": True}
    assert made.pending(2.0)[0].age_s == 0.0
    # Not accepted in time it is sent twice: one refusal says nothing of the other sending.
    made.tick(3.1)
    assert {start.key[-1]: start.resend for start in starts(made.take(3.1))} == {"0": True, "1": True}
    made.receive(refused(0, 3), 3.2)
    made.tick(5.0)
    assert {start.key[-1]: start.resend for start in starts(made.take(5.0))}["0"]
    for seq in (4, 5):
        made.receive(refused(0, seq), 5.1)
    made.tick(7.0)
    assert not {start.key[-1]: start.resend for start in starts(made.take(7.0))}["0"]


def test_a_refusal_said_again_on_a_later_connection_disproves_nothing() -> None:
    made = connected()
    submit(made, 0)
    made.take(0.0)
    made.receive(refused(0, 1), 0.1)
    made.disconnected()
    made.connect(1.0)
    made.receive(welcome("i2"), 1.0)
    assert [start.resend for start in starts(made.take(1.0))] == [False]
    made.receive(refused(0, 1), 1.1)  # the one of before, under this incarnation's number
    made.tick(3.0)
    assert [start.resend for start in starts(made.take(3.0))] == [True]


def test_a_draining_gateway_gets_no_new_calls_and_is_left_when_it_holds_none() -> None:
    made = connected()
    submit(made, 0)
    made.take(0.0)
    made.receive(ServerEvent(drain=Server.Drain()), 0.1)
    submit(made, 1)
    assert starts(made.take(0.2)) == []
    assert not made.may_leave
    made.receive(result(0, seq=1), 0.3)
    assert made.may_leave
    made.disconnected()
    made.connect(1.0)
    made.receive(welcome("i2"), 1.0)
    assert [start.key for start in starts(made.take(1.0))] == ["run/t/0/0/1"]


def test_silence_and_a_missing_welcome_end_the_connection() -> None:
    made = state(hello_timeout_s=5.0)
    made.connect(10.0)
    assert made.dead_at == 15.0
    made.receive(welcome(), 11.0)
    assert made.dead_at == 14.0
    made.receive(ServerEvent(pong=Server.Pong(nonce=1)), 13.0)
    assert made.dead_at == 16.0


def test_notices_catalogue_and_goodbye() -> None:
    made = connected()
    submit(made, 0)
    made.take(0.0)
    (noticed,) = made.receive(ServerEvent(chunk=Server.Chunk(key="run/t/0/0/0")), 0.1)
    assert isinstance(noticed, Noticed)
    assert made.receive(ServerEvent(chunk=Server.Chunk(key="run/t/0/0/9")), 0.1) == []
    entry = gateway_pb2.CatalogueEntry(spec=tool_pb2.ToolSpec(name="echo"))
    (changed,) = made.receive(ServerEvent(catalogue=Server.Catalogue(tools=[entry])), 0.1)
    assert isinstance(changed, CatalogueChanged)
    assert set(changed.tools) == {"echo"}
    goodbye = Server.Goodbye(outcome=tool_pb2.OUTCOME_FENCED, detail="d")
    (ended,) = made.receive(ServerEvent(goodbye=goodbye), 0.1)
    assert ended == Ended("d", True, 0.0)
    assert len(made.close(tool_pb2.OUTCOME_FENCED, "d")) == 1


def test_a_restored_call_is_sent_as_one_that_may_have_started() -> None:
    made = connected()
    start = call(0)
    start.last_instance_id, start.last_attempt = "i3", 2
    made.submit(start, 60.0, ("t", 1), first_sent_at=-5.0)
    (pending,) = made.pending(1.0, "t")
    assert (pending.age_s, pending.instance_id, pending.attempt, pending.remaining_s) == (6.0, "i3", 2, 59.0)
    (sent,) = starts(made.take(1.0))
    assert (sent.resend, sent.age_ms, sent.last_instance_id, sent.last_attempt) == (True, 6001, "i3", 2)


class _ModelGateway:
    """A gateway at its simplest: a ledger by key, one session, unacknowledged results replayed; its memory may go."""

    def __init__(self) -> None:
        self.incarnation = 0
        self.runs: Counter[str] = Counter()
        self.wipe()

    def wipe(self) -> None:
        self.incarnation += 1
        self.done: dict[str, int] = {}
        self.running: list[str] = []
        self.unacked: dict[int, str] = {}
        self.seq = 0
        self.out: deque[ServerEvent] = deque()

    def attach(self, hello: gateway_pb2.ClientFrame.Hello) -> None:
        self.out.clear()
        self.out.append(welcome(f"i{self.incarnation}", credits_=3))
        if hello.incarnation == f"i{self.incarnation}":
            self.ack(hello.resume_from_seq)
            for seq, key in self.unacked.items():
                self.out.append(self.event(key, seq))
        else:
            self.unacked.clear()
            for key in self.done:
                self.deliver(key)

    def handle(self, event: ClientEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "call_start":
            key = event.call_start.key
            self.out.append(ServerEvent(accepted=Server.Accepted(key=key)))
            if key in self.done:
                if key not in self.unacked.values():
                    self.deliver(key)
            elif key not in self.running:
                self.running.append(key)
                self.runs[key] += 1
        elif kind == "result_ack":
            self.ack(event.result_ack.seq)
        elif kind == "ping":
            self.out.append(ServerEvent(pong=Server.Pong(nonce=event.ping.nonce)))

    def finish(self, at: int) -> None:
        if self.running:
            key = self.running.pop(at % len(self.running))
            self.done[key] = 1
            self.deliver(key)

    def deliver(self, key: str) -> None:
        self.seq += 1
        self.unacked[self.seq] = key
        self.out.append(self.event(key, self.seq))

    def event(self, key: str, seq: int) -> ServerEvent:
        return result(int(key.rsplit("/", 1)[1]), seq)

    def ack(self, seq: int) -> None:
        self.unacked = {n: key for n, key in self.unacked.items() if n > seq}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "send", "receive", "finish", "cut", "lose frame", "restart", "wait", "cancel"]),
        st.integers(0, 9),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_every_call_resolves_exactly_once_through_cuts_losses_and_restarts(steps: list[tuple[str, int]]) -> None:
    made, gateway = state(), _ModelGateway()
    now = 0.0
    resolved: Counter[str] = Counter()
    submitted: set[str] = set()
    wire: deque[ClientEvent] = deque()

    def apply(effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Resolved):
                resolved[effect.key] += 1
                if effect.result.outcome == tool_pb2.OUTCOME_OK:
                    assert effect.result.text.decode() == effect.key.rsplit("/", 1)[1]

    def reconnect() -> None:
        made.disconnected()
        wire.clear()
        gateway.attach(made.connect(now).hello)

    def pump() -> None:
        wire.extend(made.take(now))
        while wire:
            gateway.handle(wire.popleft())
        while gateway.out:
            apply(made.receive(gateway.out.popleft(), now))

    gateway.attach(made.connect(now).hello)
    for step, n in steps:
        now += 0.1
        if step == "submit" and f"run/t/0/0/{n}" not in submitted:
            submitted.add(f"run/t/0/0/{n}")
            submit(made, n, deadline_at=now + 100)
        elif step == "send":
            wire.extend(made.take(now))
        elif step == "receive" and gateway.out:
            apply(made.receive(gateway.out.popleft(), now))
        elif step == "finish":
            while wire:
                gateway.handle(wire.popleft())
            gateway.finish(n)
        elif step == "lose frame":
            reconnect()  # a stream loses nothing without being cut
        elif step == "cut":
            while wire:
                gateway.handle(wire.popleft())  # arrived, but no answer will
            reconnect()
        elif step == "restart":
            gateway.wipe()
            reconnect()
        elif step == "wait":
            now += n
            apply(made.tick(now))
        elif step == "cancel":
            apply(made.cancel(f"run/t/0/0/{n}", "test"))
    for _ in range(60):
        now += 0.5
        apply(made.tick(now))
        pump()
        gateway.finish(0)
        if not made:
            break
    pump()
    assert resolved == dict.fromkeys(submitted, 1)
    assert len(made) == 0
    assert gateway.unacked == {} or not gateway.done


def test_a_newer_generation_that_joins_a_call_in_flight_owns_it_when_it_is_sent_again() -> None:
    made = connected()
    submit(made, 0)
    assert [s.generation for s in starts(made.take(0.0))] == [0]
    made.adopt("run/t/0/0/0", 2)
    made.adopt("run/t/0/0/0", 1)
    made.disconnected()
    made.connect(1.0)
    made.receive(welcome("i2"), 1.0)
    assert [s.generation for s in starts(made.take(1.0))] == [2]


def test_a_cancelled_call_that_is_sent_again_is_sent_together_with_its_cancel() -> None:
    made = connected()
    submit(made, 0)
    made.take(1.0)
    assert made.cancel("run/t/0/0/0", "enough") == []
    made.take(1.0)
    made.disconnected()
    made.connect(2.0)
    made.receive(welcome("i2"), 2.0)
    sent = [event for event in made.take(2.0) if event.WhichOneof("event") in ("call_start", "cancel")]
    assert kinds(sent)[-2:] == ["call_start", "cancel"], "a cancel before the call would not be understood"
    assert (sent[-1].cancel.key, sent[-1].cancel.reason) == ("run/t/0/0/0", "enough")


def test_timers_of_calls_that_ended_do_not_pile_up_until_their_deadlines() -> None:
    made = connected()
    for n in range(5 * SPARE_TIMERS):
        submit(made, n, deadline_at=3600.0)
        made.take(1.0)
        made.receive(result(n, seq=n + 1), 1.0)
    assert len(made) == 0
    assert len(made._timers) <= 2 * SPARE_TIMERS
    submit(made, 10**6, deadline_at=3600.0)
    assert [effect for effect in made.tick(3601.0) if isinstance(effect, Resolved)], "the live one keeps its deadline"
