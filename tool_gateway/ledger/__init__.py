"""The call ledger: what the gateway knows of each key, behind a store interface.

Invariant: a key has at most one terminal result, and an attempt is committed here before it is invoked anywhere.
"""

from tool_gateway.ledger.memory import MemoryLedger
from tool_gateway.ledger.opening import open_ledger
from tool_gateway.ledger.records import AttemptRecord, CallRecord, Ending
from tool_gateway.ledger.sqlite import SqliteLedger
from tool_gateway.ledger.store import (
    Conflict,
    Created,
    Creation,
    Exists,
    Fenced,
    Full,
    Gone,
    LedgerStore,
    LedgerUnavailable,
)

__all__ = [
    "AttemptRecord",
    "CallRecord",
    "Conflict",
    "Created",
    "Creation",
    "Ending",
    "Exists",
    "Fenced",
    "Full",
    "Gone",
    "LedgerStore",
    "LedgerUnavailable",
    "MemoryLedger",
    "SqliteLedger",
    "open_ledger",
]
