"""Parked trajectories: they hold nothing, hold up nobody and cost little."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fermata.v1 import rollout_pb2 as pb

from tests.unit.rollout_node.scripted import (
    Node,
    ScriptedEngine,
    ScriptedTools,
    call_text,
    one_call_then,
    sampled,
    settle,
)


async def test_a_parked_trajectory_holds_no_request_and_no_task_of_its_own() -> None:
    engine, tools = ScriptedEngine(one_call_then()), ScriptedTools()
    async with Node(engine, tools) as node:
        before = len(asyncio.all_tasks())
        for i in range(50):
            node.start(f"t{i}")
        await settle()
        assert node.loop.load().parked == 50
        assert not engine.live
        assert len(asyncio.all_tasks()) == before + 50  # one a pending call, none a trajectory
        for call in tools.pending:
            call.answer()
        events = await node.collect()
        assert sum(event.HasField("finished") for event in events) == 50
        assert len(asyncio.all_tasks()) == before


async def test_nobody_waits_for_somebody_elses_tool() -> None:
    engine, tools = ScriptedEngine(one_call_then()), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start("held")
        await settle()
        (held,) = tools.pending
        for i in range(32):
            node.start(f"t{i}")
            await settle()
        for call in tools.pending:
            if call is not held:
                call.answer()
        events = await node.collect()
        assert {e.finished.trajectory_id for e in events if e.HasField("finished")} == {f"t{i}" for i in range(32)}
        held.answer()
        assert (await node.next("finished")).finished.trajectory_id == "held"


async def test_a_parked_trajectory_is_cheap(record_property: Callable[[str, object], None]) -> None:
    import gc
    import tracemalloc

    filler = sampled("word " * 3000, stop=False)[:3800]

    def script(_trajectory: str, _turn: int) -> list[int]:
        return filler + sampled(call_text())

    engine, tools = ScriptedEngine(script), ScriptedTools()
    engine.chunk = 512
    count = 20
    async with Node(engine, tools, limits={"max_tokens_per_turn": 4000}) as node:
        node.start("warm")
        await node.next("parked")
        gc.collect()
        tracemalloc.start()
        for i in range(count):
            node.start(f"t{i}")
            parked = (await node.next("parked")).parked
            node.ack(parked)
            engine.requests.clear()
            node.events.clear()
            del parked
        gc.collect()
        used = sum(stat.size for stat in tracemalloc.take_snapshot().statistics("filename")) / count
        tracemalloc.stop()
        tokens = len(node.loop.books.open["t0"].columns)
        record_property("bytes_per_parked_trajectory", round(used))
        assert tokens > 3800
        # 8 bytes a token is 31 KB; arrays grow by an eighth ahead; one pending call with its task is the rest.
        assert used < 12 * tokens + 8192


async def test_admission_holds_new_ones_back_only_while_busy_and_returning_ones_never() -> None:
    engine, tools = ScriptedEngine(one_call_then(), manual=True), ScriptedTools()
    admission = {"busy_requests": 2, "kv_tokens": 400}
    async with Node(engine, tools, admission=admission) as node:
        node.start("parked", order=9)
        await settle()
        engine.of("parked").let_all()
        await settle()
        for i in range(4):
            node.start(f"t{i}", order=i, sampling=pb.Sampling(max_tokens_per_turn=300))
        await settle()
        assert [r.trajectory for r in engine.live] == ["t0", "t1"]
        tools.of("run/parked/0/0/0").answer()
        await settle()
        # It returned ahead of t2 and t3; and with nothing parked nobody would be pushed out for them.
        assert [r.trajectory for r in engine.live][:3] == ["t0", "t1", "parked"]
        for name in ("t0", "t1"):
            engine.of(name).let_all()
        await settle()
        assert {"t2", "t3"} <= {r.trajectory for r in engine.live}
        for request in engine.live:
            request.let_all()
