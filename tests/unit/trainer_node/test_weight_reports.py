"""What a push came to, shards compared between nodes, and tensors checked against what was declared."""

from __future__ import annotations

import pytest
import torch
from fermata.v1 import weights_pb2 as pb

from trainer_node.pusher import to_proof
from trainer_node.weights import NodeReport, SyncReport, senders
from trainer_node.weights.report import differing_shards


def proof(*shards: tuple[str, bytes], **fields: object) -> pb.Proof:
    listed = [pb.ShardDigest(worker=i, layout_fingerprint=at, digest=d) for i, (at, d) in enumerate(shards)]
    return pb.Proof(shards=listed, **fields)  # type: ignore[arg-type]


def test_equal_layouts_must_have_equal_bytes() -> None:
    same = {"a": proof(("l", b"1")), "b": proof(("l", b"1")), "c": proof(("other", b"2"))}
    assert differing_shards(same) == {}
    assert set(differing_shards({**same, "d": proof(("l", b"9"))})) == {"d"}
    assert set(differing_shards({"a": proof(("l", b"1")), "d": proof(("l", b"9"))})) == {"a", "d"}


def test_shards_of_different_workers_are_not_compared() -> None:
    assert differing_shards({"a": proof(("l", b"1"), ("l", b"2"))}) == {}


def test_a_report_sums_over_its_nodes() -> None:
    good = proof(received_equal=True, probe_max_diff=0.5, probe_mean_diff=0.1, probe_tokens=10, holds=True)
    bad = proof(received_equal=False, probe_max_diff=0.7, probe_mean_diff=0.4, probe_tokens=5)
    report = SyncReport(pb.WeightVersion(number=1))
    assert not report.holds
    report.nodes["a"] = NodeReport("a", holds=True, proof=good, tensors=7)
    assert report.holds
    report.nodes["b"] = NodeReport("b", proof=bad, tensors=7, error="b fails")
    report.nodes["c"] = NodeReport("c", reached=False, error="c is gone")
    assert not report.holds
    assert report.failed == {"b": "b fails", "c": "c is gone"}
    assert report.digests_verified == 7
    assert report.probe_max_diff == 0.7
    assert report.probe_mean_diff == pytest.approx(0.2)


def test_tensors_must_be_those_that_were_declared() -> None:
    tensors = [("a", torch.ones(2)), ("b", torch.ones(3))]
    metas = senders.metas_of(tensors)
    assert [t.numel() for t in senders.declared(metas, tensors)] == [2, 3]
    with pytest.raises(ValueError, match="1 tensors came, 2 were declared"):
        list(senders.declared(metas, tensors[:1]))
    with pytest.raises(ValueError, match="tensor 0"):
        list(senders.declared(metas, tensors[::-1]))
    with pytest.raises(ValueError, match="nothing more was declared"):
        list(senders.declared(metas, [*tensors, ("c", torch.ones(1))]))


@pytest.mark.parametrize(
    ("report", "reached"),
    [
        (NodeReport("n", error="n answered Start: its engine has ended"), False),
        (NodeReport("n", reached=False, error="n did not answer Start"), False),
        (NodeReport("n", error="n answered Finish: w: other bytes", proof=proof(received_mismatch=["w"])), True),
        (NodeReport("n", holds=True, proof=proof(received_equal=True, holds=True), tensors=3), True),
    ],
)
def test_only_a_proof_that_was_made_can_speak_against_a_node(report: NodeReport, reached: bool) -> None:
    made = to_proof(report)
    assert made.reached is reached
    assert made.holds is report.holds
    assert made.detail == report.error
