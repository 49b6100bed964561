"""What the notebooks' figures are made of: who generated, whose tool ran, who merely waited."""

from __future__ import annotations

import pytest

from node_runtime.spans import Span


@pytest.fixture
def records(monkeypatch):
    from tests.unit.examples.test_notebooks import FOLDER

    monkeypatch.syspath_prepend(str(FOLDER))
    import records

    return records


def span(kind: str, start: float, end: float, seen_from: str = "", trajectory: str = "a") -> Span:
    attributes = {"seen_from": seen_from} if seen_from else {}
    return Span(kind=kind, node="n", start=start, end=end, trajectory=trajectory, attributes=attributes)


def test_a_call_counts_once_as_the_trajectory_sees_it(records) -> None:
    spans = [span("generate", 0, 1), span("tool-run", 1, 4, "node"), span("tool-run", 1.5, 3.5), span("queue", 4, 5)]
    record = records.Record.of_spans([*spans, span("generate", 5, 6)])
    assert record.stretches["a"] == [("generate", 0, 1), ("tool", 1, 4), ("generate", 5, 6)]
    assert list(record.all_stretches()) == [*record.stretches["a"], ("others", 4, 5)]
    assert record.seconds == 6


def test_the_engine_is_busy_while_anybody_generates(records) -> None:
    spans = [span("generate", 0, 2), span("generate", 1, 3, trajectory="b"), span("tool-run", 2, 8, "node")]
    record = records.Record.of_spans([*spans, span("generate", 9, 10)])
    assert record.busy_share == pytest.approx(0.4)


def test_a_control_notes_down_the_same(records) -> None:
    record = records.Record()
    with record.during("a", "generate"):
        pass
    ((kind, start, end),) = record.stretches["a"]
    assert kind == "generate"
    assert start <= end


async def test_spans_that_do_not_come_are_told(records, tmp_path) -> None:
    from tests.unit.trainer_node.builders import trajectory

    with pytest.raises(TimeoutError, match=r"these spans are still missing: \{'generate': 1\}"):
        await records.spans_of(tmp_path, [trajectory()], within_s=0.05)
