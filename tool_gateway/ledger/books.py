"""The books of the ledger: every decision of every store, on an index in memory. Pure: no clock, no medium, no waiting.

Invariant: the first terminal outcome of a key stays; a result goes only by release, by the end of its retention, or,
once its session has acknowledged it, for want of room. Keys that went are remembered (bounded) so that they do not run
again as if new.

A durable store has the books note what a step touched and what that was before: what it must write, and what it takes
back where writing fails.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from fermata.v1 import gateway_pb2, tool_pb2

from node_runtime.logs import get_logger
from tool_gateway.ledger.queues import KeyQueue
from tool_gateway.ledger.records import AttemptRecord, CallRecord, Ending
from tool_gateway.ledger.store import Conflict, Created, Creation, Exists, Fenced, Full, Gone
from tool_gateway.settings import LedgerSettings

_log = get_logger(__name__)
_RELEASED: Final = gateway_pb2.GetCallResponse.CALL_STATE_RELEASED
_EXPIRED: Final = gateway_pb2.GetCallResponse.CALL_STATE_EXPIRED

Trajectory = tuple[str, str]
"""Run and trajectory."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record and its places in the orders of the books. Places count up over all that is entered, from 1."""

    place: int
    record: CallRecord
    """Whether it was acknowledged is not said there; ``seen`` says it."""
    joined: int
    """Place among its session's calls."""
    finished: int = 0
    """Place among those that finished; 0: it runs."""
    acked: int = 0
    """Place among those that were acknowledged; 0: it was not."""
    orphan: bool = False
    """It ran when its gateway died: no task will end it, unless its client comes back."""

    @property
    def seen(self) -> CallRecord:
        """The record as others see it."""
        return replace(self.record, acked=True) if self.acked else self.record

    def with_record(self, record: CallRecord) -> Entry:
        return Entry(self.place, record, self.joined, self.finished, self.acked, self.orphan)


@dataclass(frozen=True, slots=True)
class Mark:
    """A key that went."""

    place: int
    state: gateway_pb2.GetCallResponse.CallState


