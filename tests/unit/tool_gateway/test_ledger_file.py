"""The SQLite ledger's file: what survives which end, who may open it, and what happens where it cannot be written."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fermata.v1 import gateway_pb2, tool_pb2

from node_runtime.errors import EXIT_FAILED, EXIT_USAGE, NodeError
from tests.support.ledgers import NOON, STOPPED, ending, record
from tool_gateway.ledger import (
    AttemptRecord,
    CallRecord,
    Created,
    Exists,
    Fenced,
    Full,
    Gone,
    LedgerUnavailable,
    SqliteLedger,
)
from tool_gateway.ledger import sqlite as sqlite_module
from tool_gateway.ledger.sqlite_file import FILE_NAME
from tool_gateway.ledger.sqlite_rows import Clock
from tool_gateway.settings import LedgerSettings

GONE = gateway_pb2.GetCallResponse


@asynccontextmanager
async def opened(folder: Path, clock: Clock = STOPPED, **settings: Any) -> AsyncIterator[SqliteLedger]:
    async with SqliteLedger(folder, LedgerSettings(**settings), clock) as ledger:
        yield ledger


async def on_thread(ledger: SqliteLedger, look: Callable[[sqlite3.Connection], Any]) -> Any:
    """What is seen of the open file, by the one thread that may look."""
    return await ledger._commits.do(lambda: look(ledger._store._file._db))


# -- what comes back ---------------------------------------------------------------------------------------------------


async def test_everything_that_is_known_of_a_call_comes_back(tmp_path: Path) -> None:
    attempt = AttemptRecord(1, "instance", "host:1", 5.0)
    final = tool_pb2.Final(outcome=tool_pb2.OUTCOME_OK, structured_json=b"\x00\xff", total_bytes=1 << 40)
    final.parts.add(inline=os.urandom(100_000), mime="image/png")
    async with opened(tmp_path) as ledger:
        await ledger.create(record(0, request_bytes=77, foreign=True, received_at=1.25))
        await ledger.begin_attempt(record(0).key, attempt)
        await ledger.end_attempt(record(0).key, 1, tool_pb2.OUTCOME_INDETERMINATE, tool_pb2.STARTED_UNKNOWN, "weg „x“")
        await ledger.begin_attempt(record(0).key, replace(attempt, number=2))
        running = await ledger.load(record(0).key)
        await ledger.create(record(1))
        done = await ledger.finish(record(1).key, replace(ending(), final=final), 9.0)
        await ledger.ack("s", [record(1).key])
        await ledger.create(record(2))
        await ledger.finish(record(2).key, ending(), 9.0)
        await ledger.release("run", [record(2).key])
        await ledger.fence("run", "u", 3, [])
    async with opened(tmp_path) as ledger:
        assert await ledger.load(record(0).key) == running
        assert done is not None
        assert await ledger.load(record(1).key) == replace(done, acked=True)
        again = await ledger.create(record(1, session="later"))
        assert isinstance(again, Exists)
        assert again.record.to_result() == done.to_result()
        assert await ledger.load(record(2).key) == Gone(GONE.CALL_STATE_RELEASED)
        assert await ledger.create(record(0, trajectory="u", generation=2)) == Fenced(3)


async def test_orders_come_back(tmp_path: Path) -> None:
    names = [record(n).key for n in range(4)]
    async with opened(tmp_path, max_entries=4) as ledger:
        for n in range(4):
            await ledger.create(record(n, session="first"))
        for n in (2, 0, 3, 1):
            await ledger.finish(names[n], ending(), 1.0)
        for n in (3, 1):
            await ledger.create(record(n))
        for n in (0, 2):
            await ledger.create(record(n))
        await ledger.ack("s", [names[2], names[1]])
    async with opened(tmp_path, max_entries=4, retention_s=10) as ledger:
        assert [held.key for held in await ledger.list_session("s")] == [names[n] for n in (3, 1, 0, 2)]
        await ledger.create(record(4))  # the first that was acknowledged makes room
        assert await ledger.load(names[2]) == Gone(GONE.CALL_STATE_EXPIRED)
        assert isinstance(await ledger.load(names[1]), CallRecord)
        await ledger.sweep(12.0)
        assert list(ledger._store.books.gone) == [names[n] for n in (2, 0, 3, 1)]  # as they finished


async def test_time_passes_while_no_gateway_runs(tmp_path: Path) -> None:
    """The monotonic clock begins anew with each host; the wall clock goes on."""
    settings = {"retention_s": 100}
    async with opened(tmp_path, Clock(lambda: 500.0, lambda: NOON), **settings) as ledger:
        await ledger.create(record(0, received_at=500.0, deadline_at=560.0))
        await ledger.begin_attempt(record(0).key, AttemptRecord(1, "i", "a:1", 501.0))
        await ledger.create(record(1, received_at=500.0, deadline_at=560.0))
        await ledger.finish(record(1).key, ending(), 500.0)
    async with opened(tmp_path, Clock(lambda: 20.0, lambda: NOON + 45), **settings) as ledger:
        again = await ledger.create(record(0, received_at=20.0, deadline_at=80.0))
        assert isinstance(again, Exists)
        assert again.record.deadline_at == pytest.approx(20.0 + 15)
        assert again.record.attempts[0].started_at == pytest.approx(20.0 - 44)
        assert await ledger.sweep(20.0 + 54) == 0
        assert await ledger.sweep(20.0 + 56) == 1  # 45 s of the result's retention were over
        assert await ledger.load(record(1).key) == Gone(GONE.CALL_STATE_EXPIRED)


async def test_a_wall_clock_that_was_set_back_gives_no_call_more_time(tmp_path: Path) -> None:
    async with opened(tmp_path, Clock(lambda: 500.0, lambda: NOON)) as ledger:
        await ledger.create(record(0, received_at=500.0, deadline_at=560.0))
        await ledger.create(record(1, received_at=500.0, deadline_at=560.0))
        await ledger.finish(record(1).key, ending(), 510.0)
    async with opened(tmp_path, Clock(lambda: 20.0, lambda: NOON - 3600), retention_s=100) as ledger:
        held = await ledger.load(record(0).key)
        assert isinstance(held, CallRecord)
        assert (held.received_at, held.deadline_at) == (20.0, 80.0)
        assert await ledger.sweep(121.0) == 1


async def test_a_call_whose_client_never_comes_back_expires(tmp_path: Path) -> None:
    async with opened(tmp_path, retention_s=100) as ledger:
        for n in range(3):
            await ledger.create(record(n, received_at=NOON, deadline_at=NOON + 60 + n))
        await ledger.sweep(NOON + 1000)
        assert len(ledger) == 3  # in this process each has a task that ends it
    async with opened(tmp_path, retention_s=100) as ledger:
        await ledger.create(record(1, session="back"))
        await ledger.finish(record(1).key, ending(), NOON + 150)
        assert await ledger.sweep(NOON + 159) == 0
        assert await ledger.sweep(NOON + 170) == 2
        assert await ledger.load(record(0).key) == Gone(GONE.CALL_STATE_EXPIRED)
        assert isinstance(await ledger.load(record(1).key), CallRecord)


# -- who may open it ---------------------------------------------------------------------------------------------------


async def refusal(folder: Path) -> NodeError:
    with pytest.raises(NodeError) as refused:
        async with opened(folder):
            raise AssertionError("it was opened")
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)
    return refused.value


async def test_folder_and_file_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "deep #1?" / "data"
    async with opened(folder) as ledger:
        await ledger.create(record())
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {"data": 0o700, FILE_NAME: 0o600, f"{FILE_NAME}-wal": 0o600}


@pytest.mark.parametrize("damage", ["noise", "cut", "row", "twice"])
async def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / FILE_NAME
    async with opened(tmp_path) as ledger:
        for n in range(200):
            await ledger.create(record(n, session="x" * 100))
    if damage == "noise":
        path.write_bytes(b"no database at all" * 1000)
    elif damage == "cut":
        os.truncate(path, 8192)
    else:
        row = "INSERT INTO attempts VALUES (7, '[[1]]')"
        twice = "UPDATE calls SET key = (SELECT min(key) FROM calls) WHERE place = 7"
        with sqlite3.connect(path) as db:
            db.execute(row if damage == "row" else twice)
        db.close()
    refused = await refusal(tmp_path)
    assert refused.exit_code == EXIT_FAILED
    assert "is damaged (" in str(refused)
    assert "or move it away" in str(refused)


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("PRAGMA user_version = 2", "written by a newer version (its schema is 2, this program knows 1)"),
        ("PRAGMA application_id = 7", "is not a call ledger"),
    ],
)
async def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, statement: str, sentence: str) -> None:
    async with opened(tmp_path):
        pass
    path = tmp_path / FILE_NAME
    with sqlite3.connect(path) as db:
        db.execute(statement)
    db.close()
    before = path.read_bytes()
    refused = await refusal(tmp_path)
    assert refused.exit_code == EXIT_USAGE
    assert sentence in str(refused)
    assert path.read_bytes() == before


async def test_a_place_that_cannot_hold_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder" / FILE_NAME).mkdir(parents=True)
    for folder, sentence in ((tmp_path / "file", "cannot be written ("), (tmp_path / "folder", "is not a file")):
        refused = await refusal(folder)
        assert refused.exit_code == EXIT_USAGE
        assert sentence in str(refused)


# -- what cannot be written --------------------------------------------------------------------------------------------


def most_pages(more: int) -> Callable[[sqlite3.Connection], None]:
    def set_it(db: sqlite3.Connection) -> None:
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages + more}").close()

    return set_it


async def test_a_full_disk_refuses_what_does_not_fit_and_nothing_else(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        for n in range(8):
            await ledger.create(record(n))
        await on_thread(ledger, most_pages(4))
        big = ending("x" * 1_000_000)
        answers = await asyncio.gather(
            *(ledger.finish(record(n).key, big if n == 3 else ending(str(n)), 1.0) for n in range(8)),
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [CallRecord] * 3 + [LedgerUnavailable] + [CallRecord] * 4
        assert str(answers[3]) == (
            f"the ledger {tmp_path / FILE_NAME} cannot be written: database or disk is full; "
            "make room on its disk, or repair it"
        )
        held = await ledger.load(record(3).key)
        assert isinstance(held, CallRecord)
        assert not held.done
        await on_thread(ledger, most_pages(10_000))
        assert await ledger.finish(record(3).key, big, 2.0) is not None
    async with opened(tmp_path) as ledger:
        texts = [(await ledger.load(record(n).key)).to_result().final.parts[0].text for n in range(8)]  # type: ignore[union-attr]
        assert texts == [str(n).encode() if n != 3 else b"x" * 1_000_000 for n in range(8)]


async def test_an_output_that_cannot_be_read_costs_its_own_call_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        for n in range(2):
            await ledger.create(record(n))
            await ledger.finish(record(n).key, ending(str(n)), 1.0)
        await on_thread(ledger, lambda db: db.execute("DELETE FROM results WHERE place = 1").close())
        asked = [ledger.create(record(n, session="later")) for n in range(2)]
        lost, found = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(lost, LedgerUnavailable)
        assert "cannot be read: it is not there" in str(lost)
        assert isinstance(found, Exists)
        assert [held.key for held in await ledger.list_session("s")] == [record(0).key]


# -- one thread, few transactions, bounded room ------------------------------------------------------------------------


async def test_steps_that_wait_are_committed_together_and_never_on_the_loop(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []

    def trace(db: sqlite3.Connection) -> None:
        db.set_trace_callback(lambda statement: seen.append((threading.get_ident(), statement)))

    async with opened(tmp_path) as ledger:
        await on_thread(ledger, trace)
        await asyncio.gather(*(ledger.create(record(n)) for n in range(500)))
        await on_thread(ledger, lambda db: db.set_trace_callback(None))
    threads = {thread for thread, _ in seen}
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert "ledger" not in {thread.name for thread in threading.enumerate()}
    assert sum(statement == "COMMIT" for _, statement in seen) <= 10
    assert len(seen) < 150


async def test_what_waits_at_the_end_is_committed_and_later_steps_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        made = [asyncio.create_task(ledger.create(record(n))) for n in range(100)]
        cut_off = asyncio.create_task(ledger.create(record(100)))
        await asyncio.sleep(0)  # each has been given
        cut_off.cancel()
    assert {type(answer) for answer in await asyncio.gather(*made)} == {Created}
    with pytest.raises(LedgerUnavailable, match="it was closed"):
        await ledger.load(record().key)
    async with opened(tmp_path) as ledger:
        assert len(ledger) == 101  # who was cut off does not know, and the step counts


async def test_new_calls_are_refused_while_the_disk_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_module, "MAX_WAITING", 3)
    let_go = threading.Event()
    async with opened(tmp_path) as ledger:
        await ledger.create(record(0))
        slow = asyncio.create_task(ledger._commits.do(let_go.wait))
        behind = [asyncio.create_task(ledger.load(record(0).key)) for _ in range(2)]
        await asyncio.sleep(0)
        refused = await ledger.create(record(1))
        assert isinstance(refused, Full)
        assert "behind with 3 steps" in refused.detail
        done = asyncio.create_task(ledger.finish(record(0).key, ending(), 1.0))  # what was admitted goes on
        await asyncio.sleep(0)
        let_go.set()
        assert await done is not None
        await asyncio.gather(slow, *behind)
        assert isinstance(await ledger.create(record(1)), Created)


async def test_a_fault_of_ours_in_one_step_is_its_callers_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        wrong = replace(record(1), attempts=(object(),))  # type: ignore[arg-type]
        answers = await asyncio.gather(
            ledger.create(record(0)), ledger.create(wrong), ledger.create(record(2)), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [Created, AttributeError, Created]
        assert len(ledger) == 2


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


async def test_a_thread_that_ends_is_told_and_nobody_waits_for_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        lost = asyncio.create_task(ledger.lost())

        def fail() -> None:
            raise SystemExit("as a fault of the interpreter would")

        told = await asyncio.gather(
            ledger._commits.do(fail), ledger.create(record()), ledger.load(record().key), return_exceptions=True
        )
        assert [type(answer) for answer in told] == [LedgerUnavailable] * 3
        assert "SystemExit" in await lost
        with pytest.raises(LedgerUnavailable, match="its thread ended with SystemExit"):
            await ledger.sweep(0.0)


@pytest.mark.parametrize(
    ("synchronous", "durability", "pragma"),
    [("normal", tool_pb2.DURABILITY_PROCESS, 1), ("full", tool_pb2.DURABILITY_HOST, 2)],
)
async def test_what_is_promised_is_what_sqlite_is_asked_for(
    tmp_path: Path, synchronous: str, durability: tool_pb2.Durability, pragma: int
) -> None:
    async with opened(tmp_path, synchronous=synchronous) as ledger:
        assert ledger.durability == durability
        assert await on_thread(ledger, lambda db: db.execute("PRAGMA synchronous").fetchone()) == (pragma,)
        assert await on_thread(ledger, lambda db: db.execute("PRAGMA journal_mode").fetchone()) == ("wal",)


async def test_the_file_does_not_outgrow_what_is_held(tmp_path: Path) -> None:
    async with opened(tmp_path, max_entries=100) as ledger:

        async def life(n: int) -> None:
            made = record(n, trajectory=f"t{n}")
            await ledger.create(made)
            await ledger.finish(made.key, ending("x" * 5000), 1.0)
            await ledger.release("run", [made.key])

        sizes = []
        for turn in range(20):
            await asyncio.gather(*(life(turn * 50 + n) for n in range(50)))
            sizes.append(on_disk(tmp_path))
        (pages,) = await on_thread(ledger, lambda db: db.execute("PRAGMA page_count").fetchone())
        assert pages * 4096 < 2 * 50 * 5000
        assert sizes[-1] < 6 << 20  # a log of 1000 pages beside it


async def test_outputs_are_on_the_disk_and_not_in_memory(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(record())
        done = await ledger.finish(record().key, ending("x" * (4 << 20)), 1.0)
        assert done is not None
        (head,) = await ledger.list_session("s")
        assert head.cost_bytes == done.cost_bytes > 4 << 20
        assert head.outcome is not None
        assert head.outcome.final.ByteSize() < 100
        with pytest.raises(ValueError, match="load the record"):
            head.to_result()
        assert await ledger.load(head.key) == done
