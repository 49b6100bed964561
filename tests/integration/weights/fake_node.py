"""A rollout node's side of a weight sync without an engine: the real service, transfer group and digests, no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import torch
from fermata.v1 import tool_pb2, weights_pb2_grpc
from fermata.v1 import weights_pb2 as pb

from node_runtime import weight_wire
from rollout_node.weights import handshake, proof
from rollout_node.weights.gloo import GlooUpdateInfo
from rollout_node.weights.state import SyncState

OK = pb.SyncStatus(outcome=tool_pb2.OUTCOME_OK)


class FakeNode(weights_pb2_grpc.WeightSyncServiceServicer):
    """Keeps what it received in `tensors`. `misbehave`: step name -> "hang" | "die" | "refuse"."""

    def __init__(self, name: str, **misbehave: str) -> None:
        self.name = name
        self.misbehave = misbehave
        self.state = SyncState()
        self.tensors: dict[str, torch.Tensor] = {}
        self.received: list[tuple[str, bytes]] = []
        self.shard = b"same"
        self.calls: list[str] = []
        self.dead = False  # as a process that was killed: every call is refused
        self.channel: Any = None
        self.server: Any = None
        self._group: weight_wire.GlooGroup | None = None

    async def _step(self, name: str, context: Any) -> None:
        self.calls.append(name)
        if self.misbehave.get(name) == "die":
            self.dead = True
            self.close_group()
        if self.dead:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection refused")
        if self.misbehave.get(name) == "hang":
            await asyncio.Event().wait()

    def _refused(self, name: str) -> pb.SyncStatus | None:
        if self.misbehave.get(name) != "refuse":
            return None
        return pb.SyncStatus(outcome=tool_pb2.OUTCOME_INTERNAL, detail=f"{self.name} does not want to")

    def close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        await self._step("Status", context)
        return pb.StatusResponse(status=OK, workers=1, backends=["gloo"], group_generation=self.state.group_generation)

    async def Init(self, request: pb.InitRequest, context: Any) -> pb.InitResponse:
        await self._step("Init", context)
        if (problem := self.state.refuse_init(request.context)) is not None:
            return pb.InitResponse(status=pb.SyncStatus(outcome=tool_pb2.OUTCOME_PROTOCOL, detail=problem))
        _, info = handshake.init_info(request, timeout_s=request.context.deadline_ms / 1000)
        host, port, limit = info["master_address"], info["master_port"], info["timeout_s"]

        def join() -> weight_wire.GlooGroup:
            store = weight_wire.open_store(host, port, master=False, timeout_s=limit)
            return weight_wire.GlooGroup.join(
                store, host, port, rank=info["rank_offset"], size=info["world_size"], timeout_s=limit
            )

        try:
            self._group = await asyncio.to_thread(join)
        except RuntimeError as error:
            return pb.InitResponse(status=pb.SyncStatus(outcome=tool_pb2.OUTCOME_INTERNAL, detail=str(error)))
        self.bucket_bytes = info["bucket_bytes"]
        self.state.joined(request.context)
        return pb.InitResponse(status=OK, workers=1)

    async def Start(self, request: pb.StartRequest, context: Any) -> pb.StartResponse:
        await self._step("Start", context)
        if (problem := self.state.refuse_start(request)) is not None:
            return pb.StartResponse(status=pb.SyncStatus(outcome=tool_pb2.OUTCOME_PROTOCOL, detail=problem))
        if (status := self._refused("Start")) is not None:
            return pb.StartResponse(status=status)
        self.state.start(request)
        self.received = []
        return pb.StartResponse(status=OK)

    async def Update(self, request: pb.UpdateRequest, context: Any) -> pb.UpdateResponse:
        await self._step("Update", context)
        info = GlooUpdateInfo(**handshake.update_info(request.tensors))
        group = self._group
        assert group is not None
        self.state.updating()

        def receive() -> None:
            metas = info.metas()
            for bucket in weight_wire.plan_buckets((m.nbytes for m in metas), self.bucket_bytes):
                buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
                group.broadcast(buffer, request.context.deadline_ms / 1000)
                pairs = list(
                    weight_wire.unpack(bucket, metas[bucket.first : bucket.first + len(bucket.offsets)], buffer)
                )
                self.tensors.update(pairs)
                self.received += [(name, weight_wire.digest_of(tensor)) for name, tensor in pairs]

        try:
            await asyncio.to_thread(receive)
        except RuntimeError as error:
            self.state.given_up(touched=True)
            return pb.UpdateResponse(status=pb.SyncStatus(outcome=tool_pb2.OUTCOME_INTERNAL, detail=str(error)))
        return pb.UpdateResponse(status=OK)

    async def Finish(self, request: pb.FinishRequest, context: Any) -> pb.FinishResponse:
        await self._step("Finish", context)
        sent = [(d.name, d.digest) for d in request.digests]
        wrong = proof.compare_received(sent, [{"received": self.received, "missing": []}])
        made = pb.Proof(received_equal=not wrong, received_mismatch=wrong, probe_tokens=3, holds=not wrong)
        made.shards.add(worker=0, layout_fingerprint="layout", digest=self.shard)
        if wrong:
            self.state.failed()
        else:
            self.state.proven()
        return pb.FinishResponse(status=OK, proof=made, serving=not wrong)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        await self._step("Abort", context)
        if self.state.syncing is not None:
            self.state.given_up(touched=bool(self.received))
        return pb.AbortResponse(status=OK)

    async def Membership(self, request: pb.MembershipRequest, context: Any) -> pb.MembershipResponse:
        await self._step("Membership", context)
        self.state.left()
        self.close_group()
        return pb.MembershipResponse(status=OK)


@asynccontextmanager
async def fake_nodes(*nodes: FakeNode) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    for node in nodes:
        node.server = grpc.aio.server()
        weights_pb2_grpc.add_WeightSyncServiceServicer_to_server(node, node.server)
        port = node.server.add_insecure_port("127.0.0.1:0")
        await node.server.start()
        node.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    try:
        yield {node.name: node.channel for node in nodes}
    finally:
        for node in nodes:
            node.close_group()
            await node.channel.close()
            await node.server.stop(None)
