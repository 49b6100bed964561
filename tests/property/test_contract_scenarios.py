"""The sequences that decide the takeover rules, written out: each is what a random walk seldom meets."""

from __future__ import annotations

import pytest
from fermata.v1 import tool_pb2 as tool

from tests.property.contract.backend import Rpc
from tests.property.contract.gateway import Gateway
from tests.property.contract.world import World

KEY = "run/t/1/1/0#write"


def deliver_all(world: World) -> None:
    """Everything on the streams arrives; requests to backends stay where they are."""
    while world.movable_streams():
        world.step_stream(*world.movable_streams()[0])


def send_call(world: World, gateway: Gateway, key: str) -> Rpc:
    """The gateway has the call and its request to a backend is on the wire; the Started event is, too."""
    world.node.connect(gateway)
    deliver_all(world)
    world.node.new_call(key, key.rsplit("#", 1)[1])
    stream = world.node.stream
    assert stream is not None
    while stream.up:
        world.step_stream(stream, "up")
    return world.movable_rpcs()[0]


def world_with_call_running(tool_name: str = "write") -> tuple[World, str]:
    """One call, started at its first backend; the Started event is still on the wire."""
    world = World(shared_ledger=False)
    key = f"run/t/1/1/0#{tool_name}"
    world.step_rpc(send_call(world, world.live_gateways()[0], key))
    assert len(world.starts) == 1
    return world, key


def restart_gateway(world: World) -> None:
    world.kill_gateway("g0")
    world.start_gateway("g0")
    world.node.connect(world.live_gateways()[0])


def outcome(world: World, key: str) -> tool.Outcome:
    world.settle()
    world.check()
    result = world.node.calls[key].result
    assert result is not None
    return result.outcome


def test_a_gateway_that_lost_its_ledger_finds_the_running_call_again() -> None:
    world, key = world_with_call_running()
    world.now += 5_000
    restart_gateway(world)
    assert outcome(world, key) == tool.OUTCOME_OK
    assert len(world.starts) == 1


def test_the_call_is_found_wherever_it_runs() -> None:
    world, key = world_with_call_running()
    started_at = world.starts[0][1]
    other = next(a for a, b in world.backends.items() if b is not None and b.instance_id != started_at)
    world.now += 5_000
    # The order of the pool is not the order in which the dead gateway chose.
    world.backends = {other: world.backends[other], **world.backends}
    restart_gateway(world)
    assert outcome(world, key) == tool.OUTCOME_OK
    assert len(world.starts) == 1


@pytest.mark.parametrize("which", ["the one that ran it", "the other"])
def test_a_backend_younger_than_the_call_cannot_speak_for_its_predecessor(which: str) -> None:
    world, key = world_with_call_running()
    ran_at = next(a for a, b in world.backends.items() if b is not None and b.instance_id == world.starts[0][1])
    address = ran_at if which == "the one that ran it" else next(a for a in world.addresses if a != ran_at)
    world.now += 5_000
    world.kill_backend(address)
    world.start_backend(address)
    world.now += 1_000
    restart_gateway(world)
    assert outcome(world, key) == tool.OUTCOME_INDETERMINATE
    assert len(world.starts) == 1


def test_time_on_the_wire_counts_to_the_age_of_a_call() -> None:
    """The age was stamped before a long delay in the stream; the backend restarted just after the first send."""
    world, key = world_with_call_running()
    ran_at = next(a for a, b in world.backends.items() if b is not None and b.instance_id == world.starts[0][1])
    world.now += 10
    world.kill_backend(ran_at)
    world.start_backend(ran_at)
    restart_gateway(world)
    stream = world.node.stream
    assert stream is not None
    world.step_stream(stream, "up")
    world.step_stream(stream, "down")  # Welcome: the call is stamped and sent again
    world.now += 30_000  # and lies in the stream
    assert outcome(world, key) == tool.OUTCOME_INDETERMINATE
    assert len(world.starts) == 1


def test_an_address_that_does_not_answer_cannot_be_disproved() -> None:
    world, key = world_with_call_running()
    ran_at = next(a for a, b in world.backends.items() if b is not None and b.instance_id == world.starts[0][1])
    world.kill_backend(ran_at)
    world.now += 1_000
    restart_gateway(world)
    assert outcome(world, key) == tool.OUTCOME_INDETERMINATE


