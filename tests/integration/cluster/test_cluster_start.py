"""Starts that fail or are interrupted: one sentence, its exit code, no process left. No engine gets to run."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path

import pytest

from fermata_cli import demo
from fermata_cli.view.follow import scrape
from tests.integration.cluster.processes import Fermata, cluster_of, run, scraped, sets

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def start(tmp_path: Path, *pairs: str, within_s: float = 200) -> tuple[int, str]:
    code, out, err = run("demo", "--runs", str(tmp_path), *sets(*pairs), folder=tmp_path, within_s=within_s)
    assert "Traceback" not in err
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["outcome"] == "failed"
    assert out.strip() == str(tmp_path / "demo" / "summary.json")
    return code, err


def write_tasks(path: Path, *tools: str) -> Path:
    task = {"id": "a", "messages": [{"role": "user", "content": "?"}], "tools": list(tools), "answer": "1"}
    path.write_text(json.dumps(task) + "\n")
    return path


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, err = start(tmp_path, f"gateway.port={port}")
    assert code == 3
    assert f"port {port}" in err
    assert "gateway" in err.splitlines()[-1]


def test_a_task_that_names_a_tool_nobody_serves(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", "calculator", "telepathy")
    code, err = start(tmp_path, f"trainer.train_tasks={tasks}")
    assert code == 2
    assert f"the tasks name 'telepathy' ({tasks}:1), which no backend serves; served are 'calculator', 'search'" in err
    assert "gateway is up" not in err


def test_a_model_without_control_tokens(tmp_path: Path) -> None:
    model = shutil.copytree(demo.MODEL_DIR, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": []}))
    config = json.loads((model / "tokenizer_config.json").read_text())
    kept = {key: value for key, value in config.items() if not key.endswith(("_token", "_tokens"))}
    (model / "tokenizer_config.json").write_text(json.dumps(kept))
    code, err = start(tmp_path, f"rollout.model={model}")
    assert code == 2
    assert "control token" in err
    assert str(model) in err


def test_a_backend_that_does_not_start_says_why(tmp_path: Path) -> None:
    code, err = start(tmp_path, 'cluster.backends=[{name: mine, tools: ["no_such_module:tool"]}]')
    assert code == 2
    assert "tool backend backend-mine" in err
    assert "there is no module 'no_such_module'" in err


def test_a_backend_that_hangs_at_its_start_is_given_up(tmp_path: Path) -> None:
    backends = 'cluster.backends=[{name: slow, tools: ["tests.integration.cluster.hanging:tool"]}]'
    code, err = start(tmp_path, backends, "cluster.start.backend_s=4", "cluster.stop_grace_s=2")
    assert code == 3
    assert "tool backend backend-slow was not ready within 4 s of its start" in err


@pytest.mark.parametrize(
    "phase", ["the run is in", "tool backend backend-search is up", "gateway is up", "starting the engine"]
)
def test_ctrl_c_while_it_starts_leaves_nothing(phase: str, tmp_path: Path) -> None:
    with Fermata("demo", "--runs", str(tmp_path), *sets("cluster.stop_grace_s=5"), folder=tmp_path) as command:
        command.until_said(phase, 60)
        command.interrupt()
        code, _ = command.finish(60)
        assert code == 130, command.err
        assert command.left() == []
        assert "SIGINT: stopping everything in order" in command.err
        assert "interrupted before the first step (starting the cluster" in command.err
    assert scraped(tmp_path / "demo") == set()
    assert json.loads((tmp_path / "demo" / "summary.json").read_text())["outcome"] == "interrupted"


def test_a_cluster_with_tls_lets_its_own_in_wherever_it_listens(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    hosts = ("backend.host=::1", "gateway.host=localhost", "runtime.metrics_host=0.0.0.0")
    flags = ("--runs", str(tmp_path), "--tls", *sets("runtime.metrics_tls=true", *hosts))
    with Fermata("demo", *flags, folder=tmp_path) as command:
        command.until_said("starting the engine", 60)
        rows = cluster_of(run_dir)
        targets = json.loads((run_dir / "targets.json").read_text())
        assert {f"https://{target['targets'][0]}/metrics" for target in targets} == {
            row["metrics"] for row in rows.values()
        }
        for row in rows.values():
            assert row["address"].startswith("localhost:" if row["role"] == "gateway" else "[::1]:")
            assert row["metrics"].startswith("https://127.0.0.1:")
            assert scrape(row["metrics"], run_dir / "tls" / "ca.pem"), row["name"]
            assert scrape(row["metrics"]) == []  # nobody else's authority vouches for it
        ask = ("tools", "call", "calculator", '{"expression": "12*34"}', "--gateway", rows["gateway"]["address"])
        assert run(*ask, "--config", str(run_dir / "fermata.yaml"), folder=tmp_path)[:2] == (0, "408\n")
        assert run(*ask, folder=tmp_path)[0] == 3
        command.interrupt()
        assert command.finish(60)[0] == 130, command.err
    assert "the weights themselves travel in clear" in command.err
    assert json.loads((run_dir / "summary.json").read_text())["tls"] is True


def test_ctrl_c_before_anything_is_started(tmp_path: Path) -> None:
    with Fermata("demo", "--runs", str(tmp_path), folder=tmp_path) as command:
        command.until(lambda: (tmp_path / "demo" / ".lock").exists(), 30, "it never began")
        command.interrupt()
        code, _ = command.finish(30)
        assert code == 130, command.err
        assert command.left() == []


def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    """The backend ignores SIGTERM: in order it would take the grace of 60 s."""
    backends = 'cluster.backends=[{name: stubborn, tools: ["tests.integration.cluster.hanging:tool"]}]'
    flags = sets(backends, "cluster.stop_grace_s=60")
    with Fermata("demo", "--runs", str(tmp_path), *flags, folder=tmp_path) as command:
        log = tmp_path / "demo" / "logs" / "backend-stubborn.log"
        command.until(lambda: log.exists() and "hanging" in log.read_text(), 60, "the backend never hung")
        command.interrupt()
        command.until_said("once more ends it at once", 10)
        begun = time.monotonic()
        command.interrupt()
        code, _ = command.finish(10)
        assert code == 130
        assert time.monotonic() - begun < 5
        command.process.wait(1)
        assert command.left() == []
    assert "interrupted twice" in command.err


def test_the_command_killed_leaves_nothing(tmp_path: Path) -> None:
    """kill -9 of the command itself: its processes notice by themselves."""
    with Fermata("demo", "--runs", str(tmp_path), folder=tmp_path) as command:
        command.until_said("gateway is up", 60)
        rows = cluster_of(tmp_path / "demo")
        assert len(rows) == 3
        assert scraped(tmp_path / "demo") == set(rows)
        command.process.kill()
        command.process.wait(10)
        deadline = time.monotonic() + 30
        while command.left() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert command.left() == []


@pytest.mark.vllm
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_the_engine_loads_leaves_none_of_its_processes(times: int, tmp_path: Path) -> None:
    with Fermata("demo", "--runs", str(tmp_path), folder=tmp_path) as command:
        command.until_said("starting the engine", 90)
        # The command, two backends, the gateway, the node, and at least two processes of vLLM.
        command.until(lambda: len(command.left()) >= 7, 120, "vLLM started no process of its own")
        for number in range(times):
            command.interrupt()
            if number == 0:
                command.until_said("SIGINT: stopping everything in order", 20)
        code, _ = command.finish(60)
        assert code == 130, command.err
        deadline = time.monotonic() + 10  # killed at once, they may take a moment to be gone
        while command.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert command.left() == []
