"""A trainer that is started again leaves a run alone that has ended, and no other."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import trainer_node.run
from node_runtime.process import Lifetime
from node_runtime.runtime_settings import RuntimeSettings
from trainer_node.__main__ import serve
from trainer_node.ended import ended_run
from trainer_node.settings import TrainerSettings


def settings(run_dir: Path, steps: int = 24) -> TrainerSettings:
    return TrainerSettings(
        model=Path("m"), train_tasks=Path("t"), rollout_nodes=("127.0.0.1:1",), run_dir=run_dir, steps=steps
    )


def write(run_dir: Path, summary: object) -> None:
    (run_dir / "trainer_summary.json").write_text(summary if isinstance(summary, str) else json.dumps(summary))


@pytest.mark.parametrize(
    ("outcome", "steps"), [("finished", 24), ("finished", 30), ("target_reached", 3)], ids=lambda value: str(value)
)
def test_a_run_that_has_ended_is_left_alone(tmp_path: Path, outcome: str, steps: int) -> None:
    write(tmp_path, {"outcome": outcome, "steps": steps})
    sentence = ended_run(settings(tmp_path))
    assert sentence is not None
    assert outcome in sentence
    assert str(tmp_path) in sentence


@pytest.mark.parametrize(
    "summary",
    [
        {"outcome": "interrupted", "steps": 24},
        {"outcome": "failed", "steps": 24},
        {"outcome": "finished", "steps": 23},  # more steps are asked for since
        {"outcome": "finished"},
        {"outcome": "finished", "steps": None},
        ["finished"],
        '{"outcome": "fini',
        "",
    ],
    ids=str,
)
def test_anything_else_is_run(tmp_path: Path, summary: object) -> None:
    write(tmp_path, summary)
    assert ended_run(settings(tmp_path)) is None


def test_no_summary_is_run(tmp_path: Path) -> None:
    assert ended_run(settings(tmp_path / "absent")) is None


class EndsAtOnce:
    """A run with nothing to do."""

    run_id = "run-1"

    def __init__(self, *_args: Any, **_named: Any) -> None: ...

    async def run(self) -> None: ...

    def interrupt(self) -> None: ...


@pytest.mark.parametrize("stay", [True, False])
async def test_the_end_of_a_run_is_waited_out_only_with_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stay: bool
) -> None:
    monkeypatch.setattr(trainer_node.run, "TrainerRun", EndsAtOnce)
    runtime = RuntimeSettings()
    lifetime = Lifetime(runtime, "trainer_node")
    chosen = settings(tmp_path).model_copy(update={"stay": stay})
    serving = asyncio.create_task(serve(lifetime, chosen, runtime))
    done, _ = await asyncio.wait({serving}, timeout=0.2)
    assert (serving in done) is not stay
    lifetime.stopping.set()
    await asyncio.wait_for(serving, 5)
