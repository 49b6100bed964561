"""`python -m trainer_node` as a process: what it says and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.trainer_node.test_run import write_inputs

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def config(tmp_path, **trainer) -> Path:
    values = {
        "model": str(tmp_path / "model"),
        "train_tasks": str(tmp_path / "train.jsonl"),
        "eval_tasks": str(tmp_path / "eval.jsonl"),
        "reward": "tests.integration.trainer_node.bandit:good_first_token",
        "rollout_nodes": ["127.0.0.1:1"],
        "run_dir": str(tmp_path / "run"),
        "dispatch": {"startup_timeout_s": 120.0, "reconnect_max_s": 0.2},
        **trainer,
    }
    path = tmp_path / "fermata.yaml"
    path.write_text(yaml.safe_dump({"trainer": values, "gateway": {"port": 1}}))
    return path


def popen(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainer_node", *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr


@pytest.fixture
def inputs(tmp_path):
    write_inputs(tmp_path)
    return tmp_path


def test_an_unknown_key_is_refused_with_the_nearest_name(tmp_path):
    code, stderr = ended(popen("--config", config(tmp_path), "--set", "trainer.group_sise=4"))
    assert code == 2
    assert "group_size" in stderr
    assert "Traceback" not in stderr


def test_what_cannot_be_run_is_one_sentence(inputs):
    path = inputs / "train.jsonl"
    path.write_text(path.read_text() + '\n{"id": "broken", ')
    code, stderr = ended(popen("--config", config(inputs)))
    assert code == 2
    assert f"{path}:41: not JSON" in stderr
    assert "Traceback" not in stderr


def test_a_model_folder_that_is_not_there(inputs):
    code, stderr = ended(popen("--config", config(inputs, model=str(inputs / "absent"))))
    assert code == 2
    assert f"model folder {inputs / 'absent'} does not exist" in stderr
    assert "Traceback" not in stderr


def test_no_rollout_node_is_told_while_waiting_and_ended_by_a_signal(inputs):
    process = popen("--config", config(inputs), "--set", "runtime.metrics_port=0")
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        ready = json.loads(process.stdout.readline())
        assert ready["ready"] is True
        assert ready["metrics_port"] > 0
        for line in process.stderr:
            if "waiting for a rollout node: 127.0.0.1:1" in line:
                break
        process.send_signal(signal.SIGTERM)
        code, stderr = ended(process)
    finally:
        process.kill()
    assert code == 0
    assert "Traceback" not in stderr
    summary = json.loads((inputs / "run" / "trainer_summary.json").read_text())
    assert summary["outcome"] == "interrupted"
    assert summary["accuracy_before"] is None


def test_no_rollout_node_in_time_is_unavailable(inputs):
    code, stderr = ended(popen("--config", config(inputs, dispatch={"startup_timeout_s": 0.5})))
    assert code == 3
    assert "no rollout node answered within 0.5 s: 127.0.0.1:1" in stderr
    assert "Traceback" not in stderr
