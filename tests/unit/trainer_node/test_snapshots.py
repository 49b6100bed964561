import pytest
from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2

from node_runtime.segments import Columns, SegmentError, Version
from trainer_node.snapshots import UNREPORTED, CallTally, SnapshotStore, outcome_name


def columns():
    made = Columns()
    made.append(pb.SEGMENT_KIND_PROMPT, [1, 2])
    made.append(pb.SEGMENT_KIND_MODEL, [3, 4], logprobs=[-1.0, -1.0], version=Version("l", 1))
    return made


def snapshot(made, seq, base=0, **fields):
    tokens = made.segments[base - 1].stop if base else 0
    return pb.Snapshot(
        snapshot_seq=seq,
        base_segments=base,
        base_tokens=tokens,
        segments=made.pack(base),
        total_tokens=len(made),
        **fields,
    )


def pending(key, result=None):
    call = pb.PendingCall(key=key, tool="calculator")
    if result is not None:
        call.result.outcome = result
    return call


def summary(key, outcome=tool_pb2.OUTCOME_OK):
    return pb.CallSummary(key=key, tool="calculator", outcome=outcome)


def test_deltas_are_merged_and_the_whole_is_held():
    store, made = SnapshotStore(), columns()
    store.take("t", snapshot(made, 1), 1.0)
    made.append(pb.SEGMENT_KIND_TOOL, [5], call_key="k")
    store.take("t", snapshot(made, 2, base=2), 2.0)
    held = store.get("t")
    assert held.since == 2.0
    assert list(Columns.unpack(held.snapshot.segments).ids) == [1, 2, 3, 4, 5]
    assert held.snapshot.base_segments == 0
    store.drop("t")
    assert store.get("t") is None
    assert len(store) == 0


def test_a_delta_on_what_is_not_held_is_refused():
    made = columns()
    with pytest.raises(SegmentError):
        SnapshotStore().take("t", snapshot(made, 2, base=1), 1.0)


def test_each_key_counts_once_with_its_first_outcome():
    tally = CallTally()
    tally.seen("t", pb.Snapshot(pending=[pending("k1"), pending("k2")]))
    tally.ended("t", [summary("k1"), summary("k2", tool_pb2.OUTCOME_TOOL_ERROR)])
    tally.ended("t", [summary("k1", tool_pb2.OUTCOME_CANCELLED), summary("k3")])
    tally.close("t", None)
    assert tally.by_outcome == {"OK": 2, "TOOL_ERROR": 1}
    assert tally.by_tool["calculator", "OK"] == 2
    assert tally.lost_total == 0


def test_a_dispatched_call_without_outcome_is_lost():
    tally = CallTally()
    tally.seen("t", pb.Snapshot(pending=[pending("k1"), pending("k2")]))
    tally.ended("t", [summary("k1"), summary("k2", tool_pb2.OUTCOME_UNSPECIFIED)])
    tally.close("t", None)
    assert (tally.lost_total, tally.lost) == (1, ["k2"])
    tally.close("t", None)
    assert tally.lost_total == 1


def test_an_answer_in_the_tokens_or_in_a_snapshot_is_an_outcome():
    tally = CallTally()
    tally.seen("t", pb.Snapshot(pending=[pending("k1", tool_pb2.OUTCOME_OK), pending("k2")]))
    made = columns()
    made.append(pb.SEGMENT_KIND_TOOL, [5], call_key="k2")
    tally.close("t", snapshot(made, 1))
    assert tally.by_outcome == {"OK": 1, UNREPORTED: 1}
    assert tally.lost_total == 0


def test_lost_keys_are_bounded_and_their_number_is_not():
    tally = CallTally()
    tally.seen("t", pb.Snapshot(pending=[pending(f"k{i}") for i in range(300)]))
    tally.close("t", None)
    assert (tally.lost_total, len(tally.lost)) == (300, 100)


def test_outcomes_by_name_known_or_not():
    assert outcome_name(tool_pb2.OUTCOME_TOOL_ERROR) == "TOOL_ERROR"
    assert outcome_name(99) == "OUTCOME_99"
