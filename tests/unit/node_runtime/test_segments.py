"""Packed columns: what goes in comes out, deltas merge to the whole, contradictions are refused in a sentence."""

from __future__ import annotations

import pytest
from fermata.v1 import rollout_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from node_runtime import segments as seg
from node_runtime.segments import Columns, SegmentError, Version

V1, V2 = Version("a", 1), Version("a", 2, 1)
ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)


def piece() -> st.SearchStrategy[tuple]:
    model = st.tuples(st.just(seg.MODEL), ids, st.sampled_from([V1, V2]), st.integers(1, 3))
    other = st.tuples(st.sampled_from([seg.PROMPT, seg.TOOL, seg.INJECTED]), ids, st.none(), st.integers(1, 3))
    return st.one_of(model, other)


def add(columns: Columns, piece: tuple) -> None:
    kind, tokens, version, turn = piece
    logprobs = [-0.5] * len(tokens) if kind == seg.MODEL else []
    key = f"r/t/1/{turn}/0" if kind == seg.TOOL else ""
    columns.append(kind, tokens, logprobs=logprobs, version=version, turn=turn, call_key=key)


@given(st.lists(piece(), max_size=12))
def test_pack_and_unpack_are_inverse(pieces: list[tuple]) -> None:
    columns = Columns()
    for p in pieces:
        add(columns, p)
    again = Columns.unpack(columns.pack())
    assert (again.ids, again.logprobs, again.segments) == (columns.ids, columns.logprobs, columns.segments)
    expected = [kind == seg.MODEL for kind, tokens, _, _ in pieces for _ in tokens]
    assert [bool(b) for b in columns.loss_mask()] == expected
    assert [lp != 0.0 for lp in columns.aligned_logprobs()] == expected
    stamps = [v for _, tokens, v, _ in pieces for _ in tokens if v]
    assert [v for start, stop, v in columns.version_spans() for _ in range(stop - start)] == stamps
    assert columns.oldest_version() == (min(stamps, key=lambda v: v.number) if stamps else None)
    assert columns.model_tokens() == len(stamps)


@given(st.lists(st.tuples(st.lists(piece(), min_size=1, max_size=4), st.booleans()), min_size=1, max_size=6))
def test_deltas_on_what_was_acknowledged_merge_to_the_whole(rounds: list[tuple[list[tuple], bool]]) -> None:
    columns, held = Columns(), None
    base = (0, 0, 0)
    for seq, (pieces, acked) in enumerate(rounds, 1):
        for p in pieces:
            add(columns, (*p[:3], seq))  # a segment never grows over a snapshot: turns differ
        delta = pb.Snapshot(
            snapshot_seq=seq,
            base_snapshot_seq=base[0],
            base_tokens=base[1],
            base_segments=base[2],
            segments=columns.pack(base[2]),
            total_tokens=len(columns),
        )
        held = seg.merge(held, delta)
        assert Columns.unpack(held.segments).ids == columns.ids
        assert (held.base_tokens, held.base_segments, held.snapshot_seq) == (0, 0, seq)
        assert seg.merge(held, delta) == held  # taken in twice: the same
        if acked:
            base = (seq, len(columns), len(columns.segments))


def test_an_explicit_mask_overrides_the_rule() -> None:
    packed = Columns()
    add(packed, (seg.MODEL, [1, 2, 3], V1, 1))
    wire = packed.pack()[0]
    wire.loss_mask = bytes([0b101])
    assert list(Columns.unpack([wire]).loss_mask()) == [1, 0, 1]
    assert Columns.unpack([wire]).pack() == [wire]


def test_cut_gives_up_the_end() -> None:
    columns = Columns()
    for p in [
        (seg.PROMPT, [1, 2], None, 0),
        (seg.MODEL, [3], V1, 1),
        (seg.TOOL, [4], None, 1),
        (seg.MODEL, [5], V2, 2),
    ]:
        add(columns, p)
    before = Columns.unpack(columns.pack(0, 3))
    columns.cut(3)
    assert (columns.ids, columns.logprobs, columns.segments) == (before.ids, before.logprobs, before.segments)


