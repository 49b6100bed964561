"""Labels of versions, and which tokens each version made."""

from __future__ import annotations

from fermata.v1.weights_pb2 import WeightVersion
from hypothesis import given
from hypothesis import strategies as st

from rollout_node.weights.version import parse_label, spans_of, version_label


@given(lineage=st.text(max_size=20), number=st.integers(0, 2**63))
def test_labels_lose_nothing_of_the_identity(lineage: str, number: int) -> None:
    version = WeightVersion(lineage=lineage, number=number)
    assert parse_label(version_label(version)) == version


@given(
    runs=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    cut=st.integers(0, 30),
    count=st.integers(1, 30),
)
def test_spans_cover_exactly_the_tokens_asked_for(runs: list[int], cut: int, count: int) -> None:
    starts, owner = [], []
    for index, length in enumerate(runs):
        starts.append((f"v/{index}", len(owner)))
        owner += [f"v/{index}"] * length
    owner += [f"v/{len(runs) - 1}"] * 80  # the last version goes on
    spans = spans_of(starts, cut, count)
    assert [label for label, begin, end in spans for _ in range(begin, end)] == owner[cut : cut + count]
    assert spans[0][1] == 0
    assert spans[-1][2] == count


def test_no_tokens_are_one_empty_span_of_the_latest_version() -> None:
    assert spans_of([("v/1", 0), ("v/2", 4)], 9, 0) == [("v/2", 0, 0)]
    assert spans_of([], 0, 3) == []
