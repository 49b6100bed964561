"""A session's outbox: numbering, replay, window, frames; and the hub's fencing."""

from __future__ import annotations

from fermata.v1 import gateway_pb2, tool_pb2
from hypothesis import given
from hypothesis import strategies as st

from node_runtime.outcomes import make_final
from tool_gateway.hub import Goodbye, SessionHub
from tool_gateway.session import MAX_CONTROL, MAX_REFUSED_BYTES, Event, Session
from tool_gateway.settings import GatewaySettings

FRAME = 65_536


def session(window: int = 1 << 20) -> Session:
    made = Session("s", "run", "node", "", window)
    made.attach(1, window)
    return made


def result(n: int, size: int = 10) -> gateway_pb2.ServerFrame.Result:
    return gateway_pb2.ServerFrame.Result(key=f"k{n}", final=make_final(tool_pb2.OUTCOME_OK, text="x" * size))


def pong(nonce: int) -> Event:
    return Event(pong=gateway_pb2.ServerFrame.Pong(nonce=nonce))


def kinds(events: list[Event]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]


def seqs(events: list[Event]) -> list[int]:
    return [event.result.seq for event in events if event.WhichOneof("event") == "result"]


def test_control_goes_before_results_before_chunks_before_progress() -> None:
    made = session()
    made.add_progress(Event(progress=gateway_pb2.ServerFrame.Progress(key="p")))
    made.add_chunk(Event(chunk=gateway_pb2.ServerFrame.Chunk(key="c")))
    made.add_result(result(0))
    made.add_control(pong(1))
    assert kinds(made.take(FRAME)) == ["pong", "result", "chunk", "progress"]
    assert not made.ready


def test_a_frame_ends_at_its_size_and_a_larger_event_goes_alone() -> None:
    made = session()
    for n in range(3):
        made.add_result(result(n, size=30_000))
    made.add_result(result(3, size=200_000))
    made.add_result(result(4))
    assert [seqs(made.take(FRAME)) for _ in range(4)] == [[1, 2], [3], [4], [5]]


def test_a_huge_result_waits_for_the_window_and_control_goes_on() -> None:
    made = session(window=1000)
    made.add_result(result(0, size=600))
    made.add_result(result(1, size=600))
    made.add_control(pong(1))
    assert kinds(made.take(FRAME)) == ["pong", "result"]
    assert not made.ready
    made.add_control(pong(2))
    assert kinds(made.take(FRAME)) == ["pong"]
    assert made.ack(1) == ["k0"]
    assert seqs(made.take(FRAME)) == [2]
    # Larger than the whole window: when nothing else is outstanding.
    made.add_result(result(2, size=5000))
    assert not made.ready
    made.ack(2)
    assert seqs(made.take(FRAME)) == [3]


def test_a_new_stream_gets_what_was_not_acknowledged_and_nothing_of_the_old_ones_control() -> None:
    made = session()
    for n in range(4):
        made.add_result(result(n))
    made.take(FRAME)
    made.add_control(pong(1))
    made.ack(1)
    made.attach(2, 1 << 20)
    assert made.ack(2) == ["k1"]
    assert seqs(made.take(FRAME)) == [3, 4]
    made.attach(3, 1 << 20)
    made.renumber([result(0), result(3)])
    renumbered = made.take(FRAME)
    assert seqs(renumbered) == [5, 6, 7]
    assert [event.result.key for event in renumbered] == ["k0", "k3", "k2"]


def test_control_that_nobody_reads_is_bounded() -> None:
    made = session()
    for n in range(MAX_CONTROL):
        assert made.add_control(pong(n))
    assert not made.add_control(pong(0))


def refusal(n: int, size: int = 10) -> gateway_pb2.ServerFrame.Result:
    return gateway_pb2.ServerFrame.Result(key=f"k{n}", final=make_final(tool_pb2.OUTCOME_PROTOCOL, text="x" * size))


def test_refusals_that_nobody_acknowledges_are_bounded_and_those_acknowledged_make_room() -> None:
    made = session()
    for round_ in range(3):
        taken = 0
        while made.add_refusal(refusal(taken, size=100_000)):
            taken += 1
        assert 0.8 * MAX_REFUSED_BYTES < taken * 100_000 < MAX_REFUSED_BYTES
        made.add_result(result(10**6 + round_))
        made.renumber([])
        assert made.unacked == taken + 1
        assert not made.add_refusal(refusal(0, size=100_000)), "another number is no room"
        made.ack(made.next_seq)
    assert not made.add_refusal(refusal(0, size=MAX_REFUSED_BYTES))


