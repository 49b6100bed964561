"""P3 on plain models: kill, cut, reconnect, takeover, resume and late messages, chosen by Hypothesis."""

from __future__ import annotations

import os

from fermata.v1 import tool_pb2 as tool
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.property.contract.messages import CALL_TIMEOUT_MS
from tests.property.contract.world import World

INDEX = st.integers(0, 30)


class Contract(RuleBasedStateMachine):
    """One trajectory, its trainer, one or two gateways, two backends, and everything that can go wrong between."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(shared_ledger=False)

    @initialize(shared=st.booleans(), named_may_start=st.booleans())
    def begin(self, shared: bool, named_may_start: bool) -> None:
        self.world = World(shared_ledger=shared)
        self.world.named_may_start = named_may_start
        self.world.node.connect(self.world.live_gateways()[0])

    # -- progress
    @rule(tool_name=st.sampled_from(["read", "write", "write"]))
    def call(self, tool_name: str) -> None:
        world = self.world
        key = f"run/t/{world.generation}/{next(world.turn)}/0#{tool_name}"
        world.node.new_call(key, tool_name)

    @rule(index=INDEX, count=st.integers(1, 6))
    def move_stream(self, index: int, count: int) -> None:
        for _ in range(count):
            movable = self.world.movable_streams()
            if movable:
                self.world.step_stream(*movable[index % len(movable)])

    @rule(index=INDEX)
    def move_rpc(self, index: int) -> None:
        movable = self.world.movable_rpcs()
        if movable:
            self.world.step_rpc(movable[index % len(movable)])

    @rule(index=INDEX)
    def finish_tool(self, index: int) -> None:
        running = [(b, key) for b in self.world.backends.values() if b is not None for key in b.running()]
        if running:
            backend, key = running[index % len(running)]
            backend.finish(key)

    @rule(ms=st.sampled_from([1, 100, 5_000, 20_000]))
    def clock(self, ms: int) -> None:
        self.world.now += ms
        for gateway in self.world.live_gateways():
            gateway.tick()

    @rule()
    def park(self) -> None:
        self.world.stored = (self.world.node.snapshot(), self.world.now)

    # -- faults
    @rule(index=INDEX)
    def connect(self, index: int) -> None:
        gateways = self.world.live_gateways()
        if gateways:
            self.world.node.connect(gateways[index % len(gateways)])

    @rule(index=INDEX)
    def connect_zombie(self, index: int) -> None:
        gateways = self.world.live_gateways()
        if gateways and self.world.zombies:
            self.world.zombies[index % len(self.world.zombies)].connect(gateways[index % len(gateways)])

    @rule()
    def cut_stream(self) -> None:
        stream = self.world.node.stream
        if stream is not None and stream.alive:
            self.world.cut_stream(stream)

    @rule(index=INDEX, late=st.booleans())
    def cut_rpc(self, index: int, late: bool) -> None:
        open_rpcs = [r for r in self.world.rpcs if not r.done and not r.broken]
        if open_rpcs:
            self.world.break_rpc(open_rpcs[index % len(open_rpcs)], deliverable=late)

    @rule(index=INDEX)
    def kill_gateway(self, index: int) -> None:
        gateways = self.world.live_gateways()
        if gateways:
            self.world.kill_gateway(gateways[index % len(gateways)].name)

    @rule(address=st.sampled_from(["a", "b"]))
    def kill_backend(self, address: str) -> None:
        if self.world.backends[address] is not None:
            self.world.kill_backend(address)

    @rule(address=st.sampled_from(["a", "b"]))
    def start_backend(self, address: str) -> None:
        if self.world.backends[address] is None:
            self.world.start_backend(address)

    @rule(index=INDEX, ms=st.sampled_from([0, 5_000]))
    def bounce_gateway(self, index: int, ms: int) -> None:
        """Killed, started again at once, and the node is back on it: the shortest way into a takeover."""
        gateways = self.world.live_gateways()
        if gateways:
            name = gateways[index % len(gateways)].name
            self.world.kill_gateway(name)
            self.world.now += ms
            self.world.start_gateway(name)
            gateway = self.world.gateways[name]
            assert gateway is not None
            self.world.node.connect(gateway)

    @rule(address=st.sampled_from(["a", "b"]), ms=st.sampled_from([0, 5_000]))
    def bounce_backend(self, address: str, ms: int) -> None:
        if self.world.backends[address] is not None:
            self.world.kill_backend(address)
        self.world.now += ms
        self.world.start_backend(address)

    @rule(name=st.sampled_from(["g0", "g1"]))
    def start_gateway(self, name: str) -> None:
        if name in self.world.gateways and self.world.gateways[name] is None:
            self.world.start_gateway(name)

    @precondition(lambda self: self.world.faults < 40)
    @rule(zombie=st.booleans())
    def replace_node(self, zombie: bool) -> None:
        self.world.replace_node(zombie=zombie)

    # -- what must hold
    @invariant()
    def promises_hold(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """Heal everything; then every call of the current owner ends, and no later than its deadline."""
        world = self.world
        for address, backend in world.backends.items():
            if backend is None:
                world.start_backend(address)
        for name, gateway in world.gateways.items():
            if gateway is None:
                world.start_gateway(name)
        world.node.connect(world.live_gateways()[0])
        world.settle()
        world.now += CALL_TIMEOUT_MS
        for gateway in world.live_gateways():
            gateway.tick()
        world.settle()
        world.check()
        for key, call in world.node.calls.items():
            assert call.result is not None, f"{key} has no outcome"
            assert call.result.fault in (tool.FAULT_NONE, tool.FAULT_INFRA)


Contract.TestCase.settings = settings(
    # FERMATA_PROPERTY_EXAMPLES=5000 searches for two minutes.
    max_examples=int(os.environ.get("FERMATA_PROPERTY_EXAMPLES", "400")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestContract = Contract.TestCase
