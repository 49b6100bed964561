"""What is wrong at start is one sentence and an exit code; nothing of the engine is started for it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.rollout_node.node_world import World, node_settings
from tests.support.tiny_model import TinyModel, build

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with World(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model"), TinyModel(layers=1))


async def ends(world: World, *settings: str) -> tuple[int, str]:
    """Exit code, and what the node said on stderr in sentences of its own (log lines left out)."""
    node = await world.launch("rollout_node", settings=settings)
    code = await node.ended(150)
    said = [line for line in node.log().splitlines() if line.startswith("rollout_node: ")]
    return code, "\n".join(said)


async def test_an_unknown_key_is_refused_with_the_nearest(world: World) -> None:
    code, said = await ends(world, "rollout.model=x", "rollout.limits.max_turn=3")
    assert code == 2
    assert "max_turn" in said
    assert "max_turns" in said


async def test_a_model_named_twice_is_refused(world: World) -> None:
    code, said = await ends(world, "rollout.model=x", "rollout.engine.model=y")
    assert code == 2
    assert "name the folder in model alone" in said


async def test_a_model_folder_that_is_not_there(world: World) -> None:
    code, said = await ends(world, *node_settings(world.folder / "nowhere", "127.0.0.1:1"))
    assert code == 2
    assert "nowhere" in said
    assert len(said.splitlines()) == 1


def copy(model: Path, folder: Path, *, without: str = "nothing") -> Path:
    folder.mkdir()
    for file in model.iterdir():
        if without not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def forget_control_tokens(folder: Path) -> None:
    tokenizer, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    pairs = json.loads(tokenizer.read_text())
    pairs["added_tokens"] = []
    tokenizer.write_text(json.dumps(pairs))
    kept = {k: v for k, v in json.loads(config.read_text()).items() if not k.endswith(("_token", "_tokens"))}
    config.write_text(json.dumps(kept))


async def test_a_model_without_control_tokens(world: World, model: Path) -> None:
    folder = copy(model, world.folder / "plain")
    forget_control_tokens(folder)
    code, said = await ends(world, *node_settings(folder, "127.0.0.1:1"))
    assert code == 2
    assert len(said.splitlines()) == 1
    assert "control token" in said or "stop token" in said


async def test_a_model_without_a_chat_template(world: World, model: Path) -> None:
    folder = copy(model, world.folder / "bare", without="template")
    code, said = await ends(world, *node_settings(folder, "127.0.0.1:1"))
    assert code == 2
    assert "chat template" in said


async def test_a_port_in_use(world: World, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = await ends(world, *node_settings(model, "127.0.0.1:1", f"rollout.port={port}"))
    assert code == 3
    assert str(port) in said


async def test_a_gateway_that_is_down_is_waited_for_and_then_named(world: World, model: Path) -> None:
    began = time.monotonic()
    code, said = await ends(world, *node_settings(model, "127.0.0.1:1", "rollout.gateway_wait_s=2"))
    assert code == 3
    assert "127.0.0.1:1" in said
    assert time.monotonic() - began >= 2


async def test_a_signal_while_it_waits_ends_it_at_once(world: World, model: Path) -> None:
    node = await world.launch("rollout_node", settings=node_settings(model, "127.0.0.1:1", "rollout.gateway_wait_s=60"))
    async with asyncio.timeout(150):
        while "waiting for a tool gateway" not in node.log():  # noqa: ASYNC110 - another process' file
            await asyncio.sleep(0.05)
    began = time.monotonic()
    assert await node.terminate() == 0
    assert time.monotonic() - began < 20  # the wait itself would take 60
