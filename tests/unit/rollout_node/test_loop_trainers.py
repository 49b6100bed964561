"""The trainer's streams: one that is lost and comes back, one that does not, and another trainer's."""

from __future__ import annotations

from fermata.v1 import tool_pb2

from tests.unit.rollout_node.scripted import (
    Node,
    ScriptedEngine,
    ScriptedTools,
    one_call_then,
    resume,
    settle,
)


async def test_a_lost_stream_keeps_trajectories_for_the_window() -> None:
    engine, tools = ScriptedEngine(one_call_then()), ScriptedTools()
    async with Node(engine, tools, reconnect_window_s=0.2) as node:
        for name in ("claimed", "lost"):
            node.start(name)
        parked = [(await node.next("parked")).parked for _ in range(2)]
        node.loop.stream_lost()
        node.loop.new_stream("run", same_trainer=True)
        again = [(await node.next("parked")).parked for _ in range(2)]
        assert {p.trajectory_id for p in again} == {p.trajectory_id for p in parked}
        node.ack(next(p for p in again if p.trajectory_id == "claimed"))
        failed = (await node.next("failed")).failed
        assert failed.trajectory_id == "lost"
        assert "0.2 s" in failed.reason
        assert not tools.cancelled
        tools.of("run/claimed/0/0/0").answer()
        assert (await node.next("finished")).finished.trajectory_id == "claimed"


async def test_without_a_trainer_calls_are_cancelled_after_the_window() -> None:
    engine, tools = ScriptedEngine(one_call_then()), ScriptedTools()
    async with Node(engine, tools, reconnect_window_s=0.1) as node:
        node.start()
        await node.next("parked")
        node.loop.stream_lost()
        assert (await node.next("failed")).failed.fault == tool_pb2.FAULT_INFRA
        assert tools.cancelled == ["run/t/0/0/0"]


async def test_another_trainer_process_finds_nothing_open_and_may_rejoin_the_calls() -> None:
    engine, tools = ScriptedEngine(one_call_then()), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start()
        snapshot = (await node.next("parked")).parked.snapshot
        node.loop.stream_lost()
        node.loop.new_stream("run", same_trainer=False)
        assert not node.loop.books.open
        assert not tools.cancelled
        resume(node, snapshot)
        await settle()
        for call in tools.pending:
            call.answer()
        assert (await node.next("finished")).finished.generation == 1
