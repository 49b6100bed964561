"""All backends: kept connected, merged into one catalogue, and given out one call at a time.

Invariant: a lease is only given on a backend that serves, in the tool's chosen version, below the tool's own
max_concurrency; waiting calls get theirs in order of priority, then of arrival.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from node_runtime.logs import get_logger
from node_runtime.runtime_settings import RuntimeSettings
from tool_gateway.backends.backend import Backend
from tool_gateway.backends.members import Members
from tool_gateway.backends.resolver import LookUp, look_up
from tool_gateway.catalogue import CatalogueBuilder, Described, Tool
from tool_gateway.metrics import BACKEND_SERVING, BACKEND_STATES, BACKENDS, prepare, prepare_tool
from tool_gateway.settings import PoolSettings, TimeoutSettings
from tool_gateway.signal import Signal

_log = get_logger(__name__)


class NoSuchTool(LookupError):
    """Every pool has told what it serves, and none serves this."""


class ToolLeftOut(LookupError):
    """A backend serves the tool in a form that cannot be called; the text says why."""


class InstanceReplaced(LookupError):
    """The only instance where a call may start will never be there again."""


@dataclass(slots=True)
class Lease:
    """One call's place on a backend; give it back with ``Backends.give_back``."""

    backend: Backend
    instance_id: str
    tool: Tool


@dataclass(slots=True)
class _Waiter:
    future: asyncio.Future[Lease]
    avoid: str | None
    prefer: str | None


