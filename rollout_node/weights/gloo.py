"""The gloo weight-transfer engine: vLLM's transfer interface over a TCP group, for workers without NCCL.

Runs inside vLLM's workers. Invariant: the same layerwise life cycle as vLLM's NCCL engine, and no collective without a
timeout, so a trainer that dies leaves the worker free within the time it was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from node_runtime.weight_wire import (
    DEFAULT_BUCKET_BYTES,
    Deadline,
    GlooGroup,
    TensorMeta,
    open_store,
    plan_buckets,
    unpack,
)

DEFAULT_TIMEOUT_S = 60.0


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """The rendezvous: rank 0 (the trainer) listens at the address; this node's workers begin at rank_offset."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The tensors that follow, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(
                f"{len(self.names)} names, {len(self.dtype_names)} dtypes and {len(self.shapes)} shapes: "
                "there must be one of each per tensor"
            )

    def metas(self) -> list[TensorMeta]:
        return [
            TensorMeta(name, dtype, tuple(shape))
            for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True)
        ]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives packed buckets by broadcast from rank 0 and loads them bucket by bucket."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._group: GlooGroup | None = None
        self._bucket_bytes = DEFAULT_BUCKET_BYTES

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Joins the group; blocks until everybody has."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        deadline = Deadline(init_info.timeout_s)
        host, port = init_info.master_address, init_info.master_port
        store = open_store(host, port, master=False, timeout_s=deadline.left("the rendezvous store"))
        self._group = GlooGroup.join(
            store, host, port, rank=rank, size=init_info.world_size, timeout_s=deadline.left("the rendezvous")
        )
        self._bucket_bytes = init_info.bucket_bytes

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        import torch

        if self._group is None:
            raise RuntimeError("this worker is in no transfer group: Init comes before Update")
        deadline = Deadline(update_info.timeout_s)
        metas = update_info.metas()
        for bucket in plan_buckets((meta.nbytes for meta in metas), self._bucket_bytes):
            # A buffer per bucket: the layerwise reload keeps views until a layer is complete.
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            self._group.broadcast(buffer, deadline.left(f"the tensors from {metas[bucket.first].name!r} on"))
            members = metas[bucket.first : bucket.first + len(bucket.offsets)]
            self.model.load_weights([(name, t.to(self.device)) for name, t in unpack(bucket, members, buffer)])

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
