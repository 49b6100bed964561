"""The machine-readable feed of a run: `progress.jsonl`, one event per line.

Invariant: a line is written whole and at once, so a reader that follows the file always sees complete events. Every
line has `t` (Unix seconds), `event` and `phase`.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any


class ProgressFeed:
    """Appends events. A feed that cannot be written is a NodeError at start and never later."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")

    def write(self, event: str, phase: str, **fields: Any) -> None:
        line = json.dumps({"t": round(time.time(), 3), "event": event, "phase": phase, **clean(fields)})
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def clean(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return value


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all: written beside, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(clean(value), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
