"""Everything there is, the network between, and what must hold."""

from __future__ import annotations

import itertools

from fermata.v1 import rollout_pb2 as ro
from fermata.v1 import tool_pb2 as tool

from tests.property.contract.backend import Backend, Rpc
from tests.property.contract.gateway import Gateway, Ledger, Stream
from tests.property.contract.node import Node


class World:
    """Everything there is, and the network between."""

    def __init__(self, shared_ledger: bool, addresses: tuple[str, ...] = ("a", "b")) -> None:
        self.now = 1_000_000
        self.shared = Ledger() if shared_ledger else None
        self.named_may_start = False
        """A successor sends a call again to the instance that the ledger names, instead of laying a tombstone there."""
        self.addresses = addresses
        self.ids = itertools.count(1)
        self.backends: dict[str, Backend | None] = dict.fromkeys(addresses)
        self.gateways: dict[str, Gateway | None] = {"g0": None}
        if shared_ledger:
            self.gateways["g1"] = None
        self.rpcs: list[Rpc] = []
        self.streams: list[Stream] = []
        self.starts: list[tuple[str, str]] = []
        self.stored: tuple[ro.Snapshot, int] | None = None
        self.faults = 0
        self.zombies: list[Node] = []
        for address in addresses:
            self.start_backend(address)
        self.now += 120_000
        for name in self.gateways:
            self.start_gateway(name)
        self.generation = 1
        self.node = self.new_node()
        self.turn = itertools.count(1)

    @staticmethod
    def idempotent(tool_name: str) -> bool:
        return tool_name == "read"

    def open(self, stream: Stream) -> Stream:
        self.streams.append(stream)
        return stream

    def new_node(self) -> Node:
        return Node(self, f"session-{next(self.ids)}", self.generation)

    def start_backend(self, address: str) -> None:
        self.backends[address] = Backend(self, address, f"{address}-{next(self.ids)}")

    def start_gateway(self, name: str) -> None:
        self.gateways[name] = Gateway(self, name, f"{name}-{next(self.ids)}", self.shared or Ledger())

    def instances(self) -> list[str]:
        return [b.instance_id for b in self.backends.values() if b is not None]

    def backend(self, instance_id: str) -> Backend:
        return next(b for b in self.backends.values() if b is not None and b.instance_id == instance_id)

    def live_gateways(self) -> list[Gateway]:
        return [g for g in self.gateways.values() if g is not None]

    # -- faults
    def kill_backend(self, address: str) -> None:
        backend = self.backends[address]
        assert backend is not None
        self.faults += 1
        self.backends[address] = None
        for rpc in [r for r in self.rpcs if r.instance_id == backend.instance_id]:
            self.break_rpc(rpc, deliverable=False)

    def kill_gateway(self, name: str) -> None:
        gateway = self.gateways[name]
        assert gateway is not None
        self.faults += 1
        gateway.alive = False
        self.gateways[name] = None
        for stream in self.streams:
            if stream.gateway is gateway:
                stream.alive = False
        for rpc in self.rpcs:
            if rpc.gateway is gateway:
                rpc.broken = True  # a request already on the wire may still arrive

    def cut_stream(self, stream: Stream) -> None:
        self.faults += 1
        stream.alive = False

    def break_rpc(self, rpc: Rpc, *, deliverable: bool) -> None:
        if not deliverable:
            rpc.delivered = True
        if not rpc.broken and not rpc.done:
            rpc.broken = True
            self.faults += 1
            if rpc.gateway.alive:
                rpc.gateway.on_broken(rpc)

    def replace_node(self, *, zombie: bool) -> None:
        """The trainer takes the trajectory to a new node, from the stored snapshot or by sampling the turn again."""
        self.faults += 1
        old = self.node
        if zombie:
            self.zombies.append(old)
        elif old.stream is not None:
            old.stream.alive = False
        self.generation += 1
        self.node = self.new_node()
        if self.stored is not None:
            snapshot, at = self.stored
            self.node.restore(snapshot, self.now - at)

    # -- steps
    def step_rpc(self, rpc: Rpc) -> None:
        if not rpc.delivered:
            rpc.delivered = True
            backend = next(
                (b for b in self.backends.values() if b is not None and b.instance_id == rpc.instance_id), None
            )
            if backend is None:
                self.break_rpc(rpc, deliverable=False)
            elif isinstance(rpc.request, tool.Invocation):
                backend.invoke(rpc, rpc.request)
            else:
                backend.attach(rpc, rpc.request)
        elif rpc.response is not None and not rpc.broken:
            rpc.done = True
            if rpc.gateway.alive:
                rpc.gateway.on_response(rpc)

    def movable_rpcs(self) -> list[Rpc]:
        self.rpcs = [r for r in self.rpcs if not r.done and not (r.broken and r.delivered)]
        return [r for r in self.rpcs if not r.delivered or (r.response is not None and not r.broken)]

    def movable_streams(self) -> list[tuple[Stream, str]]:
        self.streams = [s for s in self.streams if s.alive]
        return [(s, way) for s in self.streams for way in ("up", "down") if getattr(s, way)]

    def step_stream(self, stream: Stream, way: str) -> None:
        if way == "up":
            stream.gateway.receive(stream, stream.up.popleft())
        elif stream is stream.node.stream:
            stream.node.receive(stream.down.popleft())
        else:
            stream.down.popleft()

    def settle(self) -> None:
        """Deliver and finish everything until nothing moves."""
        for _ in range(10_000):
            streams, rpcs = self.movable_streams(), self.movable_rpcs()
            running = [(b, key) for b in self.backends.values() if b is not None for key in b.running()]
            if streams:
                self.step_stream(*streams[0])
            elif rpcs:
                self.step_rpc(rpcs[0])
            elif running:
                running[0][0].finish(running[0][1])
            else:
                return
        raise AssertionError("the world does not come to rest")

    # -- what must hold
    def on_result(self, node: Node, key: str, result: tool.Final) -> None:
        if node is not self.node:
            return
        starts = [s for s in self.starts if s[0] == key]
        call = node.calls[key]
        if call.result is not None:
            assert call.result == result, f"{key}: a second, different result at one owner"
        if result.outcome == tool.OUTCOME_NOT_STARTED:
            assert not starts, f"{key}: NOT_STARTED after {starts}"
        if result.outcome == tool.OUTCOME_OK:
            ran_at = result.parts[0].text.decode().split("@")[1]
            assert (key, ran_at) in starts
        if result.outcome == tool.OUTCOME_INDETERMINATE:
            assert self.faults, f"{key}: INDETERMINATE without any fault"

    def check(self) -> None:
        for key, _ in self.starts:
            tool_name = key.rsplit("#", 1)[1]
            if not self.idempotent(tool_name):
                times = [s for s in self.starts if s[0] == key]
                assert len(times) == 1, f"{key} is not idempotent and started {times}"
        for key, call in self.node.calls.items():
            if call.result is not None and call.result.outcome == tool.OUTCOME_NOT_STARTED:
                assert not any(s[0] == key for s in self.starts), f"{key} started after NOT_STARTED"
