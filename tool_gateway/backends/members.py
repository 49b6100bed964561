"""Which addresses the pools have: fixed ones, and those that a name gives at the moment.

Invariants: a look-up that fails changes nothing; an address belongs to one pool; a backend is taken out only where
nobody uses it (no await lies between looking and taking); an instance at two addresses takes calls at one of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence

from node_runtime.credentials import check_token_stays_here
from node_runtime.errors import NodeError
from node_runtime.logs import get_logger
from node_runtime.runtime_settings import RuntimeSettings
from tool_gateway.backends.backend import Backend
from tool_gateway.backends.membership import Changes, changes
from tool_gateway.backends.resolver import LookUp, LookUpFailed, Resolver
from tool_gateway.metrics import LOOK_UPS
from tool_gateway.settings import PoolSettings, TimeoutSettings

_log = get_logger(__name__)
_UNKNOWN_S = 1.0
"""Between two look-ups of a name that has never been found."""


class Members:
    """Owns every Backend, its task and its channel. ``run`` must be awaited for as long as calls are made."""

    def __init__(
        self,
        pools: Sequence[PoolSettings],
        runtime: RuntimeSettings,
        timeouts: TimeoutSettings,
        on_change: Callable[[], None],
        look_up: LookUp,
        rng: random.Random,
    ) -> None:
        """Raises NodeError where an address or a name can never be connected to."""
        self.backends: dict[str, Backend] = {}
        self.resolved = {pool.name for pool in pools if pool.dns is None}
        """Pools whose addresses have been known at least once."""
        self._runtime = runtime
        self._timeouts = timeouts
        self._on_change = on_change
        self._rng = rng
        self._tasks: asyncio.TaskGroup | None = None
        self._runs: dict[Backend, asyncio.Task[None]] = {}
        self._holders: dict[str, Backend] = {}
        self._named = {pool: Resolver(pool.dns, look_up) for pool in pools if pool.dns is not None}
        self._lost = {pool.name: asyncio.Event() for pool in pools}
        self._failing: set[str] = set()
        self._told: dict[str, list[str]] = {}
        for pool in pools:
            if pool.dns is not None:
                check_token_stays_here(pool.dns, runtime)
            for address in pool.addresses:
                self._join(pool, address)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            for backend in self.backends.values():
                self._start(self._tasks, backend)
            for pool, resolver in self._named.items():
                self._tasks.create_task(self._follow(pool, resolver), name=f"addresses of {pool.name}")

    async def close(self) -> None:
        for backend in self.backends.values():
            await backend.close()

    # -- the addresses of a name -------------------------------------------------------------------------------------

    async def _follow(self, pool: PoolSettings, resolver: Resolver) -> None:
        lost = self._lost[pool.name]
        while True:
            lost.clear()
            try:
                answer = await resolver.resolve(self._timeouts.look_up_s)
            except LookUpFailed as failed:
                self._keep(pool, str(failed))
            else:
                self._apply(pool, answer)
            self._close_idle(pool)
            try:
                pause_s = pool.resolve_s if pool.name in self.resolved else min(pool.resolve_s, _UNKNOWN_S)
                async with asyncio.timeout(pause_s * self._rng.uniform(0.8, 1.2)):
                    await lost.wait()
            except TimeoutError:
                continue
            # Sooner, but a backend that comes and goes must not make a storm of it.
            await asyncio.sleep(pool.resolve_s * self._rng.uniform(0.1, 0.2))

    def _keep(self, pool: PoolSettings, why: str) -> None:
        LOOK_UPS.labels(pool=pool.name, outcome="FAILED").inc()
        if pool.name in self._failing:
            return
        self._failing.add(pool.name)
        told = f"{pool.dns} cannot be looked up ({why})"
        if pool.name in self.resolved:
            _log.warning(f"the pool {pool.name} keeps its {len(self._members(pool))} addresses: {told}")
        else:
            what = "start what serves under this name, or correct it in gateway.pools"
            _log.warning(f"the pool {pool.name} has no address yet: {told}: {what}")

    def _apply(self, pool: PoolSettings, answer: Sequence[str]) -> None:
        """From here to the end nothing is awaited."""
        LOOK_UPS.labels(pool=pool.name, outcome="OK").inc()
        if pool.name in self._failing:
            self._failing.discard(pool.name)
            _log.info("the pool's name can be looked up again", pool=pool.name, dns=pool.dns)
        evicted = self._evict(pool, answer)
        elsewhere = {address: b.pool for address, b in self.backends.items() if b.pool != pool.name}
        found = changes(self._members(pool), answer, elsewhere=elsewhere.keys(), most=pool.max_addresses)
        complaints = _complaints(pool, found, elsewhere)
        joined = []
        for address in found.join:
            try:
                self._join(pool, address)
                joined.append(address)
            except NodeError as error:  # certificates that are just being renewed, a token that would travel in clear
                complaints.append(f"the pool {pool.name} leaves out {address}, which {pool.dns} gives: {error}")
        for address in found.leave:
            self.backends[address].leave()
        self._tell(pool, complaints)
        first = pool.name not in self.resolved
        self.resolved.add(pool.name)
        if joined or found.leave:
            _log.info("the pool's addresses changed", pool=pool.name, joined=joined, left=list(found.leave))
        if joined or found.leave or evicted or first:
            self._changed()

    def _members(self, pool: PoolSettings) -> list[str]:
        return [address for address, b in self.backends.items() if b.pool == pool.name and not b.leaving]

    def _join(self, pool: PoolSettings, address: str) -> None:
        """Take the address in, or back. Raises NodeError where no channel to it can be made."""
        backend = self.backends.get(address)
        if backend is not None:
            backend.leaving = False
            return
        host = self._named[pool].host.rstrip(".") if pool.dns is not None else None
        lost = self._lost[pool.name].set
        backend = Backend(pool.name, address, self._runtime, self._timeouts, self._changed, dns=host, on_lost=lost)
        self.backends[address] = backend
        if self._tasks is not None:
            self._start(self._tasks, backend)

    def _evict(self, pool: PoolSettings, answer: Sequence[str]) -> bool:
        """An address that left another pool belongs to this one as soon as nobody uses it there: networks give the
        address of a pod that is gone to the next one."""
        held = [self.backends[address] for address in answer if address in self.backends]
        left = [b for b in held if b.pool != pool.name and b.leaving and not b.in_use]
        for backend in left:
            self._take_out(backend)
        return bool(left)

    def _close_idle(self, pool: PoolSettings) -> None:
        """Those that are idle for long enough, and of too many the longest idle."""
        left = [b for b in self.backends.values() if b.pool == pool.name and b.leaving and not b.in_use]
        left.sort(key=lambda b: b.idle_s)
        gone = [b for n, b in enumerate(left) if n >= pool.max_addresses or b.idle_s >= self._timeouts.leave_s]
        for backend in gone:
            self._take_out(backend)
        if gone:
            self._changed()

    def _start(self, tasks: asyncio.TaskGroup, backend: Backend) -> None:
        self._runs[backend] = tasks.create_task(backend.run(), name=f"backend {backend.address}")

    def _take_out(self, backend: Backend) -> None:
        """Whoever calls this calls ``_changed`` in the same step: the catalogue must not name the address any more."""
        del self.backends[backend.address]
        run = self._runs.pop(backend, None)
        if self._tasks is None or run is None:
            raise AssertionError(f"the backend at {backend.address} left before it was there")
        run.cancel()
        self._tasks.create_task(_close(backend, run), name=f"close {backend.address}")

    # -- what is told ------------------------------------------------------------------------------------------------

    def _tell(self, pool: PoolSettings, complaints: list[str]) -> None:
        """What was told after the last look-up is not told again."""
        before, self._told[pool.name] = self._told.get(pool.name, ()), complaints
        for complaint in complaints:
            if complaint not in before:
                _log.warning(complaint)

    # -- one instance, two addresses ---------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._mark_twins()
        self._on_change()

    def _mark_twins(self) -> None:
        """Who held an instance before goes on holding it, unless its address leaves."""
        answering = [backend for backend in self.backends.values() if backend.instance_id is not None]
        before, self._holders = self._holders, {}
        for backend in sorted(answering, key=lambda b: (b.leaving, before.get(b.instance_id or "") is not b)):
            holder = self._holders.setdefault(backend.instance_id or "", backend)
            twin_of = None if holder is backend else holder.address
            if twin_of is not None and twin_of != backend.twin_of:
                _log.info("one instance at two addresses", address=backend.address, calls_go_to=twin_of)
            backend.twin_of = twin_of
        for backend in self.backends.values():
            if backend.instance_id is None:
                backend.twin_of = None


def _complaints(pool: PoolSettings, found: Changes, elsewhere: Mapping[str, str]) -> list[str]:
    told = [
        f"the pool {pool.name} leaves out {address}, which {pool.dns} gives: it belongs to the pool "
        f"{elsewhere[address]}, and an address belongs to one pool"
        for address in found.elsewhere
    ]
    if found.left_out:
        most = pool.max_addresses
        told.append(f"the pool {pool.name} uses {most} of the addresses that {pool.dns} gives: raise its max_addresses")
    return told


async def _close(backend: Backend, run: asyncio.Task[None]) -> None:
    try:
        await asyncio.wait({run})
    finally:
        await backend.close()
