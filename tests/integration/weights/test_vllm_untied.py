"""Weight sync on a real vLLM engine with an untied model: what is served, what is caught, what never freezes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio
import torch
from fermata.v1 import tool_pb2
from fermata.v1 import weights_pb2 as pb

from node_runtime import weight_wire
from rollout_node.engine import EngineError, SamplingSpec
from tests.integration.weights.harness import ABANDON_S, GREEDY, PROBES, PROMPT, Node, Trainer, running_node
from tests.support import bitflip, tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

LONG = SamplingSpec(max_tokens=800, temperature=1.0, seed=3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # lets a test send a function to the worker
        async with running_node(tmp_path_factory.mktemp("untied"), tiny_model.TinyModel()) as running:
            yield running


async def test_a_node_serves_nothing_before_its_first_proven_sync(node: Node) -> None:
    assert not node.engine.serving
    with pytest.raises(EngineError, match="no proven weights yet") as caught:
        await node.greedy()
    assert caught.value.fault == tool_pb2.FAULT_INFRA
    await node.restore()
    assert node.engine.serving


async def test_greedy_tokens_equal_transformers_after_a_sync_that_changes_them(node: Node) -> None:
    before = await node.greedy()
    assert before == node.expected()
    tiny_model.randomise(node.model, 11)
    report = await node.push()
    assert report.holds, report.failed
    assert report.digests_verified == len(node.named_tensors())
    assert report.probe_max_diff < 1e-4
    after = await node.greedy()
    assert after != before
    assert after == node.expected()
    assert {phase for phase, s in report.seconds.items() if s > 0} >= {"start", "transfer", "finish", "total"}


async def test_sampled_logprobs_are_the_trainers(node: Node) -> None:
    spec = SamplingSpec(max_tokens=30, temperature=1.0, seed=5)
    deltas = await node.deltas("lp", spec)
    ids = [token for delta in deltas for token in delta.token_ids]
    (expected,) = node.logprobs([PROMPT + ids])
    sampled = [value for delta in deltas for value in delta.logprobs]
    assert sampled == pytest.approx(expected[len(PROMPT) - 1 :], abs=1e-4)
    assert [t for d in await node.deltas("lp2", spec) for t in d.token_ids] == ids  # the seed decides


async def test_a_stop_token_stays_in_the_ids(node: Node) -> None:
    tokens = node.expected()
    stop = tokens[5]
    deltas = await node.deltas("stop", dataclasses.replace(GREEDY, stop_token_ids=(stop,)))
    ids = [token for delta in deltas for token in delta.token_ids]
    assert ids == tokens[: tokens.index(stop) + 1]
    assert (deltas[-1].finish_reason, deltas[-1].stop_token_kept) == ("stop", True)


async def test_bad_requests_get_one_sentence_and_disturb_nobody(node: Node) -> None:
    for ids in ([], [1] * 5000, [10**6], [3, -1]):
        with pytest.raises(EngineError) as caught:
            async for _ in node.engine.generate("bad", ids, GREEDY):
                pass
        assert caught.value.fault == tool_pb2.FAULT_CALLER
    assert await node.greedy() == node.expected()


async def test_abort_ends_a_request_with_its_last_delta(node: Node) -> None:
    deltas = []
    async for delta in node.engine.generate("ab", PROMPT, LONG):
        deltas.append(delta)
        if len(deltas) == 3:
            await node.engine.abort("ab")
    assert deltas[-1].finish_reason == "abort"
    assert len(deltas) < LONG.max_tokens


async def test_a_closed_iterator_leaves_nothing_in_the_engine(node: Node) -> None:
    stream = node.engine.generate("closed", PROMPT, LONG)
    await anext(stream)
    await stream.aclose()
    assert await node.greedy() == node.expected()
    assert not node.engine._live


async def test_running_requests_go_on_under_the_new_weights_and_say_so(node: Node) -> None:
    old = node.engine.version
    running = asyncio.create_task(node.deltas("kept", LONG))
    await wait_for_tokens(node)
    # Control is answered while generation is busy.
    assert (await node.stub.Status(pb.StatusRequest(), timeout=2)).serving
    tiny_model.randomise(node.model, 12)
    await node.restore()
    deltas = await running
    assert sum(len(delta.token_ids) for delta in deltas) == LONG.max_tokens
    versions = [delta.version for delta in deltas if delta.token_ids]
    assert versions[0] == old
    assert versions[-1] == node.engine.version
    turn = versions.index(node.engine.version)
    assert all(v == old for v in versions[:turn])
    assert all(v == node.engine.version for v in versions[turn:])
    # And the tokens after the turn are the new model's, over KV that it recomputed.
    ids = PROMPT + [t for delta in deltas for t in delta.token_ids]
    (expected,) = node.logprobs([ids])
    new = sum(len(d.token_ids) for d in deltas if d.version == node.engine.version)
    assert new > 50
    tail = [value for delta in deltas for value in delta.logprobs][-new:]
    assert tail == pytest.approx(expected[-new:], abs=1e-3)
    assert not any(delta.kv_kept for delta in deltas)


async def test_kept_kv_is_stamped_and_new_requests_do_not_find_it(node: Node) -> None:
    node.sync._options = dataclasses.replace(node.sync._options, keep_kv=True)
    try:
        await node.greedy("warms the cache")
        running = asyncio.create_task(node.deltas("kept-kv", LONG))
        await wait_for_tokens(node)
        tiny_model.randomise(node.model, 13)
        await node.restore()
        deltas = await running
        stamped = {(delta.version.number, delta.kv_kept) for delta in deltas if delta.token_ids}
        assert stamped == {(node.number - 1, False), (node.number, True)}
        assert await node.greedy() == node.expected()
    finally:
        node.sync._options = dataclasses.replace(node.sync._options, keep_kv=False)
        await node.restore()


async def test_a_bit_flipped_in_transit_is_caught(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = weight_wire.pack

    def flipping(bucket: weight_wire.Bucket, tensors: list[torch.Tensor]) -> torch.Tensor:
        buffer = pack(bucket, tensors)
        if bucket.first > 0:
            buffer[bucket.offsets[0]] ^= 1
        return buffer

    monkeypatch.setattr(weight_wire, "pack", flipping)
    running = asyncio.create_task(node.deltas("cut", LONG))
    await wait_for_tokens(node)
    report = await node.push()
    proof = report.nodes["node"].proof
    assert proof is not None
    assert not report.holds
    assert not proof.received_equal
    assert "other bytes than were sent" in report.failed["node"]
    assert not node.engine.serving
    with pytest.raises(EngineError, match="failed its proof"):
        await running
    with pytest.raises(EngineError, match="failed its proof"):
        await node.greedy()
    monkeypatch.undo()
    await node.restore()
    assert await node.greedy() == node.expected()


async def test_wrong_weights_are_caught_by_the_probes_and_nothing_they_sampled_gets_out(node: Node) -> None:
    old = node.engine.version
    seen = []

    async def watch() -> None:
        async for delta in node.engine.generate("watched", PROMPT, LONG):
            seen.append(delta)

    running = asyncio.create_task(watch())
    await wait_for_tokens(node)
    honest = node.logprobs(PROBES)
    tiny_model.randomise(node.model, 14)  # what is sent; the trainer believes in other weights
    report = await node.push(probe_logprobs=lambda rows: honest)
    proof = report.nodes["node"].proof
    assert proof is not None
    assert proof.received_equal
    assert proof.probe_max_diff > 0.1
    assert not report.holds
    with pytest.raises(EngineError, match="log-probabilities of 10 probe tokens differ"):
        await running
    assert seen
    assert all(delta.version == old for delta in seen)
    assert not node.engine.serving
    await node.restore()
    assert await node.greedy() == node.expected()


async def test_a_bit_flipped_in_the_packed_head_of_a_served_model_is_caught(node: Node) -> None:
    status = await node.stub.Status(pb.StatusRequest(verify=True))
    assert status.unchanged
    assert status.serving
    await node.engine.collective(bitflip.flip_packed_head)
    status = await node.stub.Status(pb.StatusRequest(verify=True))
    assert not status.unchanged
    assert not status.serving
    assert status.phase == pb.SYNC_PHASE_FAILED
    with pytest.raises(EngineError, match="the packed copy in lm_head differs from its weight"):
        await node.greedy()
    await node.restore()
    assert (await node.stub.Status(pb.StatusRequest(verify=True))).unchanged


async def test_a_bit_flipped_in_a_plain_weight_is_caught(node: Node) -> None:
    await node.engine.collective(bitflip.flip_embedding)
    status = await node.stub.Status(pb.StatusRequest(verify=True))
    assert not status.unchanged
    assert not status.serving
    await node.restore()


async def test_a_parameter_that_was_not_sent_is_named(node: Node) -> None:
    report = await node.push(named_tensors=lambda: node.named_tensors()[1:])
    assert "embed_tokens.weight: a parameter of the model that was not sent" in report.failed["node"]
    await node.restore()


async def test_a_tensor_the_model_does_not_have_ends_in_a_sentence(node: Node) -> None:
    report = await node.push(named_tensors=lambda: [*node.named_tensors(), ("model.nonsense.weight", torch.ones(3))])
    assert not report.holds
    assert report.failed["node"]
    await node.restore()
    assert await node.greedy() == node.expected()


async def test_steps_out_of_order_and_old_numbers_are_refused_and_change_nothing(node: Node) -> None:
    generation = node.servicer.state.group_generation
    trainer = Trainer(node, generation)
    version = pb.WeightVersion(lineage=node.lineage, number=node.number + 1)
    old = pb.WeightVersion(lineage=node.lineage, number=node.number - 1)
    answers = [
        await node.stub.Update(trainer.update(version)),
        await node.stub.Finish(
            pb.FinishRequest(
                context=trainer.context(version),
                digests=[pb.TensorDigest(name="a", digest=b"1" * 32)],
                probes=node.probe_messages(),
            )
        ),
        await node.stub.Start(trainer.start(old)),
        await node.stub.Start(trainer.start(version, kind=pb.UPDATE_KIND_LORA)),
    ]
    assert all(answer.status.outcome == tool_pb2.OUTCOME_PROTOCOL for answer in answers)
    assert "older than" in answers[2].status.detail
    assert node.engine.serving
    assert await node.greedy() == node.expected()


async def test_a_trainer_that_goes_silent_after_start_freezes_nothing(node: Node) -> None:
    generation = node.servicer.state.group_generation + 1
    trainer = Trainer(node, generation)
    assert (await trainer.init(node.lineage)).status.outcome == tool_pb2.OUTCOME_OK
    version = pb.WeightVersion(lineage=node.lineage, number=node.number + 1)
    running = asyncio.create_task(node.deltas("silent", LONG))
    await wait_for_tokens(node)
    assert (await node.stub.Start(trainer.start(version))).status.outcome == tool_pb2.OUTCOME_OK
    # No further step comes: the node goes on by itself, on the old version.
    deltas = await asyncio.wait_for(running, ABANDON_S + 30)
    assert sum(len(delta.token_ids) for delta in deltas) == LONG.max_tokens
    assert {delta.version.number for delta in deltas} == {node.number}
    assert node.engine.serving
    trainer.sender.close()


async def test_a_trainer_that_never_sends_costs_its_deadline_and_no_weights(node: Node) -> None:
    generation = node.servicer.state.group_generation + 1
    trainer = Trainer(node, generation)
    await trainer.init(node.lineage)
    version = pb.WeightVersion(lineage=node.lineage, number=node.number + 1)
    await node.stub.Start(trainer.start(version))
    answer = await node.stub.Update(trainer.update(version, deadline_s=1.0))
    assert answer.status.outcome != tool_pb2.OUTCOME_OK
    assert "no tensor was touched" in answer.status.detail
    assert node.engine.serving
    assert await node.greedy() == node.expected()
    trainer.sender.close()


async def test_abort_before_any_tensor_resumes_on_the_old_version(node: Node) -> None:
    trainer = Trainer(node, node.servicer.state.group_generation)
    version = pb.WeightVersion(lineage=node.lineage, number=node.number + 1)
    await node.stub.Start(trainer.start(version))
    answer = await node.stub.Abort(pb.AbortRequest(context=trainer.context(version), reason="changed its mind"))
    assert answer.serving
    assert await node.greedy() == node.expected()
    trainer.sender.close()


async def test_a_trainer_that_dies_between_tensors_leaves_a_node_that_serves_nothing_until_a_full_sync(
    node: Node,
) -> None:
    trainer = Trainer(node, node.servicer.state.group_generation + 1)
    await trainer.init(node.lineage)
    version = node.next_version()
    await node.stub.Start(trainer.start(version))
    update = asyncio.ensure_future(node.stub.Update(trainer.update(version)))
    tensors = node.named_tensors()
    sizes = [weight_wire.meta_of(n, t).nbytes for n, t in tensors]
    first = weight_wire.plan_buckets(sizes, trainer.sender.bucket_bytes)[0]
    group = trainer.sender._group
    assert group is not None
    buffer = weight_wire.pack(first, [t for _, t in tensors[: len(first.offsets)]])
    await asyncio.to_thread(group.broadcast, buffer, 10.0)
    del group
    trainer.sender.close()
    answer = await asyncio.wait_for(update, 30)
    assert "serves nothing until a full sync" in answer.status.detail
    status = await node.stub.Status(pb.StatusRequest())
    assert (status.serving, status.phase) == (False, pb.SYNC_PHASE_FAILED)
    with pytest.raises(EngineError, match="serves nothing"):
        await node.greedy()
    await node.restore()
    assert await node.greedy() == node.expected()


async def test_a_rendezvous_that_nobody_keeps_does_not_stop_generation(node: Node) -> None:
    running = asyncio.create_task(node.deltas("joining", LONG))
    await wait_for_tokens(node)
    trainer = Trainer(node, node.servicer.state.group_generation + 1)
    request = pb.InitRequest(
        context=trainer.context(pb.WeightVersion(lineage=node.lineage), deadline_s=4.0),
        backend=pb.TRANSFER_BACKEND_GLOO,
        rendezvous_address="127.0.0.1",
        rendezvous_port=trainer.sender.port,
        world_size=2,
        rank_offset=1,
    )
    init = asyncio.ensure_future(node.stub.Init(request))
    produced = node.engine.stats().generated_tokens
    done, _ = await asyncio.wait([running, init], return_when=asyncio.FIRST_COMPLETED)
    assert running in done or node.engine.stats().generated_tokens > produced + 50
    answer = await init
    assert answer.status.outcome != tool_pb2.OUTCOME_OK
    assert f"the transfer group at 127.0.0.1:{trainer.sender.port}" in answer.status.detail
    await running
    trainer.sender.close()
    await node.restore()


async def test_a_withdrawn_version_is_served_no_longer(node: Node) -> None:
    trainer = Trainer(node, node.servicer.state.group_generation)
    version = pb.WeightVersion(lineage=node.lineage, number=node.number)
    answer = await node.stub.Abort(pb.AbortRequest(context=trainer.context(version), reason="shards differ"))
    assert not answer.serving
    assert "was withdrawn by the trainer: shards differ" in node.engine.why_not
    trainer.sender.close()
    await node.restore()


async def test_a_new_trainer_takes_over_with_its_own_lineage(node: Node) -> None:
    node.lineage, node.number = "successor", 0
    tiny_model.randomise(node.model, 15)
    await node.restore()
    assert node.engine.version == pb.WeightVersion(lineage="successor", number=1)
    assert await node.greedy() == node.expected()


async def test_leaving_the_group_and_joining_again(node: Node) -> None:
    await node.sync.close()
    assert node.servicer.state.group_lineage is None
    assert node.engine.serving
    await node.restore()


async def test_a_killed_engine_is_noticed_and_close_leaves_no_process(node: Node) -> None:
    children = node.engine._built.processes
    assert len(children) == 2
    seen: list[tuple[bool, str]] = []
    node.engine.on_serving.append(lambda serving, why: seen.append((serving, why)))
    running = asyncio.create_task(node.deltas("dies", LONG))
    await wait_for_tokens(node)
    children[0].kill()  # the core; its worker is left behind
    with pytest.raises(EngineError, match="engine process has ended"):
        await asyncio.wait_for(running, 20)
    assert [serving for serving, _ in seen] == [False]
    assert not (await node.stub.Status(pb.StatusRequest())).serving
    answer = await node.stub.Status(pb.StatusRequest(verify=True))
    assert answer.status.outcome != tool_pb2.OUTCOME_OK
    with pytest.raises(EngineError, match="engine process has ended"):
        await node.greedy()
    await node.engine.close()
    assert not [p for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def wait_for_tokens(node: Node, more: int = 20) -> None:
    """Until generation is under way, seen by a request beside it."""
    begin = node.engine.stats().generated_tokens
    spec = SamplingSpec(max_tokens=64, temperature=0.0)
    async with asyncio.timeout(30):
        async for _ in node.engine.generate("beside", PROMPT, spec):
            if node.engine.stats().generated_tokens >= begin + more:
                break
