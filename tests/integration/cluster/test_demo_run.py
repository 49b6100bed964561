"""Whole runs of `fermata demo` on real vLLM and a real trainer: what one sees while it runs, what it leaves, Ctrl-C."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from node_runtime.spans import read_spans
from tests.integration.cluster.processes import Fermata, cluster_of, run, scraped, sets
from tests.unit.fermata_cli.test_report import FIELDS

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(420)]

SMALL = sets("trainer.eval.tasks=24", "trainer.groups_per_step=4", "trainer.group_size=4")
METRICS = {
    "gateway": {
        "fermata_gateway_calls_total", "fermata_gateway_call_duration_seconds", "fermata_gateway_calls_in_flight",
        "fermata_gateway_streams_active", "fermata_gateway_attempts_total", "fermata_gateway_backend_serving",
        "fermata_gateway_retries_total", "fermata_gateway_backends", "fermata_gateway_queue_duration_seconds",
        "fermata_gateway_attempt_duration_seconds", "fermata_gateway_oldest_call_age_seconds",
        "fermata_gateway_draining",
    },
    "tool backend": {
        "fermata_backend_calls_total", "fermata_backend_call_duration_seconds", "fermata_backend_calls_in_flight",
    },
    "rollout node": {
        "fermata_rollout_trajectories", "fermata_rollout_tokens_total", "fermata_rollout_weight_version",
        "fermata_rollout_resume_to_first_token_seconds", "fermata_rollout_weight_sync_seconds",
        "fermata_rollout_tool_wait_seconds",
    },
    "trainer": {
        "fermata_trainer_reward_mean", "fermata_trainer_staleness", "fermata_trainer_masked_samples_total",
        "fermata_trainer_step_phase_seconds", "fermata_trainer_steps_total", "fermata_trainer_weight_version",
    },
}  # fmt: skip
SERVICES = {
    "gateway": {"fermata.v1.ToolGatewayService"},
    "tool backend": {"fermata.v1.ToolBackendService"},
    "rollout node": {"fermata.v1.RolloutNodeService", "fermata.v1.WeightSyncService"},
}


def families(page: str) -> set[str]:
    return {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")}


def services(address: str) -> set[str]:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (response,) = stub.ServerReflectionInfo(iter([request]), timeout=10)
    return {service.name for service in response.list_services_response.service}


def look_at(row: dict[str, Any]) -> None:
    with urllib.request.urlopen(row["metrics"], timeout=10) as page:
        found = families(page.read().decode())
    assert found >= METRICS[row["role"]], f"{row['name']} lacks {METRICS[row['role']] - found}"
    if row["address"] is not None:
        listed = services(row["address"])
        assert listed >= SERVICES[row["role"]] | {"grpc.health.v1.Health"}, row["name"]


def test_a_short_run_from_start_to_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    with Fermata("demo", "--runs", str(tmp_path), "--steps", "2", "--stay", *SMALL, folder=tmp_path) as command:
        command.until_said("the first weight sync is proven", 240)
        rows = cluster_of(run_dir)
        assert rows.keys() == {"backend-calculator", "backend-search", "gateway", "rollout-0", "trainer"}
        for row in rows.values():
            look_at(row)
        assert scraped(run_dir) == rows.keys()
        command.until_said("stays up until Ctrl-C", 120)
        command.until(
            lambda: scraped(run_dir) == rows.keys() - {"trainer"}, 10, "Prometheus is sent to a trainer that has ended"
        )
        asked = ("tools", "call", "calculator", '{"expression": "12*34"}', "--config", str(run_dir / "fermata.yaml"))
        code, out, err = run(*asked, folder=tmp_path)
        assert (code, out) == (0, "408\n"), err
        command.interrupt()
        code, out = command.finish(60)
        assert code == 0, command.err
        assert command.left() == []
    err = command.err
    assert "step 2 of 2" in err
    assert "held-out accuracy without tools" in err
    assert "did not stop within" not in err
    assert "Traceback" not in err

    summary = json.loads(Path(out.strip()).read_text())
    assert summary.keys() >= FIELDS
    assert [name for name in FIELDS if summary[name] is None] == []
    assert summary["outcome"] == "finished"
    assert summary["steps"] == 2
    assert summary["trajectories"] >= 32
    assert summary["calls"]["OK"] > 0
    assert summary["calls_lost"] == 0
    assert summary["syncs"] >= 2
    assert summary["checksums_verified"]["equal"] is True
    assert summary["logprob_diff_mean"] <= 1e-4
    assert summary["accuracy_without_tools"] <= 0.1
    assert summary["peak_rss_bytes"] < 10 * 2**30
    assert {"startup", "training", "eval_before", "eval_after", "shutdown", "total"} <= summary["seconds"].keys()
    assert (run_dir / "model" / "model.safetensors").is_file()
    for picture in ("learning_curve.png", "timeline.png"):
        assert (run_dir / picture).read_bytes().startswith(b"\x89PNG")
    kinds = {span.kind for span in read_spans(run_dir / "spans")}
    assert {"generate", "tool-run", "weight-sync", "train", "reward"} <= kinds


def test_ctrl_c_in_the_middle_of_training_leaves_nothing(tmp_path: Path) -> None:
    with Fermata("demo", "--runs", str(tmp_path), "--steps", "500", *SMALL, folder=tmp_path) as command:
        command.until_said("step 1 of 500", 300)
        command.interrupt()
        code, out = command.finish(60)
        assert code == 130, command.err
        assert command.left() == []
    assert "Traceback" not in command.err
    summary = json.loads(Path(out.strip()).read_text())
    assert summary["outcome"] == "interrupted"
    assert summary["steps"] >= 1
    assert summary["accuracy_before"] is not None
    assert summary["accuracy_after"] is None
