"""The journal: what this process knows about each key. A key that is not tombstoned starts here at most once.

A key is in one of these states::

    unknown --begin--> running --finish--> done --evicted--> ended (a mark: it was here, the result is gone)
    unknown --tombstone--> tombstoned (can never start here)

The journal is pure: time is an argument (seconds of any monotonic clock), nothing here waits, and ``begin`` looks a key
up and creates it in one step, so two requests for one key can never both start it.

Bounds, and what gives way first:

* finished results leave after ``retention_s``, earlier where entries or bytes run short (the oldest first);
* a key of an idempotent tool is then forgotten, because running it again does no harm; every other key leaves a mark
  that answers "expired" and never starts again;
* a mark lives ``mark_retention_s``, under pressure less, but never less than ``retention_s``: that is the promise that
  ``Describe`` declares. Where keeping it would take more room than there is, new starts are refused instead;
* running entries are never evicted.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections import OrderedDict
from typing import Generic, TypeVar

OwnerT = TypeVar("OwnerT")
ResultT = TypeVar("ResultT")

# What an entry costs beside its result: the key, the digest, the record and its slot in the table.
ENTRY_OVERHEAD_BYTES = 512


@dataclasses.dataclass(frozen=True)
class JournalLimits:
    """Bounds of a journal. Seconds, counts and bytes."""

    retention_s: float = 600.0
    mark_retention_s: float = 86_400.0
    max_entries: int = 50_000
    max_bytes: int = 64 * 1024 * 1024
    max_marks: int = 1_000_000


class State(enum.Enum):
    """What is known of a key."""

    UNKNOWN = "unknown"
    RUNNING = "running"
    DONE = "done"
    ENDED = "ended"
    TOMBSTONED = "tombstoned"
    CONFLICT = "conflict"  # known with other arguments


class Begin(enum.Enum):
    """What ``begin`` did."""

    STARTED = "started"  # the caller, and nobody else, runs it now
    KNOWN = "known"  # see the look-up
    FULL = "full"  # nothing was recorded and nothing may start


@dataclasses.dataclass(slots=True)
class Entry(Generic[OwnerT, ResultT]):
    """A running or finished key. ``owner`` is whoever runs it, None once it ended; ``result`` is
    None while it runs or once it was dropped."""

    key: str
    digest: bytes
    owner: OwnerT | None
    idempotent: bool
    result: ResultT | None = None
    ended_at: float | None = None
    size: int = ENTRY_OVERHEAD_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class LookUp(Generic[OwnerT, ResultT]):
    """The state of a key and, where it is running, done or in conflict, its entry."""

    state: State
    entry: Entry[OwnerT, ResultT] | None = None


class Marks:
    """A bounded set of keys, oldest first, that remembers each for at least ``floor_s`` seconds.

    Keys are kept as 16-byte digests: a mark costs about 200 bytes whatever the key's length.
    """

    def __init__(self, max_count: int, keep_s: float, floor_s: float) -> None:
        self._max_count = max_count
        self._keep_s = max(keep_s, floor_s)
        self._floor_s = floor_s
        self._marked_at: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._marked_at)

    def has(self, key: str) -> bool:
        """Whether the key is marked."""
        return bool(self._marked_at) and _short(key) in self._marked_at

    def has_room(self, now: float) -> bool:
        """Whether one more key can be marked without forgetting one before its time."""
        if len(self._marked_at) < self._max_count:
            return True
        oldest = next(iter(self._marked_at.values()), None)
        return oldest is not None and now - oldest >= self._floor_s

    def add(self, key: str, now: float) -> bool:
        """Mark a key; False, and nothing marked, where there is no room."""
        short = _short(key)
        if short in self._marked_at:
            return True
        if not self.has_room(now):
            return False
        if len(self._marked_at) >= self._max_count:
            self._marked_at.popitem(last=False)
        self._marked_at[short] = now
        return True

    def expire(self, now: float) -> None:
        """Forget the marks whose time is over."""
        while self._marked_at:
            short, marked_at = next(iter(self._marked_at.items()))
            if now - marked_at < self._keep_s:
                return
            del self._marked_at[short]


class Journal(Generic[OwnerT, ResultT]):
    """The states of all keys, bounded. Not thread-safe: one event loop owns it."""

    def __init__(self, limits: JournalLimits) -> None:
        self._limits = limits
        self._running: dict[str, Entry[OwnerT, ResultT]] = {}
        self._done: OrderedDict[str, Entry[OwnerT, ResultT]] = OrderedDict()  # in the order in which they ended
        self._with_result: OrderedDict[str, int] = OrderedDict()  # the part of _done that holds bytes, and how many
        self._ended = Marks(limits.max_marks, limits.mark_retention_s, limits.retention_s)
        self._tombstones = Marks(limits.max_marks, limits.mark_retention_s, limits.retention_s)
        self._result_bytes = 0

    @property
    def running(self) -> int:
        """Keys that run now."""
        return len(self._running)

    @property
    def entries(self) -> int:
        """Keys that run or whose entry is kept."""
        return len(self._running) + len(self._done)

    @property
    def used_bytes(self) -> int:
        """Bytes of stored results, and the overhead of every entry."""
        return self._result_bytes + self.entries * ENTRY_OVERHEAD_BYTES

    @property
    def marks(self) -> int:
        """Keys remembered by a mark alone: ended ones and tombstones."""
        return len(self._ended) + len(self._tombstones)

    def look_up(self, key: str, digest: bytes, now: float) -> LookUp[OwnerT, ResultT]:
        """What is known of a key. An empty digest asks for the key whatever its arguments were."""
        self._expire(now)
        entry = self._running.get(key) or self._done.get(key)
        if entry is not None:
            if digest and entry.digest != digest:
                return LookUp(State.CONFLICT, entry)
            if entry.ended_at is None:
                return LookUp(State.RUNNING, entry)
            return LookUp(State.DONE if entry.result is not None else State.ENDED, entry)
        if self._tombstones.has(key):
            return LookUp(State.TOMBSTONED)
        return LookUp(State.ENDED if self._ended.has(key) else State.UNKNOWN)

    def begin(self, key: str, digest: bytes, owner: OwnerT, now: float, *, idempotent: bool) -> Begin:
        """Record the start of an unknown key. Only STARTED allows the caller to run it."""
        if self.look_up(key, digest, now).state is not State.UNKNOWN:
            return Begin.KNOWN
        if not self._make_room(now):
            return Begin.FULL
        self._running[key] = Entry(key, digest, owner, idempotent)
        return Begin.STARTED

    def finish(self, key: str, result: ResultT, size: int, now: float) -> None:
        """Store the one result of a running key; ``size`` is what the result takes, in bytes."""
        entry = self._running.pop(key)
        entry.ended_at = now
        entry.owner = None
        entry.result = result
        entry.size = size
        self._done[key] = entry
        self._with_result[key] = size
        self._result_bytes += size
        self._expire(now)
        while self._result_bytes > self._limits.max_bytes and self._with_result:
            self._drop_result(next(iter(self._with_result)))

    def tombstone(self, key: str, now: float) -> bool:
        """See to it that an unknown key can never start here. False where it is known, or where there is no room."""
        state = self.look_up(key, b"", now).state
        if state is State.TOMBSTONED:
            return True
        return state is State.UNKNOWN and self._tombstones.add(key, now)

    def forget_all_results(self) -> None:
        """Drop every stored result, as the strongest memory pressure would; the keys stay known."""
        while self._with_result:
            self._drop_result(next(iter(self._with_result)))

    def _expire(self, now: float) -> None:
        while self._done:
            key, entry = next(iter(self._done.items()))
            if entry.ended_at is None or now - entry.ended_at < self._limits.retention_s or not self._evict(key, now):
                break
        self._ended.expire(now)
        self._tombstones.expire(now)

    def _make_room(self, now: float) -> bool:
        """Room for one more entry and, later, for the mark that it may leave."""
        while self.entries >= self._limits.max_entries:
            if not self._done or not self._evict(next(iter(self._done)), now):
                return False
        return True

    def _evict(self, key: str, now: float) -> bool:
        entry = self._done[key]
        if not entry.idempotent and not self._ended.add(key, now):
            return False
        self._drop_result(key)
        self._done.pop(key, None)
        return True

    def _drop_result(self, key: str) -> None:
        size = self._with_result.pop(key, None)
        if size is None:
            return
        self._result_bytes -= size
        entry = self._done[key]
        if entry.idempotent:
            del self._done[key]  # it may simply run again
        else:
            entry.result = None


def _short(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
