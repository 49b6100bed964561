"""The ledger in memory: lost with the process, bounded in entries and bytes.

Invariant: the first terminal outcome of a key stays; a result goes only by release, by the end of its retention, or,
once its session has acknowledged it, for want of room. Keys that went are remembered (bounded) so that they do not run
again as if new.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from fermata.v1 import gateway_pb2, tool_pb2

from node_runtime.logs import get_logger
from tool_gateway.ledger.records import AttemptRecord, CallRecord, Ending
from tool_gateway.ledger.store import Conflict, Created, Creation, Exists, Fenced, Full, Gone
from tool_gateway.settings import LedgerSettings

_log = get_logger(__name__)
_RELEASED: Final = gateway_pb2.GetCallResponse.CALL_STATE_RELEASED
_EXPIRED: Final = gateway_pb2.GetCallResponse.CALL_STATE_EXPIRED


class MemoryLedger:
    """See ``LedgerStore``. Not thread-safe: one event loop owns it."""

    durability: tool_pb2.Durability = tool_pb2.DURABILITY_MEMORY

    def __init__(self, settings: LedgerSettings) -> None:
        self._settings = settings
        self._calls: dict[str, CallRecord] = {}
        self._bytes = 0
        self._by_session: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._by_trajectory: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self._finished: OrderedDict[str, float] = OrderedDict()  # key → finished_at, oldest first
        self._acked: OrderedDict[str, None] = OrderedDict()  # finished and acknowledged, oldest first
        self._gone: OrderedDict[str, gateway_pb2.GetCallResponse.CallState] = OrderedDict()
        self._owners: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._evicted = 0

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def held_bytes(self) -> int:
        return self._bytes

    async def create(self, record: CallRecord) -> Creation:
        trajectory = (record.run_id, record.trajectory_id)
        owner = self._owners.get(trajectory, 0)
        if record.generation < owner:
            return Fenced(owner)
        existing = self._calls.get(record.key)
        if existing is not None:
            if existing.args_sha256 != record.args_sha256 or existing.tool != record.tool:
                return Conflict(existing)
            self._set_owner(trajectory, record.generation)
            return self._adopt(existing, record)
        if (state := self._gone.get(record.key)) is not None:
            return Gone(state)
        if not self._make_room(record.cost_bytes):
            return Full(
                f"the ledger holds {len(self._calls)} calls in {self._bytes} bytes and none may be forgotten: "
                "release results, or raise gateway.ledger.max_entries or max_bytes"
            )
        self._set_owner(trajectory, record.generation)
        self._calls[record.key] = record
        self._bytes += record.cost_bytes
        self._by_session[record.session_id][record.key] = None
        self._by_trajectory[trajectory].add(record.key)
        return Created(record)

    def _adopt(self, existing: CallRecord, asking: CallRecord) -> Exists:
        previous = existing.session_id
        if previous != asking.session_id:
            self._leave_session(existing)
            self._by_session[asking.session_id][existing.key] = None
            self._acked.pop(existing.key, None)
        record = replace(
            existing,
            session_id=asking.session_id,
            generation=asking.generation,
            acked=existing.acked and previous == asking.session_id,
        )
        self._calls[record.key] = record
        return Exists(record, previous)

    async def load(self, key: str) -> CallRecord | Gone | None:
        record = self._calls.get(key)
        if record is not None:
            return record
        state = self._gone.get(key)
        return Gone(state) if state is not None else None

    async def begin_attempt(self, key: str, attempt: AttemptRecord) -> CallRecord | Fenced | None:
        record = self._calls.get(key)
        if record is None or record.done:
            return record
        owner = self._owners.get((record.run_id, record.trajectory_id), 0)
        if record.generation < owner:
            return Fenced(owner)
        record = replace(record, attempts=(*record.attempts, attempt))
        self._calls[key] = record
        return record

    async def end_attempt(
        self,
        key: str,
        number: int,
        outcome: tool_pb2.Outcome,
        started: tool_pb2.Started,
        detail: str,
    ) -> None:
        record = self._calls.get(key)
        if record is not None:
            self._calls[key] = record.with_attempt_ended(number, outcome, started, detail)

    async def finish(self, key: str, outcome: Ending, now: float) -> CallRecord | None:
        record = self._calls.get(key)
        if record is None or record.done:
            return record
        done = replace(record, outcome=outcome, finished_at=now)
        self._calls[key] = done
        self._bytes += done.cost_bytes - record.cost_bytes
        self._finished[key] = now
        self._make_room(0)
        return done

    async def ack(self, session_id: str, keys: Sequence[str]) -> None:
        for key in keys:
            record = self._calls.get(key)
            if record is not None and record.done and record.session_id == session_id and not record.acked:
                self._calls[key] = replace(record, acked=True)
                self._acked[key] = None

    async def release(self, run_id: str, keys: Collection[str]) -> list[str]:
        running = []
        for key in keys:
            record = self._calls.get(key)
            if record is None or record.run_id != run_id:
                continue
            if record.done:
                self._forget(record, _RELEASED)
            else:
                running.append(key)
        return running

    async def release_trajectory(self, run_id: str, trajectory_id: str, generation: int) -> list[str]:
        held = self._by_trajectory.get((run_id, trajectory_id), ())
        keys = [key for key in held if self._calls[key].key_generation <= generation]
        return await self.release(run_id, keys)

    async def fence(
        self, run_id: str, trajectory_id: str, generation: int, keep: Collection[str]
    ) -> list[str] | Fenced:
        trajectory = (run_id, trajectory_id)
        owner = self._owners.get(trajectory, 0)
        if generation < owner:
            return Fenced(owner)
        self._set_owner(trajectory, generation)
        kept = set(keep)
        running = []
        for key in self._by_trajectory.get(trajectory, ()):
            record = self._calls[key]
            if key in kept:
                self._calls[key] = replace(record, generation=max(record.generation, generation))
            elif record.key_generation < generation and not record.done:
                running.append(key)
        return running

    async def list_session(self, session_id: str) -> list[CallRecord]:
        return [self._calls[key] for key in self._by_session.get(session_id, ())]

    async def sweep(self, now: float) -> int:
        expired = 0
        while self._finished:
            key, finished_at = next(iter(self._finished.items()))
            if now - finished_at < self._settings.retention_s:
                break
            self._forget(self._calls[key], _EXPIRED)
            expired += 1
        return expired

    def _make_room(self, more: int) -> bool:
        """Forget acknowledged results, oldest first, until `more` bytes and one entry fit."""
        settings = self._settings
        entries = 1 if more else 0
        while len(self._calls) + entries > settings.max_entries or self._bytes + more > settings.max_bytes:
            if not self._acked:
                return False
            self._forget(self._calls[next(iter(self._acked))], _EXPIRED)
            self._evicted += 1
            if self._evicted & (self._evicted - 1) == 0:  # at 1, 2, 4, 8, …
                _log.warning(
                    "acknowledged results were forgotten before their release, for want of room",
                    results=self._evicted,
                    entries=len(self._calls),
                    held_bytes=self._bytes,
                )
        return True

    def _forget(self, record: CallRecord, state: gateway_pb2.GetCallResponse.CallState) -> None:
        key = record.key
        del self._calls[key]
        self._bytes -= record.cost_bytes
        self._finished.pop(key, None)
        self._acked.pop(key, None)
        self._leave_session(record)
        trajectory = (record.run_id, record.trajectory_id)
        held = self._by_trajectory[trajectory]
        held.discard(key)
        if not held:
            del self._by_trajectory[trajectory]
        self._gone[key] = state
        while len(self._gone) > self._settings.max_entries:
            self._gone.popitem(last=False)

    def _leave_session(self, record: CallRecord) -> None:
        keys = self._by_session.get(record.session_id)
        if keys is not None:
            keys.pop(record.key, None)
            if not keys:
                del self._by_session[record.session_id]

    def _set_owner(self, trajectory: tuple[str, str], generation: int) -> None:
        self._owners[trajectory] = max(generation, self._owners.get(trajectory, 0))
        self._owners.move_to_end(trajectory)
        while len(self._owners) > self._settings.max_entries:
            self._owners.popitem(last=False)
