"""What the pages say in passing is true: keys are keys, outcomes blame whom the table blames, metrics exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import helm_python
import pytest
import yaml
from fermata.v1 import tool_pb2

from fermata_cli.reference.metrics import measured
from fermata_cli.schema import ALL_SECTIONS
from node_runtime.outcomes import TABLE, Retry, fault_name, outcome_name
from node_runtime.settings import load, schema_keys, schema_sections
from tests.deploy.chart import CHART, check, render, settings_text
from tests.support.pages import ROOT, blocks, without_blocks
from trainer_node.rewards import load_reward
from trainer_node.tasks import load_tasks

DOCS = sorted((ROOT / "docs").glob("*.md"))
KEYS = {key.key for key in schema_keys(ALL_SECTIONS)} | {path for path, _ in schema_sections(ALL_SECTIONS)}
_RETRIES = {
    "no": Retry.NEVER,
    "idempotent tools": Retry.IDEMPOTENT,
    "yes, when the peer says": Retry.PUSHBACK,
    "yes, elsewhere": Retry.ANY,
}


def dotted(values: object, prefix: str = "") -> set[str]:
    """The keys of the chart's values."""
    if not isinstance(values, dict):
        return set()
    return {f"{prefix}{key}" for key in values} | {
        path for key, value in values.items() for path in dotted(value, f"{prefix}{key}.")
    }


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_settings_and_values_named_in_passing_exist(page: Path) -> None:
    """Keys of the settings; of the chart's values where the page is about the chart."""
    values = dotted(yaml.safe_load((CHART / "values.yaml").read_text()))
    known, sections = (KEYS, set(ALL_SECTIONS))
    if page.name in ("deploy.md", "security.md"):
        known, sections = known | values, sections | {name.partition(".")[0] for name in values}
    named = re.findall(rf"`({'|'.join(sorted(sections))})(\.[a-zA-Z_.]+)(?:[=:][^`]*)?`", without_blocks(page))
    wrong = [first + rest for first, rest in named if first + rest not in known]
    assert [name for name in wrong if not name.endswith((".yaml", ".proto"))] == []


def test_the_values_of_the_deploy_page_render_and_its_settings_are_read(tmp_path: Path) -> None:
    [values] = [block for block in blocks(ROOT / "docs" / "deploy.md") if block.note == "values"]
    objects = render(helm_python.values_from_yaml(values.body), release="train")
    for component in ("gateway", "rollout", "trainer", "tool-mine"):
        file = tmp_path / f"{component}.yaml"
        file.write_text(settings_text(objects, component))
        mentioned = {name: ALL_SECTIONS[name] for name in yaml.safe_load(file.read_text())}
        assert load(mentioned, file=file, env={})


def test_the_other_objects_of_the_deploy_page_are_valid_and_its_ledger_renders() -> None:
    page = blocks(ROOT / "docs" / "deploy.md")
    [manifests] = [block.body for block in page if block.note == "manifests"]
    check(list(yaml.safe_load_all(manifests)))
    [ledger] = [block.body for block in page if block.note == "ledger"]
    assert "/ledger" in settings_text(render(helm_python.values_from_yaml(ledger)), "gateway")


def test_the_deploy_page_renders_without_helm_what_helm_renders(tmp_path: Path) -> None:
    page = blocks(ROOT / "docs" / "deploy.md")
    [values] = [block.body for block in page if block.note == "values"]
    for block in page:
        if block.file_name is not None:
            (tmp_path / block.file_name).write_text(block.body)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    command = [sys.executable, "render.py", "train", "default", "my-values.yaml"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    objects = render(helm_python.values_from_yaml(values), release="train", namespace="default")
    expected = [document for document in objects if "helm.sh/hook" not in document["metadata"].get("annotations", {})]
    assert [document for document in yaml.safe_load_all(printed) if document] == expected


def test_the_reward_of_the_deploy_page_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [reward] = [block for block in blocks(ROOT / "docs" / "deploy.md") if block.file_name == "my_rewards.py"]
    (tmp_path / "my_rewards.py").write_text(reward.body)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(
        '{"id": "a", "messages": [{"role": "user", "content": "Where?"}], "city": "Rome"}\n'
    )
    [task] = load_tasks(tmp_path / "tasks.jsonl")
    score = load_reward("my_rewards:score")
    trajectory = SimpleNamespace(calls=())
    assert (score(task, " Rome", trajectory), score(task, "Paris", trajectory)) == (1.0, 0.0)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_metrics_named_in_passing_exist(page: Path) -> None:
    names = {metric.name for metric in measured()}
    named = re.findall(r"`(fermata_[a-z]+_\w+?)(?:_bucket|_sum|_count)?(?:\{[^`]*)?`", page.read_text(encoding="utf-8"))
    assert [name for name in named if name not in names] == []


def test_the_outcome_table_is_the_one_that_is_obeyed() -> None:
    text = (ROOT / "docs" / "trajectory.md").read_text(encoding="utf-8")
    lines = text.partition("| outcome | fault | another attempt |\n| --- | --- | --- |\n")[2].splitlines()
    told = {}
    for line in lines[: lines.index("")]:
        names, fault, retry = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", names.partition(":")[0]):
            told[name] = (fault.split(",")[0], _RETRIES[retry])
    obeyed = {
        outcome_name(outcome): (fault_name(row.fault), row.retry)
        for outcome, row in TABLE.items()
        if outcome != tool_pb2.OUTCOME_UNSPECIFIED
    }
    assert told == obeyed
