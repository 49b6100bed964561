"""Digests of the storage a worker really computes with, packed copies included.

Covered: every parameter and buffer; the tensors vLLM derives from them (absorbed MLA projections); and the packed
weights behind `cpu_linear`. There a packed torch tensor is read as it lies. A oneDNN handler hides its bytes, so its
weights are read out through it: the product with the identity returns each stored weight exactly (one term times 1.0
and zeros), in whatever order it is packed. It costs what a prefill of as many tokens as the layer has inputs costs.

Not covered: padding that no product reads, the sign of a zero, and handles other than these (quantised CPU kernels);
the layout names the latter as opaque, and the probes stand for them.

Invariant: reading changes nothing, and equal layouts with equal digests compute the same products.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from node_runtime.weight_wire import digest_of

# Tensors outside parameters and buffers that forward passes read instead of the weights they come from.
DERIVED = ("W_UK_T", "W_UV", "W_K", "W_V", "W_UK", "_cpu_unpacked_conv_weight")
# Rows of the identity per product: bounds the output to this many rows of a vocabulary.
READ_ROWS = 128


@dataclass
class Storage:
    """Digest and layout of one worker's shard; `faults` names packed copies that differ from their weight."""

    digest: bytes
    layout: str
    tensors: int
    faults: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)


def digest_storage(model: torch.nn.Module, parallel: dict[str, int]) -> Storage:
    """Reads all of the model's storage. `parallel` (sizes and this worker's ranks) becomes part of the layout."""
    total = hashlib.sha256()
    layout: list[list[Any]] = []
    faults: list[str] = []
    opaque: list[str] = []

    def add(name: str, kind: str, tensor: torch.Tensor) -> bytes:
        digest = digest_of(tensor)
        total.update(name.encode() + b"\0" + digest)
        layout.append([name, kind, str(tensor.dtype), list(tensor.shape)])
        return digest

    for name, tensor in _named_tensors(model):
        add(name, "tensor", tensor)
    for name, module in model.named_modules():
        for position, packed in enumerate(_packed(module)):
            label = f"{name}.cpu_linear.{position}"
            if isinstance(packed, torch.Tensor):
                add(label, "packed", packed)
            elif hasattr(packed, "k") and hasattr(packed, "n"):
                weight = getattr(module, "weight", None)
                stored = read_out(module, packed.k, packed.n, _dtype_of(module, model))
                add(label, "onednn", stored)
                # A head keeps its weight beside the packed copy: the two must say the same.
                if weight is not None and weight.shape == stored.shape and not _same(stored, weight.data):
                    faults.append(f"the packed copy in {name or 'the model'} differs from its weight")
            else:
                opaque.append(label)
                layout.append([label, "opaque", type(packed).__name__, []])
    fingerprint = hashlib.sha256(json.dumps([layout, sorted(parallel.items())]).encode()).hexdigest()
    return Storage(total.digest(), fingerprint, len(layout) - len(opaque), faults, opaque)


@torch.no_grad()
def read_out(module: Any, inputs: int, outputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [outputs, inputs] that `module.cpu_linear` multiplies by, bit for bit but for the sign of zeros."""
    stored = torch.empty((inputs, outputs), dtype=dtype)
    for begin in range(0, inputs, READ_ROWS):
        rows = min(READ_ROWS, inputs - begin)
        unit = torch.zeros((rows, inputs), dtype=dtype)
        unit[torch.arange(rows), torch.arange(begin, begin + rows)] = 1
        stored[begin : begin + rows] = module.cpu_linear(unit, getattr(module, "weight", None), None)
    return stored.t().contiguous()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for subnormal numbers, which a kernel may take as zero."""
    tiny = torch.finfo(one.dtype).tiny
    return torch.equal(torch.where(one.abs() < tiny, 0, one), torch.where(other.abs() < tiny, 0, other))


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, module in model.named_modules():
        for attribute in DERIVED:
            value = module.__dict__.get(attribute)
            if isinstance(value, torch.Tensor):
                yield f"{name}.{attribute}", value


def _packed(module: torch.nn.Module) -> list[Any]:
    """What the module's packed product closes over: tensors and handles, not numbers."""
    closure = getattr(getattr(module, "cpu_linear", None), "__closure__", None) or ()
    return [cell.cell_contents for cell in closure if not isinstance(cell.cell_contents, int | float | bool)]


def _dtype_of(module: Any, model: torch.nn.Module) -> torch.dtype:
    weight = getattr(module, "weight", None)
    return weight.dtype if weight is not None else next(model.parameters()).dtype
