"""The store interface of the ledger: each method is one atomic step, so that SQLite or Redis can take memory's place.

Invariant: all compare-and-set lives here. Callers never read, decide and write back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from fermata.v1 import gateway_pb2, tool_pb2

from tool_gateway.ledger.records import AttemptRecord, CallRecord, Ending


@dataclass(frozen=True, slots=True)
class Created:
    record: CallRecord


@dataclass(frozen=True, slots=True)
class Exists:
    """The key was there, with the same arguments; it now belongs to the asking session."""

    record: CallRecord
    previous_session_id: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """The key was there with other arguments; nothing changed. Of a result perhaps only the head is given."""

    record: CallRecord


@dataclass(frozen=True, slots=True)
class Fenced:
    """A newer generation owns the trajectory; nothing changed."""

    generation: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The key was there once; its result was released or its retention ended."""

    state: gateway_pb2.GetCallResponse.CallState


@dataclass(frozen=True, slots=True)
class Full:
    """No room, and nothing that may be forgotten."""

    detail: str


Creation = Created | Exists | Conflict | Fenced | Gone | Full


class LedgerUnavailable(Exception):
    """The store's medium failed, and nothing of the step counts; the text is one sentence. The same step may succeed
    once the medium is well again."""


class LedgerStore(Protocol):
    """Call state. Every method may wait for its medium; what it returns has been committed. Steps take effect in the
    order in which they were asked for. Where the medium fails a method raises LedgerUnavailable."""

    @property
    def durability(self) -> tool_pb2.Durability: ...

    async def lost(self) -> str:
        """Returns if the store is lost for good, with the reason; else waits."""
        ...

    async def create(self, record: CallRecord) -> Creation:
        """Put the record in unless the key exists; raise the trajectory's owner generation to the record's."""
        ...

    async def load(self, key: str) -> CallRecord | Gone | None: ...

    async def begin_attempt(self, key: str, attempt: AttemptRecord) -> CallRecord | Fenced | None:
        """Commit attempt → instance. None: the key is gone. A record that is done comes back without the attempt."""
        ...

    async def end_attempt(
        self,
        key: str,
        number: int,
        outcome: tool_pb2.Outcome,
        started: tool_pb2.Started,
        detail: str,
    ) -> None:
        """Of an attempt that another one may follow."""
        ...

    async def finish(self, key: str, outcome: Ending, now: float) -> CallRecord | None:
        """Commit the terminal outcome; the first one stays. An attempt that is open ends with it. Returns the record as
        it now is (None: gone)."""
        ...

    async def ack(self, session_id: str, keys: Sequence[str]) -> None:
        """The session holds these results. They stay until release or the end of retention."""
        ...

    async def release(self, run_id: str, keys: Collection[str]) -> list[str]:
        """Forget finished calls of this run; returns the keys that still run (their owner lets them be cancelled)."""
        ...

    async def release_trajectory(self, run_id: str, trajectory_id: str, generation: int) -> list[str]:
        """The same for a trajectory's calls up to and including the generation of their key."""
        ...

    async def fence(
        self, run_id: str, trajectory_id: str, generation: int, keep: Collection[str]
    ) -> list[str] | Fenced:
        """Raise the owner; returns keys of older generations, not named, that still run. Fenced: a newer one is set."""
        ...

    async def list_session(self, session_id: str) -> list[CallRecord]:
        """Calls of this session that have not been released, oldest first; of results perhaps only the heads."""
        ...

    async def sweep(self, now: float) -> int:
        """Let results whose retention ended expire; returns how many."""
        ...
