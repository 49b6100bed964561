"""What survives kills, cuts, freezes and drains: each call has one outcome, and nothing not idempotent runs twice."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from fermata.v1 import tool_pb2
from gateway_world import World, call, client, free_port, until

from tool_gateway.client import CallOptions, Earlier, Result

pytestmark = pytest.mark.integration

OK = tool_pb2.OUTCOME_OK
INDETERMINATE = tool_pb2.OUTCOME_INDETERMINATE


def outcomes(results: list[Result]) -> Counter[tool_pb2.Outcome]:
    return Counter(result.outcome for result in results)


async def test_kill_9_of_the_gateway_in_the_middle_and_restart_on_the_same_port(world: World) -> None:
    backends = [await world.backend(), await world.backend()]
    addresses = [backend.address for backend in backends]
    port = free_port()
    gateway = await world.gateway([addresses], port=port)
    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["echo", "pay"], 10)
        done = await asyncio.gather(
            *(call(gw, f"run/a/0/{n}/0", tool="pay" if n % 2 else "echo", text=str(n)) for n in range(20))
        )
        assert outcomes(done) == {OK: 20}
        in_flight = [
            asyncio.create_task(call(gw, f"run/b/0/{n}/0", tool="pay" if n % 2 else "echo", text=str(n), seconds=1.5))
            for n in range(40)
        ]
        await world.until_started(f"run/b/0/{n}/0" for n in range(40))
        await gateway.kill()
        # Calls begun while there is no gateway are started by its successor.
        meanwhile = [
            asyncio.create_task(call(gw, f"run/c/0/{n}/0", tool="pay" if n % 2 else "echo", text=str(n)))
            for n in range(20)
        ]
        await world.gateway([addresses], port=port)
        results = await asyncio.gather(*in_flight)
        later = await asyncio.gather(*meanwhile)
        assert outcomes(later) == {OK: 20}
        # The backends are alive and hold every call: none need be INDETERMINATE, and at most those in flight may be.
        assert outcomes(results)[OK] + outcomes(results)[INDETERMINATE] == 40
        assert outcomes(results) == {OK: 40}
        assert [result.text for result in results] == [str(n).encode() for n in range(40)]
        assert max(world.starts("pay").values()) == 1
        assert set(world.starts()) == {
            f"run/{t}/0/{n}/0" for t, most in (("a", 20), ("b", 40), ("c", 20)) for n in range(most)
        }


async def test_a_call_cancelled_while_no_gateway_is_there_is_not_started_by_the_next_one(world: World) -> None:
    backend = await world.backend()
    port = free_port()
    gateway = await world.gateway([[backend.address]], port=port)
    async with client(gateway.address) as caller:
        tasks = [asyncio.create_task(call(caller, f"run/t/0/0/{n}", tool)) for n, tool in enumerate(("hang", "hang"))]
        await world.until_started(["run/t/0/0/0", "run/t/0/0/1"])
        backend.freeze()  # two more are sent and cannot begin
        tasks += [asyncio.create_task(call(caller, f"run/t/0/0/{n}", "pay")) for n in (2, 3)]
        await until(lambda: all(waiting.attempt for waiting in caller.pending()))
        await gateway.kill()
        await until(lambda: not caller.connected)
        for n in range(4):
            caller.cancel(f"run/t/0/0/{n}", "not wanted any more")
        gateway = await world.gateway([[backend.address]], port=port)
        results = await asyncio.gather(*tasks)
        backend.thaw()
        assert {result.outcome for result in results} == {tool_pb2.OUTCOME_CANCELLED}
        assert all("not wanted" in result.final.detail for result in results)
    assert max(world.starts().values()) == 1


async def test_kill_9_of_gateway_and_backend_together_leaves_no_call_open(world: World) -> None:
    first, second = await world.backend(), await world.backend()
    addresses = [first.address, second.address]
    port = free_port()
    gateway = await world.gateway([addresses], "gateway.retry.rejoin_s=2", port=port)
    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["echo", "pay"], 10)
        calls = [
            asyncio.create_task(call(gw, f"run/b/0/{n}/0", tool="pay" if n % 2 else "echo", text=str(n), seconds=1.0))
            for n in range(20)
        ]
        await world.until_started(f"run/b/0/{n}/0" for n in range(20))
        lost = {note["key"] for note in world.notes() if note["instance"] == first.ready["instance_id"]}
        await asyncio.gather(gateway.kill(), first.kill())
        await world.backend(port=first.port)
        await world.gateway([addresses], "gateway.retry.rejoin_s=2", port=port)
        results = await asyncio.gather(*calls)
        for result in results:
            if result.tool == "pay" and result.key in lost:
                assert (result.outcome, result.fault) == (INDETERMINATE, tool_pb2.FAULT_INFRA), result.final.detail
            else:
                assert result.outcome == OK, result.final.detail
        assert max(world.starts("pay").values()) == 1


async def test_a_cut_between_gateway_and_backend_rejoins_the_running_call(world: World) -> None:
    backend = await world.backend()
    proxy = await world.proxy(backend.address)
    gateway = await world.gateway([[proxy.address]])
    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["echo", "pay"], 10)
        keys = [f"run/t/0/0/{n}" for n in range(10)]
        calls = [
            asyncio.create_task(call(gw, key, tool="pay" if n % 2 else "echo", text=key, seconds=1.5))
            for n, key in enumerate(keys)
        ]
        await world.until_started(keys)
        proxy.cut()
        await until(lambda: gateway.log().count("backend is back") == 1)
        proxy.cut()
        results = await asyncio.gather(*calls)
        assert outcomes(results) == {OK: 10}
        assert [result.text.decode() for result in results] == keys
        assert {result.attempts for result in results} == {1}
        assert world.starts() == dict.fromkeys(keys, 1)


async def test_a_backend_that_cannot_be_reached_again_is_indeterminate_or_retried(world: World) -> None:
    cut_off, other = await world.backend(), await world.backend()
    proxy = await world.proxy(cut_off.address)
    gateway = await world.gateway(
        [[proxy.address, other.address]], "gateway.retry.rejoin_s=1", "gateway.retry.rejoin_idempotent_s=0.3"
    )
    async with client(gateway.address) as gw:
        await until(lambda: gateway.log().count("backend found") == 2)
        keys = [f"run/t/0/0/{n}" for n in range(16)]
        calls = [
            asyncio.create_task(call(gw, key, tool="pay" if n % 2 else "echo", text=key, seconds=2.5))
            for n, key in enumerate(keys)
        ]
        await world.until_started(keys)
        there = {note["key"] for note in world.notes() if note["instance"] == cut_off.ready["instance_id"]}
        assert there
        proxy.refuse = True
        proxy.cut()
        for result in await asyncio.gather(*calls):
            lost = result.tool == "pay" and result.key in there
            assert result.outcome == (INDETERMINATE if lost else OK), result.final.detail
        assert max(world.starts("pay").values()) == 1


async def test_kill_9_of_a_backend_in_the_middle_of_calls(world: World) -> None:
    dying, other = await world.backend(), await world.backend()
    gateway = await world.gateway([[dying.address, other.address]], "gateway.retry.rejoin_s=1")
    async with client(gateway.address) as gw:
        await until(lambda: gateway.log().count("backend found") == 2)
        keys = [f"run/t/0/0/{n}" for n in range(20)]
        calls = [
            asyncio.create_task(call(gw, key, tool="pay" if n % 2 else "echo", text=key, seconds=1.0))
            for n, key in enumerate(keys)
        ]
        await world.until_started(keys)
        there = {note["key"] for note in world.notes() if note["instance"] == dying.ready["instance_id"]}
        await dying.kill()
        for result in await asyncio.gather(*calls):
            if result.tool == "pay" and result.key in there:
                assert (result.outcome, result.fault) == (INDETERMINATE, tool_pb2.FAULT_INFRA)
                assert result.final.started == tool_pb2.STARTED_UNKNOWN
            else:
                assert result.outcome == OK
        assert max(world.starts("pay").values()) == 1


async def test_a_backend_without_streams_or_attach_is_served_with_what_it_has(world: World) -> None:
    backend = await world.backend("--without", "invoke_stream,attach")
    proxy = await world.proxy(backend.address)
    gateway = await world.gateway([[proxy.address]], "gateway.retry.rejoin_s=1")
    async with client(gateway.address) as gw:
        assert (await call(gw, "run/t/0/0/0", tool="pay", text="x")).text == b"x"
        lost = asyncio.create_task(call(gw, "run/t/0/0/1", tool="pay", seconds=1.0))
        again = asyncio.create_task(call(gw, "run/t/0/0/2", tool="echo", text="y", seconds=0.5))
        await world.until_started(["run/t/0/0/1", "run/t/0/0/2"])
        proxy.cut()
        assert (await lost).outcome == INDETERMINATE
        assert ((await again).outcome, (await again).text) == (OK, b"y")
        assert max(world.starts().values()) == 1  # its journal joined the second attempt to the first


async def test_a_client_that_is_cut_off_again_and_again_loses_and_doubles_nothing(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    proxy = await world.proxy(gateway.address)
    async with client(proxy.address) as gw:
        await gw.wait_for_tools(["echo"], 10)
        counted: Counter[str] = Counter()

        async def one(n: int) -> Result:
            result = await call(
                gw,
                f"run/t{n}/0/0/0",
                tool="pay" if n % 2 else "echo",
                text=str(n),
                seconds=(n % 40) / 20,
                deadline_s=40,
            )
            counted[result.key] += 1
            return result

        calls = [asyncio.create_task(one(n)) for n in range(200)]
        for wanted in (20, 60, 100, 140):
            await until(lambda wanted=wanted: sum(counted.values()) >= wanted)
            proxy.cut()
        results = await asyncio.gather(*calls)
        assert outcomes(results) == {OK: 200}
        assert [result.text for result in results] == [str(n).encode() for n in range(200)]
        assert set(world.starts().values()) == {1}
        assert gateway.log().count("resumed=True") >= 3


async def test_a_client_goes_to_another_gateway_and_its_calls_are_joined_there(world: World) -> None:
    backends = [await world.backend(), await world.backend()]
    addresses = [backend.address for backend in backends]
    gateways = [await world.gateway([addresses]), await world.gateway([addresses])]
    async with client(*(gateway.address for gateway in gateways)) as gw:
        await gw.wait_for_tools(["pay"], 10)
        keys = [f"run/t/0/0/{n}" for n in range(10)]
        calls = [asyncio.create_task(call(gw, key, tool="pay", text=key, seconds=1.0)) for key in keys]
        await world.until_started(keys)
        used = next(gateway for gateway in gateways if "stream attached" in gateway.log())
        await used.kill()
        results = await asyncio.gather(*calls)
        assert outcomes(results) == {OK: 10}
        assert world.starts() == dict.fromkeys(keys, 1)


async def test_a_frozen_gateway_is_given_up_after_three_pings(world: World) -> None:
    backends = [await world.backend()]
    addresses = [backend.address for backend in backends]
    fast = "gateway.heartbeat_interval_s=0.2"
    gateways = [await world.gateway([addresses], fast), await world.gateway([addresses], fast)]
    async with client(*(gateway.address for gateway in gateways)) as gw:
        await gw.wait_for_tools(["pay"], 10)
        keys = [f"run/t/0/0/{n}" for n in range(6)]
        calls = [asyncio.create_task(call(gw, key, tool="pay", text=key, seconds=2.0)) for key in keys]
        await world.until_started(keys)
        used = next(gateway for gateway in gateways if "stream attached" in gateway.log())
        used.freeze()
        results = await asyncio.gather(*calls)
        assert outcomes(results) == {OK: 6}
        assert world.starts() == dict.fromkeys(keys, 1)
        used.thaw()


async def test_drain_finishes_what_runs_refuses_what_is_new_and_ends(world: World) -> None:
    backend = await world.backend()
    port = free_port()
    gateway = await world.gateway([[backend.address]], port=port)
    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["pay"], 10)
        running = asyncio.create_task(call(gw, "run/t/0/0/0", tool="pay", text="done", seconds=1.0))
        await world.until_started(["run/t/0/0/0"])
        ended = asyncio.create_task(gateway.terminate())
        await until(lambda: "draining" in gateway.log())
        new = asyncio.create_task(call(gw, "run/t/0/0/1", tool="pay", text="new"))
        assert (await running).text == b"done"
        assert not new.done()
        assert await ended == 0
        assert set(world.starts()) == {"run/t/0/0/0"}
        await world.gateway([[backend.address]], port=port)
        assert (await new).text == b"new"
        assert set(world.starts().values()) == {1}


async def test_a_draining_gateway_is_left_for_another_one(world: World) -> None:
    backend = await world.backend()
    gateways = [await world.gateway([[backend.address]]), await world.gateway([[backend.address]])]
    async with client(*(gateway.address for gateway in gateways)) as gw:
        await gw.wait_for_tools(["pay"], 10)
        used = next(gateway for gateway in gateways if "stream attached" in gateway.log())
        assert await used.terminate() == 0
        assert (await call(gw, "run/t/0/0/0", tool="pay", text="x")).outcome == OK


async def test_calls_left_at_the_drains_deadline_are_joined_by_the_successor(world: World) -> None:
    backend = await world.backend()
    port = free_port()
    gateway = await world.gateway([[backend.address]], "gateway.drain_s=0.2", port=port)
    async with client(gateway.address) as gw:
        running = asyncio.create_task(call(gw, "run/t/0/0/0", tool="pay", text="x", seconds=3.0))
        await world.until_started(["run/t/0/0/0"])
        assert await gateway.terminate() == 0
        await world.gateway([[backend.address]], port=port)
        assert (await running).text == b"x"
        assert world.starts() == {"run/t/0/0/0": 1}


async def test_a_refused_call_starts_plainly_also_at_a_backend_that_is_younger_than_it(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]], "gateway.ledger.max_entries=1")
    async with client(gateway.address) as gw:
        held = asyncio.create_task(call(gw, "run/t/0/0/0", tool="hang"))
        await world.until_started(["run/t/0/0/0"])
        refused = asyncio.create_task(call(gw, "run/t/0/0/1", tool="pay", text="x"))
        await until(lambda: "the ledger holds 1 calls" in gateway.log())
        await backend.kill()
        await world.backend(port=backend.port)
        gw.cancel("run/t/0/0/0")
        await held
        assert (await refused).outcome == OK, (await refused).final.detail
        assert world.starts("pay") == {"run/t/0/0/1": 1}


async def test_a_restored_call_is_joined_and_never_started_twice(world: World) -> None:
    """A rollout node died; another one resumes the trajectory from its snapshot, with the pending call's key."""
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address, node_id="first") as first:
        lost = asyncio.create_task(call(first, "run/t/0/0/0", tool="pay", text="x", seconds=1.0))
        await world.until_started(["run/t/0/0/0"])
        async with client(gateway.address, node_id="second") as second:
            await second.wait_for_tools(["pay"], 10)
            old = asyncio.create_task(call(first, "run/t/0/0/1", tool="hang"))
            await world.until_started(["run/t/0/0/1"])
            second.fence("t", 1, keep_keys=["run/t/0/0/0"])
            options = CallOptions(
                generation=1, earlier=Earlier(age_s=1.0, instance_id=backend.ready["instance_id"], attempt=1)
            )
            result = await call(second, "run/t/0/0/0", tool="pay", options=options, text="x", seconds=1.0)
            assert result.text == b"x"
            # What the new generation did not name is cancelled, and its old owner may start nothing more.
            assert (await old).outcome == tool_pb2.OUTCOME_CANCELLED
            late = await call(first, "run/t/0/1/0", tool="pay", text="late")
            assert (late.outcome, late.fault) == (tool_pb2.OUTCOME_FENCED, tool_pb2.FAULT_INFRA)
        assert not lost.done()  # its result went to the new owner
        lost.cancel()
    assert world.starts("pay") == {"run/t/0/0/0": 1}


