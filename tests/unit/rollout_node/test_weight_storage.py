"""Digests of the storage served, and the receipt of what arrived, on plain torch modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout_node.weights.receipt import Receipt
from rollout_node.weights.storage import digest_storage, read_out

PARALLEL = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "rank": 0}


class Handler:
    """Hides its weight as vLLM's oneDNN handler does: only products come out."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.n, self.k = weight.shape
        self.hidden = weight.clone()


def packed_linear(weight: torch.Tensor, *, keep: bool) -> torch.nn.Module:
    module = torch.nn.Module()
    handler = Handler(weight)
    module.weight = torch.nn.Parameter(weight.clone() if keep else torch.empty(0, dtype=weight.dtype), False)
    module.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, handler.hidden, bias)
    module.handler = handler
    return module


def test_reading_out_gives_every_weight_exactly() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(70, 300).to(dtype)
        assert torch.equal(read_out(packed_linear(weight, keep=False), 300, 70, dtype), weight)


def test_a_bit_in_hidden_storage_changes_the_digest_and_not_the_layout() -> None:
    module = packed_linear(torch.randn(8, 32), keep=False)
    before = digest_storage(module, PARALLEL)
    assert digest_storage(module, PARALLEL).digest == before.digest
    module.handler.hidden.view(torch.int32)[3, 5] ^= 1
    after = digest_storage(module, PARALLEL)
    assert after.digest != before.digest
    assert after.layout == before.layout
    assert not after.faults


def test_a_packed_copy_that_differs_from_its_weight_is_a_fault() -> None:
    module = packed_linear(torch.randn(8, 32), keep=True)
    assert digest_storage(module, PARALLEL).faults == []
    module.handler.hidden.view(torch.int32)[3, 5] ^= 1
    assert digest_storage(module, PARALLEL).faults == ["the packed copy in the model differs from its weight"]


def test_plain_parameters_buffers_and_derived_tensors_count() -> None:
    module: Any = torch.nn.Linear(4, 4)
    module.register_buffer("scale", torch.ones(2))
    module.W_UV = torch.ones(3)
    digests = {digest_storage(module, PARALLEL).digest}
    for change in (module.weight.data, module.scale, module.W_UV):
        change.view(-1)[0] += 1
        digests.add(digest_storage(module, PARALLEL).digest)
    assert len(digests) == 4


def test_layouts_tell_parallel_sizes_and_shapes_apart() -> None:
    one = digest_storage(torch.nn.Linear(4, 4), PARALLEL).layout
    assert digest_storage(torch.nn.Linear(4, 4), PARALLEL).layout == one
    assert digest_storage(torch.nn.Linear(4, 5), PARALLEL).layout != one
    assert digest_storage(torch.nn.Linear(4, 4), {**PARALLEL, "tensor_parallel_size": 2}).layout != one


class Model(torch.nn.Linear):
    def load_weights(self, pairs: Any) -> set[str]:
        for name, tensor in pairs:
            getattr(self, name).data.copy_(tensor)
        return {name for name, _ in pairs}


def test_a_receipt_digests_what_arrives_and_names_what_did_not() -> None:
    model = Model(2, 2)
    receipt = Receipt(model, complete=True)
    assert not receipt.touched
    assert receipt.missing() == ["bias", "weight"]
    model.load_weights(iter([("weight", torch.ones(2, 2))]))
    assert receipt.touched
    assert [name for name, _ in receipt.digests] == ["weight"]
    assert receipt.missing() == ["bias"]
    receipt.close()
    model.load_weights([("bias", torch.ones(2))])
    assert len(receipt.digests) == 1


def test_a_receipt_is_touched_even_where_loading_fails() -> None:
    model = Model(2, 2)
    receipt = Receipt(model, complete=True)
    with pytest.raises(AttributeError):
        model.load_weights([("no_such", torch.ones(1))])
    assert receipt.touched
    receipt.close()
