"""What may not change when the chart or its values do: selectors, and pods that the change is not for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart import (
    CHART,
    VALUES,
    Document,
    component,
    merged,
    of_kind,
    render,
    rendered,
    values_of,
    workloads,
)

IMMUTABLE = ("selector", "serviceName", "volumeClaimTemplates", "podManagementPolicy")


@pytest.fixture(scope="module")
def later_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart, one version on."""
    copy = tmp_path_factory.mktemp("chart") / "fermata"
    shutil.copytree(CHART, copy)
    text = (copy / "Chart.yaml").read_text()
    assert "version: 0.1.0\n" in text
    assert 'appVersion: "0.1.0"\n' in text
    (copy / "Chart.yaml").write_text(text.replace("0.1.0", "9.8.7"))
    return copy


def fixed(document: Document) -> Any:
    """What the cluster refuses to change, or what finds pods."""
    spec = document.get("spec", {})
    kept = {key: spec[key] for key in IMMUTABLE if key in spec}
    return (document["apiVersion"], document["kind"], document["metadata"]["name"], kept, spec.get("podSelector"))


@pytest.mark.parametrize("name", VALUES)
def test_selectors_are_the_same_in_the_next_version(name: str, later_chart: Path) -> None:
    later = render(values_of(name), chart=later_chart)
    assert [fixed(d) for d in later] == [fixed(d) for d in rendered(name)]
    assert {d["metadata"]["labels"]["helm.sh/chart"] for d in later} == {"fermata-9.8.7"}
    for workload in workloads(later).values():
        assert workload["spec"]["selector"]["matchLabels"].keys() == {
            f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")
        }


def test_a_new_chart_version_alone_restarts_nothing(later_chart: Path) -> None:
    text = (later_chart / "Chart.yaml").read_text()
    (later_chart / "Chart.yaml").write_text(text.replace('appVersion: "9.8.7"', 'appVersion: "0.1.0"'))
    try:
        later = workloads(render(values_of("gpu"), chart=later_chart))
    finally:
        (later_chart / "Chart.yaml").write_text(text)
    for role, workload in workloads(rendered("gpu")).items():
        assert later[role]["spec"]["template"] == workload["spec"]["template"]


@pytest.mark.parametrize("name", VALUES)
def test_the_same_values_give_the_same_objects(name: str) -> None:
    assert tuple(render(values_of(name))) == rendered(name)


def test_no_template_asks_for_chance_the_time_or_the_cluster() -> None:
    unsteady = r"\b(rand\w+|shuffle|uuidv4|now|date|gen\w+|htpasswd|bcrypt|lookup|IsUpgrade|IsInstall|Revision)\b"
    for template in (CHART / "templates").rglob("*.*"):
        code = " ".join(re.findall(r"\{\{.*?\}\}", template.read_text(), re.DOTALL))
        code = re.sub(r'/\*.*?\*/|".*?"', "", code, flags=re.DOTALL)
        assert not re.search(unsteady, code), template


@pytest.mark.parametrize(
    ("change", "restarted"),
    [
        ({"config": {"trainer": {"steps": 999}}}, {"trainer"}),
        ({"config": {"gateway": {"retry": {"attempts": 7}}}}, {"gateway"}),
        ({"config": {"rollout": {"limits": {"max_turns": 3}}}}, {"rollout"}),
        (
            {"config": {"runtime": {"log_level": "debug"}}},
            {"gateway", "rollout", "trainer", "tool-calculator", "tool-search"},
        ),
        ({"rollout": {"replicas": 3}}, {"trainer"}),
        ({"gateway": {"labels": {"team": "a"}}}, {"gateway"}),
        ({"podDisruptionBudget": {"enabled": False}}, set()),
    ],
    ids=str,
)
def test_pods_restart_when_what_they_read_changes(change: dict[str, Any], restarted: set[str]) -> None:
    before = workloads(rendered("cpu"))
    after = workloads(render(merged(values_of("cpu"), change)))
    assert {r for r in before if before[r]["spec"]["template"] != after[r]["spec"]["template"]} == restarted
    for workload in after.values():
        assert len(workload["spec"]["template"]["metadata"]["annotations"]["checksum/config"]) == 64


def test_labels_of_ones_own_never_become_selectors() -> None:
    mine = {"app.kubernetes.io/component": "mine", "team": "a"}
    documents = render({"commonLabels": mine, "rollout": {"labels": mine}})
    for document in documents:
        assert document["metadata"]["labels"]["team"] == "a"
    assert {component(d) for d in of_kind(documents, "StatefulSet")} == {"rollout", "trainer"}
    for workload in workloads(documents).values():
        assert (
            workload["spec"]["selector"]["matchLabels"].items()
            <= workload["spec"]["template"]["metadata"]["labels"].items()
        )
        assert "team" not in workload["spec"]["selector"]["matchLabels"]
