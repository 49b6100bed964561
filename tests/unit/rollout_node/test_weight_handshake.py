"""From the contract's messages to the engines' own handshakes."""

from __future__ import annotations

from array import array

import pytest
from fermata.v1 import weights_pb2 as pb

from rollout_node.weights import handshake


def init(**fields: object) -> pb.InitRequest:
    values: dict[str, object] = {
        "backend": pb.TRANSFER_BACKEND_GLOO,
        "rendezvous_address": "10.0.0.1",
        "rendezvous_port": 4000,
        "world_size": 5,
        "rank_offset": 3,
        "packed": True,
        "packed_buffer_bytes": 1024,
        "packed_buffers": 2,
    }
    return pb.InitRequest(**{**values, **fields})  # type: ignore[arg-type]


def test_gloo_init_info() -> None:
    assert handshake.refuse(init(), 2, ("gloo",)) is None
    assert handshake.init_info(init(), timeout_s=7.0) == (
        "gloo",
        {
            "master_address": "10.0.0.1",
            "master_port": 4000,
            "rank_offset": 3,
            "world_size": 5,
            "timeout_s": 7.0,
            "bucket_bytes": 1024,
        },
    )


def test_nccl_init_info_says_what_the_message_says() -> None:
    request = init(backend=pb.TRANSFER_BACKEND_NCCL)
    assert handshake.refuse(request, 2, ("nccl", "gloo")) is None
    assert handshake.init_info(request, timeout_s=7.0) == (
        "nccl",
        {
            "master_address": "10.0.0.1",
            "master_port": 4000,
            "rank_offset": 3,
            "world_size": 5,
            "packed": True,
            "packed_buffer_size_bytes": 1024,
            "packed_num_buffers": 2,
        },
    )


def test_engine_init_json_adds_but_does_not_override() -> None:
    request = init(engine_init_json=b'{"bucket_bytes": 7, "master_port": 1, "more": 2}', packed_buffer_bytes=0)
    _, info = handshake.init_info(request, timeout_s=1.0)
    assert (info["bucket_bytes"], info["master_port"], info["more"]) == (7, 4000, 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"backend": pb.TRANSFER_BACKEND_NCCL}, "TRANSFER_BACKEND_NCCL is not to be had on this node: it has gloo"),
        ({"backend": pb.TRANSFER_BACKEND_UNSPECIFIED}, "is not to be had"),
        ({"rendezvous_address": ""}, "no rendezvous"),
        ({"rendezvous_port": 0}, "no rendezvous"),
        ({"rank_offset": 0}, "do not fit a world of 5"),
        ({"rank_offset": 4}, "2 workers from rank 4 on do not fit a world of 5"),
        ({"tensor_parallel_size": 4}, "the trainer expects 4 workers"),
        ({"engine_init_json": b"{"}, "is no JSON"),
        ({"engine_init_json": b"[]"}, "must be a JSON object"),
    ],
)
def test_inits_that_cannot_be_followed(fields: dict[str, object], words: str) -> None:
    assert words in (handshake.refuse(init(**fields), 2, ("gloo",)) or "")


def test_tensors_become_the_engines_lists() -> None:
    tensors = [pb.TensorMeta(name="a", dtype="float32", shape=[2, 3]), pb.TensorMeta(name="b", dtype="bfloat16")]
    assert handshake.refuse_tensors(tensors) is None
    assert handshake.update_info(tensors) == {
        "names": ["a", "b"],
        "dtype_names": ["float32", "bfloat16"],
        "shapes": [[2, 3], []],
    }
    assert "no tensors" in (handshake.refuse_tensors([]) or "")


def test_a_finish_must_be_able_to_prove_something() -> None:
    probe = pb.Probe(token_ids=array("i", [1, 2]).tobytes(), logprobs=array("f", [-1]).tobytes())
    digest = pb.TensorDigest(name="a", digest=b"1" * 32)
    assert handshake.refuse_finish(pb.FinishRequest(digests=[digest], probes=[probe])) is None
    assert "no digests" in (handshake.refuse_finish(pb.FinishRequest(probes=[probe])) or "")
    assert "no probes" in (handshake.refuse_finish(pb.FinishRequest(digests=[digest])) or "")
    nan = pb.FinishRequest(digests=[digest], probes=[probe], probe_tolerance=float("nan"))
    assert "probe_tolerance" in (handshake.refuse_finish(nan) or "")
    bad = pb.FinishRequest(digests=[digest], probes=[pb.Probe(token_ids=b"1")])
    assert "probe 0" in (handshake.refuse_finish(bad) or "")