class Backends:
    """``run`` must be awaited for as long as calls are made."""

    def __init__(
        self,
        pools: Iterable[PoolSettings],
        runtime: RuntimeSettings,
        timeouts: TimeoutSettings,
        rng: random.Random | None = None,
        look_up: LookUp = look_up,
    ) -> None:
        self._rng = rng or random.Random()
        self._pools = {pool.name: pool for pool in pools}
        self.changed = Signal()
        self._members = Members(tuple(self._pools.values()), runtime, timeouts, self._on_change, look_up, self._rng)
        self.backends = self._members.backends
        """By address; those of a name come and go."""
        self._builder = CatalogueBuilder()
        self.tools: dict[str, Tool] = {}
        self._serving: dict[str, list[Backend]] = {}
        """Of each tool, the backends to which its calls go; made anew at each change."""
        self.version = 0
        """Raised whenever `tools` changes in what clients see."""
        self._shown: object = None
        self._queues: dict[str, list[tuple[int, int, _Waiter]]] = {}
        self._arrivals = itertools.count()
        prepare(self._pools)

    async def run(self) -> None:
        await self._members.run()

    async def close(self) -> None:
        await self._members.close()

    @property
    def catalogue_known(self) -> bool:
        """At least one address of each pool has been described: what no pool serves does not exist."""
        return self._pools.keys() <= self._described_pools()

    def silent_addresses(self) -> list[str]:
        """Where nothing has been heard yet: addresses, and names without any."""
        silent = [backend.address for backend in self.backends.values() if backend.described is None]
        return silent + [
            pool.dns for pool in self._pools.values() if pool.dns and pool.name not in self._members.resolved
        ]

    async def find(self, name: str) -> Tool:
        """The tool, waiting for pools that have not told yet. Raises NoSuchTool or ToolLeftOut."""
        while (tool := self.tools.get(name)) is None:
            if (why := self._builder.left_out.get(name)) is not None:
                raise ToolLeftOut(why)
            if self.catalogue_known:
                raise NoSuchTool(name)
            await self.changed.wait()
        return tool

    async def acquire(
        self,
        name: str,
        *,
        priority: int = 0,
        avoid: str | None = None,
        prefer: str | None = None,
        only: tuple[str, str] | None = None,
    ) -> Lease:
        """A place for one call, waiting until there is one. `avoid` and `prefer` are addresses and wishes; `only` is an
        (address, instance_id) and a must: the lease is given there whatever its load."""
        if only is not None:
            return await self._acquire_only(name, *only)
        lease = None if self._queues.get(name) else self._pick(name, avoid, prefer)
        if lease is not None:
            return lease
        waiter = _Waiter(asyncio.get_running_loop().create_future(), avoid, prefer)
        heapq.heappush(self._queues.setdefault(name, []), (priority, next(self._arrivals), waiter))
        self._pump(name)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                self.give_back(waiter.future.result())
            raise

    async def _acquire_only(self, name: str, address: str, instance_id: str) -> Lease:
        while True:
            there = self.backends.get(address)
            serving = [b for b in self.backends.values() if b.instance_id == instance_id and b.serving]
            replaced = there is not None and there.connected and there.instance_id != instance_id
            if replaced or (there is None and not serving):  # or its pool's name does not give it any more
                raise InstanceReplaced(f"the instance {instance_id} at {address}, where the call may start, is gone")
            tool = self.tools.get(name)
            if tool is not None and serving:
                return self._take(serving[0], tool)
            await self.changed.wait()

    def give_back(self, lease: Lease) -> None:
        name = lease.tool.spec.name
        lease.backend.give_back(name)
        self._pump(name)

    def lease_at(self, backend: Backend, tool: Tool) -> Lease:
        """A place on this backend whatever its load: for a call that is there already."""
        return self._take(backend, tool)

    def address_of(self, instance_id: str) -> str | None:
        """Where this instance answers now."""
        if not instance_id:
            return None
        return next((a for a, backend in self.backends.items() if backend.instance_id == instance_id), None)

    def pool_of(self, name: str) -> str:
        """For metrics: the pool whose backends a call of this tool waits for (the first, where several serve it)."""
        tool = self.tools.get(name)
        pools = {self.backends[address].pool for address in tool.addresses} if tool is not None else set()
        return next((pool for pool in self._pools if pool in pools), "unknown")

    def suspects(self, name: str) -> list[Backend]:
        """Backends that may have run this tool: every address of the pools that serve it or are not known, those that
        are leaving too; each instance once."""
        pools = self._suspect_pools(name)
        return [b for b in self.backends.values() if b.pool in pools and b.twin_of is None]

    def suspects_complete(self, name: str) -> bool:
        """No other address can have run this tool: of a name, one may have left before this gateway looked."""
        return all(self._pools[pool].dns is None for pool in self._suspect_pools(name))

    async def wait_for_suspects(self, name: str) -> None:
        """Returns once every suspect answers; also those that a name gives meanwhile."""
        while not self._suspect_pools(name) <= self._members.resolved or not all(
            backend.connected for backend in self.suspects(name)
        ):
            await self.changed.wait()

    def _suspect_pools(self, name: str) -> set[str]:
        serving = {backend.pool for backend in self.backends.values() if name in backend.specs}
        return serving | (self._pools.keys() - self._described_pools())

    def _described_pools(self) -> set[str]:
        return {backend.pool for backend in self.backends.values() if backend.described is not None}

    def _pick(self, name: str, avoid: str | None, prefer: str | None) -> Lease | None:
        """The less loaded of two random candidates ("The Power of Two Choices", Mitzenmacher 1996)."""
        tool = self.tools.get(name)
        if tool is None:
            return None
        candidates = self._serving[name]
        if tool.spec.max_concurrency:
            candidates = [backend for backend in candidates if backend.has_room(tool.spec)]
        if not candidates:
            return None
        if prefer is not None and (preferred := self.backends.get(prefer)) in candidates and preferred is not None:
            return self._take(preferred, tool)
        if avoid is not None:
            candidates = [backend for backend in candidates if backend.address != avoid] or candidates
        two = self._rng.sample(candidates, 2) if len(candidates) > 2 else candidates
        return self._take(min(two, key=lambda backend: backend.in_flight), tool)

    def _take(self, backend: Backend, tool: Tool) -> Lease:
        backend.take(tool.spec.name)
        return Lease(backend, backend.instance_id or "", tool)

    def _pump(self, name: str) -> None:
        queue = self._queues.get(name)
        while queue:
            waiter = queue[0][2]
            if waiter.future.done():  # cancelled meanwhile
                heapq.heappop(queue)
                continue
            lease = self._pick(name, waiter.avoid, waiter.prefer)
            if lease is None:
                return
            heapq.heappop(queue)
            waiter.future.set_result(lease)
        self._queues.pop(name, None)

    def _listed(self, pool: str) -> list[Backend]:
        """Whose tools the pool serves: of the ones that leave only where no other has told its tools yet."""
        members = [b for b in self.backends.values() if b.pool == pool and b.twin_of is None]
        staying = [backend for backend in members if not backend.leaving]
        return staying if any(backend.described is not None for backend in staying) else members

    def _on_change(self) -> None:
        described = [
            Described(b.address, b.connected and not b.leaving, b.serving, tuple(b.specs.values()))
            for pool in self._pools
            for b in self._listed(pool)
            if b.described is not None
        ]
        before = set(self.tools)
        self.tools, complaints = self._builder.build(described)
        self._serving = {
            name: [backend for address in tool.addresses if (backend := self.backends[address]).serving]
            for name, tool in self.tools.items()
        }
        for name in before.difference(self.tools):
            BACKEND_SERVING.labels(tool=name).set(0)
        for complaint in complaints:
            _log.warning(complaint)
        shown = [(name, tool.spec.version_hash, len(tool.addresses), tool.serving) for name, tool in self.tools.items()]
        if shown != self._shown:
            self._shown = shown
            self.version += 1
        for name, tool in self.tools.items():
            BACKEND_SERVING.labels(tool=name).set(tool.serving)
            if name not in before:
                prepare_tool(name)
        states = Counter((backend.pool, backend.state) for backend in self.backends.values())
        for pool, state in itertools.product(self._pools, BACKEND_STATES):
            BACKENDS.labels(pool=pool, state=state).set(states[pool, state])
        self.changed.raise_()
        for name in list(self._queues):
            self._pump(name)
