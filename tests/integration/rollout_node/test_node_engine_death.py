"""kill -9 of the engine under a rollout node: what is parked is handed over, and the node ends with a sentence."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from node_runtime.errors import EXIT_FAILED
from tests.integration.rollout_node import calling_model
from tests.integration.rollout_node.node_world import Trainer, World, start

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(300)]


def descendants(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, timeout=10)
    children = [int(line) for line in found.stdout.split()]
    return children + [grandchild for child in children for grandchild in descendants(child)]


def named_vllm(pids: list[int]) -> list[int]:
    return [pid for pid in pids if "VLLM" in Path(f"/proc/{pid}/comm").read_text().upper()]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def test_a_node_whose_engine_is_killed_says_so_and_ends(tmp_path: Path) -> None:
    model = calling_model.build(tmp_path / "model")
    async with World(tmp_path) as world:
        gateway = await world.gateway([await world.backend()])
        node = await world.node(model, gateway.address)
        async with Trainer(node.address) as trainer:
            await trainer.say(start=start("parked", context={"seconds": "60"}))
            await trainer.until(lambda: "parked" in trainer.parked())
            engine = descendants(node.process.pid)
            workers = named_vllm(engine)
            assert workers, f"no engine process among {engine}"
            os.kill(workers[-1], signal.SIGKILL)
            killed = time.monotonic()
            code = await asyncio.wait_for(node.process.wait(), 40)
            assert code == EXIT_FAILED
            assert time.monotonic() - killed < 40
            assert "the vLLM engine process has ended unexpectedly" in node.log()
            handed = trainer.ends["parked"].handed_over
            assert handed.snapshot.pending[0].key == "run/parked/0/0/0"
        assert not alive(workers), "an engine process was left behind"
        async with asyncio.timeout(10):
            while alive(engine):  # noqa: ASYNC110 (Python's own resource tracker ends when it sees its parent gone)
                await asyncio.sleep(0.05)
