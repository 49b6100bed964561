"""Figures and pictures of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fermata_cli import proc
from fermata_cli.commands.timeline import redraw
from fermata_cli.report.curve import draw_curve
from fermata_cli.report.files import read_json, write_json
from fermata_cli.report.lanes import choose_scene
from fermata_cli.report.memory import MemoryWatch
from fermata_cli.report.summary import final_lines, make_summary
from fermata_cli.report.timeline import draw_timeline
from fermata_cli.run_folder import run_folder
from node_runtime.errors import NodeError
from node_runtime.spans import Span, SpanWriter

FIELDS = {
    "accuracy_before", "accuracy_after", "accuracy_without_tools", "steps", "trajectories", "calls", "calls_lost",
    "tokens_per_second", "parked_share", "syncs", "checksums_verified", "logprob_diff_mean", "logprob_diff_max",
    "logprob_diff_from", "logprob_diff_tokens", "masked_share", "seconds", "peak_rss_bytes", "seed", "versions",
}  # fmt: skip


def turn(trajectory: str, start: float, end: float, number: int = 0) -> Span:
    return Span(kind="generate", node="n", start=start, end=end, trajectory=trajectory, turn=number)


def call(trajectory: str, start: float, end: float, seen_from: str = "node", **more: Any) -> Span:
    attributes = {"seen_from": seen_from, **more}
    return Span(kind="tool-run", node="n", start=start, end=end, trajectory=trajectory, tool="search",
                call_key=f"r/{trajectory}/0/0/0", attributes=attributes)  # fmt: skip


def spans_with_one_slow_call() -> list[Span]:
    spans = [turn("slow", 0.0, 0.1), call("slow", 0.1, 2.1), turn("slow", 2.1, 2.2, 1)]
    for number in range(40):
        begin = 0.2 + 0.04 * number
        spans += [turn(f"q{number}", begin, begin + 0.05), call(f"q{number}", begin + 0.05, begin + 0.06)]
        spans += [turn(f"q{number}", begin + 0.07, begin + 0.12, 1)]
    spans += [Span(kind="train", node="t", start=1.0, end=1.4), Span(kind="weight-sync", node="t", start=1.4, end=1.45)]
    # The gateway tells of the same call too; it is drawn once.
    return [*spans, call("slow", 0.1, 2.0, seen_from="gateway")]


def test_the_scene_is_around_the_slow_call_and_shows_the_others() -> None:
    scene = choose_scene(spans_with_one_slow_call(), rows=12)
    assert scene is not None
    assert scene.slow is not None
    assert scene.slow.end - scene.slow.start == pytest.approx(2.0)
    assert scene.lanes[0].trajectory == "slow"
    assert len(scene.lanes) == 12
    assert scene.start < 0.1
    assert scene.end > 2.2
    assert len(scene.lanes[0].tools) == 1
    assert scene.turns_meanwhile == 80
    assert len(scene.trainings) == 1


def test_a_wait_is_slow_by_the_tools_time_not_by_the_machines() -> None:
    spans = [turn("a", 0, 1), call("a", 1, 3, run_us=1000), turn("a", 3, 4, 1)]
    spans += [turn("b", 0, 1), call("b", 1, 2, run_us=900_000), turn("b", 2, 4, 1)]
    scene = choose_scene(spans)
    assert scene is not None
    assert scene.slow is not None
    assert scene.slow.trajectory == "b"


def test_a_tools_own_time_is_told_from_the_wait_for_its_result() -> None:
    seen = [
        turn("a", 0, 1),
        call("a", 1, 3, run_us=6000, queue_us=500_000),
        call("a", 1.1, 1.2, seen_from="gateway"),  # a first attempt
        call("a", 1.5, 2.5, seen_from="gateway"),
        turn("b", 0, 1),
        call("b", 1, 3, run_us=6000, queue_us=500_000),  # no word from the gateway
        turn("c", 0, 1),
        call("c", 1, 3, run_us=300_000),
        call("c", 901, 903, seen_from="gateway"),  # another machine's clock
    ]
    scene = choose_scene(seen)
    assert scene is not None
    lanes = {lane.trajectory: lane for lane in scene.lanes}
    runs = {name: lane.run_of(lane.tools[0]) for name, lane in lanes.items()}
    assert runs["a"] == (1.5, 2.5)
    assert runs["b"] == pytest.approx((1.5, 1.506))
    assert runs["c"] == pytest.approx((1.0, 1.3))
    assert {name: lane.is_slow(lane.tools[0]) for name, lane in lanes.items()} == {"a": True, "b": False, "c": True}


def test_pictures_are_drawn_and_nothing_is_drawn_from_nothing(tmp_path: Path) -> None:
    picture = tmp_path / "timeline.png"
    assert not draw_timeline([], picture)
    assert draw_timeline(spans_with_one_slow_call(), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    evil = "$x^$ \x1b[31m<b>"
    assert draw_timeline([turn(evil, 0, 1), call(evil, 1, 2)], picture)
    assert not draw_curve({"learning_curve": []}, tmp_path / "no.png")
    assert draw_curve(
        {"name": evil, "seed": 1, "learning_curve": [{"step": 1, "reward_mean": 0.5, "accuracy": None}],
         "accuracy_before": 0.2, "accuracy_after": 0.9, "accuracy_without_tools": 0.0}, tmp_path / "curve.png"
    )  # fmt: skip


def test_a_run_is_drawn_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SpanWriter(tmp_path / "spans", "n") as writer:
        for span in spans_with_one_slow_call():
            writer.record(span)
    assert redraw(tmp_path) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "timeline.png")
    with pytest.raises(NodeError, match="no folder"):
        redraw(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NodeError, match="nothing to draw"):
        redraw(tmp_path / "empty")


def test_the_summary_has_every_field_and_invents_none() -> None:
    summary = make_summary(
        {}, name="x", outcome="failed", seed=3, seconds={"startup": 1.0, "total": 2.0}, peak_rss_bytes=None,
        high_water_bytes={}, gateway_restarts=0, versions={"python": "3"},
    )  # fmt: skip
    assert summary.keys() >= FIELDS
    assert summary["accuracy_after"] is None
    assert summary["seconds"] == {"startup": 1.0, "total": 2.0}
    assert all(isinstance(line, str) for line in final_lines(summary))


def test_phases_stand_between_start_and_end() -> None:
    trainer = {"seconds": {"training": 5.0, "total": 7.0}, "accuracy_after": 0.9, "versions": {"torch": "2"}}
    summary = make_summary(
        trainer, name="x", outcome="finished", seed=0, seconds={"startup": 1.0, "shutdown": 0.5, "total": 9.0},
        peak_rss_bytes=2**30, high_water_bytes={"trainer": 5}, gateway_restarts=1, versions={},
    )  # fmt: skip
    assert list(summary["seconds"].items()) == [
        ("startup", 1.0), ("training", 5.0), ("trainer", 7.0), ("shutdown", 0.5), ("total", 9.0),
    ]  # fmt: skip
    assert summary["versions"] == {"torch": "2"}
    assert "1.00 GiB" in final_lines(summary)[-1]


def test_calls_of_the_evaluation_without_tools_are_told_apart() -> None:
    trainer = {
        "accuracy_without_tools": 0.0,
        "calls": {"OK": 5023, "PARSE_ERROR": 89, "UNKNOWN_TOOL": 210},
        "calls_by_tool": {
            "none": {"PARSE_ERROR": 89},
            "calculator": {"OK": 5023, "UNKNOWN_TOOL": 119},
            "search": {"UNKNOWN_TOOL": 89},
            "made up": {"UNKNOWN_TOOL": 2},
        },
    }
    summary = make_summary(
        trainer, name="x", outcome="finished", seed=0, seconds={}, peak_rss_bytes=None, high_water_bytes={},
        gateway_restarts=0, versions={}, always_offered={"calculator", "search"},
    )  # fmt: skip
    assert summary["calls"] == trainer["calls"]
    assert summary["calls_without_tools"] == {"UNKNOWN_TOOL": 208}
    told = "tool calls: OK 5023, PARSE_ERROR 89, UNKNOWN_TOOL 2; with the tools switched off: UNKNOWN_TOOL 208; "
    assert any(line.startswith(told) for line in final_lines(summary))


def test_json_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    assert read_json(path) == {"x": 1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"x": float("nan")})
    assert read_json(path) == {"x": 1}
    path.write_text("[1]")
    with pytest.raises(NodeError, match="must hold a JSON object"):
        read_json(path)


def test_memory_is_of_the_whole_tree() -> None:
    code = "import sys; block = bytearray(64 << 20); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        alone, watch = MemoryWatch(child.pid), MemoryWatch()
        alone.look()
        watch.look([("child", child.pid)])
        members = proc.tree(os.getpid(), proc.snapshot())
        assert child.pid in {member.pid for member in members}
        assert proc.group_alive(child.pid)
        child.communicate()
    assert not proc.group_alive(child.pid)
    assert alone.peak_bytes is not None
    assert alone.peak_bytes > 64 << 20
    assert watch.peak_bytes is not None
    assert watch.peak_bytes > alone.peak_bytes
    assert watch.high_water_bytes["child"] > 64 << 20


def test_a_run_folder_is_emptied_only_where_it_is_a_runs(tmp_path: Path) -> None:
    with run_folder(tmp_path, "a") as folder:
        (folder / "old").mkdir()
        (folder / "old" / "file").write_text("x")
        with pytest.raises(NodeError, match="another run is under way"), run_folder(tmp_path, "a"):
            raise AssertionError
    with run_folder(tmp_path, "a") as folder:
        assert not (folder / "old").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(NodeError, match="not a run's"), run_folder(tmp_path, "mine"):
        raise AssertionError
    assert (tmp_path / "mine" / "thesis.tex").exists()
    for name in ("../x", "", ".", "a/b"):
        with pytest.raises(NodeError, match="cannot be a run's"), run_folder(tmp_path, name):
            raise AssertionError
