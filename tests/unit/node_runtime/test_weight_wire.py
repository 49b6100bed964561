"""Bytes, digests and buckets: what both sides of a weight transfer must agree on."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node_runtime import weight_wire
from node_runtime.weight_wire import ALIGN, Deadline, TensorMeta, plan_buckets


@given(sizes=st.lists(st.integers(0, 300), max_size=40), limit=st.integers(1, 400))
def test_buckets_hold_every_tensor_once_in_order_and_aligned(sizes: list[int], limit: int) -> None:
    buckets = plan_buckets(sizes, limit)
    index = 0
    for bucket in buckets:
        assert bucket.first == index
        end = 0
        for offset in bucket.offsets:
            assert offset % ALIGN == 0
            assert offset >= end
            end = offset + sizes[index]
            index += 1
        assert bucket.nbytes == end
        assert end <= limit or len(bucket.offsets) == 1
    assert index == len(sizes)


@settings(max_examples=30)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8),
    dtypes=st.lists(st.sampled_from(["float32", "bfloat16", "float16", "int8", "int64"]), min_size=8, max_size=8),
    limit=st.integers(16, 512),
)
def test_what_is_packed_comes_out_bit_for_bit(shapes: list[list[int]], dtypes: list[str], limit: int) -> None:
    tensors = []
    for shape, dtype in zip(shapes, dtypes, strict=False):
        meta = TensorMeta("t", dtype, tuple(shape))
        raw = torch.randint(0, 256, (meta.nbytes,), dtype=torch.uint8)
        tensors.append(raw.view(meta.torch_dtype).reshape(meta.shape))
    metas = [weight_wire.meta_of(f"t{index}", tensor) for index, tensor in enumerate(tensors)]
    back: list[tuple[str, torch.Tensor]] = []
    for bucket in plan_buckets((meta.nbytes for meta in metas), limit):
        end = bucket.first + len(bucket.offsets)
        buffer = weight_wire.pack(bucket, tensors[bucket.first : end])
        assert buffer.numel() == bucket.nbytes
        back += weight_wire.unpack(bucket, metas[bucket.first : end], buffer)
    assert [name for name, _ in back] == [meta.name for meta in metas]
    assert weight_wire.digests_of([t for _, t in back]) == weight_wire.digests_of(tensors)
    assert [tuple(t.shape) for _, t in back] == [meta.shape for meta in metas]


def test_a_digest_is_of_the_contiguous_bytes() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert weight_wire.digest_of(tensor) == hashlib.sha256(tensor.numpy().tobytes()).digest()
    assert weight_wire.digest_of(tensor.t()) == hashlib.sha256(tensor.t().contiguous().numpy().tobytes()).digest()
    flipped = tensor.clone()
    flipped.view(torch.uint8)[0, 0] ^= 1
    assert weight_wire.digest_of(flipped) != weight_wire.digest_of(tensor)


def test_many_large_tensors_have_the_same_digests_side_by_side() -> None:
    tensors = [torch.randn(2**21) for _ in range(4)]
    assert weight_wire.digests_of(tensors) == [weight_wire.digest_of(tensor) for tensor in tensors]


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="'x' has dtype 'float33'"):
        _ = TensorMeta("x", "float33", (1,)).nbytes


def test_a_deadline_that_has_passed_names_the_step() -> None:
    assert Deadline(5.0).left("it") > 4
    with pytest.raises(TimeoutError, match="no time was left for the rendezvous"):
        Deadline(-1.0).left("the rendezvous")


def test_background_hands_back_result_and_error() -> None:
    fine = weight_wire.Background(lambda: 5, "t")
    bad = weight_wire.Background(lambda: 1 / 0, "t")
    fine._thread.join(5)
    bad._thread.join(5)
    assert (fine.done, fine.result, fine.error) == (True, 5, None)
    assert isinstance(bad.error, ZeroDivisionError)
