"""Files of a run folder. Invariant: a JSON file is there whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from node_runtime.errors import EXIT_USAGE, NodeError


def write_json(path: Path, value: Any) -> None:
    """Written beside, then renamed."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """An object. Raises NodeError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NodeError(f"{path} cannot be read: {error.strerror or error}", EXIT_USAGE) from None
    except ValueError as error:
        raise NodeError(f"{path} is not JSON: {error}", EXIT_USAGE) from None
    if not isinstance(found, dict):
        raise NodeError(f"{path} must hold a JSON object, got {type(found).__name__}", EXIT_USAGE)
    return found
