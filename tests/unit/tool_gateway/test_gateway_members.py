"""Pools of a name without any network: answers and leases in any order, with nothing behind the addresses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fermata.v1 import tool_pb2
from structlog.testing import capture_logs

from node_runtime.errors import NodeError
from node_runtime.runtime_settings import RuntimeSettings
from tool_gateway.backends import Backend, Backends, Lease
from tool_gateway.settings import PoolSettings, TimeoutSettings


class Names:
    """What the names give; counts how often they were asked."""

    def __init__(self) -> None:
        self.given: dict[str, list[str]] = {}
        self.asked = 0

    def look_up(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        if host not in self.given:
            raise OSError("not known")
        return [f"127.0.0.1:{n}" for n in self.given[host]]


def pool(name: str, resolve_s: float = 3600.0, most: int = 256) -> PoolSettings:
    return PoolSettings(name=name, dns=f"{name}:1", resolve_s=resolve_s, max_addresses=most)


async def until(holds: Callable[[], object]) -> None:
    """Looks until it holds: the look-up's thread and the loop tell of themselves in no other way."""
    async with asyncio.timeout(10):
        while True:
            if holds():
                return
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are made by the tests alone, by ``describe``."""

    async def run(backend: Backend) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Backend, "run", run)


@asynccontextmanager
async def running(names: Names, *pools: PoolSettings, leave_s: float = 60.0) -> AsyncIterator[Backends]:
    backends = Backends(pools, RuntimeSettings(), TimeoutSettings(leave_s=leave_s), look_up=names.look_up)
    task = asyncio.create_task(backends.run())
    try:
        await until(lambda: names.asked >= len(pools))
        yield backends
    finally:
        task.cancel()
        await asyncio.wait({task})
        await backends.close()


def answer(backends: Backends, pool: PoolSettings, *ports: int) -> None:
    backends._members._apply(pool, [f"127.0.0.1:{port}" for port in ports])


def describe(backends: Backends, port: int, instance: str, *tools: str) -> Backend:
    """As if somebody answered there."""
    backend = backends.backends[f"127.0.0.1:{port}"]
    specs = [tool_pb2.ToolSpec(name=tool, version_hash="1", input_schema_json=b"{}") for tool in tools]
    backend.described = tool_pb2.DescribeResponse(instance_id=instance, tools=specs)
    backend._connected = backend._serving = True
    backends._members._changed()
    return backend


def states(backends: Backends) -> dict[int, str]:
    return {int(address.rpartition(":")[2]): backend.state for address, backend in backends.backends.items()}


async def test_tools_are_those_of_who_stays_and_of_who_leaves_only_while_nobody_else_has_told() -> None:
    names, calc = Names(), pool("calc")
    async with running(names, calc) as backends:
        assert not backends.catalogue_known
        assert backends.silent_addresses() == ["calc:1"]
        answer(backends, calc, 1)
        old = describe(backends, 1, "old", "add", "sub")
        assert (set(backends.tools), backends.tools["add"].serving) == ({"add", "sub"}, 1)
        answer(backends, calc, 2)
        assert states(backends) == {1: "leaving", 2: "down"}
        assert set(backends.tools) == {"add", "sub"}, "a model must not be told that its tool does not exist"
        assert backends.tools["add"].serving == 0
        waiting = asyncio.create_task(backends.acquire("add"))
        await asyncio.sleep(0)
        assert not waiting.done()
        new = describe(backends, 2, "new", "add")
        assert (await waiting).backend is new
        assert set(backends.tools) == {"add"}
        assert backends.suspects("sub") == [old, new], "it may have run where it is served no more"
        assert not backends.suspects_complete("sub")


async def test_an_address_that_returns_is_the_backend_it_was() -> None:
    names, calc = Names(), pool("calc")
    async with running(names, calc) as backends:
        answer(backends, calc, 1, 2)
        one, two = describe(backends, 1, "i1", "add"), describe(backends, 2, "i2", "add")
        answer(backends, calc, 2)
        leases = [await backends.acquire("add") for _ in range(5)]
        assert {lease.backend for lease in leases} == {two}
        answer(backends, calc, 1)
        assert (await backends.acquire("add")).backend is one
        assert states(backends) == {1: "serving", 2: "leaving"}


async def test_who_is_used_stays_open_and_who_is_idle_is_closed_after_its_time() -> None:
    names, calc = Names(), pool("calc")
    async with running(names, calc, leave_s=1.0) as backends:
        answer(backends, calc, 1, 2, 3)
        used, held, _ = (describe(backends, n, f"i{n}", "add") for n in (1, 2, 3))
        lease = backends.lease_at(used, backends.tools["add"])
        answer(backends, calc, 4)
        with held.held():
            for backend in backends.backends.values():
                backend._used_at -= 2.0
            backends._members._close_idle(calc)
            assert states(backends) == {1: "leaving", 2: "leaving", 4: "down"}
        backends.give_back(lease)
        backends._members._close_idle(calc)
        assert states(backends) == {1: "leaving", 2: "leaving", 4: "down"}, "their time begins when they are idle"
        for backend in backends.backends.values():
            backend._used_at -= 2.0
        backends._members._close_idle(calc)
        assert states(backends) == {4: "down"}
        assert not backends.catalogue_known, "nobody there has told anything"


async def test_a_name_that_changes_all_the_time_does_not_pile_up_channels() -> None:
    names, calc = Names(), pool("calc", most=3)
    async with running(names, calc) as backends:
        for n in range(1, 60, 3):
            answer(backends, calc, n, n + 1, n + 2, n + 3)
            backends._members._close_idle(calc)
            assert len(backends.backends) <= 6
        await asyncio.sleep(0)


async def test_one_instance_at_two_addresses_takes_calls_at_one_and_keeps_it() -> None:
    names, calc = Names(), pool("calc")
    async with running(names, calc) as backends:
        answer(backends, calc, 1, 2)
        first, second = describe(backends, 1, "same", "add"), describe(backends, 2, "same", "add")
        assert states(backends) == {1: "serving", 2: "duplicate"}
        assert backends.tools["add"].serving == 1
        assert {(await backends.acquire("add")).backend for _ in range(9)} == {first}
        assert backends.suspects("add") == [first]
        first._set_down("cut")
        assert states(backends) == {1: "down", 2: "serving"}
        describe(backends, 1, "same", "add")
        assert states(backends) == {1: "duplicate", 2: "serving"}
        answer(backends, calc, 1)
        assert states(backends) == {1: "serving", 2: "leaving"}
        assert second.twin_of == first.address
        describe(backends, 1, "another", "add")
        assert second.twin_of is None


async def test_complaints_are_told_once_and_again_when_they_are_new() -> None:
    names, a, b = Names(), pool("a", most=2), pool("b")
    async with running(names, a, b) as backends:
        with capture_logs() as logs:
            for _ in range(3):
                answer(backends, a, 1, 2, 3)
                answer(backends, b, 2, 9)
        told = [log["event"] for log in logs if log["log_level"] == "warning"]
        assert told == [
            "the pool a uses 2 of the addresses that a:1 gives: raise its max_addresses",
            "the pool b leaves out 127.0.0.1:2, which b:1 gives: it belongs to the pool a, and an address belongs to "
            "one pool",
        ]
        with capture_logs() as logs:
            for why in ("not known", "no answer"):
                backends._members._keep(a, why)
            answer(backends, a, 1, 2)
            answer(backends, a, 1, 2, 3)
        assert [log["event"] for log in logs] == [
            "the pool a keeps its 2 addresses: a:1 cannot be looked up (not known)",
            "the pool's name can be looked up again",
            "the pool a uses 2 of the addresses that a:1 gives: raise its max_addresses",
        ]


async def test_a_lost_backend_has_its_name_looked_up_sooner() -> None:
    names, calc = Names(), pool("calc", resolve_s=1.0)
    names.given["calc"] = [1]
    async with running(names, calc) as backends:
        await until(lambda: backends.backends)
        loop = asyncio.get_running_loop()
        begun, asked = loop.time(), names.asked
        describe(backends, 1, "i1", "add")._set_down("cut")
        await until(lambda: names.asked > asked)
        assert loop.time() - begun < 0.7, "the period is at least 0.8 s"


async def test_a_token_that_would_travel_in_clear_is_refused_before_the_first_look_up(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length\n")
    runtime = RuntimeSettings.model_validate({"tokens": {"send_file": token}})
    with pytest.raises(NodeError, match=r"calc:1: a token is set .* and would travel in clear"):
        Backends([pool("calc")], runtime, TimeoutSettings())


@pytest.mark.parametrize("seed", range(20))
async def test_any_order_of_answers_leases_and_losses_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    names, pools = Names(), [pool("a", most=3), pool("b", most=4)]
    leases: list[Lease] = []
    async with running(names, *pools, leave_s=1.0) as backends:
        members = backends._members
        for _ in range(300):
            match rng.randrange(8):
                case 0 | 1:
                    answer(backends, rng.choice(pools), *rng.sample(range(1, 8), rng.randint(1, 6)))
                case 2 | 3 if backends.backends:
                    port = int(rng.choice(list(backends.backends)).rpartition(":")[2])
                    describe(backends, port, f"i{rng.randrange(6)}", *rng.sample(["x", "y"], rng.randint(1, 2)))
                case 4 if backends.backends:
                    rng.choice(list(backends.backends.values()))._set_down("cut")
                case 5:
                    for tool in ("x", "y"):
                        lease = backends._pick(tool, None, None)
                        if lease is not None:
                            assert lease.backend.serving
                            leases.append(lease)
                case 6 if leases:
                    backends.give_back(leases.pop(rng.randrange(len(leases))))
                case _:
                    for backend in backends.backends.values():
                        backend._used_at -= rng.uniform(0, 1)
                    members._close_idle(rng.choice(pools))
                    await asyncio.sleep(0)
            open_ = backends.backends
            assert all(lease.backend is open_.get(lease.backend.address) for lease in leases), "used, and closed"
            for tool in backends.tools.values():
                assert tool.addresses <= open_.keys()
            for one in pools:
                mine = members._members(one)
                assert len(mine) <= one.max_addresses
            serving = [backend.instance_id for backend in open_.values() if backend.serving]
            assert len(set(serving)) == len(serving), "an instance takes calls at one address"
            assert members._runs.keys() == set(open_.values())
        for lease in leases:
            backends.give_back(lease)
        assert all(backend.in_flight == 0 for backend in backends.backends.values())
