"""What /metrics of a real gateway shows while calls fail, are retried, wait and are cut off."""

from __future__ import annotations

import asyncio

import pytest
from fermata.v1 import tool_pb2
from gateway_world import World, call, client, scrape, until, until_shown, value

from tool_gateway.client import CallOptions

pytestmark = pytest.mark.integration

G = "fermata_gateway_"


async def test_retries_queues_attempts_and_backends_are_told_by_pool(world: World) -> None:
    refusing, other = await world.backend("--refuse", "pay"), await world.backend()
    gateway = await world.gateway([[refusing.address, other.address]], "runtime.metrics_port=0")
    port = gateway.ready["metrics_port"]
    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["pay"], 10)
        await until_shown(port, 2, 2, f"{G}backends", pool="pool0", state="serving")
        results = await asyncio.gather(*(call(gw, f"run/t/0/0/{n}", tool="pay", text="x") for n in range(8)))
        refused = sum(result.attempts for result in results) - 8
        assert await value(port, f"{G}retries_total", pool="pool0", reason="OVERLOADED") == refused > 0
        assert await value(port, f"{G}attempts_total", pool="pool0", outcome="OVERLOADED") == refused
        assert await value(port, f"{G}attempts_total", pool="pool0", outcome="OK") == 8
        assert await value(port, f"{G}attempt_duration_seconds_count", pool="pool0") == 8 + refused
        assert await value(port, f"{G}queue_duration_seconds_count", pool="pool0") == 8 + refused
        await refusing.kill()
        await until_shown(port, 1, 1, f"{G}backends", pool="pool0", state="down")
        assert await value(port, f"{G}backends", pool="pool0", state="serving") == 1


async def test_what_is_cut_off_or_gets_no_place_is_counted_too(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]], "runtime.metrics_port=0")
    port = gateway.ready["metrics_port"]
    async with client(gateway.address) as gw:
        held = asyncio.create_task(call(gw, "run/t/0/0/0", tool="one", seconds=60.0))
        await world.until_started(["run/t/0/0/0"])
        hurried = await call(gw, "run/t/0/0/1", tool="one", options=CallOptions(queue_timeout_s=0.2))
        assert hurried.outcome == tool_pb2.OUTCOME_QUEUE_TIMEOUT
        assert await value(port, f"{G}queue_duration_seconds_count", pool="pool0") == 2
        assert 0.1 <= await value(port, f"{G}queue_duration_seconds_sum", pool="pool0") < 10
        await until_shown(port, 0.5, 20, f"{G}oldest_call_age_seconds")
        gw.cancel("run/t/0/0/0")
        assert (await held).outcome == tool_pb2.OUTCOME_CANCELLED
        assert await value(port, f"{G}attempts_total", pool="pool0", outcome="CANCELLED") == 1
        await until_shown(port, 0, 0, f"{G}oldest_call_age_seconds")
        running = asyncio.create_task(call(gw, "run/t/0/0/2", text="x", seconds=1.0))
        await world.until_started(["run/t/0/0/2"])
        leaving = asyncio.create_task(gateway.terminate())
        await until(lambda: "draining" in gateway.log())
        assert await value(port, f"{G}draining") == 1
        assert (await running).text == b"x"
        assert await leaving == 0


async def test_a_name_that_a_model_made_up_is_no_label(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]], "runtime.metrics_port=0")
    port = gateway.ready["metrics_port"]
    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["echo"], 10)
        unknown = await call(gw, "run/t/0/0/0", tool="made_up_1", text="x")
        foreign = await call(gw, "other/t/0/0/0", tool="made_up_2", text="x")
        hidden = await call(gw, "run/t/0/0/1", tool="grade", text="x")
        assert unknown.outcome == hidden.outcome == tool_pb2.OUTCOME_UNKNOWN_TOOL
        assert foreign.outcome == tool_pb2.OUTCOME_PERMISSION
        assert await value(port, f"{G}calls_total", tool="unknown", outcome="UNKNOWN_TOOL", fault="MODEL") == 2
        assert await value(port, f"{G}calls_total", tool="unknown", outcome="PERMISSION") == 1
        assert await value(port, f"{G}call_duration_seconds_count", tool="unknown", fault="MODEL") == 2
        assert "made_up" not in await scrape(port)
