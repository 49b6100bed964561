"""The processes that use GPUs show them on their metrics port, from the moment it is open."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.trainer_node.test_run import write_inputs
from tests.support import tiny_model
from tests.support.nvml import recorded_nvml

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def rollout_node(folder: Path) -> Sequence[str]:
    """It waits for a gateway that does not come."""
    tiny_model.build(folder / "model")
    return (
        f"rollout.model={folder / 'model'}",
        f"rollout.gateway=['127.0.0.1:{free_port()}']",
        "rollout.port=0",
    )


def trainer_node(folder: Path) -> Sequence[str]:
    """It waits for a rollout node that does not come."""
    return (
        f"trainer.model={write_inputs(folder)}",
        f"trainer.train_tasks={folder / 'train.jsonl'}",
        f"trainer.eval_tasks={folder / 'eval.jsonl'}",
        "trainer.reward=tests.integration.trainer_node.bandit:good_first_token",
        f"trainer.rollout_nodes=['127.0.0.1:{free_port()}']",
        f"trainer.run_dir={folder / 'run'}",
    )


@pytest.mark.parametrize(("prefix", "node"), [("fermata_rollout", rollout_node), ("fermata_trainer", trainer_node)])
def test_gpus_are_on_the_page(tmp_path: Path, prefix: str, node) -> None:
    port = free_port()
    settings = [f"runtime.metrics_port={port}", *node(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    process = subprocess.Popen(
        [sys.executable, "-m", node.__name__, *(word for setting in settings for word in ("--set", setting))],
        cwd=ROOT,
        env={**environ, **recorded_nvml(tmp_path), "CUDA_VISIBLE_DEVICES": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        page = first_page(process, port)
        process.terminate()
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, stderr
    series = [line.partition("{")[0] for line in page.splitlines() if line.startswith(f"{prefix}_gpu_")]
    kinds = ("utilization_ratio", "memory_used_bytes", "memory_total_bytes", "power_watts")
    assert sorted(series) == sorted(f"{prefix}_gpu_{kind}" for kind in kinds)
    assert f'{prefix}_gpu_power_watts{{gpu="0",model="NVIDIA H100 80GB HBM3"}} 129.0' in page


def first_page(process: subprocess.Popen[str], port: int) -> str:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                page: str = answer.read().decode()
                if "_gpu_" in page:  # the port is open a moment before they are on it
                    return page
        except urllib.error.URLError:
            pass
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no GPU on the page"
        time.sleep(0.05)