@pytest.mark.parametrize(
    ("segment", "words"),
    [
        (pb.Segment(kind=seg.MODEL, token_ids=b"\0" * 8, logprobs=b"\0" * 4), "2 model tokens, 1 logprobs"),
        (pb.Segment(kind=seg.PROMPT, token_ids=b"\0" * 7), "whole number"),
        (pb.Segment(kind=seg.TOOL, token_ids=b"\0" * 4, logprobs=b"\0" * 4), "only model tokens"),
        (pb.Segment(kind=seg.PROMPT, token_ids=b"\0" * 4, loss_mask=b"\0\0"), "loss mask of 2 bytes"),
    ],
)
def test_a_contradiction_is_refused(segment: pb.Segment, words: str) -> None:
    with pytest.raises(SegmentError, match=words):
        Columns.unpack([segment])


def test_a_model_token_needs_logprob_and_version() -> None:
    with pytest.raises(SegmentError, match="each token needs both"):
        Columns().append(seg.MODEL, [1, 2], logprobs=[-1.0], version=V1)
    with pytest.raises(SegmentError, match="only model tokens"):
        Columns().append(seg.TOOL, [1], logprobs=[-1.0])


def test_a_delta_on_what_is_not_held_is_refused() -> None:
    with pytest.raises(SegmentError, match="builds on 1 segments but 0 are held"):
        seg.merge(None, pb.Snapshot(snapshot_seq=2, base_snapshot_seq=1, base_segments=1, base_tokens=3))
    held = pb.Snapshot(segments=[pb.Segment(kind=seg.PROMPT, token_ids=b"\0" * 8)], total_tokens=2)
    with pytest.raises(SegmentError, match="builds on 3 tokens but the held segments have 2"):
        seg.merge(held, pb.Snapshot(snapshot_seq=2, base_segments=1, base_tokens=3))
    with pytest.raises(SegmentError, match="says 9 tokens but merges to 2"):
        seg.merge(held, pb.Snapshot(snapshot_seq=2, base_segments=1, base_tokens=2, total_tokens=9))


def test_versions_compare_within_a_lineage() -> None:
    assert V2.at_least(V1)
    assert not V1.at_least(V2)
    assert not Version("b", 9).at_least(V1)
    assert Version("b", 0).at_least(Version("", 0))


def test_eight_bytes_a_model_token() -> None:
    columns = Columns()
    for _ in range(64):
        columns.append(seg.MODEL, [7] * 64, logprobs=[-1.0] * 64, version=V1, turn=1)
    used = columns.ids.buffer_info()[1] * 4 + columns.logprobs.buffer_info()[1] * 4
    assert (len(columns), len(columns.segments), used) == (4096, 1, 8 * 4096)
    assert seg.unpack_ids(seg.pack_ids(columns.ids)) == columns.ids


@pytest.mark.parametrize("kind", [seg.PROMPT, seg.TOOL, seg.INJECTED, 77])
def test_only_tokens_that_a_model_sampled_can_be_trained(kind: int) -> None:
    segment = pb.Segment(kind=kind, token_ids=seg.pack_ids([5, 6, 7]), loss_mask=b"\x00")  # type: ignore[arg-type]
    assert sum(Columns.unpack([segment]).loss_mask()) == 0
    segment.loss_mask = b"\x04"
    with pytest.raises(SegmentError, match="segment 0 trains tokens that no model sampled"):
        Columns.unpack([segment])


def test_a_models_own_mask_is_read_lowest_bit_first() -> None:
    columns = Columns()
    columns.append(seg.PROMPT, [1, 2])
    columns.append(seg.MODEL, list(range(10)), logprobs=[-0.5] * 10, version=V1)
    segments = columns.pack()
    segments[1].loss_mask = bytes([0b10000101, 0b10])
    assert list(Columns.unpack(segments).loss_mask()) == [0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_logprob_that_is_no_number_is_refused(value: float) -> None:
    columns = Columns()
    columns.append(seg.MODEL, [1, 2, 3], logprobs=[-0.5, value, -3e38], version=V1)
    with pytest.raises(SegmentError, match="segment 0 has a logprob that is no finite number"):
        Columns.unpack(columns.pack())
