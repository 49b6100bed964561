"""A rollout node's engine and weight sync service on a port, and the trainer's model beside it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import torch
from fermata.v1 import weights_pb2 as pb
from fermata.v1 import weights_pb2_grpc

from rollout_node.engine import Delta, Engine, SamplingSpec
from rollout_node.engine_settings import EngineSettings
from rollout_node.weights.service import WeightSyncServicer
from tests.support import tiny_model
from trainer_node.weights import SyncReport, WeightSync, senders

PROMPT = [5, 6, 7, 8]
PROBES = [[5, 6, 7, 8, 9, 30, 31, 32], [100, 101, 102, 103]]
GREEDY = SamplingSpec(max_tokens=40, temperature=0.0)
ABANDON_S = 1.0


@dataclass
class Node:
    """An engine with its sync service, the trainer's model, and a way to push it."""

    engine: Engine
    servicer: WeightSyncServicer
    channel: grpc.aio.Channel
    model: Any
    sync: WeightSync
    number: int = 0
    lineage: str = "test"
    stub: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stub = weights_pb2_grpc.WeightSyncServiceStub(self.channel)

    def next_version(self) -> pb.WeightVersion:
        self.number += 1
        return pb.WeightVersion(lineage=self.lineage, number=self.number)

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter.detach()) for name, parameter in self.model.named_parameters()]

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        values = []
        for row in rows:
            logits = torch.log_softmax(self.model(torch.tensor([list(row)])).logits[0].float(), -1)
            values.append([logits[i, row[i + 1]].item() for i in range(len(row) - 1)])
        return values

    async def push(self, **changes: Any) -> SyncReport:
        arguments: dict[str, Any] = {
            "version": self.next_version(),
            "named_tensors": self.named_tensors,
            "probes": PROBES,
            "probe_logprobs": self.logprobs,
        }
        return await self.sync.push(**{**arguments, **changes})

    async def restore(self) -> None:
        """A full sync of the model as it is: whatever a test broke serves again."""
        report = await self.push()
        assert report.holds, report.failed

    @torch.no_grad()
    def expected(self, count: int = 40) -> list[int]:
        """Greedy tokens by transformers."""
        ids = list(PROMPT)
        for _ in range(count):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(PROMPT) :]

    async def greedy(self, request_id: str = "greedy", spec: SamplingSpec = GREEDY) -> list[int]:
        return [token for delta in await self.deltas(request_id, spec) for token in delta.token_ids]

    async def deltas(self, request_id: str, spec: SamplingSpec) -> list[Delta]:
        return [delta async for delta in self.engine.generate(request_id, PROMPT, spec)]

    def probe_messages(self) -> list[pb.Probe]:
        return [
            pb.Probe(token_ids=array("i", ids).tobytes(), logprobs=array("f", values).tobytes())
            for ids, values in zip(PROBES, self.logprobs(PROBES), strict=True)
        ]


class Trainer:
    """The sender's side by hand, step by step, for what WeightSync would never do."""

    def __init__(self, node: Node, generation: int) -> None:
        self.node = node
        self.generation = generation
        self.sender = senders.GlooSender("127.0.0.1", bucket_bytes=20_000)

    def context(self, version: pb.WeightVersion, deadline_s: float = 20.0) -> pb.SyncContext:
        return pb.SyncContext(version=version, group_generation=self.generation, deadline_ms=int(deadline_s * 1000))

    async def init(self, lineage: str) -> pb.InitResponse:
        request = pb.InitRequest(
            context=self.context(pb.WeightVersion(lineage=lineage)),
            backend=pb.TRANSFER_BACKEND_GLOO,
            rendezvous_address="127.0.0.1",
            rendezvous_port=self.sender.port,
            world_size=2,
            rank_offset=1,
            packed_buffer_bytes=self.sender.bucket_bytes,
        )
        join = asyncio.to_thread(self.sender.join, 2, 20.0)
        _, response = await asyncio.gather(join, self.node.stub.Init(request))
        return response

    def start(self, version: pb.WeightVersion, **fields: Any) -> pb.StartRequest:
        return pb.StartRequest(context=self.context(version), **fields)

    def update(self, version: pb.WeightVersion, deadline_s: float = 20.0) -> pb.UpdateRequest:
        metas = senders.metas_of(self.node.named_tensors())
        return pb.UpdateRequest(
            context=self.context(version, deadline_s),
            tensors=[pb.TensorMeta(name=m.name, dtype=m.dtype, shape=m.shape) for m in metas],
        )


@asynccontextmanager
async def running_node(folder: Path, spec: tiny_model.TinyModel, **settings: Any) -> AsyncIterator[Node]:
    tiny_model.build(folder, spec)
    chosen: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "kv_cache_gib": 0.25,
        "max_model_len": 2048,
        "enforce_eager": True,
        "max_num_seqs": 64,
    }
    engine = await Engine.start(EngineSettings(**{**chosen, **settings}))
    try:
        servicer = WeightSyncServicer(engine, node="node", abandon_after_s=ABANDON_S)
        server = grpc.aio.server()
        weights_pb2_grpc.add_WeightSyncServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        sync = await WeightSync.open({"node": channel}, step_timeout_s=20.0, join_timeout_s=20.0, bucket_bytes=20_000)
        try:
            yield Node(engine, servicer, channel, tiny_model.make_model(spec), sync)
        finally:
            await sync.close()
            await channel.close()
            await servicer.close()
            await server.stop(0)
    finally:
        await engine.close()
