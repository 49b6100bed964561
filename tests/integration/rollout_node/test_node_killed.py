"""A rollout node killed with kill -9 while its trajectories wait for tools: another real node goes on with them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2

from node_runtime.segments import MODEL, PROMPT, TOOL, Columns
from tests.integration.rollout_node import calling_model
from tests.integration.rollout_node.node_world import Trainer, World, start

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(300)]

TRAJECTORIES = 6


async def test_calls_of_a_killed_node_are_joined_by_the_next_and_never_run_twice(tmp_path: Path) -> None:
    model = calling_model.build(tmp_path / "model")
    starts = tmp_path / "starts.txt"
    names = [f"t{i}" for i in range(TRAJECTORIES)]
    async with World(tmp_path) as world:
        tools = "tests.integration.rollout_node.counted_tools:work"
        backend = await world.start("tool_backend", tools, settings=("backend.port=0",))
        gateway = await world.gateway([backend])
        first = await world.node(model, gateway.address)
        second = await world.node(model, gateway.address)

        async with Trainer(first.address) as trainer:
            for order, name in enumerate(names):
                context = {"seconds": "6", "starts": str(starts)}
                await trainer.say(start=start(name, order=order, context=context))
            await trainer.until(lambda: trainer.parked() == set(names))
            async with asyncio.timeout(20):
                while not starts.exists() or len(starts.read_text().split()) < TRAJECTORIES:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            first.process.kill()
            await first.ended()
            held_since = time.monotonic()
            held = dict(trainer.snapshots)

        async with Trainer(second.address) as trainer:
            trainer.snapshots.update(held)
            for order, name in enumerate(names):
                again = start(name, order=order, generation=1, context={"seconds": "6", "starts": str(starts)})
                held_ms = round((time.monotonic() - held_since) * 1000)
                await trainer.say(resume=pb.RunRequest.Resume(start=again, snapshot=held[name], held_ms=held_ms))
            for name in names:
                finished = (await trainer.end(name)).finished
                assert finished.generation == 1, trainer.ends[name]
                assert finished.reason == pb.FINISH_REASON_MAX_TURNS
                joined, unread = finished.calls
                assert (joined.key, joined.outcome) == (f"run/{name}/0/0/0", tool_pb2.OUTCOME_OK)
                assert joined.attempts == 1
                # The second turn was sampled by the new generation, and no turn follows that could read its call.
                assert (unread.key, unread.outcome) == (f"run/{name}/1/1/0", tool_pb2.OUTCOME_CANCELLED)
                columns = Columns.unpack(trainer.snapshots[name].segments)
                before = Columns.unpack(held[name].segments)
                assert [s.kind for s in columns.segments] == [PROMPT, MODEL, TOOL, MODEL]
                assert list(columns.ids)[: len(before)] == list(before.ids)
                assert list(columns.logprobs)[: len(before.logprobs)] == list(before.logprobs)
                assert columns.model_tokens() == sum(columns.loss_mask()) == 2 * calling_model.TURN_TOKENS
    assert sorted(starts.read_text().split()) == sorted(f"run/{name}/0/0/0" for name in names)
