"""A secured demo run under a real Prometheus: every query of the dashboard has an answer, GPUs played back included."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.dashboard_picture import draw
from tests.integration.cluster.processes import Fermata, sets
from tests.support.dashboard import Dashboard, Target
from tests.support.nvml import recorded_nvml
from tests.support.prometheus import Prometheus, check_config

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(420)]

BOARD = Dashboard()
STEPS = 60
PROCESSES = {"backend-calculator", "backend-search", "gateway", "rollout-0", "trainer"}
# Every call takes about a second, so that a step takes one on any machine, and is spent at tools.
SMALL = sets(
    "trainer.eval.tasks=16", "trainer.groups_per_step=4", "trainer.group_size=4",
    "backend.delay.share=1.0", "backend.delay.seconds=[0.8, 1.6]",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Watched:
    """A run that has ended, and the Prometheus that saw it from `begun` to `ended` (Unix time)."""

    prometheus: Prometheus
    run_dir: Path
    begun: float  # all processes were up
    trained: float  # the last step was done
    ended: float
    targets: list[dict[str, Any]]  # as Prometheus saw them when the last step was done
    promtool: str
    code: int
    summary: dict[str, Any]
    err: str


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    run_dir = folder / "demo"
    config = run_dir / "prometheus.yml"
    arguments = ("demo", "--tls", "--runs", str(folder), "--steps", str(STEPS), *SMALL)
    with Fermata(*arguments, folder=folder, env=recorded_nvml(folder)) as command:
        command.until(config.exists, 60, "it left no prometheus.yml")
        promtool = check_config(config)
        with Prometheus(config, run_dir / "prometheus") as prometheus:
            command.until(lambda: up(prometheus) >= PROCESSES, 240, "Prometheus never saw all processes up")
            begun = time.time()
            command.until_said(f"step {STEPS} of {STEPS}", 200)
            trained = time.time()
            targets = list(prometheus.targets())
            code, out = command.finish(90)
            yield Watched(
                prometheus, run_dir, begun, trained, time.time(), targets, promtool, code,
                json.loads(Path(out.strip()).read_text()), command.err,
            )  # fmt: skip


def up(prometheus: Prometheus) -> set[str]:
    return {target["labels"]["node"] for target in prometheus.targets() if target["health"] == "up"}


def test_the_run_was_a_sound_one(watched: Watched) -> None:
    assert watched.code == 0, watched.err
    summary = watched.summary
    assert (summary["outcome"], summary["steps"], summary["tls"]) == ("finished", STEPS, True)
    assert summary["calls_lost"] == 0
    for figure in ("accuracy_before", "accuracy_after", "accuracy_without_tools"):
        assert 0 <= summary[figure] <= 1
    assert summary["accuracy_after"] > summary["accuracy_before"]
    assert "Traceback" not in watched.err


def test_prometheus_saw_every_process_of_it_for_a_minute(watched: Watched) -> None:
    assert "SUCCESS" in watched.promtool
    assert 2 <= watched.prometheus.scrape_s <= 5
    assert watched.trained - watched.begun >= 60
    assert {target["labels"]["node"] for target in watched.targets} == PROCESSES
    assert [target for target in watched.targets if target["health"] != "up" or target["lastError"]] == []
    seen = watched.prometheus.query_range("up", watched.begun, watched.trained, 1)
    assert {series.labels["node"] for series in seen} == PROCESSES
    assert {value for series in seen for _, value in series.points} == {1}
    assert watched.prometheus.complaints == []


@pytest.mark.parametrize("target", BOARD.targets, ids=lambda target: target.name)
def test_a_query_has_an_answer(watched: Watched, target: Target) -> None:
    scrape_s = watched.prometheus.scrape_s
    query = BOARD.fill(target.expr, scrape_s=scrape_s, step_s=scrape_s)
    answer = watched.prometheus.query_range(query, watched.begun, watched.ended, scrape_s)
    assert [series for series in answer if series.finite], f"{query} found nothing but {answer}"
    named = [target.named(series.labels) for series in answer]
    assert len(set(named)) == len(named), "series of one panel that cannot be told apart"
    if target.panel.unit == "percentunit":
        assert all(0 <= value <= 1 for series in answer for _, value in series.finite)


def test_the_answers_agree_with_what_the_run_says_of_itself(watched: Watched) -> None:
    def ask(query: str) -> float:
        series = watched.prometheus.query_range(query, watched.ended, watched.ended, 1)
        return series[0].points[0][1]

    span = f"[{watched.ended - watched.begun + 60:.0f}s]"
    summary = watched.summary
    assert STEPS - 5 <= ask(f"max_over_time(fermata_trainer_steps_total{span})") <= STEPS
    assert ask(f"min_over_time(fermata_trainer_eval_accuracy{span})") == pytest.approx(summary["accuracy_before"])
    good = ask(f'sum(max_over_time(fermata_gateway_calls_total{{outcome="OK"}}{span}))')
    # The last scrape was before the end, and calls of trajectories that were not used are not in the summary.
    assert good == pytest.approx(summary["calls"]["OK"], rel=0.15)


def test_the_picture_of_it_can_be_drawn(watched: Watched) -> None:
    picture = watched.run_dir / "dashboard.png"
    assert draw(watched.prometheus, picture, where="demo") == len(BOARD.panels)
    assert picture.read_bytes().startswith(b"\x89PNG")
