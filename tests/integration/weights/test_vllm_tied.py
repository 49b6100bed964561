"""Weight sync on a real vLLM engine with tied embeddings: the head keeps a packed copy that a reload passes by."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fermata.v1 import weights_pb2 as pb

from rollout_node.engine import EngineError
from tests.integration.weights.harness import Node, running_node
from tests.support import bitflip, tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        spec = tiny_model.TinyModel(tied=True, seed=1)
        async with running_node(tmp_path_factory.mktemp("tied"), spec, serve_before_sync=True) as running:
            yield running


async def test_the_folders_own_weights_are_served_where_asked_for(node: Node) -> None:
    assert node.engine.serving
    assert await node.greedy() == node.expected()
    assert (await node.stub.Status(pb.StatusRequest(verify=True))).unchanged


async def test_greedy_tokens_equal_transformers_after_each_sync(node: Node) -> None:
    before = await node.greedy()
    for seed in (21, 22):
        tiny_model.randomise(node.model, seed)
        await node.restore()
        after = await node.greedy()
        assert after != before
        assert after == node.expected()
        before = after


async def test_a_head_that_was_not_packed_again_fails_its_proof(node: Node) -> None:
    """What vLLM alone would do: right bytes received, and another model served."""
    await node.engine.collective(bitflip.disable_repacking)
    tiny_model.randomise(node.model, 23)
    report = await node.push()
    proof = report.nodes["node"].proof
    assert proof is not None
    assert proof.received_equal
    assert "the packed copy in lm_head differs from its weight" in report.failed["node"]
    assert not node.engine.serving
    await node.engine.collective(bitflip.enable_repacking)
    await node.restore()
    assert await node.greedy() == node.expected()


async def test_a_bit_flipped_in_the_packed_head_is_caught(node: Node) -> None:
    await node.engine.collective(bitflip.flip_packed_head)
    status = await node.stub.Status(pb.StatusRequest(verify=True))
    assert not status.unchanged
    assert not status.serving
    with pytest.raises(EngineError, match="tampered with"):
        await node.greedy()
    await node.restore()
    assert await node.greedy() == node.expected()
