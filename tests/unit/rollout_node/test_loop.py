"""The node loop over a scripted engine and scripted tools: what is sampled, called, parked, resumed and said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2
from fermata.v1.weights_pb2 import WeightVersion

from node_runtime.segments import MODEL, PROMPT, TOOL, Columns, merge
from tests.unit.rollout_node.scripted import (
    CALCULATOR,
    TURNS,
    Node,
    ScriptedEngine,
    ScriptedTools,
    call_text,
    sampled,
    settle,
    start,
)


def one_call_then(answer: str = "It is 2.", calls: int = 1):
    def script(_trajectory: str, turn: int) -> list[int]:
        return sampled("".join(call_text(f"{i}+1") for i in range(calls)) if turn == 0 else answer)

    return script


async def test_a_call_is_sent_at_its_closing_token_and_the_turn_goes_on() -> None:
    engine = ScriptedEngine(lambda *_: sampled(call_text("1+1") + "and" + call_text("2+2")), manual=True)
    tools = ScriptedTools()
    async with Node(engine, tools) as node:
        node.start()
        await settle()
        request = engine.of("t")
        closing = sampled(call_text(), stop=False)
        request.let(len(closing) - 1)
        await settle()
        assert not tools.calls
        request.let()
        await settle()
        assert [call.args_json for call in tools.calls] == [b'{"expression": "1+1"}']
        assert tools.calls[0].key == "run/t/0/0/0"
        request.let_all()
        await settle()
        assert [call.key for call in tools.calls] == ["run/t/0/0/0", "run/t/0/0/1"]
        assert not engine.live


async def test_results_go_in_by_call_order_whatever_order_they_came_in() -> None:
    tools = ScriptedTools()
    async with Node(ScriptedEngine(one_call_then(calls=3)), tools) as node:
        node.start()
        parked = (await node.next("parked")).parked
        assert [call.ordinal for call in parked.snapshot.pending] == [0, 1, 2]
        for ordinal in (2, 0, 1):
            tools.of(f"run/t/0/0/{ordinal}").answer(f"answer-{ordinal}")
        finished = (await node.next("finished")).finished
        assert finished.reason == pb.FINISH_REASON_STOP
        assert finished.answer == b"It is 2."
        merged = merge(parked.snapshot, finished.snapshot) if finished.snapshot.base_segments else finished.snapshot
        columns = Columns.unpack(merged.segments)
        answers = [s for s in columns.segments if s.kind == TOOL]
        assert [s.call_key for s in answers] == [f"run/t/0/0/{i}" for i in range(3)]
        texts = [TURNS.vocabulary.decode(list(columns.ids[s.start : s.stop])) for s in answers]
        assert all(f"answer-{i}" in text for i, text in enumerate(texts))
        assert [call.outcome for call in finished.calls] == [tool_pb2.OUTCOME_OK] * 3
        assert finished.tool_wait_us > 0


async def test_tokens_trained_are_tokens_sampled() -> None:
    engine = ScriptedEngine(one_call_then())
    async with Node(engine, ScriptedTools(auto=True)) as node:
        node.start()
        finished = (await node.next("finished")).finished
        columns = Columns.unpack(finished.snapshot.segments)
        first, second = engine.requests
        turn_0, turn_1 = sampled(call_text("0+1")), sampled("It is 2.")
        assert list(columns.ids) == second.prompt + turn_1
        assert second.prompt[: len(first.prompt) + len(turn_0)] == first.prompt + turn_0
        kinds = [(s.kind, s.turn) for s in columns.segments]
        assert kinds == [(PROMPT, 0), (MODEL, 0), (TOOL, 1), (MODEL, 1)]
        trained = [i for i, bit in zip(columns.ids, columns.loss_mask(), strict=True) if bit]
        assert trained == turn_0 + turn_1
        assert second.priority < first.priority  # returning before new


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


async def test_invalid_calls_are_answered_at_once_and_counted() -> None:
    texts = [
        call_text(tool="nope"),
        "<tool_call>\nnot json\n</tool_call>",
        call_text().replace("expression", "exp"),
        "x",
    ]
    engine, tools = ScriptedEngine(lambda _t, turn: sampled(texts[turn])), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start("a", limits=pb.Limits(max_consecutive_invalid_calls=4))
        finished = (await node.next("finished")).finished
        assert finished.reason == pb.FINISH_REASON_STOP
        outcomes = [call.outcome for call in finished.calls]
        expected = [tool_pb2.OUTCOME_UNKNOWN_TOOL, tool_pb2.OUTCOME_PARSE_ERROR, tool_pb2.OUTCOME_INVALID_ARGS]
        assert outcomes == expected
        assert not tools.calls
        node.start("b", limits=pb.Limits(max_consecutive_invalid_calls=3))
        finished = (await node.next("finished")).finished
        assert finished.reason == pb.FINISH_REASON_INVALID_CALLS
        assert finished.snapshot.consecutive_invalid_calls == 3


async def test_calls_beyond_the_limit_of_a_turn_get_an_answer_each() -> None:
    engine, tools = ScriptedEngine(one_call_then(calls=4)), ScriptedTools(auto=True)
    async with Node(engine, tools) as node:
        node.start(limits=pb.Limits(max_calls_per_turn=2))
        finished = (await node.next("finished")).finished
        assert [call.outcome for call in finished.calls] == [tool_pb2.OUTCOME_OK] * 2 + [
            tool_pb2.OUTCOME_INVALID_ARGS
        ] * 2
        assert len(tools.calls) == 2
        text = TURNS.vocabulary.decode(list(Columns.unpack(finished.snapshot.segments).ids))
        assert text.count("the most one turn may have") == 2


@pytest.mark.parametrize(
    ("limits", "reason", "sent"),
    [
        (pb.Limits(max_turns=2), pb.FINISH_REASON_MAX_TURNS, 1),
        (pb.Limits(max_calls=1), pb.FINISH_REASON_MAX_CALLS, 1),
    ],
)
async def test_a_call_whose_answer_no_turn_could_read_is_not_sent(limits: pb.Limits, reason: int, sent: int) -> None:
    engine, tools = ScriptedEngine(lambda *_: sampled(call_text())), ScriptedTools(auto=True)
    async with Node(engine, tools) as node:
        node.start(limits=limits)
        finished = (await node.next("finished")).finished
        assert finished.reason == reason
        assert len(tools.calls) == sent
        assert [call.outcome for call in finished.calls] == [tool_pb2.OUTCOME_OK, tool_pb2.OUTCOME_CANCELLED]


async def test_a_call_cut_by_max_tokens_never_runs_and_its_neighbours_are_cancelled() -> None:
    ids = sampled(call_text("1+1") + call_text("2+2"))
    engine, tools = ScriptedEngine(lambda *_: ids), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start(sampling=pb.Sampling(max_tokens_per_turn=len(ids) - 3))
        finished = (await node.next("finished")).finished
        assert finished.reason == pb.FINISH_REASON_LENGTH
        assert [call.key for call in tools.calls] == ["run/t/0/0/0"]
        assert tools.cancelled == ["run/t/0/0/0"]
        assert [(c.key, c.outcome) for c in finished.calls] == [("run/t/0/0/0", tool_pb2.OUTCOME_CANCELLED)]


@pytest.mark.parametrize(("room", "reason"), [(60, pb.FINISH_REASON_STOP), (3, pb.FINISH_REASON_LENGTH)])
async def test_results_are_cut_to_the_context_and_end_it_where_nothing_fits(room: int, reason: int) -> None:
    tools = ScriptedTools()
    async with Node(ScriptedEngine(one_call_then()), tools) as node:
        node.start("measure")
        most = (await node.next("parked")).parked.snapshot.total_tokens + room
        node.start(limits=pb.Limits(max_context_tokens=most))
        parked = (await node.next("parked")).parked
        tools.of("run/t/0/0/0").answer("9" * 2000)
        finished = (await node.next("finished")).finished
        assert finished.reason == reason
        assert finished.snapshot.total_tokens <= most
        assert (finished.snapshot.total_tokens > parked.snapshot.total_tokens) is (room == 60)


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


async def test_deltas_build_on_what_was_acknowledged_and_stored_results_are_released() -> None:
    def script(_trajectory: str, turn: int) -> list[int]:
        return sampled(call_text(f"{turn}+1") if turn < 3 else "done")

    tools = ScriptedTools()
    async with Node(ScriptedEngine(script), tools) as node:
        node.start()
        held = None
        for turn in range(3):
            parked = (await node.next("parked")).parked
            held = merge(held, parked.snapshot)
            pending = parked.snapshot.pending
            assert [call.key for call in pending] == [f"run/t/0/{turn}/0"]
            assert parked.snapshot.turn == turn + 1
            if turn == 0:
                assert parked.snapshot.base_segments == 0
                node.ack(parked)
            elif turn == 1:
                assert parked.snapshot.base_snapshot_seq == 1
                assert parked.snapshot.base_segments == 2
                node.ack(parked, stored=False)
                assert tools.released == []
            else:
                assert parked.snapshot.base_snapshot_seq == 2
                node.ack(parked)
                assert tools.released == ["run/t/0/0/0", "run/t/0/1/0"]
            tools.pending[0].answer()
        finished = (await node.next("finished")).finished
        held = merge(held, finished.snapshot)
        assert not held.pending
        assert finished.snapshot.base_snapshot_seq == 3
        node.ack(finished)
        assert tools.released_trajectories == [("t", 0)]


async def test_pending_calls_are_named_with_what_a_successor_needs() -> None:
    engine, tools = ScriptedEngine(one_call_then(calls=2), manual=True), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start()
        await settle()
        engine.of("t").let(len(sampled(call_text(), stop=False)) + 1)
        await settle()
        tools.pending[0].started("backend-7", attempt=2)
        tools.pending[0].answer("early")
        engine.of("t").let_all()
        parked = (await node.next("parked")).parked
        first, second = parked.snapshot.pending
        assert (first.instance_id, first.last_attempt, first.tool) == ("backend-7", 2, "calculator")
        assert first.result.parts[0].text == b"early"
        assert second.args_json == b'{"expression": "1+1"}'
        assert not second.HasField("result")
        assert 0 < second.remaining_ms <= 300_000
        assert parked.snapshot.tokenizer_hash == TURNS.tokenizer_hash


async def resume_elsewhere(node: Node, snapshot: pb.Snapshot, generation: int = 1, held_ms: int = 500) -> None:
    resume = pb.RunRequest.Resume(start=start(generation=generation), snapshot=snapshot, held_ms=held_ms)
    node.loop.take_in(resume)


async def test_resume_on_another_node_rejoins_pending_keys_under_a_new_generation() -> None:
    engine, tools = ScriptedEngine(one_call_then(calls=2), manual=True), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start()
        await settle()
        engine.of("t").let(len(sampled(call_text(), stop=False)) + 1)
        await settle()
        tools.pending[0].started("backend-7")
        tools.pending[0].answer("early")
        engine.of("t").let_all()
        snapshot = (await node.next("parked")).parked.snapshot
        tools.pending[0].started("backend-8")
        prompt = engine.of("t").prompt
    other, more = ScriptedEngine(one_call_then()), ScriptedTools()
    async with Node(other, more) as node:
        await resume_elsewhere(node, snapshot)
        assert (await node.next("accepted")).accepted.generation == 1
        await settle()
        assert more.fenced == [("t", 1, ("run/t/0/0/1",))]
        (call,) = more.calls
        assert call.key == "run/t/0/0/1"
        assert call.options.generation == 1
        assert call.options.earlier is not None
        assert call.options.earlier.age_s >= 0.5
        assert call.deadline_s <= 299.6
        assert not other.requests
        call.answer("late")
        finished = (await node.next("finished")).finished
        assert finished.snapshot.base_segments == len(snapshot.segments)
        merged = merge(snapshot, finished.snapshot)
        columns = Columns.unpack(merged.segments)
        assert list(columns.ids)[: len(prompt)] == prompt
        assert list(columns.ids)[: snapshot.total_tokens] == list(Columns.unpack(snapshot.segments).ids)
        text = TURNS.vocabulary.decode(list(columns.ids))
        assert text.index("early") < text.index("late")
        assert [call.key for call in finished.calls] == ["run/t/0/0/0", "run/t/0/0/1"]


async def test_a_resumed_call_without_time_left_is_only_joined() -> None:
    tools = ScriptedTools()
    async with Node(ScriptedEngine(one_call_then()), tools) as node:
        node.start()
        snapshot = (await node.next("parked")).parked.snapshot
    snapshot.pending[0].remaining_ms = 100
    more = ScriptedTools()
    async with Node(ScriptedEngine(one_call_then()), more) as node:
        await resume_elsewhere(node, snapshot, held_ms=1000)
        await settle()
        assert more.calls[0].options.join_only


async def test_a_newer_generation_on_the_same_node_takes_the_calls_along() -> None:
    engine, tools = ScriptedEngine(one_call_then()), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start()
        snapshot = (await node.next("parked")).parked.snapshot
        await resume_elsewhere(node, snapshot, held_ms=0)
        await settle()
        assert not tools.cancelled
        for call in tools.pending:
            call.answer()
        finished = (await node.next("finished")).finished
        assert finished.generation == 1
        assert not [e for e in await node.collect() if not e.HasField("accepted")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: setattr(s, "tokenizer_hash", "other"), "tokenizer_hash other"),
        (lambda s: setattr(s, "total_tokens", 3), "says 3 tokens"),
        (lambda s: setattr(s, "base_segments", 1), "must be merged"),
        (lambda s: s.ClearField("pending"), "nothing follows"),
        (lambda s: setattr(s.segments[0], "token_ids", b"abc"), "contradicts itself"),
    ],
)
async def test_a_snapshot_that_cannot_be_resumed_is_refused_in_a_sentence(change, words: str) -> None:
    tools = ScriptedTools()
    async with Node(ScriptedEngine(one_call_then()), tools) as node:
        node.start()
        snapshot = (await node.next("parked")).parked.snapshot
    change(snapshot)
    async with Node(ScriptedEngine(one_call_then()), tools) as node:
        await resume_elsewhere(node, snapshot)
        rejected = (await node.next("rejected")).rejected
        assert words in rejected.reason
        assert rejected.retry_after_ms < 0


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


async def test_before_the_first_sync_trajectories_wait() -> None:
    engine = ScriptedEngine(one_call_then())
    engine.set_serving("no proven weights yet")
    async with Node(engine, ScriptedTools(auto=True)) as node:
        node.start()
        assert (await node.next("accepted")).accepted.trajectory_id == "t"
        assert not engine.requests
        engine.set_serving("")
        assert (await node.next("finished")).finished.reason == pb.FINISH_REASON_STOP


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


async def test_drain_hands_over_parked_at_once_and_sampled_at_their_turns_end() -> None:
    engine, tools = ScriptedEngine(one_call_then(), manual=True), ScriptedTools()
    async with Node(engine, tools) as node:
        for name in ("parked", "turning", "stuck"):
            node.start(name)
        await settle()
        engine.of("parked").let_all()
        await settle()
        node.loop.drain(0.15)
        handed = (await node.next("handed_over")).handed_over
        assert handed.trajectory_id == "parked"
        assert [call.key for call in handed.snapshot.pending] == ["run/parked/0/0/0"]
        assert not tools.cancelled  # the next owner rejoins it
        engine.of("turning").let_all()
        handed = (await node.next("handed_over")).handed_over
        assert handed.trajectory_id == "turning"
        assert len(handed.snapshot.pending) == 1
        engine.of("stuck").let(len(sampled(call_text(), stop=False)) + 0)
        handed = (await node.next("handed_over")).handed_over
        assert handed.trajectory_id == "stuck"
        columns = Columns.unpack(handed.snapshot.segments)
        assert [s.kind for s in columns.segments] == [PROMPT]  # half a turn is nobody's
        assert tools.cancelled == ["run/stuck/0/0/0"]
        await node.loop.books.none_open()
        node.start("late")
        assert "leaving" in (await node.next("rejected")).rejected.reason


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
        await resume_elsewhere(node, snapshot)
        await settle()
        for call in tools.pending:
            call.answer()
        assert (await node.next("finished")).finished.generation == 1


async def test_a_grader_is_called_at_the_end() -> None:
    engine, tools = ScriptedEngine(one_call_then("It is 2.", 1)), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start(grader="judge")
        await settle()
        tools.pending[0].answer()
        await settle()
        (grading,) = tools.pending
        assert (grading.tool, grading.options.grader, grading.args_json) == ("judge", True, b'{"answer": "It is 2."}')
        grading.answer("0.5")
        finished = (await node.next("finished")).finished
        assert finished.grade.parts[0].text == b"0.5"
        node.start("u", grader="judge")
        await settle()
        tools.pending[0].answer()
        await settle()
        tools.pending[0].answer("", tool_pb2.OUTCOME_INTERNAL)
        failed = (await node.next("failed")).failed
        assert failed.tool == "judge"


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


async def test_spans_say_what_happened(tmp_path) -> None:
    from node_runtime.spans import SpanWriter, read_spans
    from rollout_node.loop import NodeLoop
    from rollout_node.outbox import Outbox

    engine, tools = ScriptedEngine(one_call_then()), ScriptedTools(auto=True)
    node = Node(engine, tools)
    with SpanWriter(tmp_path, "n") as spans:
        node.loop = NodeLoop(node.settings, engine, TURNS, Outbox(8), spans)
        node.loop.desk.use("run", tools)
        node.loop.new_stream("run", same_trainer=False)
        async with node:
            node.start()
            await node.next("finished")
    seen = [(s.kind, s.turn, s.tokens, s.outcome) for s in read_spans(tmp_path)]
    assert sorted(kind for kind, *_ in seen) == ["generate", "generate", "queue", "queue", "tool-run"]
    assert ("tool-run", 0, None, "OK") in seen
    assert ("generate", 1, len(sampled("It is 2.")), "") in seen


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
