"""The store that the settings name. Invariant: it is closed with its context, the last steps committed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tool_gateway.ledger.memory import MemoryLedger
from tool_gateway.ledger.sqlite import SqliteLedger
from tool_gateway.ledger.store import LedgerStore
from tool_gateway.settings import GatewaySettings


@asynccontextmanager
async def open_ledger(settings: GatewaySettings) -> AsyncIterator[LedgerStore]:
    """Raises NodeError where the store cannot be used."""
    if settings.data_dir is None:
        yield MemoryLedger(settings.ledger)
        return
    async with SqliteLedger(settings.data_dir, settings.ledger) as ledger:
        yield ledger
