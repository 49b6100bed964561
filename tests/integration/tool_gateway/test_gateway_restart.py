"""A gateway that is killed and started again on its data folder goes on where it was."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fermata.v1 import gateway_pb2, gateway_pb2_grpc, tool_pb2
from gateway_world import World, call, client, free_port, until

from node_runtime.grpc_channel import open_channel
from node_runtime.runtime_settings import RuntimeSettings
from tool_gateway.client import CallOptions, Earlier, Result
from tool_gateway.client.types import Notice

pytestmark = pytest.mark.integration

OK = tool_pb2.OUTCOME_OK
INDETERMINATE = tool_pb2.OUTCOME_INDETERMINATE


def outcomes(results: list[Result]) -> Counter[tool_pb2.Outcome]:
    return Counter(result.outcome for result in results)


def ledger_in(folder: Path) -> str:
    return f"gateway.data_dir={folder}"


async def until_stored(
    address: str, key: str, holds: Callable[[gateway_pb2.GetCallResponse], bool], within_s: float = 10.0
) -> gateway_pb2.GetCallResponse:
    """What the ledger says of the key, once that holds."""
    async with open_channel(address, RuntimeSettings()) as channel, asyncio.timeout(within_s):
        stub = gateway_pb2_grpc.ToolGatewayServiceStub(channel)
        while True:
            told = await stub.GetCall(gateway_pb2.GetCallRequest(key=key, include_output=True))
            if holds(told):
                return told
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("store", ["sqlite", "memory"])
async def test_forty_calls_in_flight_a_young_backend_and_kill_9(world: World, store: str) -> None:
    """Twenty run, twenty wait for room. What the young backend's predecessor may have run only a ledger knows."""
    settings = [ledger_in(world.folder / "data")] if store == "sqlite" else []
    first, young, port = await world.backend("--room", "20"), free_port(), free_port()
    pools = [[first.address, f"127.0.0.1:{young}"]]
    gateway = await world.gateway(pools, *settings, port=port)
    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["pay"], 10)
        keys = [f"run/t/0/{n}/0" for n in range(40)]
        calls = [asyncio.create_task(call(gw, key, tool="pay", text=key, seconds=2.0)) for key in keys]
        await world.until_started(keys[:20])
        await gateway.kill()
        await world.backend("--room", "20", port=young)
        await world.gateway(pools, *settings, port=port)
        results = await asyncio.gather(*calls)
    assert max(world.starts().values()) == 1
    if store == "sqlite":
        assert outcomes(results) == {OK: 40}, [result.final.detail for result in results]
        assert [result.text.decode() for result in results] == keys
    else:
        assert outcomes(results) == {OK: 20, INDETERMINATE: 20}
        assert "its predecessor may have started the call" in results[-1].final.detail


async def test_a_finished_result_is_given_by_the_ledger_alone(world: World) -> None:
    backend, port, data = await world.backend(), free_port(), ledger_in(world.folder / "data")
    gateway = await world.gateway([[backend.address]], data, port=port)
    proxy = await world.proxy(gateway.address)
    async with client(proxy.address) as gw:
        keys = [f"run/t/0/0/{n}" for n in range(10)]
        notices: list[Notice] = []
        calls = [
            asyncio.create_task(
                call(gw, key, tool="pay", on_event=notices.append, text=key, bytes=n * 70_000, seconds=0.5)
            )
            for n, key in enumerate(keys)
        ]
        await world.until_started(keys)
        promised = {told.durability for told in notices if isinstance(told, gateway_pb2.ServerFrame.Accepted)}
        assert promised == {tool_pb2.DURABILITY_PROCESS}
        proxy.refuse = True
        proxy.cut()
        for key in keys:
            stored = await until_stored(gateway.address, key, lambda told: told.HasField("result"))
            assert not stored.acked
        await asyncio.gather(gateway.kill(), backend.kill())
        gateway = await world.gateway([[backend.address]], data, port=port)
        proxy.refuse = False
        results = await asyncio.gather(*calls)
        assert outcomes(results) == {OK: 10}
        assert [result.text for result in results] == [key.encode() + b"x" * n * 70_000 for n, key in enumerate(keys)]
        assert {result.instance_id for result in results} == {backend.ready["instance_id"]}
        assert max(world.starts().values()) == 1
        # Once they are acknowledged they are not given again, and stay for whoever asks by key.
        await until_stored(gateway.address, keys[9], lambda told: told.acked)
        proxy.cut()
        again = await call(gw, keys[9], tool="pay", text=keys[9], bytes=9 * 70_000, seconds=0.5)
        assert (again.text, again.from_cache) == (results[9].text, False)


