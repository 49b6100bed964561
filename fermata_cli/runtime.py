"""The `runtime` section for commands that speak to a running cluster: its TLS files and tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from node_runtime import logs
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.settings import load
from node_runtime.settings.sources import ENV_CONFIG


def load_runtime(file: Path | None, overrides: Sequence[str]) -> RuntimeSettings:
    """Raises SettingsError. Logs below `warning` would only be in the way of a command's own words."""
    if file is None and os.environ.get(ENV_CONFIG):
        file = Path(os.environ[ENV_CONFIG])
    sections = load({"runtime": RuntimeSettings}, file=file, env=os.environ, overrides=overrides)
    runtime = cast(RuntimeSettings, sections["runtime"])
    logs.configure(runtime.model_copy(update={"log_level": "error"}), "fermata")
    return runtime
