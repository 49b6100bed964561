"""What is taken in, refused in a sentence, or waits for tools and weights."""

from __future__ import annotations

import pytest
from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2
from fermata.v1.weights_pb2 import WeightVersion

from node_runtime.segments import Columns
from tests.unit.rollout_node.scripted import (
    CALCULATOR,
    Node,
    ScriptedEngine,
    ScriptedTools,
    one_call_then,
    sampled,
    settle,
    start,
)


@pytest.mark.parametrize(
    ("fields", "words", "retry"),
    [
        ({"model_id": "other"}, "serves model 'demo'", False),
        ({"adapter_id": "lora"}, "no adapters", False),
        ({"mode": pb.MODE_INTERRUPT}, "MODE_INTERRUPT", False),
        ({"run_id": "another"}, "of run 'another'", False),
        ({"trajectory_id": "a/b"}, "contains '/'", False),
        ({"sampling": pb.Sampling(stop=["x"])}, "stop texts", False),
        ({"sampling": pb.Sampling(temperature=-1)}, "temperature is -1", False),
        ({"deadline_ms": 0}, "deadline has passed", False),
        ({"limits": pb.Limits(max_context_tokens=10)}, "the prompt has", False),
        ({"messages": [pb.ChatMessage(role="user", parts=[tool_pb2.ContentPart(uri="x")])]}, "not text", False),
        ({"messages": [pb.ChatMessage(role="user", parts=[tool_pb2.ContentPart(text=b"\xff")])]}, "not UTF-8", False),
    ],
)
async def test_a_task_that_cannot_run_is_rejected_in_a_sentence(fields: dict, words: str, retry: bool) -> None:
    async with Node(ScriptedEngine(one_call_then()), ScriptedTools(), model_id="demo") as node:
        message = start()
        for name, value in fields.items():
            if isinstance(value, list):
                message.ClearField(name)
                getattr(message, name).extend(value)
            elif isinstance(value, (str, int)):
                setattr(message, name, value)
            else:
                getattr(message, name).CopyFrom(value)
        node.loop.take_in(message)
        rejected = (await node.next("rejected")).rejected
        assert words in rejected.reason
        assert (rejected.retry_after_ms >= 0) is retry


async def test_an_unknown_tool_is_waited_for_and_then_refused_naming_what_is_served() -> None:
    tools = ScriptedTools(tools=[])
    async with Node(ScriptedEngine(one_call_then()), tools, catalogue_wait_s=0.6) as node:
        node.start("early")
        await settle()
        assert not (await node.collect())
        tools.catalogue = {"calculator": CALCULATOR}
        assert (await node.next("accepted")).accepted.trajectory_id == "early"
        node.start("never", tools=["nope"])
        rejected = (await node.next("rejected")).rejected
        assert "'nope'" in rejected.reason
        assert "calculator" in rejected.reason
        assert rejected.retry_after_ms < 0


async def test_the_node_takes_no_more_than_its_bound() -> None:
    async with Node(ScriptedEngine(one_call_then()), ScriptedTools(), admission={"max_trajectories": 2}) as node:
        for i in range(3):
            node.start(f"t{i}")
        rejected = (await node.next("rejected")).rejected
        assert rejected.trajectory_id == "t2"
        assert rejected.retry_after_ms >= 1000


async def test_the_same_start_twice_is_begun_once() -> None:
    engine, tools = ScriptedEngine(one_call_then()), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start()
        await settle()
        node.start()
        await settle()
        assert len(engine.requests) == 1
        tools.pending[0].answer()
        finished = (await node.next("finished")).finished
        node.start()  # not acknowledged yet: said again
        assert (await node.next("finished")).finished == finished
        assert len(engine.requests) == 2


async def test_weights_that_are_too_old_are_waited_for_and_tokens_are_stamped() -> None:
    engine = ScriptedEngine(one_call_then())
    wanted = WeightVersion(lineage="a", number=2)
    async with Node(engine, ScriptedTools(auto=True)) as node:
        node.start("new", min_weight_version=wanted)
        node.start("old", order=5)
        assert (await node.next("finished")).finished.trajectory_id == "old"
        assert node.loop.load().queued == 1
        engine.version = wanted
        finished = (await node.next("finished")).finished
        assert {v.number for _, _, v in Columns.unpack(finished.snapshot.segments).version_spans()} == {2}


async def test_a_weight_change_in_the_middle_of_a_turn_splits_its_versions() -> None:
    engine = ScriptedEngine(lambda *_: sampled("one two three four"), manual=True)
    async with Node(engine, ScriptedTools()) as node:
        node.start()
        await settle()
        engine.of("t").let(3)
        await settle()
        engine.version = WeightVersion(lineage="a", number=2, base_number=1)
        engine.of("t").let_all()
        finished = (await node.next("finished")).finished
        columns = Columns.unpack(finished.snapshot.segments)
        spans = [(stop - start, v.number) for start, stop, v in columns.version_spans()]
        assert spans[0] == (3, 1)
        assert spans[1][1] == 2
        assert sum(n for n, _ in spans) == columns.model_tokens()


async def test_waiting_for_weights_ends_at_the_deadline() -> None:
    async with Node(ScriptedEngine(one_call_then()), ScriptedTools()) as node:
        node.start(min_weight_version=WeightVersion(lineage="b", number=9), deadline_ms=80)
        failed = (await node.next("failed")).failed
        assert failed.outcome == tool_pb2.OUTCOME_DEADLINE_EXCEEDED
        assert failed.fault == tool_pb2.FAULT_INFRA
        assert "weight version b/9 (served: a/1)" in failed.reason


async def test_before_the_first_sync_trajectories_wait() -> None:
    engine = ScriptedEngine(one_call_then())
    engine.set_serving("no proven weights yet")
    async with Node(engine, ScriptedTools(auto=True)) as node:
        node.start()
        assert (await node.next("accepted")).accepted.trajectory_id == "t"
        assert not engine.requests
        engine.set_serving("")
        assert (await node.next("finished")).finished.reason == pb.FINISH_REASON_STOP
