"""The `runtime` section for commands that speak to a running cluster: its TLS files and tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from fermata_cli.schema import ALL_SECTIONS
from node_runtime import logs
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.settings import load
from node_runtime.settings.sources import ENV_CONFIG, merge_sources

DEFAULT_GATEWAY = "127.0.0.1:7000"


def _file(given: Path | None) -> Path | None:
    return Path(os.environ[ENV_CONFIG]) if given is None and os.environ.get(ENV_CONFIG) else given


def find_gateway(file: Path | None, overrides: Sequence[str]) -> str:
    """The gateway that the rollout nodes of these settings use; as in the file of a run that is up."""
    named = merge_sources(ALL_SECTIONS, _file(file), os.environ, overrides).tree.get("rollout", {}).get("gateway")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else DEFAULT_GATEWAY


def load_runtime(file: Path | None, overrides: Sequence[str]) -> RuntimeSettings:
    """Raises SettingsError. Logs below `warning` would only be in the way of a command's own words."""
    sections = load({"runtime": RuntimeSettings}, file=_file(file), env=os.environ, overrides=overrides)
    runtime = cast(RuntimeSettings, sections["runtime"])
    logs.configure(runtime.model_copy(update={"log_level": "error"}), "fermata")
    return runtime
