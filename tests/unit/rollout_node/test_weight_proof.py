"""The three parts of the proof, each failing for what it is there to find."""

from __future__ import annotations

import math
from array import array

import pytest
from fermata.v1 import weights_pb2 as pb

from rollout_node.weights import proof

SENT = [("a", b"1" * 32), ("b", b"2" * 32)]


def worker(received: list[tuple[str, bytes]] = SENT, missing: tuple[str, ...] = ()) -> dict[str, object]:
    return {"received": received, "missing": list(missing)}


def test_equal_digests_on_all_workers() -> None:
    assert proof.compare_received(SENT, [worker(), worker()]) == []


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ([worker(), worker([SENT[0], ("b", b"x" * 32)])], "b: other bytes than were sent"),
        ([worker(SENT[:1])], "b: not received"),
        ([worker([*SENT, ("c", b"3" * 32)])], "c: received, but the trainer has no digest of it"),
        ([worker(missing=("lm_head.weight",))], "lm_head.weight: a parameter of the model that was not sent"),
    ],
)
def test_what_differs_is_named(workers: list[dict[str, object]], words: str) -> None:
    assert proof.compare_received(SENT, workers) == [words]


def test_no_digests_prove_nothing() -> None:
    assert proof.compare_received([], [worker([])])
    assert proof.compare_received([SENT[0], SENT[0]], [worker(SENT[:1])])


def test_probes_compare_by_largest_and_mean_difference() -> None:
    worst, mean, tokens = proof.compare_probes([[-1.0, -2.0], [-3.0]], [[-1.0, -2.5], [-3.25]])
    assert (worst, mean, tokens) == (0.5, 0.25, 3)


def test_what_is_no_number_agrees_with_nothing() -> None:
    worst, _, _ = proof.compare_probes([[-1.0, math.nan]], [[-1.0, -2.0]])
    assert not worst <= 1e9
    worst, _, tokens = proof.compare_probes([], [])
    assert tokens == 0
    assert not worst <= 1e9


def test_a_probe_has_one_logprob_fewer_than_tokens() -> None:
    good = pb.Probe(token_ids=array("i", [1, 2, 3]).tobytes(), logprobs=array("f", [-1, -2]).tobytes())
    assert proof.unpack_probe(good) == ([1, 2, 3], [-1.0, -2.0])
    with pytest.raises(ValueError, match="3 tokens and 1 log-probabilities"):
        proof.unpack_probe(pb.Probe(token_ids=good.token_ids, logprobs=array("f", [-1]).tobytes()))
    with pytest.raises(ValueError, match="4 bytes an entry"):
        proof.unpack_probe(pb.Probe(token_ids=b"123", logprobs=b""))


def test_tolerances_by_dtype_and_a_bounded_sentence() -> None:
    assert proof.default_tolerance("float32") < proof.default_tolerance("bfloat16")
    assert proof.default_tolerance("float8_e4m3fn") == proof.default_tolerance("bfloat16")
    text = proof.summary([f"t{i}" for i in range(100)])
    assert text.endswith("t7 and 92 more")