async def test_join_only_never_starts_a_call(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address) as gw:
        result = await call(gw, "run/t/0/0/0", options=CallOptions(join_only=True), text="x")
        assert (result.outcome, result.fault) == (INDETERMINATE, tool_pb2.FAULT_INFRA)
        await call(gw, "run/t/0/0/1", text="x")
        joined = await call(gw, "run/t/0/0/1", options=CallOptions(join_only=True), text="x")
        assert (joined.outcome, joined.from_cache) == (OK, False)
        assert world.starts() == {"run/t/0/0/1": 1}


@pytest.mark.parametrize(("age_s", "expected"), [(0.1, OK), (3600.0, INDETERMINATE)])
async def test_a_resent_call_without_a_record_starts_only_where_a_start_is_disproved(
    world: World, age_s: float, expected: tool_pb2.Outcome
) -> None:
    backends = [await world.backend(), await world.backend()]
    gateway = await world.gateway([[backend.address for backend in backends]])
    # The backends' uptime is what is tested: it must exceed the call's age, which counts from Welcome, by the margin.
    await asyncio.sleep(0.5)
    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["pay"], 10)
        options = CallOptions(earlier=Earlier(age_s=age_s))
        result = await call(gw, "run/t/0/0/0", tool="pay", options=options, text="x")
        assert result.outcome == expected, result.final.detail
        assert sum(world.starts().values()) == (1 if expected == OK else 0)
        # An instance that is gone was the last to hear of the call: a start cannot be disproved.
        options = CallOptions(earlier=Earlier(age_s=age_s, instance_id="gone", attempt=1))
        result = await call(gw, "run/t/0/0/1", tool="pay", options=options, text="x")
        assert result.outcome == INDETERMINATE
        # An idempotent tool may run again.
        result = await call(gw, "run/t/0/0/2", tool="echo", options=options, text="x")
        assert result.outcome == OK
