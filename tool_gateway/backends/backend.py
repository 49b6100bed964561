"""One backend address: its channel, who answers there, whether it serves, and the calls on it.

Invariant: `instance` is what the last Describe said and is dropped the moment the health watch breaks, so nothing is
sent to a process that has not been described.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
from fermata.v1 import tool_pb2, tool_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from node_runtime.grpc_channel import open_channel, told_error
from node_runtime.logs import get_logger
from node_runtime.runtime_settings import RuntimeSettings
from tool_gateway.settings import TimeoutSettings
from tool_gateway.signal import Signal

_log = get_logger(__name__)

HEALTH_SERVICE = "fermata.v1.ToolBackendService"
PROTOCOL_MINOR = 1
FEATURES = ("attach", "cancel", "invoke_stream")
_RETRY_MAX_S = 2.0
_REMIND_S = 10.0


class UnusableBackend(Exception):
    """Somebody answers, but not as a tool backend should; the text says what would be right."""


class Backend:
    """`run` keeps the connection for as long as it is awaited; the rest may be used meanwhile."""

    def __init__(
        self,
        pool: str,
        address: str,
        runtime: RuntimeSettings,
        timeouts: TimeoutSettings,
        on_change: Callable[[], None],
        dns: str | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`dns`: the host that the address was looked up by. `on_lost` is told when it takes calls no more."""
        self.pool = pool
        self.address = address
        self.changed = Signal()
        self.in_flight = 0
        self.in_flight_by_tool: Counter[str] = Counter()
        self.leaving = False
        """The pool's name does not give this address any more: what runs here goes on, nothing new comes."""
        self.twin_of: str | None = None
        """The address at which the same instance takes its calls."""
        self.described = None
        self._runtime = runtime
        self._timeouts = timeouts
        self._on_change = on_change
        self._serving = False
        self._connected = False
        self._dns = dns
        self._on_lost = on_lost
        self._holders = 0
        self._used_at = time.monotonic()
        self._down_since = time.monotonic()
        self._lost = False
        """The connection broke, and why has not been told yet."""
        self._reminded_at = 0.0
        self._channel = open_channel(address, runtime, keepalive=False, server_name=dns)
        self.stub = tool_pb2_grpc.ToolBackendServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    @property
    def described(self) -> tool_pb2.DescribeResponse | None:
        """The last Describe ever heard at this address (kept while it is down, for the catalogue)."""
        return self._described

    @described.setter
    def described(self, described: tool_pb2.DescribeResponse | None) -> None:
        self._described = described
        self.specs: dict[str, tool_pb2.ToolSpec] = {}
        """Its tools by name, of two with one name the first."""
        for spec in described.tools if described is not None else ():
            self.specs.setdefault(spec.name, spec)
        self._instance_id = described.instance_id if described is not None else None

    @property
    def connected(self) -> bool:
        """Somebody has been described at this address and the health watch lives."""
        return self._connected

    @property
    def reachable(self) -> bool:
        """The connection stands: where it does not, a request never leaves. Known a little before the watch breaks."""
        return self._connected and self._channel.get_state() == grpc.ChannelConnectivity.READY

    @property
    def serving(self) -> bool:
        """New calls may be sent here."""
        return self.state == "serving"

    @property
    def state(self) -> str:
        """One of ``metrics.BACKEND_STATES``."""
        if self.leaving:
            return "leaving"
        if not self._connected:
            return "down"
        if self.twin_of is not None:
            return "duplicate"
        return "serving" if self._serving else "draining"

    @property
    def instance_id(self) -> str | None:
        """Who answers at this address now; None while nobody does."""
        return self._instance_id if self._connected else None

    @property
    def features(self) -> frozenset[str]:
        return frozenset(self.described.features) if self.described is not None else frozenset()

    @property
    def retention_s(self) -> float:
        """For how long a key is remembered there; one that declares nothing promises nothing."""
        return self.described.journal.retention_ms / 1000 if self.described is not None else 0.0

    def has_room(self, spec: tool_pb2.ToolSpec) -> bool:
        return not spec.max_concurrency or self.in_flight_by_tool[spec.name] < spec.max_concurrency

    def take(self, tool: str) -> None:
        """One more call of this tool is here."""
        self.in_flight += 1
        self.in_flight_by_tool[tool] += 1

    def give_back(self, tool: str) -> None:
        self.in_flight -= 1
        self.in_flight_by_tool[tool] -= 1
        self._used_at = time.monotonic()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the channel open without a call: closing it would cancel whoever awaits an RPC on it."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self._used_at = time.monotonic()

    @property
    def in_use(self) -> bool:
        return bool(self.in_flight or self._holders)

    @property
    def idle_s(self) -> float:
        """Since somebody last used this, or since its address left. Only where nobody does now."""
        return time.monotonic() - self._used_at

    def leave(self) -> None:
        self.leaving = True
        self._used_at = time.monotonic()

    async def run(self) -> None:
        """Describe, watch health, and start over when the watch breaks; until cancelled."""
        failures = 0
        try:
            while True:
                try:
                    await self._describe()
                    failures = 0
                    why = await self._watch()
                except grpc.aio.AioRpcError as error:
                    self._drop()  # at once: to find out why may take a second
                    why, _ = await told_error(error, self.address, self._runtime, self._dns)
                except (UnusableBackend, asyncio.InvalidStateError) as error:
                    why = str(error)
                self._set_down(why)
                failures += 1
                await asyncio.sleep(random.uniform(0.02, min(_RETRY_MAX_S, 0.1 * 2 ** min(failures, 10))))
        finally:
            self._connected = False

    async def close(self) -> None:
        await self._channel.close()

    async def wait_until_connected(self) -> None:
        """Returns once somebody is described at this address."""
        while not self._connected:
            await self.changed.wait()

    async def _describe(self) -> None:
        request = tool_pb2.DescribeRequest(protocol_minor=PROTOCOL_MINOR, features=FEATURES)
        described = await self.stub.Describe(request, timeout=self._timeouts.describe_s)
        if not described.instance_id:
            raise UnusableBackend(f"the backend at {self.address} describes itself without an instance_id: set one")
        before = self.described.instance_id if self.described is not None else None
        self.described = described
        self._connected = True
        self._serving = True
        self._reminded_at = 0.0
        _log.info(
            "backend found" if before is None else "backend is back",
            pool=self.pool,
            address=self.address,
            instance=described.instance_id,
            new_instance=before not in (None, described.instance_id),
            tools=[spec.name for spec in described.tools],
        )
        self._tell()

    async def _watch(self) -> str:
        """Follows the backend's health until the stream ends; returns why it did."""
        watch = self._health.Watch(health_pb2.HealthCheckRequest(service=HEALTH_SERVICE))
        try:
            async for status in watch:
                # A backend that serves health without naming its service is taken at its Describe.
                serving = status.status != health_pb2.HealthCheckResponse.NOT_SERVING
                if serving != self._serving:
                    self._serving = serving
                    _log.info("backend serves again" if serving else "backend drains", address=self.address)
                    self._tell()
                    if not serving:
                        self._on_lost()
            return "the health watch ended"
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return await self._watch_channel()
            raise
        finally:
            watch.cancel()

    async def _watch_channel(self) -> str:
        """For a backend without the health service: it serves for as long as the connection stands."""
        while (state := self._channel.get_state()) == grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)
        return "the connection was lost"

    def _drop(self) -> None:
        if self._connected:
            self._connected = False
            self._down_since = time.monotonic()
            self._lost = True
            self._tell()
            self._on_lost()

    def _set_down(self, why: str) -> None:
        self._drop()
        now = time.monotonic()
        if self._lost:
            self._lost = False
            _log.warning("backend lost", pool=self.pool, address=self.address, why=why, leaving=self.leaving)
        if now - self._reminded_at >= _REMIND_S and not self.leaving:
            self._reminded_at = now
            where = "gateway.pools" if self._dns is None else f"the records of {self._dns}"
            _log.warning(
                f"waiting for the tool backend at {self.address}: start it, or take it out of {where}",
                pool=self.pool,
                down_s=round(now - self._down_since, 1),
                why=why,
            )

    def _tell(self) -> None:
        self.changed.raise_()
        self._on_change()
