"""SQLite against memory, step by step: the file is closed and opened again, or refuses to be written, at any point."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from fermata.v1 import tool_pb2
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.ledgers import STOPPED, ending, record
from tool_gateway.ledger import AttemptRecord, Conflict, LedgerStore, LedgerUnavailable, MemoryLedger, SqliteLedger
from tool_gateway.settings import LedgerSettings

SMALL = LedgerSettings(max_entries=4, max_bytes=1 << 16, retention_s=10)
NUMBER = st.integers(0, 7)
TRAJECTORY = st.sampled_from(["t", "u"])
GENERATION = st.integers(0, 2)
SESSION = st.sampled_from(["s", "other"])
Step = Callable[[LedgerStore], Coroutine[Any, Any, Any]]


def key(n: int, trajectory: str, generation: int = 0) -> str:
    return record(n, trajectory=trajectory, generation=generation).key


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """In memory where there is such a place: it is not the disk that is tested."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


class Stores(RuleBasedStateMachine):
    """Both stores are asked the same and must say the same; a step that the file refused has happened in neither."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.results: dict[str, bytes] = {}
        self.folder = new_folder()
        self.loop = asyncio.Runner()
        self.memory = MemoryLedger(SMALL)
        self.sqlite = SqliteLedger(Path(self.folder.name), SMALL, STOPPED)
        self.refusing = False
        self.loop.run(self.sqlite.__aenter__())

    def teardown(self) -> None:
        self.loop.run(self.sqlite.__aexit__())
        self.loop.close()

    def both(self, *steps: Step) -> None:
        """The steps together, as one transaction may take them."""
        self.loop.run(self._both(steps))

    async def _both(self, steps: tuple[Step, ...]) -> None:
        answers = await asyncio.gather(*(step(self.sqlite) for step in steps), return_exceptions=True)
        for step, answer in zip(steps, answers, strict=True):
            if isinstance(answer, LedgerUnavailable):
                assert self.refusing, answer
                continue
            expected = await step(self.memory)
            assert answer == expected or (isinstance(answer, Conflict) and isinstance(expected, Conflict))

    # -- steps
    @rule(n=NUMBER, trajectory=TRAJECTORY, session=SESSION, digest=st.sampled_from([b"d", b"d", b"e"]))
    def create(self, n: int, trajectory: str, session: str, digest: bytes) -> None:
        made = record(n, trajectory=trajectory, session=session, digest=digest, deadline_at=1e5, foreign=n == 1)
        self.both(lambda store: store.create(made))

    @rule(n=NUMBER, trajectory=TRAJECTORY, session=SESSION, generation=GENERATION, owner=GENERATION)
    def create_later(self, n: int, trajectory: str, session: str, generation: int, owner: int) -> None:
        made = record(n, trajectory=trajectory, session=session, generation=generation, deadline_at=1e5)
        self.both(lambda store: store.create(replace(made, generation=max(generation, owner))))

    @rule(n=NUMBER, trajectory=TRAJECTORY, number=st.integers(1, 3))
    def begin(self, n: int, trajectory: str, number: int) -> None:
        attempt = AttemptRecord(number, f"instance {n}", "a:1", self.now)
        self.both(lambda store: store.begin_attempt(key(n, trajectory), attempt))

    @rule(n=NUMBER, trajectory=TRAJECTORY, number=st.integers(1, 3))
    def end(self, n: int, trajectory: str, number: int) -> None:
        ended = (number, tool_pb2.OUTCOME_NOT_STARTED, tool_pb2.STARTED_NO, "zu spät")
        self.both(lambda store: store.end_attempt(key(n, trajectory), *ended))

    @rule(n=NUMBER, trajectory=TRAJECTORY, size=st.sampled_from([1, 1, 30_000]))
    def finish(self, n: int, trajectory: str, size: int) -> None:
        outcome, now = ending(f"{self.now}" * size), self.now
        self.both(lambda store: store.finish(key(n, trajectory), outcome, now))

    @rule(numbers=st.lists(NUMBER, max_size=4), trajectory=TRAJECTORY, session=SESSION)
    def ack(self, numbers: list[int], trajectory: str, session: str) -> None:
        keys = [key(n, trajectory) for n in numbers]
        self.both(lambda store: store.ack(session, keys))

    @rule(numbers=st.lists(NUMBER, max_size=2), trajectory=TRAJECTORY)
    def release(self, numbers: list[int], trajectory: str) -> None:
        keys = [key(n, trajectory) for n in numbers]
        self.both(lambda store: store.release("run", keys))

    @rule(trajectory=TRAJECTORY, generation=GENERATION)
    def release_trajectory(self, trajectory: str, generation: int) -> None:
        self.both(lambda store: store.release_trajectory("run", trajectory, generation))

    @rule(trajectory=TRAJECTORY, generation=GENERATION, keep=st.lists(NUMBER, max_size=2))
    def fence(self, trajectory: str, generation: int, keep: list[int]) -> None:
        kept = [key(n, trajectory) for n in keep]
        self.both(lambda store: store.fence("run", trajectory, generation, kept))

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def sweep(self, seconds: float) -> None:
        self.now += seconds
        now = self.now
        self.both(lambda store: store.sweep(now))

    @rule(n=NUMBER, trajectory=TRAJECTORY)
    def whole_life_at_once(self, n: int, trajectory: str) -> None:
        """Made, run, finished and forgotten within one transaction, or within few."""
        name, now = key(n, trajectory), self.now
        self.both(
            lambda store: store.create(record(n, trajectory=trajectory, deadline_at=1e5)),
            lambda store: store.begin_attempt(name, AttemptRecord(1, "i", "a:1", now)),
            lambda store: store.finish(name, ending("whole"), now),
            lambda store: store.load(name),
            lambda store: store.ack("s", [name]),
            lambda store: store.release("run", [name]),
            lambda store: store.load(name),
        )

    @rule(n=NUMBER, trajectory=TRAJECTORY, acked=st.integers(0, 4), adopted=st.integers(0, 4))
    def fill(self, n: int, trajectory: str, acked: int, adopted: int) -> None:
        """As many results as there is room for; some may be forgotten, some are another session's, in another order."""
        names, now = [key(n + more, trajectory) for more in range(4)], self.now
        for more in range(4):
            made = record(n + more, trajectory=trajectory, deadline_at=1e5)
            self.both(methodcaller("create", made), methodcaller("finish", made.key, ending("full"), now))
        for more in reversed(range(adopted)):
            asked = record(n + more, trajectory=trajectory, session="other")
            self.both(methodcaller("create", asked))
        self.both(lambda store: store.ack("s", names[::-1][:acked]), lambda store: store.ack("other", names[1:acked]))

    # -- what happens to a file
    @rule(killed=st.booleans())
    def open_again(self, killed: bool) -> None:
        """After an orderly end, or on what lies on the disk while the file is in use, as after kill -9."""
        folder = self.folder
        if killed:
            self.folder = new_folder()
            for file in Path(folder.name).iterdir():
                shutil.copy(file, self.folder.name)
        self.loop.run(self.sqlite.__aexit__())
        self.sqlite = SqliteLedger(Path(self.folder.name), SMALL, STOPPED)
        self.loop.run(self.sqlite.__aenter__())
        self.refusing = False
        self.loop.run(self.sqlite._commits.do(self._nothing_is_left_behind))

    def _nothing_is_left_behind(self) -> None:
        books = self.sqlite._store.books
        entries = books.calls.values()
        expected = {
            "calls": len(entries),
            "attempts": sum(bool(entry.record.attempts) for entry in entries),
            "results": sum(entry.record.done for entry in entries),
            "acknowledged": sum(bool(entry.acked) for entry in entries),
            "gone": len(books.gone),
            "owners": len(books.owners),
        }
        run = self.sqlite._store._file._db.execute
        assert {table: run(f"SELECT count(*) FROM {table}").fetchone()[0] for table in expected} == expected

    @rule()
    def refuse(self) -> None:
        self._query_only(True)

    @precondition(lambda self: self.refusing)
    @rule()
    def let_write(self) -> None:
        self._query_only(False)

    def _query_only(self, on: bool) -> None:
        self.refusing = on
        file = self.sqlite._store._file
        self.loop.run(self.sqlite._commits.do(lambda: file._db.execute(f"PRAGMA query_only = {on:d}").close()))

    # -- what must hold
    @invariant()
    def they_hold_the_same(self) -> None:
        self.loop.run(self._compare())

    async def _compare(self) -> None:
        assert len(self.sqlite) == len(self.memory) <= 4
        assert self.sqlite.held_bytes == self.memory.held_bytes
        held, kept = self.sqlite._store.books, self.memory._books
        assert list(held.gone) == list(kept.gone), "what is forgotten first"
        assert list(held.owners) == list(kept.owners)
        assert not self.sqlite._store._finals, "outputs are in the file alone"
        total, results = 0, dict[str, bytes]()
        for session in ("s", "other"):
            expected = await self.memory.list_session(session)
            assert [held.key for held in await self.sqlite.list_session(session)] == [one.key for one in expected]
            for one in expected:
                assert await self.sqlite.load(one.key) == one
                total += one.cost_bytes
                if one.outcome is not None:
                    text = results[one.key] = one.outcome.final.parts[0].text
                    assert self.results.get(one.key, text) == text, "the first outcome stays"
        self.results = results
        assert total == self.memory.held_bytes, "every call has one session"


TestStores = Stores.TestCase
TestStores.pytestmark = [pytest.mark.timeout(240)]
TestStores.settings = settings(
    max_examples=100, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow], deadline=None
)
