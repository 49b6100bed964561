"""From WeightSync messages to the engines' own handshakes: vLLM's NCCL engine and the gloo engine.

Pure. Invariant: what the contract's fields say goes over the engine's own JSON, and a message an engine cannot take is
refused here in one sentence before any worker is asked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from fermata.v1 import weights_pb2 as pb

from rollout_node.weights import proof

BACKENDS = {pb.TRANSFER_BACKEND_GLOO: "gloo", pb.TRANSFER_BACKEND_NCCL: "nccl"}


def refuse(request: pb.InitRequest, workers: int, backends: Sequence[str]) -> str | None:
    """Why this Init cannot be followed; None if it can."""
    backend = BACKENDS.get(request.backend, "")
    if backend not in backends:
        asked = pb.TransferBackend.Name(request.backend) if request.backend in BACKENDS else f"{request.backend}"
        return f"transfer backend {asked} is not to be had on this node: it has {' and '.join(backends)}"
    if not request.rendezvous_address or not 0 < request.rendezvous_port < 65536:
        return "Init names no rendezvous: an address and a port of the trainer's sender are needed"
    if request.rank_offset < 1 or request.rank_offset + workers > request.world_size:
        return (
            f"{workers} workers from rank {request.rank_offset} on do not fit a world of {request.world_size}: "
            "rank 0 is the sender, and every worker needs a rank of its own"
        )
    sizes = (request.data_parallel_size, request.tensor_parallel_size, request.pipeline_parallel_size)
    expected = math.prod(size or 1 for size in sizes)
    if any(sizes) and expected != workers:
        return f"the trainer expects {expected} workers (dp x tp x pp {sizes}), this node has {workers}"
    if request.engine_init_json:
        try:
            extra = json.loads(request.engine_init_json)
        except ValueError as error:
            return f"engine_init_json is no JSON: {error}"
        if not isinstance(extra, dict):
            return "engine_init_json must be a JSON object of the engine's own init fields"
    return None


def init_info(request: pb.InitRequest, *, timeout_s: float) -> tuple[str, dict[str, Any]]:
    """(backend, the keyword arguments of its init info class)."""
    backend = BACKENDS[request.backend]
    info: dict[str, Any] = json.loads(request.engine_init_json) if request.engine_init_json else {}
    info |= {
        "master_address": request.rendezvous_address,
        "master_port": request.rendezvous_port,
        "rank_offset": request.rank_offset,
        "world_size": request.world_size,
    }
    if backend == "gloo":
        info["timeout_s"] = timeout_s
        if request.packed_buffer_bytes:
            info["bucket_bytes"] = request.packed_buffer_bytes
        return backend, info
    # vLLM: NCCLWeightTransferInitInfo. Its defaults stand where the trainer says nothing.
    info["packed"] = request.packed
    if request.packed_buffer_bytes:
        info["packed_buffer_size_bytes"] = request.packed_buffer_bytes
    if request.packed_buffers:
        info["packed_num_buffers"] = request.packed_buffers
    return backend, info


def refuse_tensors(tensors: Sequence[pb.TensorMeta]) -> str | None:
    if not tensors:
        return "Update names no tensors: name what is broadcast, in order"
    if any(size < 0 for tensor in tensors for size in tensor.shape):
        return "Update names a tensor with a negative size"
    return None


def update_info(tensors: Sequence[pb.TensorMeta]) -> dict[str, Any]:
    """The keyword arguments of both engines' update info classes."""
    return {
        "names": [tensor.name for tensor in tensors],
        "dtype_names": [tensor.dtype for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }


def refuse_finish(request: pb.FinishRequest) -> str | None:
    if request.algorithm not in (pb.DIGEST_ALGORITHM_UNSPECIFIED, pb.DIGEST_ALGORITHM_SHA256):
        return f"digest algorithm {request.algorithm} is not known here: use SHA256"
    if not request.digests:
        return "Finish brings no digests: the proof needs one per tensor sent"
    if not request.probes:
        return "Finish brings no probes: the proof needs at least one"
    if not request.probe_tolerance >= 0:
        return f"probe_tolerance is {request.probe_tolerance}: a difference above 0, or 0 for the node's own, is needed"
    for index, probe in enumerate(request.probes):
        try:
            proof.unpack_probe(probe)
        except ValueError as error:
            return f"probe {index}: {error}"
    return None
