"""Turns and their calls: what is sampled, sent, answered in order, and where limits end it."""

from __future__ import annotations

import pytest
from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2

from node_runtime.segments import MODEL, PROMPT, TOOL, Columns, merge
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
