"""Events on their way to the trainer, and the ends it has not yet acknowledged.

Invariant: per trajectory at most one Accepted, one Rejected and one state (Parked, Finished, Failed, HandedOver) wait
here, the newest: a newer state says all that an unsent older one did, because snapshots are deltas on what was
acknowledged and not on what was sent. So the size is bounded by the number of trajectories, whoever reads slowly.
Ends stay in `kept` until acknowledged (bounded, oldest first out), to be sent again over a new stream.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from fermata.v1 import rollout_pb2 as pb

Event = pb.RunResponse.Event

_ANSWERS = frozenset({"accepted", "rejected"})
_ENDS = frozenset({"finished", "failed", "handed_over"})


class Outbox:
    """One reader (`take`), any number of writers on the same event loop."""

    def __init__(self, kept_ends: int) -> None:
        self._waiting: dict[tuple[str, str], Event] = {}
        self._kept: OrderedDict[str, Event] = OrderedDict()
        self._kept_ends = kept_ends
        self._filled = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._settled = asyncio.Event()
        self._settled.set()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, event: Event) -> None:
        kind = event.WhichOneof("event")
        trajectory = "" if kind in ("load", "welcome") else getattr(event, kind).trajectory_id
        slot = kind if kind in _ANSWERS or not trajectory else "state"
        self._waiting.pop((trajectory, slot), None)  # to the end: order of the newest
        self._waiting[(trajectory, slot)] = event
        if kind in _ENDS:
            self._kept.pop(trajectory, None)
            self._kept[trajectory] = event
            while len(self._kept) > self._kept_ends:
                self._kept.popitem(last=False)
            self._settled.clear()
        self._filled.set()

    async def take(self, max_bytes: int) -> list[Event]:
        """Every event that is ready, up to `max_bytes` (one event at least), oldest first; waits for the first."""
        while not self._waiting:
            await self._filled.wait()
        taken: list[Event] = []
        size = 0
        for slot, event in list(self._waiting.items()):
            size += event.ByteSize()
            if taken and size > max_bytes:
                break
            taken.append(event)
            del self._waiting[slot]
        if not self._waiting:
            self._filled.clear()
        self._drained.set()
        return taken

    async def below(self, events: int) -> None:
        """Wait until fewer than `events` wait: a reader that stops here lets HTTP/2 hold its peer back."""
        while len(self._waiting) >= events:
            self._drained.clear()
            await self._drained.wait()

    async def settled(self) -> None:
        """Wait until every end has been acknowledged."""
        await self._settled.wait()

    def end_of(self, trajectory_id: str, generation: int) -> Event | None:
        """The kept end of a trajectory, where it is of this generation."""
        event = self._kept.get(trajectory_id)
        if event is None:
            return None
        return event if getattr(event, event.WhichOneof("event")).generation == generation else None

    def acknowledge(self, trajectory_id: str, generation: int, snapshot_seq: int) -> Event | None:
        """The trainer holds this snapshot: the end is dropped (and returned) where it is no newer than that."""
        event = self.end_of(trajectory_id, generation)
        if event is None:
            return None
        end = getattr(event, event.WhichOneof("event"))
        if isinstance(end, pb.RunResponse.Failed) or end.snapshot.snapshot_seq <= snapshot_seq:
            del self._kept[trajectory_id]
            self._note_settled()
            return event
        return None

    def forget(self, trajectory_id: str) -> None:
        """The trajectory is taken up again: nothing said of it before matters."""
        self._kept.pop(trajectory_id, None)
        self._note_settled()
        for slot in (*_ANSWERS, "state"):
            self._waiting.pop((trajectory_id, slot), None)
        if not self._waiting:
            self._filled.clear()

    def replay(self) -> None:
        """A new stream of the same trainer: say again whatever end it has not acknowledged."""
        for event in list(self._kept.values()):
            self.put(event)

    def clear(self) -> None:
        """Another trainer process: what was meant for its predecessor is nothing to it."""
        self._waiting.clear()
        self._kept.clear()
        self._filled.clear()
        self._drained.set()
        self._note_settled()

    def _note_settled(self) -> None:
        if not self._kept:
            self._settled.set()
