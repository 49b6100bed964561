"""The ledger in an SQLite file: it survives a killed process, or a killed host, as its setting says.

Invariant: what a method returns is in the file; the event loop waits for no disk. What is stored of a call's arguments
is their digest alone; its output stays until it is released or its retention ends, and the bytes of what went stay in
free pages of the file until they are used again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, Self

from fermata.v1 import tool_pb2

from tool_gateway.ledger.group_commit import GroupCommit
from tool_gateway.ledger.records import AttemptRecord, CallRecord, Ending
from tool_gateway.ledger.sqlite_rows import Clock
from tool_gateway.ledger.sqlite_store import SqliteStore
from tool_gateway.ledger.store import Creation, Fenced, Full, Gone
from tool_gateway.settings import LedgerSettings

MAX_WAITING: Final = 16_384
"""Steps that may wait for the disk before new calls are refused; those of admitted calls are bounded by these."""
CLOSE_S: Final = 10.0


class SqliteLedger:
    """See ``LedgerStore``. Open for as long as it is entered (``async with``); the folder is its own meanwhile.

    Entering raises NodeError where the file cannot be used: in use, damaged, of a newer version, not writable.
    """

    def __init__(self, folder: Path, settings: LedgerSettings, clock: Clock | None = None) -> None:
        """Times of records are of `clock.monotonic`, by default of the running event loop."""
        self._store = SqliteStore(folder, settings, clock or _loop_clock())
        self._commits = GroupCommit(self._store, "ledger")
        full = settings.synchronous == "full"
        self.durability: tool_pb2.Durability = tool_pb2.DURABILITY_HOST if full else tool_pb2.DURABILITY_PROCESS

    async def __aenter__(self) -> Self:
        await self._commits.open()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._commits.close(CLOSE_S)

    def __len__(self) -> int:
        return len(self._store.books)

    @property
    def held_bytes(self) -> int:
        return self._store.books.held_bytes

    async def lost(self) -> str:
        return await self._commits.lost()

    async def create(self, record: CallRecord) -> Creation:
        if self._commits.waiting >= MAX_WAITING:
            return Full(f"the ledger's disk is behind with {self._commits.waiting} steps: send the call again later")
        return await self._commits.do(lambda: self._store.create(record))

    async def load(self, key: str) -> CallRecord | Gone | None:
        return await self._commits.do(lambda: self._store.load(key))

    async def begin_attempt(self, key: str, attempt: AttemptRecord) -> CallRecord | Fenced | None:
        return await self._commits.do(lambda: self._store.begin_attempt(key, attempt))

    async def end_attempt(
        self, key: str, number: int, outcome: tool_pb2.Outcome, started: tool_pb2.Started, detail: str
    ) -> None:
        await self._commits.do(lambda: self._store.books.end_attempt(key, number, outcome, started, detail))

    async def finish(self, key: str, outcome: Ending, now: float) -> CallRecord | None:
        return await self._commits.do(lambda: self._store.finish(key, outcome, now), outcome.size)

    async def ack(self, session_id: str, keys: Sequence[str]) -> None:
        await self._commits.do(lambda: self._store.books.ack(session_id, keys))

    async def release(self, run_id: str, keys: Collection[str]) -> list[str]:
        return await self._commits.do(lambda: self._store.books.release(run_id, keys))

    async def release_trajectory(self, run_id: str, trajectory_id: str, generation: int) -> list[str]:
        return await self._commits.do(lambda: self._store.books.release_trajectory(run_id, trajectory_id, generation))

    async def fence(
        self, run_id: str, trajectory_id: str, generation: int, keep: Collection[str]
    ) -> list[str] | Fenced:
        return await self._commits.do(lambda: self._store.books.fence(run_id, trajectory_id, generation, keep))

    async def list_session(self, session_id: str) -> list[CallRecord]:
        """Results without their outputs: ``load`` gives those."""
        return await self._commits.do(lambda: self._store.books.list_session(session_id))

    async def sweep(self, now: float) -> int:
        return await self._commits.do(lambda: self._store.books.sweep(now))


def _loop_clock() -> Clock:
    """The loop's time, readable from another thread."""
    ahead = asyncio.get_running_loop().time() - time.monotonic()
    return Clock(lambda: time.monotonic() + ahead)
