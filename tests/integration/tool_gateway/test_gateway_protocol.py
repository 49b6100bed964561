"""The attach stream itself, spoken by hand: hello, fencing, resume, window, credits, liveness."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fermata.v1 import gateway_pb2, gateway_pb2_grpc, tool_pb2
from gateway_world import World, call, client, until

from node_runtime.grpc_channel import open_channel
from node_runtime.runtime_settings import RuntimeSettings
from tool_gateway.client import CallOptions, Earlier, ToolGateway

pytestmark = pytest.mark.integration
Client = gateway_pb2.ClientFrame
Server = gateway_pb2.ServerFrame


class Stream:
    """One attach stream by hand."""

    def __init__(self, call_: Any) -> None:
        self._call = call_
        self._events: list[Server.Event] = []

    async def send(self, *events: Client.Event) -> None:
        await self._call.write(Client(events=events))

    async def next(self, *kinds: str) -> Any:
        """The next event of these kinds; others are passed over."""
        async with asyncio.timeout(15):  # ends the stream, and with it the test
            while True:
                while self._events:
                    event = self._events.pop(0)
                    kind = event.WhichOneof("event")
                    if kind in kinds:
                        return getattr(event, kind)
                frame = await self._call.read()
                if not isinstance(frame, Server):
                    return None
                self._events.extend(frame.events)

    def cancel(self) -> None:
        self._call.cancel()


def hello(session: str = "s", epoch: int = 1, **fields: Any) -> Client.Event:
    fields = {"run_id": "run", "node_id": "node"} | fields
    return Client.Event(hello=Client.Hello(session_id=session, epoch=epoch, **fields))


def start(key: str, tool: str = "echo", args: bytes = b"{}", **fields: Any) -> Client.Event:
    return Client.Event(call_start=Client.CallStart(key=key, tool=tool, args_json=args, **fields))


@contextlib.asynccontextmanager
async def streams(address: str) -> AsyncIterator[Any]:
    channel = open_channel(address, RuntimeSettings())
    opened: list[Stream] = []

    def attach() -> Stream:
        opened.append(Stream(gateway_pb2_grpc.ToolGatewayServiceStub(channel).Attach()))
        return opened[-1]

    try:
        yield attach
    finally:
        for stream in opened:
            stream.cancel()
        await channel.close()


async def test_the_first_event_must_be_a_whole_hello(world: World) -> None:
    gateway = await world.gateway()
    async with streams(gateway.address) as attach:
        for first, said in (
            (start("run/t/0/0/0"), "first event of a stream must be Hello"),
            (hello(session=""), "Hello.session_id is empty"),
        ):
            stream = attach()
            await stream.send(first)
            goodbye = await stream.next("goodbye")
            assert goodbye.outcome == tool_pb2.OUTCOME_PROTOCOL
            assert said in goodbye.detail
            assert await stream.next("welcome") is None


async def test_a_higher_epoch_fences_the_older_stream_and_a_lower_one_is_refused(world: World) -> None:
    gateway = await world.gateway()
    async with streams(gateway.address) as attach:
        old, new, late = attach(), attach(), attach()
        await old.send(hello(epoch=2))
        assert not (await old.next("welcome")).resumed
        await new.send(hello(epoch=3))
        assert (await new.next("welcome")).resumed
        assert (await old.next("goodbye")).outcome == tool_pb2.OUTCOME_FENCED
        assert await old.next("goodbye") is None
        await late.send(hello(epoch=2))
        refused = await late.next("goodbye")
        assert (refused.outcome, refused.reconnect) == (tool_pb2.OUTCOME_FENCED, False)
        await new.send(Client.Event(ping=Client.Ping(nonce=7)))
        assert (await new.next("pong")).nonce == 7


async def test_a_second_client_with_the_session_ends_the_first_one_and_its_calls(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address, session_id="mine") as first:
        waiting = asyncio.create_task(call(first, "run/t/0/0/0", tool="hang"))
        await world.until_started(["run/t/0/0/0"])
        async with streams(gateway.address) as attach:
            thief = attach()
            await thief.send(hello(session="mine", epoch=99))
            result = await waiting
            assert (result.outcome, result.fault) == (tool_pb2.OUTCOME_FENCED, tool_pb2.FAULT_INFRA)
            again = await call(first, "run/t/0/0/1", text="x")
            assert again.outcome == tool_pb2.OUTCOME_FENCED


async def test_unacknowledged_results_are_replayed_from_where_the_client_is(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with streams(gateway.address) as attach:
        first = attach()
        await first.send(hello(epoch=1), *(start(f"run/t/0/0/{n}") for n in range(4)))
        incarnation = (await first.next("welcome")).incarnation
        results = [await first.next("result") for _ in range(4)]
        assert [result.seq for result in results] == [1, 2, 3, 4]
        await first.send(Client.Event(result_ack=Client.ResultAck(seq=1)))
        second = attach()
        await second.send(hello(epoch=2, resume_from_seq=2, incarnation=incarnation))
        welcome = await second.next("welcome")
        assert sorted(welcome.known_calls) == [f"run/t/0/0/{n}" for n in range(4)]
        assert [(await second.next("result")).seq for _ in range(2)] == [3, 4]
        # Another incarnation: all that was neither acknowledged nor released, under fresh numbers.
        await second.send(Client.Event(release=Client.Release(keys=[results[2].key])))
        await second.send(Client.Event(ping=Client.Ping(nonce=1)))
        await second.next("pong")
        third = attach()
        await third.send(hello(epoch=3, resume_from_seq=4, incarnation="another"))
        again = await third.next("result")
        assert (again.key, again.seq, again.from_cache) == (results[3].key, 5, False)


async def test_a_huge_result_waits_for_the_window_and_control_goes_on(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    big = b'{"bytes": 300000}'
    async with streams(gateway.address) as attach:
        stream = attach()
        await stream.send(hello(window_bytes=400_000), start("run/t/0/0/0", args=big))
        one = await stream.next("result")
        await stream.send(start("run/t/0/0/1", args=big))
        await stream.next("started")
        await world.until_started(["run/t/0/0/1"])
        for nonce in range(20):
            await stream.send(Client.Event(ping=Client.Ping(nonce=nonce)))
            assert type(await stream.next("pong", "result")).__name__ == "Pong"
        await stream.send(Client.Event(window=Client.Window(add_bytes=400_000)))
        two = await stream.next("result")
        await stream.send(start("run/t/0/0/2", args=big), Client.Event(result_ack=Client.ResultAck(seq=two.seq)))
        three = await stream.next("result")
        assert [one.seq, two.seq, three.seq] == [1, 2, 3]


async def test_more_unaccepted_calls_than_twice_the_credits_end_the_stream(world: World) -> None:
    gateway = await world.gateway((), "gateway.limits.credits=4")
    async with streams(gateway.address) as attach:
        stream = attach()
        await stream.send(hello())
        assert (await stream.next("welcome")).credits == 4
        await stream.send(*(start(f"run/t/0/0/{n}") for n in range(40)))
        goodbye = await stream.next("goodbye")
        assert goodbye.outcome == tool_pb2.OUTCOME_PROTOCOL
        assert "4 were granted" in goodbye.detail


async def test_requests_that_can_only_be_refused_do_not_fill_the_gateway(world: World) -> None:
    gateway = await world.gateway()
    long = "run/" + "x" * 100_000
    async with streams(gateway.address) as attach:
        stream = attach()
        await stream.send(hello())
        for _ in range(10):
            await stream.send(*(start(long) for _ in range(10)))
        goodbye = await stream.next("goodbye")
        assert goodbye.outcome == tool_pb2.OUTCOME_OVERLOADED
        assert goodbye.reconnect
        again = attach()
        await again.send(hello(epoch=2))
        assert (await again.next("result")).final.outcome == tool_pb2.OUTCOME_PROTOCOL, "what waits is handed out"


async def test_a_frame_of_a_million_events_holds_nobody_up(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with streams(gateway.address) as attach, client(gateway.address) as other:
        stream = attach()
        await stream.send(hello())
        await stream.next("welcome")
        sent = asyncio.create_task(stream.send(*[Client.Event(window=Client.Window(add_bytes=1))] * 1_000_000))
        slowest = 0.0
        while not sent.done() or slowest == 0.0:
            begun = asyncio.get_running_loop().time()
            assert (await call(other, f"run/t/0/0/{int(begun * 1e3) % 10**9}")).outcome == tool_pb2.OUTCOME_OK
            slowest = max(slowest, asyncio.get_running_loop().time() - begun)
        await stream.send(Client.Event(ping=Client.Ping(nonce=7)))
        assert (await stream.next("pong")).nonce == 7


@pytest.mark.parametrize(
    "fields",
    [
        {"heartbeat_timeout_ms": 2**63 - 1},
        {"attempt_timeout_ms": 2**63 - 1, "queue_timeout_ms": 2**63 - 1, "total_timeout_ms": 2**63 - 1},
        {"resend": True, "last_attempt": 2**32 - 1},
        {"resend": True, "age_ms": -(2**63)},
    ],
)
async def test_numbers_at_their_ends_do_not_lose_a_call(world: World, fields: dict[str, Any]) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with streams(gateway.address) as attach:
        stream = attach()
        await stream.send(hello())
        await stream.next("catalogue")
        for number, tool in enumerate(("echo", "pay")):
            await stream.send(start(f"run/t/0/0/{number}", tool=tool, **fields))
            outcome = (await stream.next("result")).final.outcome
            assert outcome in (tool_pb2.OUTCOME_OK, tool_pb2.OUTCOME_INDETERMINATE)


@pytest.mark.parametrize("total_ms", [0, -5])
async def test_a_call_that_arrives_without_time_is_not_started(world: World, total_ms: int) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with streams(gateway.address) as attach:
        stream = attach()
        await stream.send(hello())
        await stream.send(start("run/t/0/0/0", tool="pay", total_timeout_ms=total_ms))
        final = (await stream.next("result")).final
        assert (final.outcome, final.started) == (tool_pb2.OUTCOME_DEADLINE_EXCEEDED, tool_pb2.STARTED_NO)
        await stream.send(start("run/t/0/0/1", tool="pay"))
        assert (await stream.next("result")).final.outcome == tool_pb2.OUTCOME_OK
    assert set(world.starts("pay")) == {"run/t/0/0/1"}


async def test_a_hello_with_endless_names_is_refused(world: World) -> None:
    gateway = await world.gateway()
    async with streams(gateway.address) as attach:
        stream = attach()
        await stream.send(hello(session="s" * 1_000_000))
        assert "at most 512" in (await stream.next("goodbye")).detail


async def test_a_client_that_is_never_heard_is_given_up_and_may_come_back(world: World) -> None:
    gateway = await world.gateway((), "gateway.heartbeat_interval_s=0.1")
    async with streams(gateway.address) as attach:
        stream = attach()
        await stream.send(hello(epoch=1))
        goodbye = await stream.next("goodbye")
        assert "nothing was heard for 3 heartbeat intervals" in goodbye.detail
        assert goodbye.reconnect
        again = attach()
        await again.send(hello(epoch=2))
        assert (await again.next("welcome")).resumed


async def test_a_final_goodbye_cancels_what_runs(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address) as gw:
        waiting = asyncio.create_task(call(gw, "run/t/0/0/0", tool="hang"))
        await world.until_started(["run/t/0/0/0"])
        await gw.close()
        assert (await waiting).outcome == tool_pb2.OUTCOME_CANCELLED
    await until(lambda: "run/t/0/0/0" in world.cancels())


async def test_a_client_that_leaves_lets_its_calls_run_on_for_the_next_owner(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address, node_id="first") as first:
        waiting = asyncio.create_task(call(first, "run/t/0/0/0", tool="pay", text="x", seconds=1.0))
        await world.until_started(["run/t/0/0/0"])
        await first.leave()
        assert (await waiting).outcome == tool_pb2.OUTCOME_CANCELLED
    async with client(gateway.address, node_id="second") as second:
        options = CallOptions(generation=1, earlier=Earlier(age_s=1.0))
        result = await call(second, "run/t/0/0/0", tool="pay", options=options, text="x", seconds=1.0)
        assert (result.outcome, result.text) == (tool_pb2.OUTCOME_OK, b"x")
    assert world.starts() == {"run/t/0/0/0": 1}
    assert world.cancels() == []


async def test_a_client_that_comes_back_after_its_window_still_hears_new_results(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]], "gateway.resume_window_s=0.1")
    proxy = await world.proxy(gateway.address)
    async with client(proxy.address) as gw:
        for n in range(3):
            assert (await call(gw, f"run/t/0/0/{n}", text="x")).outcome == tool_pb2.OUTCOME_OK
        waiting = asyncio.create_task(call(gw, "run/t/0/1/0", tool="pay", text="late", seconds=2.5))
        await world.until_started(["run/t/0/1/0"])
        proxy.refuse = True
        proxy.cut()
        await until(lambda: "expired" in gateway.log())
        proxy.refuse = False
        assert (await waiting).text == b"late"
    assert world.starts("pay") == {"run/t/0/1/0": 1}


async def test_a_call_of_a_session_forgotten_after_its_window_ends_in_the_ledger(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]], "gateway.resume_window_s=0.1")
    async with streams(gateway.address) as attach:
        stream = attach()
        await stream.send(hello(session="gone"), start("run/t/0/0/0", tool="pay", args=b'{"text": "x", "seconds": 2}'))
        await world.until_started(["run/t/0/0/0"])
        stream.cancel()
        async with client(gateway.address, node_id="other") as gw:
            await until(lambda: "expired" in gateway.log())
            result = await call(gw, "run/t/0/0/0", tool="pay", text="x", seconds=2)
            assert result.text == b"x"
    assert world.starts() == {"run/t/0/0/0": 1}


async def test_no_rpc_is_left_behind_by_many_connections(world: World) -> None:
    """Abandoned aio calls are never collected: the client must end each of its own."""
    import gc

    import grpc.aio

    gateway = await world.gateway()
    for n in range(20):
        async with ToolGateway([gateway.address], runtime=RuntimeSettings(), run_id="run", node_id=f"node{n}") as gw:
            await gw.wait_connected(10)
    gc.collect()
    left = [o for o in gc.get_objects() if isinstance(o, grpc.aio.StreamStreamCall) and not o.done()]
    assert left == []