def test_a_refusal_of_a_key_does_not_stand_for_its_result() -> None:
    made = session()
    made.add_refusal(refusal(0))
    assert not made.holds_result("k0")
    made.add_result(result(0))
    assert made.holds_result("k0")


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("result"), st.integers(1, 3000)),
            st.tuples(st.just("take"), st.integers(100, 4000)),
            st.tuples(st.just("ack"), st.integers(0, 100)),
            st.tuples(st.just("reattach"), st.integers(0, 100)),
        ),
        max_size=60,
    )
)
def test_every_result_reaches_the_client_in_order_within_the_window(steps: list[tuple[str, int]]) -> None:
    window = 4000
    made = session(window)
    epoch, added, seen, sent_sizes = 1, 0, 0, {}
    acked = 0
    for step, value in steps:
        if step == "result":
            made.add_result(result(added, size=value))
            added += 1
        elif step == "take" and made.ready:
            for event in made.take(value):
                assert event.result.seq == seen + 1, "in order, without a gap"
                seen += 1
                sent_sizes[seen] = event.ByteSize()
            outstanding = sum(size for seq, size in sent_sizes.items() if seq > acked)
            assert outstanding <= window or sum(seq > acked for seq in sent_sizes) == 1
        elif step == "ack":
            acked = max(acked, min(value, seen))
            made.ack(acked)
        elif step == "reattach":
            epoch += 1
            seen = max(acked, min(value, seen))  # what the client really holds: all, or what it had before the cut
            made.attach(epoch, window)
            made.ack(seen)
            acked = seen
            sent_sizes.clear()
    made.ack(seen)
    while made.ready:
        for event in made.take(FRAME):
            assert event.result.seq == seen + 1
            seen += 1
        made.ack(seen)
    made.ack(seen)
    assert seen == added
    assert made.unacked == 0


def hello(epoch: int, session_id: str = "s", run_id: str = "run") -> gateway_pb2.ClientFrame.Hello:
    return gateway_pb2.ClientFrame.Hello(run_id=run_id, node_id="n", session_id=session_id, epoch=epoch)


def test_the_hub_keeps_one_stream_per_session() -> None:
    hub = SessionHub(GatewaySettings(resume_window_s=10))
    ended: list[Goodbye] = []
    first = hub.attach(hello(1), lambda: None, ended.append)
    assert isinstance(first, tuple)
    assert not first[1]
    second = hub.attach(hello(2), lambda: None, ended.append)
    assert isinstance(second, tuple)
    assert second[1]
    assert [goodbye.outcome for goodbye in ended] == [tool_pb2.OUTCOME_FENCED]
    hub.detach(first[0], 1, now=0.0)  # the fenced stream's end is not the session's
    assert hub.streams == [second[0]]
    for epoch in (1, 2):
        refused = hub.attach(hello(epoch), lambda: None, ended.append)
        assert isinstance(refused, Goodbye)
        assert "raise the epoch" in refused.detail
    other_run = hub.attach(hello(9, run_id="other"), lambda: None, ended.append)
    assert isinstance(other_run, Goodbye)
    assert other_run.outcome == tool_pb2.OUTCOME_PERMISSION
    hub.detach(second[0], 2, now=100.0)
    assert hub.streams == []
    assert hub.expire(109.9) == []
    assert hub.expire(110.0) == ["s"]
    assert hub.attach(hello(1), lambda: None, ended.append)[1] is False  # type: ignore[index]


def test_the_hub_is_bounded() -> None:
    hub = SessionHub(GatewaySettings.model_validate({"limits": {"max_sessions": 1}}))
    hub.attach(hello(1), lambda: None, lambda goodbye: None)
    refused = hub.attach(hello(1, "t"), lambda: None, lambda goodbye: None)
    assert isinstance(refused, Goodbye)
    assert (refused.outcome, refused.reconnect) == (tool_pb2.OUTCOME_OVERLOADED, True)
