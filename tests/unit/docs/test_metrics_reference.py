"""docs/metrics.md names every metric that the processes make."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fermata_cli.main import main
from fermata_cli.reference.metrics import PROCESSES, measured

ROOT = Path(__file__).parents[3]
PACKAGES = ("node_runtime", "tool_gateway", "tool_backend", "rollout_node", "trainer_node")


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference", "--metrics"]) == 0
    hint = "run: .venv/bin/fermata config reference --metrics > docs/metrics.md"
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == capsys.readouterr().out, hint


def test_every_metric_has_a_meaning_and_stands_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference", "--metrics", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told if not row["meaning"].strip()] == []
    assert {row["process"] for row in told} == set(PROCESSES)
    assert len({(row["process"], row["name"]) for row in told}) == len(told)


def test_no_module_makes_a_metric_that_the_page_lacks() -> None:
    """A new module of metrics has to be named in PROCESSES."""
    made = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            if "prometheus_client" in text:
                made |= set(re.findall(r'"(fermata_[a-z]+_\w+?)(?:_total)?"', text))
    assert len(made) > 20
    assert made - {metric.name.removesuffix("_total") for metric in measured()} == set()


def test_labels_are_those_of_the_metric() -> None:
    by_name = {metric.name: metric for metric in measured()}
    assert by_name["fermata_gateway_calls_total"].labels == ("tool", "outcome", "fault")
    assert by_name["fermata_gateway_calls_total"].type == "counter"
    assert by_name["fermata_trainer_logprob_diff_mean"].labels == ()
    assert by_name["fermata_rollout_gpu_power_watts"].labels == ("gpu", "model")
