"""What trainer and rollout workers share of the weight transfer: bytes, digests, buckets, the gloo group.

Imports torch (nothing imports it by default). Invariants: both sides plan the same buckets from the same metadata, so
no lengths travel; a digest is SHA-256 over a tensor's contiguous little-endian bytes, whatever device it is on; every
collective has its own timeout, after which the group is broken and must be made anew.
"""

from __future__ import annotations

import hashlib
import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

# Start of each tensor in a bucket: a view as any dtype needs its alignment.
ALIGN: Final = 16
DEFAULT_BUCKET_BYTES: Final = 256 * 2**20
# Its stubs leave out what is built in C++.
dist: Any = torch.distributed


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Name, torch dtype name ("float32") and shape, as the wire carries them."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"tensor {self.name!r} has dtype {self.dtype!r}: torch has no such dtype")
        return dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a flat uint8 tensor on its own device (a view where the tensor is contiguous)."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digest_of(tensor: torch.Tensor) -> bytes:
    """SHA-256 of the tensor's bytes."""
    # A memoryview of numpy's view: no copy, and hashlib releases the GIL for it.
    flat: Any = tensor_bytes(tensor).cpu().numpy()
    return hashlib.sha256(memoryview(flat)).digest()


def digests_of(tensors: Sequence[torch.Tensor], threads: int = 4) -> list[bytes]:
    """Digests of many tensors, side by side where it pays."""
    if threads < 2 or sum(t.numel() * t.element_size() for t in tensors) < 2**24:
        return [digest_of(tensor) for tensor in tensors]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(digest_of, tensors))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some consecutive tensors, and where each begins in one packed buffer."""

    first: int  # index of the first tensor
    offsets: tuple[int, ...]
    nbytes: int


def plan_buckets(sizes: Iterable[int], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> list[Bucket]:
    """Cuts tensor sizes, in order, into buckets of at most `bucket_bytes`, or of one tensor where it is larger."""
    buckets: list[Bucket] = []
    offsets: list[int] = []
    end = first = 0
    for index, size in enumerate(sizes):
        begin = -(-end // ALIGN) * ALIGN
        if offsets and begin + size > bucket_bytes:
            buckets.append(Bucket(first, tuple(offsets), end))
            offsets, first, begin = [], index, 0
        offsets.append(begin)
        end = begin + size
    if offsets:
        buckets.append(Bucket(first, tuple(offsets), end))
    return buckets


def pack(bucket: Bucket, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat uint8 CPU tensor that holds the bucket's tensors; gaps are zero."""
    buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    for offset, tensor in zip(bucket.offsets, tensors, strict=True):
        flat = tensor_bytes(tensor)
        buffer[offset : offset + flat.numel()].copy_(flat)
    return buffer


def unpack(bucket: Bucket, metas: Sequence[TensorMeta], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The bucket's tensors as views of the buffer."""
    for offset, meta in zip(bucket.offsets, metas, strict=True):
        flat = buffer[offset : offset + meta.nbytes]
        yield meta.name, flat.view(meta.torch_dtype).reshape(meta.shape)


def local_address_towards(host: str, port: int) -> str:
    """The address of this machine that the route to `host` starts from. Sends nothing."""
    family, kind, _proto, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class GlooGroup:
    """A gloo process group of its own, beside torch's default group. Blocking; use it from one thread at a time."""

    def __init__(self, store: Any, group: Any, rank: int, size: int) -> None:
        self._store = store
        self._group = group
        self.rank = rank
        self.size = size

    @classmethod
    def join(
        cls, store: Any, host: str, port: int, *, rank: int, size: int, timeout_s: float, name: str = "weights"
    ) -> GlooGroup:
        """Joins at the store of rank 0 (`open_store`). Blocks until all are there; RuntimeError after the timeout."""
        limit = timedelta(seconds=max(0.001, timeout_s))
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_address_towards(host, port))]
        options._timeout = limit
        store.set_timeout(limit)
        group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)
        return cls(store, group, rank, size)

    def broadcast(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """From rank 0 to all, in place. RuntimeError when a peer is gone or the timeout has passed."""
        limit = timedelta(seconds=max(0.001, timeout_s))
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = limit
        self._group.broadcast([buffer], options).wait(limit)

    def close(self) -> None:
        """Cuts the connections; peers that wait in a collective fail at once."""
        self._group = None
        self._store = None


def open_store(host: str, port: int, *, master: bool, timeout_s: float) -> Any:
    """The rendezvous store: rank 0 opens it (port 0: a free one, see `.port`), the others connect."""
    return dist.TCPStore(
        host, port, None, master, timedelta(seconds=max(0.001, timeout_s)), wait_for_workers=False, use_libuv=True
    )


class Deadline:
    """A point in time that blocking steps share."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self, what: str) -> float:
        """Seconds left; TimeoutError naming the step where none are."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no time was left for {what}")
        return left


class Background:
    """Runs one blocking call in a daemon thread that nobody has to wait for (a rendezvous with a peer that died)."""

    def __init__(self, call: Any, name: str) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(call,), name=name, daemon=True)
        self._thread.start()

    def _run(self, call: Any) -> None:
        try:
            self.result = call()
        except BaseException as error:  # noqa: BLE001  (handed to whoever asks for the result)
            self.error = error
        finally:
            self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()