@dataclass(frozen=True, slots=True)
class Owner:
    """The generation that owns a trajectory, where it is not the first."""

    place: int
    generation: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What the touched keys held before (None: nothing)."""

    calls: dict[str, Entry | None] = field(default_factory=dict)
    gone: dict[str, Mark | None] = field(default_factory=dict)
    owners: dict[Trajectory, Owner | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.calls or self.gone or self.owners)


class Books:
    """One thread owns it. The steps are those of ``LedgerStore``."""

    def __init__(self, settings: LedgerSettings, *, noting: bool = False) -> None:
        """`noting`: what is touched is noted in `changes`, until ``keep`` or ``undo``."""
        self._settings = settings
        self._noting = noting
        self.changes = Changes()
        self.calls: dict[str, Entry] = {}
        self.gone: OrderedDict[str, Mark] = OrderedDict()
        self.owners: OrderedDict[Trajectory, Owner] = OrderedDict()
        self.held_bytes = 0
        self._by_session: defaultdict[str, set[str]] = defaultdict(set)
        self._by_trajectory: defaultdict[Trajectory, set[str]] = defaultdict(set)
        calls = self.calls
        self._finished = KeyQueue(lambda key: entry.finished if (entry := calls.get(key)) else 0)
        self._acked = KeyQueue(lambda key: entry.acked if (entry := calls.get(key)) else 0)
        self._orphans = KeyQueue(lambda key: _orphaned_until(calls.get(key)))
        self._places = 0
        self._evicted = 0

    def __len__(self) -> int:
        return len(self.calls)

    # -- the steps ---------------------------------------------------------------------------------------------------

    def create(self, record: CallRecord) -> Creation:
        trajectory = (record.run_id, record.trajectory_id)
        owner = self._generation(trajectory)
        if record.generation < owner:
            return Fenced(owner)
        existing = self.calls.get(record.key)
        if existing is not None:
            if existing.record.args_sha256 != record.args_sha256 or existing.record.tool != record.tool:
                return Conflict(existing.seen)
            self._own(trajectory, record.generation)
            return self._adopt(existing, record)
        if (mark := self.gone.get(record.key)) is not None:
            return Gone(mark.state)
        if not self._make_room(record.cost_bytes):
            return Full(
                f"the ledger holds {len(self.calls)} calls in {self.held_bytes} bytes and none may be forgotten: "
                "release results, or raise gateway.ledger.max_entries or max_bytes"
            )
        self._own(trajectory, record.generation)
        place = self._place()
        self._put(record.key, Entry(place, record, joined=place))
        return Created(record)

    def _adopt(self, entry: Entry, asking: CallRecord) -> Exists:
        record = entry.record
        previous = record.session_id
        if previous != asking.session_id:
            record = replace(record, session_id=asking.session_id, generation=asking.generation)
            entry = Entry(entry.place, record, self._place(), entry.finished, orphan=entry.orphan)
            self._put(record.key, entry)
        elif record.generation != asking.generation:
            entry = entry.with_record(replace(record, generation=asking.generation))
            self._put(record.key, entry)
        return Exists(entry.seen, previous)

    def load(self, key: str) -> CallRecord | Gone | None:
        entry = self.calls.get(key)
        if entry is not None:
            return entry.seen
        mark = self.gone.get(key)
        return Gone(mark.state) if mark is not None else None

    def begin_attempt(self, key: str, attempt: AttemptRecord) -> CallRecord | Fenced | None:
        entry = self.calls.get(key)
        if entry is None or entry.finished:
            return entry.seen if entry is not None else None
        record = entry.record
        owner = self._generation((record.run_id, record.trajectory_id))
        if record.generation < owner:
            return Fenced(owner)
        record = record.with_attempt(attempt)
        self._put(key, entry.with_record(record))
        return record

    def end_attempt(
        self, key: str, number: int, outcome: tool_pb2.Outcome, started: tool_pb2.Started, detail: str
    ) -> None:
        entry = self.calls.get(key)
        if entry is not None:
            record = entry.record.with_attempt_ended(number, outcome, started, detail)
            self._put(key, entry.with_record(record))

    def finish(self, key: str, outcome: Ending, now: float) -> CallRecord | None:
        entry = self.calls.get(key)
        if entry is None or entry.finished:
            return entry.seen if entry is not None else None
        done = entry.record.with_outcome(outcome, now)
        self._put(key, Entry(entry.place, done, entry.joined, self._place(), orphan=entry.orphan))
        self._make_room(0)
        return done

    def ack(self, session_id: str, keys: Sequence[str]) -> None:
        for key in keys:
            entry = self.calls.get(key)
            if entry is None or not entry.finished or entry.acked or entry.record.session_id != session_id:
                continue
            acked = self._place()
            self._put(key, Entry(entry.place, entry.record, entry.joined, entry.finished, acked, entry.orphan))

    def release(self, run_id: str, keys: Collection[str]) -> list[str]:
        running = []
        for key in keys:
            entry = self.calls.get(key)
            if entry is None or entry.record.run_id != run_id:
                continue
            if entry.record.done:
                self._forget(key, _RELEASED)
            else:
                running.append(key)
        return running

    def release_trajectory(self, run_id: str, trajectory_id: str, generation: int) -> list[str]:
        held = self._held_for((run_id, trajectory_id))
        return self.release(run_id, [record.key for record in held if record.key_generation <= generation])

    def fence(self, run_id: str, trajectory_id: str, generation: int, keep: Collection[str]) -> list[str] | Fenced:
        trajectory = (run_id, trajectory_id)
        owner = self._generation(trajectory)
        if generation < owner:
            return Fenced(owner)
        self._own(trajectory, generation)
        kept = set(keep)
        running = []
        for record in self._held_for(trajectory):
            key = record.key
            if key in kept:
                if record.generation < generation:
                    self._put(key, self.calls[key].with_record(replace(record, generation=generation)))
            elif record.key_generation < generation and not record.done:
                running.append(key)
        return running

    def list_session(self, session_id: str) -> list[CallRecord]:
        entries = [self.calls[key] for key in self._by_session.get(session_id, ())]
        entries.sort(key=lambda entry: entry.joined)
        return [entry.seen for entry in entries]

    def sweep(self, now: float) -> int:
        due = now - self._settings.retention_s
        expired = 0
        while (key := self._finished.first()) is not None and self.calls[key].record.finished_at <= due:
            self._forget(key, _EXPIRED)
            expired += 1
        while (key := self._orphans.first()) is not None and self.calls[key].record.deadline_at <= due:
            self._forget(key, _EXPIRED)
            expired += 1
        return expired

    # -- for a durable store -----------------------------------------------------------------------------------------

    def restore(
        self, calls: Iterable[Entry], gone: Iterable[tuple[str, Mark]], owners: Iterable[tuple[Trajectory, Owner]]
    ) -> None:
        """Fill empty books with what was stored, marks and owners in order of their places.

        Calls that ran have become orphans: unless their client comes back they expire, as long after their deadline as
        results do after their end.
        """
        for entry in calls:
            self._places = max(self._places, entry.place, entry.joined, entry.finished, entry.acked)
            self._hold(entry.record.key, entry if entry.record.done else replace(entry, orphan=True))
        self.gone.update(gone)
        self.owners.update(owners)
        self._places = max((self._places, *(mark.place for mark in self.gone.values())))
        self._places = max((self._places, *(owner.place for owner in self.owners.values())))

    def keep(self) -> None:
        """The changes noted are the store's as well: note from here on."""
        self.changes = Changes()

    def undo(self) -> None:
        """Be as before the changes noted."""
        changes, self.changes = self.changes, Changes()
        for key, entry in changes.calls.items():
            self._hold(key, entry)
        for key, mark in reversed(changes.gone.items()):
            self.gone.pop(key, None)
            if mark is not None:  # it had been forgotten, as the oldest
                self.gone[key] = mark
                self.gone.move_to_end(key, last=False)
        for trajectory, owner in changes.owners.items():
            self.owners.pop(trajectory, None)
            if owner is not None:
                self.owners[trajectory] = owner
        if any(changes.owners.values()):
            self.owners = OrderedDict(sorted(self.owners.items(), key=lambda item: item[1].place))

    # -- small parts -------------------------------------------------------------------------------------------------

    def _make_room(self, more: int) -> bool:
        """Forget acknowledged results, oldest first, until `more` bytes and one entry fit."""
        settings = self._settings
        entries = 1 if more else 0
        while len(self.calls) + entries > settings.max_entries or self.held_bytes + more > settings.max_bytes:
            if (key := self._acked.first()) is None:
                return False
            self._forget(key, _EXPIRED)
            self._evicted += 1
            if self._evicted & (self._evicted - 1) == 0:  # at 1, 2, 4, 8, …
                _log.warning(
                    "acknowledged results were forgotten before their release, for want of room",
                    results=self._evicted,
                    entries=len(self.calls),
                    held_bytes=self.held_bytes,
                )
        return True

    def _forget(self, key: str, state: gateway_pb2.GetCallResponse.CallState) -> None:
        self._put(key, None)
        self._put_mark(key, Mark(self._place(), state))
        while len(self.gone) > self._settings.max_entries:
            self._put_mark(next(iter(self.gone)), None)

    def _held_for(self, trajectory: Trajectory) -> list[CallRecord]:
        """The trajectory's calls, oldest first."""
        entries = [self.calls[key] for key in self._by_trajectory.get(trajectory, ())]
        entries.sort(key=lambda entry: entry.place)
        return [entry.record for entry in entries]

    def _generation(self, trajectory: Trajectory) -> int:
        owner = self.owners.get(trajectory)
        return owner.generation if owner is not None else 0

    def _own(self, trajectory: Trajectory, generation: int) -> None:
        """`generation` is not below the owner's. The first one need not be remembered: nobody comes before it."""
        if generation == self._generation(trajectory):
            return
        self._put_owner(trajectory, None)
        self._put_owner(trajectory, Owner(self._place(), generation))
        while len(self.owners) > self._settings.max_entries:
            self._put_owner(next(iter(self.owners)), None)

    def _place(self) -> int:
        self._places += 1
        return self._places

    # -- the only writes ---------------------------------------------------------------------------------------------

    def _put(self, key: str, entry: Entry | None) -> None:
        if self._noting:
            self.changes.calls.setdefault(key, self.calls.get(key))
        self._hold(key, entry)

    def _put_mark(self, key: str, mark: Mark | None) -> None:
        old = self.gone.pop(key, None)
        if self._noting:
            self.changes.gone.setdefault(key, old)
        if mark is not None:
            self.gone[key] = mark

    def _put_owner(self, trajectory: Trajectory, owner: Owner | None) -> None:
        old = self.owners.pop(trajectory, None)
        if self._noting:
            self.changes.owners.setdefault(trajectory, old)
        if owner is not None:
            self.owners[trajectory] = owner

    def _hold(self, key: str, entry: Entry | None) -> None:
        """Put the entry (None: nothing) in the place of what the key holds, in all indexes."""
        old = self.calls.get(key)
        if entry is None:
            if old is not None:
                del self.calls[key]
                self.held_bytes -= old.record.cost_bytes
                _discard(self._by_session, old.record.session_id, key)
                _discard(self._by_trajectory, (old.record.run_id, old.record.trajectory_id), key)
            return
        record = entry.record
        self.calls[key] = entry
        if old is None:
            self.held_bytes += record.cost_bytes
            self._by_session[record.session_id].add(key)
            self._by_trajectory[record.run_id, record.trajectory_id].add(key)
        else:
            if record.outcome is not old.record.outcome:
                self.held_bytes += record.cost_bytes - old.record.cost_bytes
            if record.session_id != old.record.session_id:
                _discard(self._by_session, old.record.session_id, key)
                self._by_session[record.session_id].add(key)
        if entry.finished and (old is None or old.finished != entry.finished):
            self._finished.add(entry.finished, key)
        if entry.acked and (old is None or old.acked != entry.acked):
            self._acked.add(entry.acked, key)
        if entry.orphan and not record.done:
            self._orphans.add(record.deadline_at, key)


def _orphaned_until(entry: Entry | None) -> float | None:
    return entry.record.deadline_at if entry is not None and entry.orphan and not entry.record.done else None


_G = TypeVar("_G")


def _discard(index: defaultdict[_G, set[str]], group: _G, key: str) -> None:
    held = index.get(group)
    if held is not None:
        held.discard(key)
        if not held:
            del index[group]
