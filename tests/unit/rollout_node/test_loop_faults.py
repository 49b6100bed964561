"""Faults and whom they blame: what the model sees of a call, and what masks a trajectory."""

from __future__ import annotations

import pytest
from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2

from node_runtime.segments import TOOL, Columns
from tests.unit.rollout_node.scripted import (
    TURNS,
    Node,
    ScriptedEngine,
    ScriptedTools,
    call_text,
    one_call_then,
    sampled,
    settle,
)


@pytest.mark.parametrize(
    ("outcome", "fault", "shown"),
    [
        (tool_pb2.OUTCOME_OK, 0, "some output"),
        (tool_pb2.OUTCOME_TOOL_ERROR, 0, "Error: some output"),
        (tool_pb2.OUTCOME_TOOL_TIMEOUT, 0, "The tool ran out of time."),
        (tool_pb2.OUTCOME_TOOL_OOM, 0, "The tool ran out of memory."),
        (tool_pb2.OUTCOME_DEADLINE_EXCEEDED, tool_pb2.FAULT_MODEL, "The tool did not answer in time."),
    ],
)
async def test_what_the_model_sees(outcome: int, fault: int, shown: str) -> None:
    tools = ScriptedTools()
    async with Node(ScriptedEngine(one_call_then()), tools) as node:
        node.start()
        await settle()
        tools.pending[0].answer("some output", outcome, fault)
        finished = (await node.next("finished")).finished
        columns = Columns.unpack(finished.snapshot.segments)
        (answer,) = [s for s in columns.segments if s.kind == TOOL]
        assert shown in TURNS.vocabulary.decode(list(columns.ids[answer.start : answer.stop]))
        assert finished.calls[0].outcome == outcome


@pytest.mark.parametrize(
    "outcome",
    [
        tool_pb2.OUTCOME_INDETERMINATE,
        tool_pb2.OUTCOME_DEADLINE_EXCEEDED,
        tool_pb2.OUTCOME_NOT_STARTED,
        tool_pb2.OUTCOME_OVERLOADED,
        tool_pb2.OUTCOME_FENCED,
        tool_pb2.OUTCOME_CANCELLED,
        tool_pb2.OUTCOME_INTERNAL,
    ],
)
async def test_infrastructure_faults_never_reach_the_model(outcome: int) -> None:
    engine, tools = ScriptedEngine(one_call_then(calls=2)), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start()
        await settle()
        tools.of("run/t/0/0/1").answer("", outcome, detail="the backend is gone")
        failed = (await node.next("failed")).failed
        assert failed.outcome == outcome
        assert failed.fault in (tool_pb2.FAULT_INFRA, tool_pb2.FAULT_CALLER)
        assert failed.tool == "calculator"
        assert "the backend is gone" in failed.reason
        assert tools.cancelled == ["run/t/0/0/0"]
        assert len(engine.requests) == 1
        assert {e.WhichOneof("event") for e in await node.collect()} <= {"accepted", "parked"}


async def test_an_infrastructure_fault_in_the_middle_of_a_turn_aborts_it() -> None:
    engine, tools = ScriptedEngine(lambda *_: sampled(call_text() + "word " * 20), manual=True), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start()
        await settle()
        engine.of("t").let(len(sampled(call_text(), stop=False)) + 3)
        await settle()
        tools.pending[0].answer("", tool_pb2.OUTCOME_INDETERMINATE)
        assert (await node.next("failed")).failed.outcome == tool_pb2.OUTCOME_INDETERMINATE
        await settle()
        assert not engine.live


async def test_a_deadline_while_parked_masks_and_while_sampling_cuts() -> None:
    tools = ScriptedTools()
    async with Node(ScriptedEngine(one_call_then()), tools) as node:
        node.start(deadline_ms=80)
        failed = (await node.next("failed")).failed
        assert (failed.outcome, failed.fault) == (tool_pb2.OUTCOME_DEADLINE_EXCEEDED, tool_pb2.FAULT_INFRA)
        assert "calculator" in failed.reason
        assert tools.cancelled == ["run/t/0/0/0"]
    engine = ScriptedEngine(lambda *_: sampled("one two three"), manual=True)
    async with Node(engine, tools) as node:
        node.start(deadline_ms=80)
        await settle()
        engine.of("t").let(2)
        finished = (await node.next("finished")).finished
        assert finished.reason == pb.FINISH_REASON_DEADLINE
        assert Columns.unpack(finished.snapshot.segments).model_tokens() == 2


async def test_a_cancel_reaches_the_engine_and_the_tools() -> None:
    engine, tools = ScriptedEngine(lambda *_: sampled(call_text() + "word " * 9), manual=True), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start()
        await settle()
        engine.of("t").let(len(sampled(call_text(), stop=False)) + 1)
        await settle()
        node.loop.cancel("t", "not wanted")
        failed = (await node.next("failed")).failed
        assert (failed.fault, failed.outcome) == (tool_pb2.FAULT_CALLER, tool_pb2.OUTCOME_CANCELLED)
        assert "not wanted" in failed.reason
        await settle()
        assert tools.cancelled == ["run/t/0/0/0"]
        assert not engine.live


async def test_an_engine_that_stops_serving_fails_what_it_has_with_the_reason() -> None:
    engine, tools = ScriptedEngine(one_call_then(), manual=True), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start("parked")
        await settle()
        engine.of("parked").let_all()
        await settle()
        node.start("sampling")
        await settle()
        engine.set_serving("the proof of version 2 failed")
        failed = (await node.next("failed")).failed
        assert failed.trajectory_id == "sampling"
        assert "the proof of version 2 failed" in failed.reason
        assert failed.fault == tool_pb2.FAULT_INFRA
        node.start("new")
        rejected = (await node.next("rejected")).rejected
        assert rejected.retry_after_ms > 0
        assert "proof" in rejected.reason
        tools.of("run/parked/0/0/0").answer()
        assert (await node.next("failed")).failed.trajectory_id == "parked"
        engine.set_serving("")
        node.start("new")
        await settle()
        engine.of("new").let_all()
        await settle()
        tools.of("run/new/0/0/0").answer()


async def test_a_request_that_ends_unasked_masks_the_trajectory() -> None:
    engine = ScriptedEngine(one_call_then(), manual=True)
    async with Node(engine, ScriptedTools()) as node:
        node.start()
        await settle()
        engine.of("t").reason = "abort"
        engine.of("t").let()
        failed = (await node.next("failed")).failed
        assert "(abort)" in failed.reason
        assert failed.fault == tool_pb2.FAULT_INFRA


async def test_an_offered_tool_that_is_unknown_to_the_gateway_now_is_not_the_models_mistake() -> None:
    engine, tools = ScriptedEngine(one_call_then()), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start()
        await settle()
        tools.pending[0].answer("there is no tool 'calculator'", tool_pb2.OUTCOME_UNKNOWN_TOOL)
        failed = (await node.next("failed")).failed
        assert (failed.fault, failed.outcome) == (tool_pb2.FAULT_INFRA, tool_pb2.OUTCOME_UNKNOWN_TOOL)
        assert "was served when it was offered" in failed.reason
        assert len(engine.requests) == 1
