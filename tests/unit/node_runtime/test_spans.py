"""The span record: what is written is read back; torn and foreign lines do no harm."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_runtime.errors import EXIT_USAGE, NodeError
from node_runtime.spans import MAX_BUFFERED, Span, SpanWriter, read_spans

times = st.floats(0, 4e9)
spans = st.builds(
    Span,
    kind=st.sampled_from(["queue", "generate", "tool-queue", "tool-run", "weight-sync"]),
    node=st.text(min_size=1, max_size=8),
    start=times,
    end=times,
    trajectory=st.text(max_size=8),
    turn=st.none() | st.integers(0, 9),
    tokens=st.none() | st.integers(0, 2**40),
    tool=st.text(max_size=5),
    attributes=st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4) | st.booleans(), max_size=2),
)


@given(spans)
def test_a_line_is_one_line_and_is_read_back(span: Span) -> None:
    line = span.to_json()
    assert "\n" not in line
    assert Span.from_mapping(json.loads(line)) == span
    assert json.loads(line)["version"] == 1


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    written = [Span(kind="generate", node="rollout/0", start=i, end=i + 0.5, tokens=i) for i in range(3)]
    with SpanWriter(tmp_path / "spans", "rollout/0") as writer:
        for span in written:
            writer.record(span)
    writer.close()
    assert writer.path.name == "spans-rollout_0.jsonl"
    assert list(read_spans(tmp_path / "spans")) == written


def test_without_a_folder_nothing_happens() -> None:
    with SpanWriter(None, "n") as writer:
        writer.record(Span(kind="train", node="n", start=0, end=1))
    assert writer.lost == 0


def test_the_buffer_is_bounded_and_nothing_is_lost(tmp_path: Path) -> None:
    span = Span(kind="train", node="n", start=0, end=1)
    writer = SpanWriter(tmp_path, "n")
    try:
        for _ in range(MAX_BUFFERED):
            writer.record(span)
        # The record that fills the buffer writes it.
        assert sum(1 for _ in read_spans(tmp_path)) == MAX_BUFFERED
    finally:
        writer.close()


def test_lines_reach_the_file_within_a_second_or_so(tmp_path: Path) -> None:
    with SpanWriter(tmp_path, "n") as writer:
        flushed = threading.Event()
        flush = writer.flush

        def seen() -> None:
            flush()
            flushed.set()

        writer.flush = seen  # type: ignore[method-assign]
        writer.record(Span(kind="train", node="n", start=0, end=1))
        assert flushed.wait(10)
        assert len(list(read_spans(tmp_path))) == 1


def test_a_torn_line_is_skipped_and_kept_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Span(kind="train", node="n", start=0, end=1)
    (tmp_path / "spans-n.jsonl").write_text(first.to_json() + "\n" + first.to_json()[:20])
    with SpanWriter(tmp_path, "n") as writer:
        writer.record(first)
    with caplog.at_level(logging.WARNING):
        assert list(read_spans(tmp_path)) == [first, first]
    assert "spans-n.jsonl:2: is half a line" in caplog.text


def test_foreign_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = json.loads(Span(kind="train", node="n", start=0, end=1).to_json())
    file = tmp_path / "spans-n.jsonl"
    file.write_text("\n".join(["", "[]", "{}", json.dumps({**line, "later": 1})]) + "\n")
    with caplog.at_level(logging.WARNING):
        assert len(list(read_spans(tmp_path))) == 1
    assert caplog.text.count("is no span") == 2
    file.write_text(json.dumps({**line, "version": 2}) + "\n")
    with pytest.raises(NodeError, match=r"spans-n\.jsonl:1: is a span of version 2"):
        list(read_spans(tmp_path))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NodeError, match=r"runtime\.spans_dir: .* cannot be written") as caught:
        SpanWriter(tmp_path / "file", "n")
    assert caught.value.exit_code == EXIT_USAGE


def test_a_full_disk_costs_spans_and_not_the_run(tmp_path: Path) -> None:
    """The limit on file size stands in for the full disk, in a process of its own."""
    program = f"""
import resource, signal, pathlib
from node_runtime.spans import Span, SpanWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
writer = SpanWriter(pathlib.Path({str(tmp_path)!r}), "n")
for _ in range(3):
    writer.record(Span(kind="train", node="n", start=0, end=1))
    writer.flush()
writer.close()
print(writer.lost)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, env=dict(os.environ), check=True
    )
    assert done.stdout == "3\n"
    assert done.stderr.count("spans are lost from here on") == 1
