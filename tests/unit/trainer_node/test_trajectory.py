from array import array

import pytest
from fermata.v1 import rollout_pb2 as pb

from node_runtime.segments import Columns, SegmentError, Version
from tests.unit.trainer_node.builders import sample, trajectory, version
from trainer_node.trajectory import Trajectory, consume


def finished(columns, **fields):
    snapshot = pb.Snapshot(segments=columns.pack(), total_tokens=len(columns))
    return pb.RunResponse.Finished(trajectory_id="t", generation=2, snapshot=snapshot, **fields)


def test_a_trajectory_is_exactly_what_the_segments_say():
    columns = Columns()
    columns.append(pb.SEGMENT_KIND_PROMPT, [1, 2, 3])
    columns.append(pb.SEGMENT_KIND_MODEL, [4, 5], logprobs=[-0.5, -1.5], version=Version("l", 3), turn=0)
    columns.append(pb.SEGMENT_KIND_TOOL, [6, 7, 8], turn=1, call_key="r/t/0/0/0")
    columns.append(pb.SEGMENT_KIND_MODEL, [9], logprobs=[-0.25], version=Version("l", 5), turn=1)
    last = finished(columns, answer=b"408", tool_wait_us=7, reason=pb.FINISH_REASON_STOP)
    built = Trajectory.of(last, last.snapshot)
    assert built.ids == array("i", range(1, 10))
    assert list(built.mask) == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert list(built.logprobs) == [0, 0, 0, -0.5, -1.5, 0, 0, 0, -0.25]
    assert [(start, stop, stamp.number) for start, stop, stamp in built.versions] == [(3, 5, 3), (8, 9, 5)]
    assert (built.answer, built.turns, built.trained_tokens, built.model_tokens) == ("408", 2, 3, 3)
    assert list(built.made_by(Version("l", 5))) == [0] * 8 + [1]
    assert built.recomputed


def test_kept_kv_is_known():
    columns = Columns()
    columns.append(pb.SEGMENT_KIND_MODEL, [4], logprobs=[-1.0], version=Version("l", 1), kv_mode=pb.KV_MODE_KEPT)
    last = finished(columns)
    assert not Trajectory.of(last, last.snapshot).recomputed


def test_columns_that_contradict_themselves_are_refused():
    segment = pb.Segment(kind=pb.SEGMENT_KIND_MODEL, token_ids=b"\0" * 8, logprobs=b"\0" * 4)
    with pytest.raises(SegmentError):
        Trajectory.of(pb.RunResponse.Finished(), pb.Snapshot(segments=[segment]))


def test_staleness_is_that_of_the_oldest_model_token():
    assert trajectory(versions=[(3, 1), (5, 3)]).staleness(version(6)) == 3
    assert trajectory(versions=[(6, 4)]).staleness(version(6)) == 0
    assert trajectory(lineage="another").staleness(version(6)) is None


def test_age_is_checked_when_consumed_however_young_a_sample_began():
    old, fresh, foreign = sample(versions=[(1, 1), (9, 3)]), sample(versions=[(8, 4)]), sample(lineage="before")
    result = consume([old, fresh, foreign], version(9), max_staleness=4)
    assert (result.kept, result.dropped, result.ages) == ([fresh], 2, [1])
    assert consume([old], version(9), max_staleness=8).kept == [old]
    assert consume([fresh], version(8), max_staleness=0).ages == [0]
