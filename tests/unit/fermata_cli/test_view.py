"""Events and metrics become the figures of the view; what is foreign in them is escaped."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fermata_cli.text import printable
from fermata_cli.view.follow import Feed, total
from fermata_cli.view.show import PlainShow, draw, sparkline
from fermata_cli.view.state import RunView


def test_the_feed_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    feed = Feed(path)
    assert feed.new_events() == []
    path.write_text('{"event": "start"}\nnot json\n{"no": "event"}\n{"event": "ti')
    assert [event["event"] for event in feed.new_events()] == ["start"]
    with path.open("a") as file:
        file.write('ck", "step": 3}\n')
    assert feed.new_events() == [{"event": "tick", "step": 3}]
    assert feed.new_events() == []


def test_steps_and_evaluations_are_told_in_a_line() -> None:
    view = RunView()
    line = view.hear(
        {
            "event": "step", "phase": "train", "step": 2, "steps": 9, "reward_mean": 0.5, "masked_share": 0.01,
            "tokens_per_second": 1234.4, "staleness_max": 1, "step_seconds": 2.25, "version": 3, "trajectories": 256,
        }
    )  # fmt: skip
    assert line == "step 2 of 9, reward 0.500, 1,234 tokens/s, staleness 1, masked 1.0%, 2.2 s"
    line = view.hear(
        {"event": "eval", "phase": "eval_after", "name": "without_tools", "accuracy": 0.25, "scored": 8, "seconds": 1.0,
         "accuracy_by_kind": {"lookup": 0.25}}
    )  # fmt: skip
    assert line == "held-out accuracy without tools: 0.250 on 8 samples (lookup 0.250), 1.0 s"
    assert view.hear({"event": "tick", "phase": "eval_after", "step": 2, "eval_done": 3, "eval_total": 8}) is None
    assert view.eval_progress == (3, 8)
    assert view.phase == "eval_after"


def test_an_event_with_nothing_in_it_is_no_error() -> None:
    view = RunView()
    for kind in ("tick", "eval", "waiting", "synced", "end", "of a later version"):
        view.hear({"event": kind, "phase": "?"})
    assert "reward –" in (view.hear({"event": "step", "phase": "train", "step": 1, "reward_mean": None}) or "")


def test_metrics_become_rates_and_counts() -> None:
    view = RunView()
    histogram = "fermata_gateway_call_duration_seconds"
    gateway = [
        ("fermata_gateway_calls_in_flight", {"tool": "a"}, 2.0),
        ("fermata_gateway_calls_in_flight", {"tool": "b"}, 1.0),
        (f"{histogram}_count", {"tool": "a"}, 10.0),
        (f"{histogram}_bucket", {"tool": "a", "le": "0.25"}, 8.0),
        (f"{histogram}_bucket", {"tool": "a", "le": "+Inf"}, 10.0),
    ]
    states = [("fermata_rollout_trajectories", {"state": "parked"}, 3.0)] * 2
    view.measure(10.0, gateway, [*states, ("fermata_rollout_tokens_total", {"kind": "model"}, 100.0)])
    view.measure(12.0, [], [("fermata_rollout_tokens_total", {"kind": "model"}, 300.0)])
    assert (view.calls_in_flight, view.calls_done, view.calls_slow) == (3, 10, 2)
    assert view.states == {"parked": 6}
    assert view.tokens_per_second == 100.0
    assert total(gateway, "fermata_gateway_calls_in_flight", tool="b") == 1.0


def test_foreign_text_moves_no_cursor_and_opens_no_markup() -> None:
    evil = "a\x1b[31mred\r\n[bold]x\u202e\ud800"
    assert printable(evil) == "a\\x1b[31mred\\r\\n[bold]x\\u202e\\ud800"
    assert printable(b"\xff\x00ok") == "\\xff\\x00ok"
    assert printable("a\nb\x07", keep_lines=True) == "a\nb\\x07"
    assert printable("x" * 300, 10) == "x" * 9 + "…"
    view = RunView()
    view.hear({"event": "eval", "phase": "eval_after", "name": "[red]x", "accuracy": 0.5, "scored": 1})
    console = Console(file=io.StringIO(), width=80)
    console.print(draw(view, 3.0))
    assert "[red]x 0.500" in console.file.getvalue()  # type: ignore[attr-defined]


def test_where_nothing_happens_a_line_says_what_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    view = RunView(waiting_for="waiting for the gateway, at most 60 s")
    show = PlainShow(view, clock=lambda: now[0])
    show.refresh()
    for now[0] in (10.0, 14.5, 20.0):
        show.refresh()
    show.say("a thing")
    view.phase, view.waiting_for, view.eval_progress = "eval_before", "", (3, 200)
    for now[0] in (30.0, 35.0):
        show.refresh()
    assert capsys.readouterr().err.splitlines() == [
        "[  14.5 s] still starting the cluster: waiting for the gateway, at most 60 s",
        "[  20.0 s] a thing",
        "[  35.0 s] held-out evaluation before training: 3 of 200 samples",
    ]


def test_how_far_a_run_has_got() -> None:
    assert RunView().where == "before the first step (starting the cluster)"
    assert RunView(step=3, steps=24, phase="sync").where == "at step 3 of 24 (training: weight sync)"


def test_the_panel_says_the_phase_until_steps_are_known() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(draw(RunView(waiting_for="waiting for the gateway"), 1.0))
    console.print(draw(RunView(step=1, steps=4, version=2, staleness=1), 1.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "now  starting the cluster: waiting for the gateway" in text
    assert "0 of" not in text
    assert "trained 1 version old" in text


def test_the_panel_shows_what_is_known() -> None:
    view = RunView(step=2, steps=4, phase="train", rewards=[0.0, 0.5, 1.0], masked_share=0.1)
    console = Console(file=io.StringIO(), width=100)
    console.print(draw(view, 12.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 of 4" in text
    assert "10.0%" in text
    assert sparkline(view.rewards) == "▁▅█"
    assert sparkline(view.rewards) in text
