"""The ledger in memory: lost with the process, bounded in entries and bytes.

Invariant: that of the books; here nothing else can happen to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from fermata.v1 import tool_pb2

from tool_gateway.ledger.books import Books
from tool_gateway.ledger.records import AttemptRecord, CallRecord, Ending
from tool_gateway.ledger.store import Creation, Fenced, Gone
from tool_gateway.settings import LedgerSettings


class MemoryLedger:
    """See ``LedgerStore``. Not thread-safe: one event loop owns it."""

    durability: tool_pb2.Durability = tool_pb2.DURABILITY_MEMORY

    def __init__(self, settings: LedgerSettings) -> None:
        self._books = Books(settings)

    def __len__(self) -> int:
        return len(self._books)

    @property
    def held_bytes(self) -> int:
        return self._books.held_bytes

    async def lost(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def create(self, record: CallRecord) -> Creation:
        return self._books.create(record)

    async def load(self, key: str) -> CallRecord | Gone | None:
        return self._books.load(key)

    async def begin_attempt(self, key: str, attempt: AttemptRecord) -> CallRecord | Fenced | None:
        return self._books.begin_attempt(key, attempt)

    async def end_attempt(
        self, key: str, number: int, outcome: tool_pb2.Outcome, started: tool_pb2.Started, detail: str
    ) -> None:
        self._books.end_attempt(key, number, outcome, started, detail)

    async def finish(self, key: str, outcome: Ending, now: float) -> CallRecord | None:
        return self._books.finish(key, outcome, now)

    async def ack(self, session_id: str, keys: Sequence[str]) -> None:
        self._books.ack(session_id, keys)

    async def release(self, run_id: str, keys: Collection[str]) -> list[str]:
        return self._books.release(run_id, keys)

    async def release_trajectory(self, run_id: str, trajectory_id: str, generation: int) -> list[str]:
        return self._books.release_trajectory(run_id, trajectory_id, generation)

    async def fence(
        self, run_id: str, trajectory_id: str, generation: int, keep: Collection[str]
    ) -> list[str] | Fenced:
        return self._books.fence(run_id, trajectory_id, generation, keep)

    async def list_session(self, session_id: str) -> list[CallRecord]:
        return self._books.list_session(session_id)

    async def sweep(self, now: float) -> int:
        return self._books.sweep(now)
