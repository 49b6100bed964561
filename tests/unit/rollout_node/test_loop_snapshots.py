"""Snapshots out and in: deltas on what was acknowledged, and another owner that goes on from them."""

from __future__ import annotations

import pytest
from fermata.v1 import rollout_pb2 as pb

from node_runtime.segments import PROMPT, TOOL, Columns, merge
from tests.unit.rollout_node.scripted import (
    TURNS,
    Node,
    ScriptedEngine,
    ScriptedTools,
    call_text,
    one_call_then,
    resume,
    sampled,
    settle,
)


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
        resume(node, snapshot)
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
        resume(node, snapshot, held_ms=1000)
        await settle()
        assert more.calls[0].options.join_only


async def test_a_newer_generation_on_the_same_node_takes_the_calls_along() -> None:
    engine, tools = ScriptedEngine(one_call_then()), ScriptedTools()
    async with Node(engine, tools) as node:
        node.start()
        snapshot = (await node.next("parked")).parked.snapshot
        resume(node, snapshot, held_ms=0)
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
        resume(node, snapshot)
        rejected = (await node.next("rejected")).rejected
        assert words in rejected.reason
        assert rejected.retry_after_ms < 0


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


@pytest.mark.parametrize("parked", [True, False])
async def test_a_snapshot_that_just_fills_the_context_ends_with_length_as_it_would_have_where_it_was(
    parked: bool,
) -> None:
    tools = ScriptedTools()
    async with Node(ScriptedEngine(one_call_then()), tools) as node:
        node.start()
        snapshot = (await node.next("parked")).parked.snapshot
    if not parked:
        # As at a boundary after the answers.
        columns = Columns.unpack(snapshot.segments)
        columns.append(TOOL, [1, 2, 3], turn=1, call_key="run/t/0/0/0")
        del snapshot.pending[:], snapshot.segments[:]
        snapshot.segments.extend(columns.pack())
        snapshot.total_tokens = len(columns)
    engine, more = ScriptedEngine(one_call_then()), ScriptedTools(auto=True)
    async with Node(engine, more, limits={"max_context_tokens": snapshot.total_tokens}) as node:
        resume(node, snapshot)
        finished = (await node.next("finished")).finished
        assert finished.reason == pb.FINISH_REASON_LENGTH
        assert not engine.requests
    async with Node(engine, more, limits={"max_context_tokens": snapshot.total_tokens - 1}) as node:
        resume(node, snapshot)
        assert "no turn fits" in (await node.next("rejected")).rejected.reason
