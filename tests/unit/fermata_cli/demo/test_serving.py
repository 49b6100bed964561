"""The settings of a demo cluster without a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fermata_cli.demo import MODEL_DIR
from fermata_cli.demo.serving import serving_cluster
from node_runtime.errors import NodeError


def test_the_file_holds_the_demos_settings_with_the_callers_tools(tmp_path: Path) -> None:
    tools = {"calculator": "mine:calculator", "search": "search"}
    serving_cluster(tmp_path / "run", tools=tools, overrides=["rollout.limits.max_turns=3"], say=lambda _: None)
    settings = yaml.safe_load((tmp_path / "run" / "fermata.yaml").read_text())
    (backend,) = settings["cluster"]["backends"]
    assert backend["tools"] == ["mine:calculator", "search"]
    assert settings["backend"]["delay"]["share"] == 0
    assert settings["rollout"]["engine"]["serve_before_sync"] is True
    assert settings["rollout"]["model"] == str(MODEL_DIR)
    assert settings["rollout"]["limits"]["max_turns"] == 3
    assert settings["runtime"]["spans_dir"] == str(tmp_path / "run" / "spans")


def test_a_setting_that_is_wrong_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"rollout\.limits\.max_turns"):
        serving_cluster(tmp_path / "run", tools={"a": "m:a"}, overrides=["rollout.limits.max_turns=0"])
    assert not (tmp_path / "run").exists()
