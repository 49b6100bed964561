"""`trainer.stay`: what supervises the process may start it again and again, and the run is not run twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.integration

WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None  # whoever imports it now fails: nothing is loaded for a run that has ended
runpy.run_module("trainer_node", run_name="__main__", alter_sys=True)
"""


def test_a_run_that_has_ended_is_waited_out(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    summary = run_dir / "trainer_summary.json"
    summary.write_text(json.dumps({"outcome": "finished", "steps": 2}))
    (run_dir / "progress.jsonl").write_text('{"event": "end"}\n')
    config = tmp_path / "fermata.yaml"
    trainer = {
        "model": str(tmp_path / "absent"),
        "train_tasks": str(tmp_path / "absent.jsonl"),
        "rollout_nodes": ["127.0.0.1:1"],
        "run_dir": str(run_dir),
        "steps": 2,
        "stay": True,
    }
    config.write_text(yaml.safe_dump({"trainer": trainer}))
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TORCH, "--config", str(config)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["run_dir"] == str(run_dir)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert f"the run in {run_dir} has ended (finished after 2 steps)" in stderr
    assert json.loads(summary.read_text())["steps"] == 2
    assert (run_dir / "progress.jsonl").read_text() == '{"event": "end"}\n'
