"""The rollout client against scripted rollout nodes on real gRPC."""

from __future__ import annotations

import asyncio
import socket

import pytest
from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2

from node_runtime.errors import EXIT_UNAVAILABLE, NodeError
from tests.integration.trainer_node.scripted_node import Script, ScriptedNode
from trainer_node.client import RolloutClient, RolloutFailed

pytestmark = pytest.mark.integration


@pytest.fixture
async def serve():
    nodes: list[ScriptedNode] = []

    async def start(script: Script, *, serving: bool = True) -> ScriptedNode:
        nodes.append(ScriptedNode(script, serving=serving))
        await nodes[-1].start()
        return nodes[-1]

    yield start
    for node in nodes:
        await node.kill()


async def test_a_rollout_gives_its_trajectory_and_what_was_heard_on_the_way(serve):
    gate = asyncio.Event()

    async def park_then_answer(node, start, snapshot):
        node.send(accepted=pb.RunResponse.Accepted(trajectory_id=start.trajectory_id, generation=start.generation))
        columns = node.first_turn()
        node.park(start, columns, key := node.key(start))
        await gate.wait()
        columns.append(pb.SEGMENT_KIND_TOOL, [20], turn=1, call_key=key)
        columns.append(pb.SEGMENT_KIND_MODEL, [30], logprobs=[-0.5], version=node.version, turn=1)
        node.finish(start, columns, "408", keys=[key], seq=2)

    node = await serve(park_then_answer)
    async with RolloutClient([node.address], run_id="run") as client:
        rollout = client.start(
            "What is 12*34?", tools=["calculator"], name="mine", temperature=0.5, context={"seed": "7"}
        )
        parked = await rollout.until("parked")
        assert parked.said.snapshot.pending[0].tool == "calculator"
        assert not rollout.done
        gate.set()
        trajectory = await rollout
    assert trajectory.answer == "408"
    assert [(s.kind, s.start, s.stop, s.turn) for s in trajectory.segments] == [
        (pb.SEGMENT_KIND_PROMPT, 0, 3, 0),
        (pb.SEGMENT_KIND_MODEL, 3, 5, 0),
        (pb.SEGMENT_KIND_TOOL, 5, 6, 1),
        (pb.SEGMENT_KIND_MODEL, 6, 7, 1),
    ]
    assert trajectory.segments[2].call_key == "run/mine-0001/0/0/0"
    assert [heard.kind for heard in rollout.heard] == ["accepted", "parked", "finished"]
    times = [heard.seconds for heard in rollout.heard]
    assert times[0] > 0
    assert times == sorted(times)
    (start,) = node.starts
    assert (start.run_id, start.trajectory_id, list(start.tools)) == ("run", "mine-0001", ["calculator"])
    assert (start.sampling.temperature, start.sampling.logprobs, dict(start.context)) == (0.5, True, {"seed": "7"})
    assert [(m.role, m.parts[0].text) for m in start.messages] == [("user", b"What is 12*34?")]


async def test_a_rollout_that_fails_says_why_and_what_was_heard(serve):
    async def fail(node, start, snapshot):
        node.fail(start, tool_pb2.OUTCOME_INDETERMINATE)

    node = await serve(fail)
    async with RolloutClient([node.address]) as client:
        rollout = client.start("?", name="lost")
        with pytest.raises(RolloutFailed, match=r"rollout lost-0001 was never parked; heard of it: failed"):
            await rollout.until("parked")
        with pytest.raises(RolloutFailed, match=r"rollout lost-0001 failed \(INDETERMINATE\): the tool's host is gone"):
            await rollout


async def test_closing_cancels_what_is_open_at_the_node_too(serve):
    async def hold(node, start, snapshot):
        node.park(start, node.first_turn(), node.key(start))

    node = await serve(hold)
    client = await RolloutClient([node.address]).connect()
    rollout = client.start("?")
    await rollout.until("parked")

    async def end_what_is_cancelled():
        await node.until(lambda: node.cancels)
        node.fail(node.starts[0], tool_pb2.OUTCOME_CANCELLED)

    ending = asyncio.create_task(end_what_is_cancelled())
    await client.close()
    await ending
    assert node.cancels == ["t-0001"]
    with pytest.raises(asyncio.CancelledError):
        await rollout
    await client.close()


async def test_a_node_that_serves_nothing_is_told(serve):
    async def never(node, start, snapshot):
        raise AssertionError("it was given a trajectory")

    node = await serve(never, serving=False)
    with pytest.raises(NodeError, match=f"the rollout node at {node.address} does not serve") as error:
        await RolloutClient([node.address]).connect()
    assert error.value.exit_code == EXIT_UNAVAILABLE


async def test_nobody_there_is_told():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(NodeError, match=r"no rollout node answered within 0.5 s") as error:
        await RolloutClient([f"127.0.0.1:{port}"]).connect(0.5)
    assert error.value.exit_code == EXIT_UNAVAILABLE
