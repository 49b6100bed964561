"""Records, endings and both kinds of store for the ledger's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fermata.v1 import tool_pb2

from node_runtime.outcomes import make_final
from tool_gateway.ledger import CallRecord, Ending, MemoryLedger, SqliteLedger
from tool_gateway.ledger.sqlite_rows import Clock
from tool_gateway.settings import LedgerSettings

NOON = 1_000_000.0
STOPPED = Clock(lambda: NOON, lambda: NOON)
"""Both clocks at the same time for ever: what is stored comes back to the last bit."""


def record(
    n: int = 0,
    *,
    trajectory: str = "t",
    generation: int = 0,
    session: str = "s",
    digest: bytes = b"d",
    **fields: Any,
) -> CallRecord:
    fields.setdefault("received_at", 0.0)
    fields.setdefault("deadline_at", 60.0)
    return CallRecord(
        key=f"run/{trajectory}/{generation}/0/{n}",
        run_id="run",
        trajectory_id=trajectory,
        key_generation=generation,
        generation=generation,
        session_id=session,
        tool="echo",
        args_sha256=digest,
        **fields,
    )


def ending(text: str = "x") -> Ending:
    return Ending(make_final(tool_pb2.OUTCOME_OK, text=text), 11, 22, "instance", attempts=1)


@asynccontextmanager
async def opened(
    store: str, folder: Path, clock: Clock = STOPPED, **settings: Any
) -> AsyncIterator[MemoryLedger | SqliteLedger]:
    """`store`: "memory" or "sqlite"."""
    if store == "memory":
        yield MemoryLedger(LedgerSettings(**settings))
        return
    async with SqliteLedger(folder, LedgerSettings(**settings), clock) as ledger:
        yield ledger
