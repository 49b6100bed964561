"""Pools of a name: backends come and go under real calls, and none is lost, none runs twice."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fermata.v1 import tool_pb2
from gateway_world import Process, World, call, client, free_port, until, until_shown, value

from fermata_cli.cluster.certificates import Authority, Pem
from node_runtime.runtime_settings import RuntimeSettings
from tool_gateway.client import CallOptions, Earlier, Result, ToolGateway

pytestmark = pytest.mark.integration

BACKENDS = "fermata_gateway_backends"
LOOK_UPS = "fermata_gateway_dns_lookups_total"
OK = tool_pb2.OUTCOME_OK
INDETERMINATE = tool_pb2.OUTCOME_INDETERMINATE
TOOLS = ("tests.support.noted_tools:pay", "tests.support.noted_tools:echo")


def pool(port: int, name: str = "calc", resolve_s: float = 0.2, **more: object) -> str:
    fields = ", ".join(f"{key}: {value}" for key, value in more.items())
    return f"{{name: {name}, dns: '{name}:{port}', resolve_s: {resolve_s}{', ' + fields if fields else ''}}}"


def tls(authority: Authority, shown: Pem) -> list[str]:
    files = {"ca_file": authority.ca_file, "cert_file": shown.cert, "key_file": shown.key}
    return [word for key, path in files.items() for word in ("--set", f"runtime.tls.{key}={path}")]


async def until_backends(gateway: Process, state: str, count: int, name: str = "calc") -> None:
    await until_shown(gateway.ready["metrics_port"], count, count, BACKENDS, pool=name, state=state)


@asynccontextmanager
async def under_load(gw: ToolGateway, results: list[Result]) -> AsyncIterator[None]:
    """Twelve callers, one call after another each, of both tools, until the block ends."""
    numbers, stop = itertools.count(), asyncio.Event()

    async def caller() -> None:
        while not stop.is_set():
            n = next(numbers)
            tool = "pay" if n % 3 else "echo"
            results.append(await call(gw, f"run/t{n}/0/0/0", tool, text=str(n), seconds=(n % 7) * 0.05))

    async with asyncio.TaskGroup() as callers:
        for _ in range(12):
            callers.create_task(caller())
        try:
            yield
        finally:
            stop.set()


async def test_replicas_go_from_one_to_three_to_one_under_load_and_no_call_is_lost_or_runs_twice(world: World) -> None:
    first = await world.sdk_backend(*TOOLS, host="127.0.0.1")
    port = first.port
    world.give(calc=["127.0.0.1"])
    gateway = await world.gateway_by_name(f"[{pool(port)}]")
    results: list[Result] = []
    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["pay", "echo"], 20)
        async with under_load(gw, results):
            await until(lambda: len(results) >= 20)
            more = [await world.sdk_backend(*TOOLS, port=port, host=f"127.0.0.{n}") for n in (2, 3)]
            world.give(calc=["127.0.0.1", "127.0.0.2", "127.0.0.3"])
            await until_backends(gateway, "serving", 3)
            assert gw.catalogue["pay"].name == "pay"
            so_far = len(results)
            await until(lambda: len(results) >= so_far + 60)
            # As a cluster scales down: the records go, and the processes are asked to end at the same time.
            world.give(calc=["127.0.0.3"])
            codes = await asyncio.gather(first.terminate(), more[0].terminate())
            assert codes == [0, 0]
            await until_backends(gateway, "serving", 1)
            so_far = len(results)
            await until(lambda: len(results) >= so_far + 20)
        assert Counter(result.outcome for result in results) == {OK: len(results)}
        assert all(result.text.decode() == result.key.split("/")[1][1:] for result in results)
        assert world.starts("pay") == {result.key: 1 for result in results if result.tool == "pay"}
        assert {result.attempts for result in results if result.tool == "pay"} <= {1, 2, 3}
        assert len({note["pid"] for note in world.notes()}) == 3


async def test_what_runs_at_an_address_that_left_runs_on_and_is_rejoined_there(world: World) -> None:
    leaving = await world.backend(host="127.0.0.2")
    other = await world.backend(port=leaving.port, host="127.0.0.3")
    world.give(calc=["127.0.0.2"])
    gateway = await world.gateway_by_name(f"[{pool(leaving.port)}]", "gateway.timeouts.leave_s=1")
    async with client(gateway.address) as gw:
        held = asyncio.create_task(call(gw, "run/t/0/0/0", tool="pay", text="there", seconds=3.0))
        await world.until_started(["run/t/0/0/0"])
        world.give(calc=["127.0.0.3"])
        await until_backends(gateway, "leaving", 1)
        await until_backends(gateway, "serving", 1)
        later = await asyncio.gather(*(call(gw, f"run/t/0/1/{n}", tool="pay", text="x") for n in range(6)))
        assert {result.instance_id for result in later} == {other.ready["instance_id"]}
        result = await held
        assert (result.outcome, result.text, result.attempts) == (OK, b"there", 1)
        assert result.instance_id == leaving.ready["instance_id"]
        await until_backends(gateway, "leaving", 0)
        # The address returns, with the same process behind it.
        world.give(calc=["127.0.0.2"])
        await until(lambda: gateway.log().count("joined=['127.0.0.2") == 2)
        await until_backends(gateway, "serving", 1)
        back = await call(gw, "run/t/0/2/0", tool="pay", text="x")
        assert back.instance_id == leaving.ready["instance_id"]
        assert set(world.starts().values()) == {1}


async def test_a_name_that_fails_or_is_empty_keeps_what_it_gave(world: World) -> None:
    backend = await world.backend(host="127.0.0.2")
    world.give()
    gateway = await world.gateway_by_name(f"[{pool(backend.port)}]")
    metrics = gateway.ready["metrics_port"]
    async with client(gateway.address) as gw:
        await gw.wait_connected(10)
        early = asyncio.create_task(call(gw, "run/t/0/0/0", tool="made_up", text="x"))
        hopeless = await call(gw, "run/t/0/0/1", deadline_s=2.0, text="x")
        assert (hopeless.outcome, hopeless.fault) == (tool_pb2.OUTCOME_DEADLINE_EXCEEDED, tool_pb2.FAULT_INFRA)
        assert f"while waiting for the tool backends at calc:{backend.port}" in hopeless.final.detail
        world.give(calc=["127.0.0.2"])
        assert (await early).outcome == tool_pb2.OUTCOME_UNKNOWN_TOOL, "once the pool has told, it is not there"
        await until_backends(gateway, "serving", 1)
        looked_up = 1
        for broken in ({}, {"calc": []}):
            failed = await value(metrics, LOOK_UPS, pool="calc", outcome="FAILED")
            world.give(**broken)
            await until_shown(metrics, failed + 2, 1e9, LOOK_UPS, pool="calc", outcome="FAILED")
            assert (await call(gw, f"run/t/1/0/{len(broken)}", tool="pay", text="x")).outcome == OK
            world.give(calc=["127.0.0.2"])
            looked_up += 1
            await until(lambda n=looked_up: gateway.log().count("can be looked up again") == n)
    for sentence in (
        f"the pool calc has no address yet: calc:{backend.port} cannot be looked up (Name or service not known): start",
        f"the pool calc keeps its 1 addresses: calc:{backend.port} cannot be looked up (Name or service not known)",
        f"the pool calc keeps its 1 addresses: calc:{backend.port} cannot be looked up (it has no address)",
    ):
        assert gateway.log().count(sentence) == 1


async def test_an_address_belongs_to_one_pool_and_goes_to_the_next_when_the_first_lets_it_go(world: World) -> None:
    backend = await world.backend(host="127.0.0.2")
    world.give(calc=["127.0.0.2"], search=["127.0.0.2"])
    gateway = await world.gateway_by_name(f"[{pool(backend.port)}, {pool(backend.port, 'search')}]")
    async with client(gateway.address) as gw:
        await until(lambda: ", and an address belongs to one pool" in gateway.log())
        first = "calc" if "the pool search leaves out" in gateway.log() else "search"
        second = "search" if first == "calc" else "calc"
        await until_backends(gateway, "serving", 1, first)
        await until_backends(gateway, "serving", 0, second)
        running = asyncio.create_task(call(gw, "run/t/0/0/0", tool="pay", text="there", seconds=1.0))
        await world.until_started(["run/t/0/0/0"])
        world.give(**{first: ["127.0.0.3"], second: ["127.0.0.2"]})
        await until_backends(gateway, "leaving", 1, first)
        assert (await running).text == b"there"
        await until_backends(gateway, "serving", 1, second)
        await until_backends(gateway, "leaving", 0, first)
        assert (await call(gw, "run/t/0/0/1", tool="pay", text="x")).outcome == OK


async def test_a_call_that_may_have_run_at_an_address_that_is_gone_is_not_started_again(world: World) -> None:
    """A gateway that comes anew cannot know what its name gave before."""
    leaving = await world.backend(host="127.0.0.2")
    await world.backend(port=leaving.port, host="127.0.0.3")
    world.give(calc=["127.0.0.2"])
    at = f"gateway.port={free_port()}"
    gateway = await world.gateway_by_name(f"[{pool(leaving.port)}]", at)
    async with client(gateway.address) as gw:
        aged = await call(gw, "run/t/0/0/0", text="x", seconds=2.0)  # the other backend becomes older than the calls
        assert aged.outcome == OK
        calls = [
            asyncio.create_task(call(gw, f"run/t/0/1/{n}", tool, seconds=1.0)) for n, tool in enumerate(("pay", "echo"))
        ]
        await world.until_started(["run/t/0/1/0", "run/t/0/1/1"])
        await asyncio.gather(gateway.kill(), leaving.kill())
        world.give(calc=["127.0.0.3"])
        gateway = await world.gateway_by_name(f"[{pool(leaving.port)}]", at)
        paid, echoed = await asyncio.gather(*calls)
        assert (paid.outcome, paid.fault, paid.final.started) == (
            INDETERMINATE,
            tool_pb2.FAULT_INFRA,
            tool_pb2.STARTED_UNKNOWN,
        )
        assert echoed.outcome == OK
        assert world.starts("pay") == {"run/t/0/1/0": 1}
        # Also where the caller had heard of no instance, and all that are there are old enough to know.
        earlier = CallOptions(earlier=Earlier(age_s=0.1))
        lost = await call(gw, "run/t/0/2/0", tool="pay", options=earlier, text="x")
        assert lost.outcome == INDETERMINATE
        assert "no backend that its pool's name gives now knows it" in lost.final.detail
        assert world.starts("pay") == {"run/t/0/1/0": 1}


async def test_another_gateway_finds_a_call_at_an_address_that_has_left(world: World) -> None:
    leaving = await world.backend(host="127.0.0.2")
    await world.backend(port=leaving.port, host="127.0.0.3")
    world.give(calc=["127.0.0.2"])
    gateways = [await world.gateway_by_name(f"[{pool(leaving.port)}]") for _ in range(2)]
    async with client(*(gateway.address for gateway in gateways)) as gw:
        await gw.wait_for_tools(["pay"], 10)
        for gateway in gateways:
            await until_backends(gateway, "serving", 1)
        running = [
            asyncio.create_task(call(gw, f"run/t/0/0/{n}", tool="pay", text=str(n), seconds=2.5)) for n in range(5)
        ]
        await world.until_started(f"run/t/0/0/{n}" for n in range(5))
        world.give(calc=["127.0.0.3"])
        for gateway in gateways:
            await until_backends(gateway, "leaving", 1)
        used = next(gateway for gateway in gateways if "stream attached" in gateway.log())
        await used.kill()
        results = await asyncio.gather(*running)
        assert [(result.outcome, result.text) for result in results] == [(OK, str(n).encode()) for n in range(5)]
        assert set(world.starts().values()) == {1}


async def test_one_instance_at_two_addresses_is_one_backend(world: World) -> None:
    backend = await world.backend(host="0.0.0.0")
    world.give(calc=["127.0.0.2", "127.0.0.3", "127.0.0.2"])
    gateway = await world.gateway_by_name(f"[{pool(backend.port)}]")
    async with client(gateway.address) as gw:
        await until_backends(gateway, "duplicate", 1)
        await until_backends(gateway, "serving", 1)
        held = [asyncio.create_task(call(gw, f"run/t/0/0/{n}", tool="one", seconds=0.3)) for n in range(2)]
        await asyncio.gather(*held)
        assert (await held[0]).queue_us + (await held[1]).queue_us > 200_000, "max_concurrency is the instance's"
        (told,) = (line for line in gateway.log().splitlines() if "one instance at two addresses" in line)
        second = "127.0.0.2" if f"address=127.0.0.2:{backend.port}" in told else "127.0.0.3"
        world.give(calc=[second])
        await until_backends(gateway, "leaving", 1)
        await until_backends(gateway, "serving", 1)
        assert (await call(gw, "run/t/0/0/2", tool="pay", text="x")).outcome == OK


async def test_the_certificate_of_an_address_must_carry_the_name(world: World) -> None:
    authority = Authority(world.folder)
    shown = authority.issue("backend", hosts=("calc",), ips=())
    own = authority.issue("gateway")
    backend = await world.sdk_backend(*TOOLS, *tls(authority, shown), host="127.0.0.2")
    other = await world.sdk_backend(*TOOLS, *tls(authority, shown), port=backend.port, host="127.0.0.3")
    world.give(calc=["127.0.0.2"], search=["127.0.0.3"])
    pools = f"[{pool(backend.port)}, {pool(backend.port, 'search')}]"
    gateway = await world.gateway_by_name(pools, *tls(authority, own)[1::2])
    runtime = RuntimeSettings.model_validate({"tls": {"ca_file": authority.ca_file}})
    async with client(gateway.address, runtime=runtime) as gw:
        result = await call(gw, "run/t/0/0/0", tool="pay", text="x")
        assert (result.outcome, result.instance_id) == (OK, backend.ready["instance_id"])
        told = f"waiting for the tool backend at {other.address}: start it, or take it out of the records of search"
        await until(lambda: told in gateway.log())
        await until_backends(gateway, "down", 1, "search")


async def test_the_systems_own_resolver_is_asked(world: World) -> None:
    backend = await world.backend()
    pools = f"[{{name: calc, dns: 'localhost:{backend.port}'}}, {{name: none, dns: 'no-such-name.invalid:7020'}}]"
    pairs = ("gateway.port=0", f"gateway.pools={pools}")
    gateway = await world.start_gateway(*pairs)
    async with client(gateway.address) as gw:
        assert (await call(gw, "run/t/0/0/0", tool="pay", text="x")).outcome == OK
        await until(lambda: "the pool none has no address yet: no-such-name.invalid:7020 cannot" in gateway.log())
        assert await gateway.terminate() == 0