async def test_who_owns_a_trajectory_is_known_after_the_kill_and_what_it_left_behind_is_cancelled(world: World) -> None:
    backend, port, data = await world.backend(), free_port(), ledger_in(world.folder / "data")
    gateway = await world.gateway([[backend.address]], data, port=port)
    async with client(gateway.address, node_id="first") as first:
        left = asyncio.create_task(call(first, "run/t/0/0/0", tool="hang"))
        await world.until_started(["run/t/0/0/0"])
        await first.leave()
        left.cancel()
    await gateway.kill()
    gateway = await world.gateway([[backend.address]], data, port=port)
    async with client(gateway.address, node_id="second") as second:
        await second.wait_for_tools(["pay"], 10)
        second.fence("t", 1)
        await until(lambda: world.cancels() == ["run/t/0/0/0"])
        stored = await until_stored(gateway.address, "run/t/0/0/0", lambda told: told.HasField("result"))
        assert stored.result.final.outcome == tool_pb2.OUTCOME_CANCELLED
        assert "generation 1 owns the trajectory t now" in stored.result.final.detail
    await gateway.kill()
    gateway = await world.gateway([[backend.address]], data, port=port)
    async with client(gateway.address, node_id="first") as late:
        result = await call(late, "run/t/0/1/0", tool="pay", text="late")
        assert (result.outcome, result.fault) == (tool_pb2.OUTCOME_FENCED, tool_pb2.FAULT_INFRA)
    assert not world.starts("pay")


async def test_a_call_cancelled_while_no_gateway_was_there_is_stopped_where_it_runs(world: World) -> None:
    backend, port, data = await world.backend(), free_port(), ledger_in(world.folder / "data")
    gateway = await world.gateway([[backend.address]], data, port=port)
    async with client(gateway.address) as gw:
        running = asyncio.create_task(call(gw, "run/t/0/0/0", tool="hang"))
        await world.until_started(["run/t/0/0/0"])
        await gateway.kill()
        gw.cancel("run/t/0/0/0", "not wanted any more")
        await world.gateway([[backend.address]], data, port=port)
        result = await running
        assert (result.outcome, result.fault) == (tool_pb2.OUTCOME_CANCELLED, tool_pb2.FAULT_CALLER)
        await until(lambda: world.cancels() == ["run/t/0/0/0"])


async def test_an_instance_that_is_gone_cannot_be_disproved_and_an_idempotent_tool_runs_again(world: World) -> None:
    backend, port, data = await world.backend(), free_port(), ledger_in(world.folder / "data")
    gateway = await world.gateway([[backend.address]], data, port=port)
    async with client(gateway.address) as gw:
        calls = {
            tool: asyncio.create_task(call(gw, f"run/{tool}/0/0/0", tool, seconds=1.0)) for tool in ("pay", "echo")
        }
        await world.until_started([f"run/{tool}/0/0/0" for tool in calls])
        await asyncio.gather(gateway.kill(), backend.kill())
        again = await world.backend(port=backend.port)
        await world.gateway([[backend.address]], data, port=port)
        assert (await calls["echo"]).outcome == OK
        lost = await calls["pay"]
        assert (lost.outcome, lost.final.started) == (INDETERMINATE, tool_pb2.STARTED_UNKNOWN)
        assert f"the instance {again.ready['instance_id']} answers there now" in lost.final.detail
    assert world.starts() == {"run/pay/0/0/0": 1, "run/echo/0/0/0": 2}


