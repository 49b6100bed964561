"""Every store: compare-and-set, one outcome, release, retention, bounds, fences."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from fermata.v1 import gateway_pb2

from tests.support.ledgers import ending, opened, record
from tool_gateway.ledger import AttemptRecord, CallRecord, Conflict, Created, Exists, Fenced, Full, Gone, LedgerStore

Open = Callable[..., AbstractAsyncContextManager[LedgerStore]]


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return lambda **settings: opened(request.param, tmp_path, **settings)


async def test_a_key_is_created_once_and_belongs_to_who_asked_last(store: Open) -> None:
    async with store() as ledger:
        assert isinstance(await ledger.create(record()), Created)
        again = await ledger.create(record(session="other"))
        assert isinstance(again, Exists)
        assert (again.previous_session_id, again.record.session_id) == ("s", "other")
        assert await ledger.list_session("s") == []
        assert [held.key for held in await ledger.list_session("other")] == [record().key]
        assert isinstance(await ledger.create(record(digest=b"e")), Conflict)
        assert isinstance(await ledger.create(replace(record(), tool="pay")), Conflict)


async def test_the_first_outcome_stays(store: Open) -> None:
    async with store() as ledger:
        await ledger.create(record())
        await ledger.begin_attempt(record().key, AttemptRecord(1, "i", "a", 0.0))
        first = await ledger.finish(record().key, ending("one"), 1.0)
        second = await ledger.finish(record().key, ending("two"), 2.0)
        assert first == second
        assert first is not None
        assert first.to_result().final.parts[0].text == b"one"
        late = await ledger.begin_attempt(record().key, AttemptRecord(2, "i", "a", 3.0))
        assert isinstance(late, CallRecord)
        assert [attempt.number for attempt in late.attempts] == [1]


async def test_what_was_released_or_expired_never_runs_again_as_if_new(store: Open) -> None:
    async with store(retention_s=10) as ledger:
        for n in range(3):
            await ledger.create(record(n))
        await ledger.finish(record(0).key, ending(), 1.0)
        await ledger.finish(record(1).key, ending(), 1.0)
        assert await ledger.release("run", [record(0).key, record(2).key, "run/none/0/0/0"]) == [record(2).key]
        assert await ledger.release("another", [record(1).key]) == []
        assert await ledger.sweep(10.9) == 0
        assert await ledger.sweep(11.0) == 1
        states = gateway_pb2.GetCallResponse
        assert await ledger.create(record(0)) == Gone(states.CALL_STATE_RELEASED)
        assert await ledger.load(record(1).key) == Gone(states.CALL_STATE_EXPIRED)
        assert len(ledger) == 1


async def test_a_trajectorys_release_goes_by_the_generation_of_the_key(store: Open) -> None:
    async with store() as ledger:
        for generation in range(3):
            await ledger.create(record(trajectory="t", generation=generation))
            await ledger.finish(record(generation=generation).key, ending(), 1.0)
        await ledger.create(record(trajectory="u"))
        await ledger.release_trajectory("run", "t", 1)
        assert [held.key for held in await ledger.list_session("s")] == ["run/t/2/0/0", "run/u/0/0/0"]


async def test_a_fence_names_what_to_cancel_and_refuses_late_writers(store: Open) -> None:
    async with store() as ledger:
        for n in range(3):
            await ledger.create(record(n))
        await ledger.finish(record(2).key, ending(), 1.0)
        assert await ledger.fence("run", "t", 1, keep=[record(0).key]) == [record(1).key]
        assert await ledger.create(record(9)) == Fenced(1)
        assert await ledger.begin_attempt(record(1).key, AttemptRecord(1, "i", "a", 0.0)) == Fenced(1)
        assert isinstance(await ledger.begin_attempt(record(0).key, AttemptRecord(1, "i", "a", 0.0)), CallRecord)
        assert await ledger.fence("run", "t", 0, keep=[]) == Fenced(1)
        # The new owner asks for an old key in its own generation's name; the old owner does so in vain.
        assert isinstance(await ledger.create(replace(record(0), generation=1)), Exists)
        assert await ledger.create(record(0)) == Fenced(1)
        # A call of a newer generation is a fence of its own for writers of older ones.
        await ledger.create(record(generation=4))
        assert await ledger.create(record(5, generation=3)) == Fenced(4)


async def test_without_room_only_acknowledged_results_go_and_the_rest_is_refused(store: Open) -> None:
    async with store(max_entries=3) as ledger:
        for n in range(3):
            await ledger.create(record(n))
            await ledger.finish(record(n).key, ending(), float(n))
        assert isinstance(await ledger.create(record(3)), Full)
        await ledger.ack("another", [record(0).key])
        assert isinstance(await ledger.create(record(3)), Full)
        await ledger.ack("s", [record(1).key])
        assert isinstance(await ledger.create(record(3)), Created)
        assert isinstance(await ledger.load(record(1).key), Gone)
        assert isinstance(await ledger.load(record(0).key), CallRecord)


async def test_the_requests_of_calls_that_run_are_counted_until_they_end(store: Open) -> None:
    async with store(max_bytes=1 << 16) as ledger:
        taken = 0
        while isinstance(made := await ledger.create(replace(record(taken), request_bytes=10_000)), Created):
            taken += 1
        assert isinstance(made, Full)
        assert taken == 6
        await ledger.finish(record(0).key, ending(), 1.0)
        assert isinstance(await ledger.create(replace(record(taken), request_bytes=10_000)), Created)


async def test_bytes_are_bounded_as_well(store: Open) -> None:
    async with store(max_bytes=1 << 16) as ledger:
        for n in range(100):
            assert isinstance(await ledger.create(record(n)), Created)
            await ledger.finish(record(n).key, ending("x" * 4000), float(n))
            await ledger.ack("s", [record(n).key])
        assert ledger.held_bytes <= 1 << 16
