"""A real rollout node (vLLM) with a real gateway and a real backend: what a trainer sees on its stream."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from node_runtime.grpc_channel import open_channel
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.segments import MODEL, PROMPT, TOOL, Columns
from node_runtime.spans import read_spans
from tests.integration.rollout_node import calling_model
from tests.integration.rollout_node.node_world import Process, Trainer, World, start
from tool_gateway.client import CallOptions, Earlier, ToolGateway

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]


class Setup:
    def __init__(self, world: World, gateway: Process, node: Process, folder: Path) -> None:
        self.world, self.gateway, self.node, self.folder = world, gateway, node, folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    folder = tmp_path_factory.mktemp("node")
    model = calling_model.build(folder / "model")
    async with World(folder) as world:
        backend = await world.backend()
        gateway = await world.gateway([backend])
        node = await world.node(
            model, gateway.address, f"runtime.spans_dir={folder / 'spans'}", "rollout.catalogue_wait_s=1"
        )
        yield Setup(world, gateway, node, folder)


async def test_one_held_call_holds_up_nobody_and_goes_on_by_itself(setup: Setup) -> None:
    """With one tool call held for 30 s, 32 others with calls of their own finish meanwhile."""
    async with Trainer(setup.node.address) as trainer:
        began = time.monotonic()
        await trainer.say(start=start("held", order=0, context={"seconds": "30"}))
        await trainer.until(lambda: "held" in trainer.parked())
        for i in range(32):
            await trainer.say(start=start(f"t{i}", order=i + 1))
        for i in range(32):
            finished = (await trainer.end(f"t{i}")).finished
            assert finished.reason == pb.FINISH_REASON_MAX_TURNS
            assert [call.outcome for call in finished.calls] == [tool_pb2.OUTCOME_OK, tool_pb2.OUTCOME_CANCELLED]
        assert time.monotonic() - began < 25
        assert "held" not in trainer.ends
        held = (await trainer.end("held", 60)).finished
        assert time.monotonic() - began >= 30
        assert held.reason == pb.FINISH_REASON_MAX_TURNS
        assert held.tool_wait_us > 29e6
        columns = Columns.unpack(trainer.snapshots["held"].segments)
        assert [s.kind for s in columns.segments] == [PROMPT, MODEL, TOOL, MODEL]
        assert columns.model_tokens() == 2 * calling_model.TURN_TOKENS
        assert sum(columns.loss_mask()) == columns.model_tokens()
        assert all(-0.1 < logprob <= 0 for logprob in columns.logprobs)


async def test_outcomes_follow_the_table(setup: Setup) -> None:
    async with Trainer(setup.node.address, epoch=2) as trainer:
        await trainer.say(start=start("fails", context={"error": "no such file"}))
        await trainer.say(start=start("late", context={"seconds": "60"}, deadline_ms=2500))
        await trainer.say(start=start("unknown", tools=["nope"]))
        await trainer.say(hello=pb.RunRequest.Hello(run_id="run", epoch=2))  # a second one disturbs nothing
        await trainer.say(start=start("cancelled", context={"seconds": "60"}))
        finished = (await trainer.end("fails")).finished
        assert finished.calls[0].outcome == tool_pb2.OUTCOME_TOOL_ERROR
        late = (await trainer.end("late")).failed
        assert late.fault == tool_pb2.FAULT_INFRA
        assert late.outcome in (tool_pb2.OUTCOME_ATTEMPT_TIMEOUT, tool_pb2.OUTCOME_DEADLINE_EXCEEDED)
        rejected = (await trainer.end("unknown")).rejected
        assert "'nope'" in rejected.reason
        assert "work" in rejected.reason
        await trainer.until(lambda: "cancelled" in trainer.parked())
        await trainer.say(cancel=pb.RunRequest.Cancel(trajectory_id="cancelled", reason="test"))
        assert (await trainer.end("cancelled")).failed.fault == tool_pb2.FAULT_CALLER
        # The tool was told: it frees the backend long before its 60 s.
        async with ToolGateway([setup.gateway.address], runtime=RuntimeSettings(), run_id="run", node_id="ask") as ask:
            result = await ask.call(
                key="run/cancelled/0/0/0", tool="work", args_json=b"{}", deadline_s=10,
                options=CallOptions(join_only=True, earlier=Earlier(1.0)),
            )  # fmt: skip
        assert result.outcome == tool_pb2.OUTCOME_CANCELLED


async def test_a_stream_that_comes_back_finds_its_trajectories(setup: Setup) -> None:
    async with Trainer(setup.node.address, epoch=3, acknowledge=False) as trainer:
        await trainer.say(start=start("kept", context={"seconds": "2"}))
        await trainer.until(lambda: "kept" in trainer.parked())
    async with Trainer(setup.node.address, epoch=3) as trainer:
        finished = (await trainer.end("kept")).finished
        assert finished.reason == pb.FINISH_REASON_MAX_TURNS
        assert trainer.snapshots["kept"].total_tokens == len(Columns.unpack(trainer.snapshots["kept"].segments))


async def test_a_trainer_of_a_higher_epoch_takes_the_run_over_and_resumes(setup: Setup) -> None:
    async with Trainer(setup.node.address, epoch=4) as older:
        await older.say(start=start("taken", context={"seconds": "3"}))
        await older.until(lambda: "taken" in older.parked())
        snapshot = older.snapshots["taken"]
        async with Trainer(setup.node.address, epoch=5) as newer:
            await newer.until(lambda: newer.welcome.node_id)
            await asyncio.wait_for(older._reader, 10)
            assert older.error is not None
            assert older.error.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert "epoch 5" in (older.error.details() or "")
            newer.snapshots["taken"] = snapshot
            resume = pb.RunRequest.Resume(start=start("taken", generation=1), snapshot=snapshot, held_ms=100)
            await newer.say(resume=resume)
            finished = (await newer.end("taken")).finished
            assert finished.generation == 1
            assert finished.calls[0].outcome == tool_pb2.OUTCOME_OK
            assert finished.calls[0].key == "run/taken/0/0/0"
        async with Trainer(setup.node.address, epoch=4) as late:
            await asyncio.wait_for(late._reader, 10)
            assert late.error is not None
            assert "epoch 4" in (late.error.details() or "")


async def test_services_metrics_and_spans_are_there(setup: Setup) -> None:
    channel = open_channel(setup.node.address, RuntimeSettings())
    try:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {s.name async for answer in call for s in answer.list_services_response.service}
    finally:
        await channel.close()
    assert {"fermata.v1.RolloutNodeService", "fermata.v1.WeightSyncService", "grpc.health.v1.Health"} <= names
    url = f"http://127.0.0.1:{setup.node.ready['metrics_port']}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
    for name in (
        'fermata_rollout_trajectories{state="parked"}',
        'fermata_rollout_tokens_total{kind="model"}',
        'fermata_rollout_tokens_total{kind="tool"}',
        "fermata_rollout_resume_to_first_token_seconds_bucket",
        "fermata_rollout_weight_version",
        "fermata_rollout_weight_sync_seconds",
        'fermata_rollout_tool_wait_seconds_bucket{le="300.0",tool="work"}',
    ):
        assert name in text
    async with asyncio.timeout(10):
        # Written once a second, by another process.
        while {"queue", "generate", "tool-run"} - {span.kind for span in read_spans(setup.folder / "spans")}:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def test_at_sigterm_a_parked_trajectory_is_handed_over_with_its_call_running(setup: Setup) -> None:
    """The last test of this module: it ends the node."""
    async with Trainer(setup.node.address, epoch=9) as trainer:
        await trainer.say(start=start("moved", context={"seconds": "6"}))
        await trainer.until(lambda: "moved" in trainer.parked())
        code = asyncio.create_task(setup.node.terminate())
        handed = (await trainer.end("moved")).handed_over
        assert await code == 0
        (pending,) = handed.snapshot.pending
        assert pending.key == "run/moved/0/0/0"
        async with ToolGateway(
            [setup.gateway.address], runtime=RuntimeSettings(), run_id="run", node_id="next"
        ) as next_:
            next_.fence("moved", 1, [pending.key])
            earlier = Earlier(pending.age_ms / 1000, pending.instance_id, pending.last_attempt)
            result = await next_.call(
                key=pending.key, tool="work", args_json=pending.args_json, deadline_s=30,
                options=CallOptions(generation=1, earlier=earlier),
            )  # fmt: skip
        assert result.outcome == tool_pb2.OUTCOME_OK
        assert result.attempts == 1