@pytest.mark.parametrize("late", [False, True])
async def test_an_attempt_that_had_not_arrived_starts_once_at_its_own_instance(world: World, late: bool) -> None:
    """The ledger names the instance for each call, and none has begun there: the requests are lost, or will come."""
    backend, port, data = await world.backend(), free_port(), ledger_in(world.folder / "data")
    proxy = await world.proxy(backend.address)
    gateway = await world.gateway([[proxy.address]], data, port=port)
    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["pay"], 10)
        if late:
            backend.freeze()
        else:
            proxy.swallow = True
        keys = [f"run/t/0/0/{n}" for n in range(20)]
        calls = [asyncio.create_task(call(gw, key, tool="pay", text=key)) for key in keys]
        await until(lambda: sum(bool(pending.attempt) for pending in gw.pending()) == len(keys))
        await gateway.kill()
        proxy.swallow = False
        gateway = await world.gateway([[proxy.address]], data, port=port)
        backend.thaw()
        results = await asyncio.gather(*calls)
        assert outcomes(results) == {OK: 20}, [result.final.detail for result in results]
    assert world.starts() == dict.fromkeys(keys, 1)


async def test_a_call_that_came_from_elsewhere_is_taken_over_again_after_a_kill_in_the_middle(world: World) -> None:
    """It has a record without an attempt, which says nothing: another gateway may have started it."""
    backend, port, data = await world.backend(), free_port(), ledger_in(world.folder / "data")
    silent = free_port()
    pools = [[backend.address, f"127.0.0.1:{silent}"]]
    gateway = await world.gateway(pools, data, port=port)
    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["pay"], 10)
        options = CallOptions(earlier=Earlier(age_s=3600.0))
        asked = asyncio.create_task(call(gw, "run/t/0/0/0", tool="pay", options=options, text="x"))
        await until_stored(gateway.address, "run/t/0/0/0", lambda told: told.found)
        await gateway.kill()
        await world.backend(port=silent)
        await world.gateway(pools, data, port=port)
        assert (await asked).outcome == INDETERMINATE
    assert not world.starts()


async def test_a_full_disk_holds_calls_back_and_costs_none(world: World) -> None:
    backend, data = await world.backend(), ledger_in(world.folder / "data")
    gateway = await world.gateway([[backend.address]], data)
    pid = gateway.process.pid
    async with client(gateway.address) as gw:
        # A log of the ledger that is longer than the file size the gateway will be allowed.
        big = await call(gw, "run/big/0/0/0", tool="pay", bytes=900_000)
        assert big.outcome == OK
        keys = ["run/t/0/0/0", "run/t/0/0/1"]
        tools = ("pay", "one")
        running = [
            asyncio.create_task(call(gw, key, tool, text=key, seconds=0.7))
            for key, tool in zip(keys, tools, strict=True)
        ]
        await world.until_started(keys)
        waits = asyncio.create_task(call(gw, "run/t/0/0/2", tool="one", text="after"))
        await until_stored(gateway.address, "run/t/0/0/2", lambda told: told.found)
        unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (300_000, unlimited[1]))
        told = await asyncio.gather(*running)
        assert outcomes(told) == {OK: 2}
        assert [result.text.decode() for result in told] == keys
        assert all("it is not stored: the ledger" in result.final.detail for result in told)
        held_back = [asyncio.create_task(call(gw, f"run/t/0/1/{n}", tool="pay", text=str(n))) for n in range(3)]
        await until(lambda: gateway.log().count("cannot be written") >= 3)
        assert not any(one.done() for one in (waits, *held_back))
        assert set(world.starts()) == {"run/big/0/0/0", *keys}  # what is not stored is not run
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
        assert outcomes(await asyncio.gather(waits, *held_back)) == {OK: 4}
        await until(lambda: "the ledger can be written again" in gateway.log())
        stored = await until_stored(gateway.address, "run/t/0/0/0", lambda told: told.HasField("result"))
        assert (stored.result.final.parts[0].text.decode(), stored.result.final.detail) == (keys[0], "")
    assert max(world.starts().values()) == 1


async def test_a_folder_in_use_and_a_damaged_file_end_the_start_with_one_sentence(world: World) -> None:
    folder = world.folder / "data"
    first = await world.gateway([], ledger_in(folder))
    with pytest.raises(AssertionError, match="is in use by another gateway: give each gateway a folder of its own"):
        await world.gateway([], ledger_in(folder))
    assert await first.terminate() == 0
    assert [path.name for path in folder.iterdir()] == ["ledger.sqlite3"]  # the log went into the file
    (folder / "ledger.sqlite3").write_bytes(b"noise" * 4096)
    since = time.monotonic()
    with pytest.raises(AssertionError, match=r"is damaged \(file is not a database\): restore it, or move it away"):
        await world.gateway([], ledger_in(folder))
    assert time.monotonic() - since < 15
