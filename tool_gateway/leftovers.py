"""Calls that an earlier gateway drove and that nobody asks for any more: their cancels and their ends.

Invariant: an instance that may run such a call is told to stop it, as soon as it answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fermata.v1 import tool_pb2

from node_runtime.logs import get_logger
from node_runtime.outcomes import make_final
from tool_gateway.backends import Backends
from tool_gateway.backends.attempt import cancel
from tool_gateway.ledger import AttemptRecord, CallRecord, Ending, LedgerStore, LedgerUnavailable
from tool_gateway.recoveries import Recoveries
from tool_gateway.recovery import open_attempts
from tool_gateway.settings import GatewaySettings

_log = get_logger(__name__)


class Leftovers:
    """Holds no call state of its own."""

    def __init__(self, settings: GatewaySettings, ledger: LedgerStore, backends: Backends) -> None:
        self._settings = settings
        self._ledger = ledger
        self._recoveries = Recoveries(settings, backends)

    async def of_session(self, session_id: str) -> list[str]:
        """Keys that have no outcome."""
        return [head.key for head in await self._ledger.list_session(session_id) if not head.done]

    async def end(self, key: str, reason: str) -> CallRecord | None:
        """End the call as cancelled. Returns its record if there is something to tell its session."""
        record = await self._ledger.load(key)
        if not isinstance(record, CallRecord) or record.done:
            return None
        final = make_final(tool_pb2.OUTCOME_CANCELLED, detail=reason, started=may_have_started(record.attempts))
        now = asyncio.get_running_loop().time()
        try:
            return await self._ledger.finish(key, Ending(final, attempts=len(record.attempts)), now)
        except LedgerUnavailable as problem:  # it expires a while after its deadline
            _log.warning("the end of a call was not stored", key=key, why=str(problem))
            return None

    async def stop(self, key: str, attempts: Sequence[AttemptRecord], reason: str) -> None:
        """Tell the instances that may run the call."""
        attempts = open_attempts(attempts, foreign=False)
        found = await self._recoveries.find(attempts, self._settings.retry.rejoin_s)
        for backend in found.values():
            problem = await cancel(backend, key, reason, self._settings.timeouts.control_s)
            if problem is not None:
                _log.info("a cancel did not reach the backend", key=key, address=backend.address, why=problem)


def may_have_started(attempts: Sequence[AttemptRecord]) -> tool_pb2.Started:
    return tool_pb2.STARTED_UNKNOWN if open_attempts(attempts, foreign=False) else tool_pb2.STARTED_NO