def test_an_idempotent_tool_runs_again() -> None:
    world, key = world_with_call_running("read")
    ran_at = next(a for a, b in world.backends.items() if b is not None and b.instance_id == world.starts[0][1])
    world.kill_backend(ran_at)
    restart_gateway(world)
    assert outcome(world, key) == tool.OUTCOME_OK
    assert len(world.starts) == 2


def test_a_request_of_a_dead_gateway_that_arrives_late_starts_nothing_twice() -> None:
    world = World(shared_ledger=False)
    late = send_call(world, world.live_gateways()[0], KEY)
    world.now += 1_000
    restart_gateway(world)
    deliver_all(world)
    for rpc in [r for r in world.movable_rpcs() if r is not late]:
        world.step_rpc(rpc)  # tombstones are laid first
    world.step_rpc(late)
    assert outcome(world, KEY) == tool.OUTCOME_OK
    assert len(world.starts) == 1


def test_a_resumed_node_rejoins_by_the_key_of_the_snapshot() -> None:
    world, key = world_with_call_running()
    world.stored = (world.node.snapshot(), world.now)
    world.now += 3_000
    world.replace_node(zombie=True)
    world.node.connect(world.live_gateways()[0])
    assert outcome(world, key) == tool.OUTCOME_OK
    assert len(world.starts) == 1
    assert world.zombies[0].calls[key].result is None, "the older owner is fenced"


def test_a_resumed_node_says_that_its_calls_may_have_been_sent() -> None:
    """The gateway forgot, and its pool is in another order: only `resend` keeps the second start away."""
    world, key = world_with_call_running()
    world.stored = (world.node.snapshot(), world.now)
    world.now += 3_000
    world.kill_gateway("g0")
    world.start_gateway("g0")
    world.backends = dict(reversed(world.backends.items()))
    world.replace_node(zombie=False)
    world.node.connect(world.live_gateways()[0])
    assert outcome(world, key) == tool.OUTCOME_OK
    assert len(world.starts) == 1


def test_a_gateway_that_lost_its_session_starts_nothing_for_it() -> None:
    """Its attempt is tombstoned by the successor; the retry it then wants is refused by the ledger."""
    world = World(shared_ledger=True, addresses=("a", "b", "c"))
    old, new = world.live_gateways()
    late = send_call(world, old, KEY)
    world.node.connect(new)
    deliver_all(world)
    attach = next(r for r in world.movable_rpcs() if r is not late)
    world.step_rpc(attach)
    world.step_rpc(attach)  # nothing found, tombstone laid: the successor starts it elsewhere
    invoke = next(r for r in world.movable_rpcs() if r is not late)
    world.step_rpc(invoke)
    assert len(world.starts) == 1
    world.step_rpc(late)  # refused by the tombstone
    world.step_rpc(late)  # which the old gateway hears: it must not try the third backend
    assert outcome(world, KEY) == tool.OUTCOME_OK
    assert len(world.starts) == 1


def test_a_call_that_never_arrived_starts_once_at_the_instance_that_the_ledger_names() -> None:
    """However late the dead gateway's request comes, and whichever of the two comes first."""
    for late_first in (False, True):
        world = World(shared_ledger=True, addresses=("a",))
        world.named_may_start = True
        late = send_call(world, world.live_gateways()[0], KEY)
        world.now += 1_000
        world.kill_gateway("g0")
        world.node.connect(world.live_gateways()[0])
        deliver_all(world)
        again = next(r for r in world.movable_rpcs() if r is not late)
        for rpc in (late, again) if late_first else (again, late):
            world.step_rpc(rpc)
        assert outcome(world, KEY) == tool.OUTCOME_OK
        assert len(world.starts) == 1


def test_not_started_is_never_said_where_an_unrecorded_attempt_ran() -> None:
    world, key = world_with_call_running("read")
    world.now += 1_000
    ran_at = next(a for a, b in world.backends.items() if b is not None and b.instance_id == world.starts[0][1])
    world.kill_backend(ran_at)
    world.start_backend(ran_at)
    restart_gateway(world)
    deliver_all(world)
    for _ in range(20):  # every attempt of the successor is lost before it arrives, its key then tombstoned
        for rpc in world.movable_rpcs():
            if rpc.response is None and not hasattr(rpc.request, "if_absent"):
                world.break_rpc(rpc, deliverable=False)
            else:
                world.step_rpc(rpc)
    assert outcome(world, key) in (tool.OUTCOME_OK, tool.OUTCOME_INDETERMINATE)
