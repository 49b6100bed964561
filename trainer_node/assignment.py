"""Which trajectory goes to which node, and when. Pure: time and events come in, decisions go out.

Invariant: every trajectory added is in exactly one of three states (waiting, open on one node, or removed), and its
generation grows each time it is given to an owner again, so that what an earlier owner still says can be told apart.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Collection, Iterable


class Fate(enum.Enum):
    """Why a trajectory will not be tried again."""

    NODE_LOST = "node_lost"  # it was moved as often as allowed
    REJECTED = "rejected"  # every node said: never right here
    DEADLINE = "deadline"  # its time ran out, and no node said so


@dataclasses.dataclass(slots=True)
class NodeView:
    """What is known of one node."""

    address: str
    node_id: str = ""
    incarnation: str = ""
    connected: bool = False
    serving: bool = False
    draining: bool = False
    synced: bool = False  # it serves weights of our lineage, proven
    failed_syncs: int = 0  # in a row
    tools: frozenset[str] = frozenset()
    max_trajectories: int = 0  # 0: unknown
    open: set[str] = dataclasses.field(default_factory=set)

    @property
    def member(self) -> str:
        """What a weight sync calls this process."""
        return f"{self.address} ({self.incarnation[:12]})"

    @property
    def ready(self) -> bool:
        return self.connected and self.serving and self.synced and not self.draining

    @property
    def room(self) -> bool:
        return not self.max_trajectories or len(self.open) < self.max_trajectories

    @property
    def fill(self) -> float:
        return len(self.open) / self.max_trajectories if self.max_trajectories else float(len(self.open))


@dataclasses.dataclass(slots=True)
class Entry:
    """One trajectory and where it stands."""

    trajectory_id: str
    order: int
    tools: frozenset[str]
    deadline: float
    generation: int = 0
    started: bool = False  # it had an owner: the next one is a new generation
    moves: int = 0
    node: str | None = None
    not_before: float = 0.0
    refused_by: set[str] = dataclasses.field(default_factory=set)


class Assignment:
    """Least-loaded assignment by order, with moves, refusals and deadlines."""

    def __init__(self, addresses: Iterable[str], *, max_moves: int) -> None:
        self.nodes = {address: NodeView(address) for address in addresses}
        self.entries: dict[str, Entry] = {}
        self._waiting: list[tuple[int, str]] = []  # (order, id), sorted
        self._max_moves = max_moves

    def add(self, entry: Entry) -> None:
        if entry.trajectory_id in self.entries:
            raise ValueError(f"trajectory {entry.trajectory_id} is known already: ids are unique in a run")
        self.entries[entry.trajectory_id] = entry
        bisect.insort(self._waiting, (entry.order, entry.trajectory_id))

    def remove(self, trajectory_id: str) -> Entry | None:
        """It reached its end, or nobody wants it any more."""
        entry = self.entries.pop(trajectory_id, None)
        if entry is not None:
            self._release(entry)
        return entry

    def is_current(self, address: str, trajectory_id: str, generation: int) -> bool:
        """Whether what this node says of this generation counts."""
        entry = self.entries.get(trajectory_id)
        return entry is not None and entry.node == address and entry.generation == generation

    def connected(
        self,
        address: str,
        *,
        node_id: str,
        incarnation: str,
        serving: bool,
        max_trajectories: int,
        tools: Collection[str],
        draining: bool = False,
    ) -> bool:
        """A node said Welcome. Returns whether it is a process not seen before, which has no weights of ours yet."""
        node = self.nodes[address]
        fresh = node.incarnation != incarnation
        node.node_id, node.incarnation = node_id, incarnation
        node.connected, node.serving, node.draining = True, serving, draining
        node.max_trajectories, node.tools = max_trajectories, frozenset(tools)
        if fresh:
            node.synced = False
            for entry in self.entries.values():
                entry.refused_by.discard(address)
        return fresh

    def load(self, address: str, *, serving: bool, draining: bool) -> None:
        node = self.nodes[address]
        node.serving, node.draining = serving, draining

    def lost(self, address: str, now: float) -> tuple[list[str], dict[str, Fate]]:
        """A node's stream ended: what it had open waits for another owner, or has been moved too often."""
        node = self.nodes[address]
        node.connected = node.serving = False
        again, ended = [], {}
        for trajectory_id in sorted(node.open):
            if self.moved(trajectory_id, now):
                again.append(trajectory_id)
            else:
                ended[trajectory_id] = Fate.NODE_LOST
        return again, ended

    def moved(self, trajectory_id: str, now: float) -> bool:
        """Take a trajectory from its node. False: it was moved as often as allowed, and is for the caller to end."""
        entry = self.entries[trajectory_id]
        self._release(entry)
        entry.moves += 1
        entry.not_before = now
        bisect.insort(self._waiting, (entry.order, trajectory_id))
        return entry.moves <= self._max_moves

    def rejected(self, trajectory_id: str, *, retry_after: float | None, now: float) -> Fate | None:
        """A node would not take it: later, or (None) never at that node. Returns a fate where no node is left."""
        entry = self.entries[trajectory_id]
        address = entry.node
        self._release(entry)
        bisect.insort(self._waiting, (entry.order, trajectory_id))
        if retry_after is not None:
            entry.not_before = now + retry_after
        elif address is not None:
            entry.refused_by.add(address)
            if entry.refused_by.issuperset(self.nodes):
                return Fate.REJECTED
        return None

    def plan(self, now: float) -> list[tuple[str, Entry]]:
        """Give waiting trajectories to ready nodes: lowest order first, each to the least loaded that has its tools."""
        ready = [node for node in self.nodes.values() if node.ready and node.room]
        given: list[tuple[str, Entry]] = []
        if not ready:
            return given
        left: list[tuple[int, str]] = []
        for index, (order, trajectory_id) in enumerate(self._waiting):
            if not ready:
                left.extend(self._waiting[index:])
                break
            entry = self.entries[trajectory_id]
            able = [n for n in ready if entry.tools <= n.tools and n.address not in entry.refused_by]
            if entry.not_before > now or not able:
                left.append((order, trajectory_id))
                continue
            node = min(able, key=lambda n: (n.fill, n.address))
            if entry.started:
                entry.generation += 1
            entry.started = True
            entry.node = node.address
            node.open.add(trajectory_id)
            if not node.room:
                ready.remove(node)
            given.append((node.address, entry))
        self._waiting = left
        return given

    def expired(self, now: float) -> list[str]:
        """Trajectories whose deadline has passed, wherever they are."""
        return [entry.trajectory_id for entry in self.entries.values() if entry.deadline <= now]

    def next_due(self, now: float) -> float | None:
        """The next time at which anything becomes due by itself. What is due but finds no node waits for an event."""
        times = [entry.deadline for entry in self.entries.values()]
        times.extend(self.entries[trajectory_id].not_before for _, trajectory_id in self._waiting)
        return min((time for time in times if time > now), default=None)

    def _release(self, entry: Entry) -> None:
        if entry.node is not None:
            self.nodes[entry.node].open.discard(entry.trajectory_id)
            entry.node = None
            return
        index = bisect.bisect_left(self._waiting, (entry.order, entry.trajectory_id))
        if index < len(self._waiting) and self._waiting[index] == (entry.order, entry.trajectory_id):
            del self._waiting[index]
