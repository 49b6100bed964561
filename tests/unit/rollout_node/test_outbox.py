"""The outbox: the newest of each trajectory, ends kept until acknowledged, a bound for slow readers."""

from __future__ import annotations

import asyncio

import pytest
from fermata.v1 import rollout_pb2 as pb

from rollout_node.outbox import Outbox

Event = pb.RunResponse.Event


def accepted(trajectory: str) -> Event:
    return Event(accepted=pb.RunResponse.Accepted(trajectory_id=trajectory))


def parked(trajectory: str, seq: int) -> Event:
    return Event(parked=pb.RunResponse.Parked(trajectory_id=trajectory, snapshot=pb.Snapshot(snapshot_seq=seq)))


def finished(trajectory: str, seq: int = 1, generation: int = 0) -> Event:
    said = pb.RunResponse.Finished(
        trajectory_id=trajectory, generation=generation, snapshot=pb.Snapshot(snapshot_seq=seq)
    )
    return Event(finished=said)


def failed(trajectory: str) -> Event:
    return Event(failed=pb.RunResponse.Failed(trajectory_id=trajectory))


def kinds(events: list[Event]) -> list[str]:
    return [str(event.WhichOneof("event")) for event in events]


async def test_a_newer_state_takes_the_place_of_an_unsent_one() -> None:
    outbox = Outbox(8)
    for event in (accepted("a"), parked("a", 1), accepted("b"), parked("a", 2), finished("a", 3)):
        outbox.put(event)
    events = await outbox.take(1 << 20)
    assert kinds(events) == ["accepted", "accepted", "finished"]
    assert not len(outbox)


async def test_a_frame_is_bounded_in_bytes_and_never_empty() -> None:
    outbox = Outbox(8)
    for name in "abc":
        outbox.put(Event(rejected=pb.RunResponse.Rejected(trajectory_id=name, reason="x" * 100)))
    assert [len(await outbox.take(150)) for _ in range(3)] == [1, 1, 1]


async def test_take_waits_for_the_first_event() -> None:
    outbox = Outbox(8)
    waiting = asyncio.create_task(outbox.take(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(accepted("a"))
    assert kinds(await waiting) == ["accepted"]


async def test_ends_are_said_again_until_acknowledged() -> None:
    outbox = Outbox(8)
    outbox.put(finished("a", 3))
    outbox.put(failed("b"))
    await outbox.take(1 << 20)
    outbox.replay()
    assert kinds(await outbox.take(1 << 20)) == ["finished", "failed"]
    assert outbox.acknowledge("a", 0, 2) is None  # an older snapshot
    assert outbox.acknowledge("a", 1, 3) is None  # another generation
    assert outbox.acknowledge("a", 0, 3) is not None
    assert outbox.acknowledge("b", 0, 0) is not None
    await asyncio.wait_for(outbox.settled(), 1)
    outbox.replay()
    assert not len(outbox)


async def test_kept_ends_are_bounded_oldest_first() -> None:
    outbox = Outbox(2)
    for name in "abc":
        outbox.put(finished(name))
    assert outbox.end_of("a", 0) is None
    assert outbox.end_of("c", 0) is not None


async def test_what_is_taken_up_again_is_forgotten() -> None:
    outbox = Outbox(2)
    outbox.put(finished("a"))
    outbox.forget("a")
    assert not len(outbox)
    waiting = asyncio.create_task(outbox.take(1))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting, 0.01)


async def test_a_reader_waits_while_too_much_is_unsent() -> None:
    outbox = Outbox(2)
    for name in "abc":
        outbox.put(accepted(name))
    below = asyncio.create_task(outbox.below(3))
    await asyncio.sleep(0)
    assert not below.done()
    await outbox.take(1)
    await asyncio.wait_for(below, 1)


async def test_another_trainer_gets_nothing_of_the_first_ones() -> None:
    outbox = Outbox(2)
    outbox.put(finished("a"))
    outbox.clear()
    outbox.replay()
    assert not len(outbox)
    assert outbox.end_of("a", 0) is None
