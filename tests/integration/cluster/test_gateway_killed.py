"""kill -9 of the gateway in the middle of a step of a real run, and its restart.

Two backends serve the calculator, which is declared not idempotent and keeps an execution ledger. The run goes on, each
call has one outcome, nothing runs twice, and at most what was in flight is INDETERMINATE.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from fermata_cli.view.follow import scrape, total
from node_runtime.spans import Span, read_spans
from tests.integration.cluster.processes import Fermata, cluster_of, scraped, sets

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(420)]

BACKENDS = [
    {"name": "calculator", "tools": ["tests.integration.cluster.odd_tools:counted"], "replicas": 2},
    {"name": "search", "tools": ["search"]},
]
SETTINGS = sets(
    f"cluster.backends={json.dumps(BACKENDS)}",
    "trainer.eval.tasks=16",
    "trainer.groups_per_step=8",
    "trainer.group_size=8",
    "trainer.masked.share_limit=0.9",
    "gateway.retry.rejoin_s=3",
)
SLACK_S = 0.05  # between this process's clock reading and the kill itself


def calls(run_dir: Path) -> list[Span]:
    """Each call's end, as the node that waits for it saw it."""
    spans = read_spans(run_dir / "spans")
    return [span for span in spans if span.kind == "tool-run" and span.attributes.get("seen_from") == "node"]


def test_the_run_goes_on_and_nothing_runs_twice(tmp_path: Path) -> None:
    ledger, run_dir = tmp_path / "executions.jsonl", tmp_path / "demo"
    arguments = ("demo", "--runs", str(tmp_path), "--steps", "4", "--slow-share", "0", *SETTINGS)
    with Fermata(*arguments, folder=tmp_path, env={"EXECUTION_LEDGER": str(ledger)}) as command:
        command.until_said("step 1 of 4", 300)
        row = cluster_of(run_dir)["gateway"]
        command.until(
            lambda: total(scrape(row["metrics"]), "fermata_gateway_calls_in_flight", tool="calculator") > 0,
            60,
            "no call ran",
        )
        killed_from = time.time()
        os.kill(row["pid"], signal.SIGKILL)
        killed_to = time.time()
        command.until(lambda: "gateway" not in scraped(run_dir), 10, "Prometheus is sent to a gateway that is down")
        command.until_said("gateway is up again", 60)
        assert "gateway" in scraped(run_dir)
        again = cluster_of(run_dir)["gateway"]
        assert (again["address"], again["metrics"]) == (row["address"], row["metrics"])
        assert again["pid"] != row["pid"]
        code, out = command.finish(240)
        assert code == 0, command.err
        assert command.left() == []
    assert "was ended by SIGKILL" in command.err

    summary = json.loads(Path(out.strip()).read_text())
    assert summary["outcome"] == "finished"
    assert summary["steps"] == 4
    assert summary["gateway_restarts"] == 1
    assert summary["calls_lost"] == 0

    starts = Counter(
        line["key"] for line in map(json.loads, ledger.read_text().splitlines()) if line["event"] == "start"
    )
    assert starts
    assert [key for key, times in starts.items() if times > 1] == []

    ended = calls(run_dir)
    assert [key for key, times in Counter(span.call_key for span in ended).items() if times > 1] == []
    in_flight = {
        span.call_key for span in ended if span.start <= killed_to + SLACK_S and span.end >= killed_from - SLACK_S
    }
    indeterminate = [span.call_key for span in ended if span.outcome == "INDETERMINATE"]
    assert in_flight
    assert set(indeterminate) <= in_flight
    # What was reported as done really ran; and calls went on after the restart.
    assert all(starts[span.call_key] == 1 for span in ended if span.tool == "calculator" and span.outcome == "OK")
    assert any(span.outcome == "OK" and span.start > killed_to + 1 for span in ended)
    # Both replicas took part.
    assert len({line["pid"] for line in map(json.loads, ledger.read_text().splitlines())}) == 2
