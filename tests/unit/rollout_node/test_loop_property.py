"""Random interleavings of tokens, results, cancels, weight changes, acknowledgements and take-overs.

Whatever the order: ids are append-only, each call is dispatched once, only sampled tokens are trained, deltas merge to
the whole, and every generation of a trajectory ends exactly once (or is taken over by the next).
"""

from __future__ import annotations

import asyncio
from collections import Counter

from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2
from fermata.v1.weights_pb2 import WeightVersion
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node_runtime.segments import MODEL, Columns, merge
from tests.unit.rollout_node.scripted import Node, ScriptedEngine, ScriptedTools, call_text, sampled, settle, start

TURNS = {
    "text": lambda: sampled("It is 2."),
    "call": lambda: sampled(call_text("1+1")),
    "two": lambda: sampled(call_text("1+1") + call_text("2+2")),
    "unknown": lambda: sampled(call_text(tool="nope")),
    "mixed": lambda: sampled("so " + call_text("3+3") + "<tool_call>\nnot json\n</tool_call>"),
    "open": lambda: sampled("<tool_call>\n{"),
}
OUTCOMES = (
    tool_pb2.OUTCOME_OK,
    tool_pb2.OUTCOME_OK,
    tool_pb2.OUTCOME_TOOL_ERROR,
    tool_pb2.OUTCOME_TOOL_TIMEOUT,
    tool_pb2.OUTCOME_INDETERMINATE,
)
ACTIONS = (
    "tokens",
    "tokens",
    "tokens",
    "turn",
    "answer",
    "answer",
    "cancel",
    "weights",
    "take_over",
    "ack",
    "reconnect",
)
steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7), st.integers(0, 40)), min_size=5, max_size=60)
plans = st.lists(st.lists(st.sampled_from(sorted(TURNS)), min_size=1, max_size=4), min_size=1, max_size=4)


class Trainer:
    """Holds snapshots as a trainer does, and checks what it hears."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.held: dict[str, pb.Snapshot] = {}
        self.unacked: dict[str, object] = {}
        self.generation: Counter[str] = Counter()
        self.ends: Counter[tuple[str, int]] = Counter()
        self.finished: dict[str, pb.RunResponse.Finished] = {}
        self.accepted: Counter[tuple[str, int]] = Counter()

    async def hear(self) -> None:
        for event in await self.node.collect():
            kind = event.WhichOneof("event")
            if kind == "load":
                continue
            said = getattr(event, kind)
            owner = (said.trajectory_id, said.generation)
            if said.generation != self.generation[said.trajectory_id]:
                continue  # of an owner before this one
            if kind == "accepted":
                self.accepted[owner] += 1
                continue
            assert self.accepted[owner], f"{owner} was told {kind} before Accepted"
            assert not self.ends[owner] or kind in ("finished", "failed"), f"{owner}: {kind} after its end"
            if kind in ("parked", "finished"):
                if self.ends[owner]:
                    continue  # said again over a new stream
                before = self.held.get(said.trajectory_id)
                merged = merge(before, said.snapshot)
                old = Columns.unpack(before.segments).ids if before is not None else []
                assert list(Columns.unpack(merged.segments).ids)[: len(old)] == list(old), "ids are append-only"
                self.held[said.trajectory_id] = merged
                self.unacked[said.trajectory_id] = said
            if kind in ("finished", "failed"):
                self.ends[owner] = 1
            if kind == "failed":
                assert said.outcome != tool_pb2.OUTCOME_INTERNAL, said.reason
            if kind == "finished":
                self.finished[said.trajectory_id] = said

    def take_over(self, trajectory: str) -> None:
        """The trainer gives the trajectory to this node once more, from what it holds."""
        if self.ends[(trajectory, self.generation[trajectory])]:
            return
        self.generation[trajectory] += 1
        self.unacked.pop(trajectory, None)
        begin = start(trajectory, generation=self.generation[trajectory])
        held = self.held.get(trajectory)
        self.node.loop.take_in(begin if held is None else pb.RunRequest.Resume(start=begin, snapshot=held, held_ms=3))


async def run(plan: list[list[str]], actions: list[tuple[str, int, int]]) -> None:
    names = [f"t{i}" for i in range(len(plan))]

    def script(trajectory: str, turn: int) -> list[int]:
        turns = plan[names.index(trajectory)]
        return TURNS[turns[turn]]() if turn < len(turns) else sampled("done")

    engine, tools = ScriptedEngine(script, manual=True), ScriptedTools()
    async with Node(engine, tools) as node:
        trainer = Trainer(node)
        for name in names:
            node.start(name)
        await trainer.hear()
        for request in engine.live[1:]:
            request.let(len(request.given) + 1)  # all but one have ended their first turn
        await trainer.hear()
        number = 1
        for action, which, amount in actions:
            name = names[which % len(names)]
            live, pending = engine.live, tools.pending
            if action in ("tokens", "turn") and live:
                request = live[which % len(live)]
                request.let(amount if action == "tokens" else len(request.given) + 1)
            elif action == "answer" and pending:
                pending[which % len(pending)].answer(f"r{amount}", OUTCOMES[amount % len(OUTCOMES)])
            elif action == "cancel" and amount < 8:
                node.loop.cancel(name, "property")
            elif action == "weights":
                number += 1
                engine.version = WeightVersion(lineage="a", number=number)
            elif action == "take_over":
                trainer.take_over(name)
            elif action == "ack" and name in trainer.unacked:
                node.ack(trainer.unacked.pop(name), stored=amount % 2 == 0)
            elif action == "reconnect":
                node.loop.stream_lost()
                node.loop.new_stream("run", same_trainer=True)
            await trainer.hear()
        for _ in range(12):
            for request in engine.live:
                request.let(len(request.given) + 1)
            await settle(50)
            for call in tools.pending:
                call.answer()
            await trainer.hear()
        assert not node.loop.books.open
        check(names, trainer, engine, tools)


def check(names: list[str], trainer: Trainer, engine: ScriptedEngine, tools: ScriptedTools) -> None:
    sent = Counter(call.key for call in tools.calls if call.options.earlier is None)
    assert all(count == 1 for count in sent.values()), "a call is dispatched once"
    for name in names:
        owner = (name, trainer.generation[name])
        assert trainer.ends[owner] == 1, f"{owner} ended {trainer.ends[owner]} times"
    for name, finished in trainer.finished.items():
        columns = Columns.unpack(trainer.held[name].segments)
        trained = [token for token, bit in zip(columns.ids, columns.loss_mask(), strict=True) if bit]
        model = [i for s in columns.segments if s.kind == MODEL for i in columns.ids[s.start : s.stop]]
        assert trained == model
        assert len(columns.logprobs) == len(model)
        # Every turn kept is what one request sampled after exactly the ids before it.
        for segment in (s for s in columns.segments if s.kind == MODEL):
            ids = list(columns.ids[segment.start : segment.stop])
            before = list(columns.ids[: segment.start])
            assert any(r.prompt == before and r.out[: len(ids)] == ids for r in engine.requests if r.trajectory == name)
        keys = [call.key for call in finished.calls]
        assert len(keys) == len(set(keys))
        assert not trainer.held[name].pending


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans, steps)
def test_whatever_the_order(plan: list[list[str]], actions: list[tuple[str, int, int]]) -> None:
    asyncio.run(run(plan, actions))
