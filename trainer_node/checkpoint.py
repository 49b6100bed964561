"""Checkpoints: policy, optimiser, random state, data frontier, lineage.

Invariant: `checkpoint/` is always whole: a new one is written beside it and takes its name by renames, and a crash
between them leaves the older one under `checkpoint.old`, which loading falls back to.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch

from node_runtime.errors import EXIT_USAGE, NodeError

FORMAT = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """What a run needs to go on, beside the tensors."""

    step: int
    frontier: int
    seed: int
    lineage: str  # of the weights in the checkpoint; the run that goes on starts its own
    version: int
    untrained: tuple[int, ...] = ()  # positions before the frontier that were handed out and not trained on


def save(folder: Path, progress: Progress, policy: dict[str, Any], update: dict[str, Any]) -> None:
    """Replace the checkpoint in `folder`."""
    partial = folder.with_name(folder.name + ".partial")
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    state = {
        "format": FORMAT,
        "progress": dataclasses.asdict(progress),
        "policy": policy,
        "update": update,
        "torch_rng": torch.get_rng_state(),
        "python_rng": repr(random.getstate()),
    }
    with (partial / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def load(folder: Path) -> tuple[Progress, dict[str, Any], dict[str, Any]] | None:
    """(progress, policy, update), with the random state set; None where there is no checkpoint."""
    found = next((f for f in (folder, folder.with_name(folder.name + ".old")) if (f / "state.pt").is_file()), None)
    if found is None:
        return None
    try:
        state = torch.load(found / "state.pt", map_location="cpu", weights_only=True)
        if state["format"] != FORMAT:
            raise NodeError(f"checkpoint {found} has format {state['format']}, this build reads {FORMAT}", EXIT_USAGE)
        progress = Progress(**state["progress"])
        torch.set_rng_state(state["torch_rng"])
        random.setstate(_literal(state["python_rng"]))
    except NodeError:
        raise
    except Exception as error:
        raise NodeError(
            f"checkpoint {found} cannot be read ({type(error).__name__}: {error}): move it away to start anew",
            EXIT_USAGE,
        ) from error
    return progress, state["policy"], state["update"]


def _literal(text: str) -> Any:
    import ast

    return ast.literal_eval(text)
