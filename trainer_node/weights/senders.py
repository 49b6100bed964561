"""The data plane of the trainer: rank 0 of the transfer group, over gloo or vLLM's packed NCCL.

Blocking; one thread at a time. Invariants: what was declared (`metas`) is what is sent, in order, or the send fails
before a wrong byte leaves; the digest of a tensor is taken from the tensor itself, before it is packed.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from fermata.v1 import weights_pb2 as pb

from node_runtime import weight_wire
from node_runtime.weight_wire import Deadline, GlooGroup, TensorMeta

NamedTensors = Iterable[tuple[str, torch.Tensor]]
NCCL_BUFFERS = 2


class Sender(Protocol):
    """Made per generation of the group."""

    backend: pb.TransferBackend.ValueType
    host: str
    port: int
    bucket_bytes: int
    buffers: int

    def join(self, world_size: int, timeout_s: float) -> None: ...
    def send(self, metas: Sequence[TensorMeta], tensors: NamedTensors, timeout_s: float) -> list[bytes]: ...
    def close(self) -> None: ...


class GlooSender:
    """Broadcasts packed buckets over TCP."""

    backend = pb.TRANSFER_BACKEND_GLOO
    buffers = 1

    def __init__(self, host: str, *, bucket_bytes: int = weight_wire.DEFAULT_BUCKET_BYTES, timeout_s: float = 30.0):
        self.host = host
        self.bucket_bytes = bucket_bytes
        # The server is nobody's client: closing it ends every rendezvous that still waits, ours too.
        self._server = weight_wire.open_store(host, 0, master=True, timeout_s=timeout_s)
        self.port = int(self._server.port)
        self._group: GlooGroup | None = None

    def join(self, world_size: int, timeout_s: float) -> None:
        store = weight_wire.open_store(self.host, self.port, master=False, timeout_s=timeout_s)
        self._group = GlooGroup.join(store, self.host, self.port, rank=0, size=world_size, timeout_s=timeout_s)

    def send(self, metas: Sequence[TensorMeta], tensors: NamedTensors, timeout_s: float) -> list[bytes]:
        """Sends all tensors; their digests, in order. TimeoutError or RuntimeError break the group."""
        if self._group is None:
            raise RuntimeError("the sender is in no transfer group: join comes before send")
        deadline = Deadline(timeout_s)
        stream = declared(metas, tensors)
        digests: list[bytes] = []
        for bucket in weight_wire.plan_buckets((meta.nbytes for meta in metas), self.bucket_bytes):
            members = [next(stream) for _ in bucket.offsets]
            digests += weight_wire.digests_of(members)
            buffer = weight_wire.pack(bucket, members)
            self._group.broadcast(buffer, deadline.left(f"the tensors from {metas[bucket.first].name!r} on"))
        if next(stream, None) is not None:
            raise ValueError("more tensors came than were declared")
        return digests

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        self._server = None


class NcclSender:
    """Broadcasts with vLLM's packed NCCL producer, which its workers' NCCL engine takes apart. Needs a GPU and vLLM."""

    backend = pb.TRANSFER_BACKEND_NCCL
    buffers = NCCL_BUFFERS

    def __init__(self, host: str, device: int, *, bucket_bytes: int = weight_wire.DEFAULT_BUCKET_BYTES):
        self.host = host
        self.bucket_bytes = bucket_bytes
        self._device = device
        with socket.create_server((host, 0)) as free:
            self.port = int(free.getsockname()[1])
        self._group: Any = None

    def join(self, world_size: int, timeout_s: float) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        torch.accelerator.set_device_index(self._device)  # the current device is a thread's own
        self._group = trainer_init({"master_address": self.host, "master_port": self.port, "world_size": world_size})

    def send(self, metas: Sequence[TensorMeta], tensors: NamedTensors, timeout_s: float) -> list[bytes]:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.accelerator.set_device_index(self._device)
        digests: list[bytes] = []

        def noted(item: tuple[str, torch.Tensor]) -> torch.Tensor:
            digests.append(weight_wire.digest_of(item[1]))
            return item[1]

        pairs = ((meta.name, tensor) for meta, tensor in zip(metas, declared(metas, tensors), strict=True))
        packed_nccl_broadcast_producer(
            iterator=pairs,
            group=self._group,
            src=0,
            post_iter_func=noted,
            buffer_size_bytes=self.bucket_bytes,
            num_buffers=self.buffers,
        )
        return digests

    def close(self) -> None:
        """Aborts the communicator: a broadcast that waits for a dead worker returns."""
        if self._group is not None:
            self._group.destroy()
            self._group = None


def materialise(tensor: torch.Tensor) -> torch.Tensor:
    """A whole local tensor: an FSDP shard is gathered, which every rank must do in the same order."""
    gather = getattr(tensor, "full_tensor", None)
    return (gather() if callable(gather) else tensor).detach()


def metas_of(tensors: NamedTensors) -> list[TensorMeta]:
    """What will be sent; gathers nothing."""
    return [weight_wire.meta_of(name, tensor) for name, tensor in tensors]


def declared(metas: Sequence[TensorMeta], tensors: NamedTensors) -> Iterator[torch.Tensor]:
    """The tensors, each checked against what was declared: a difference would shift every byte after it."""
    count = 0
    for name, tensor in tensors:
        whole = materialise(tensor)
        if count >= len(metas) or weight_wire.meta_of(name, whole) != metas[count]:
            said = metas[count] if count < len(metas) else "nothing more"
            raise ValueError(
                f"tensor {count} is {weight_wire.meta_of(name, whole)}, but {said} was declared: "
                "named_tensors must give the same tensors each time"
            )
        count += 1
        yield whole
    if count != len(metas):
        raise ValueError(f"{count} tensors came, {len(metas)} were declared")
