"""Values of people's own beside the chart's: what goes over what, and several of one kind.

Invariant: nothing stands twice in an object, and no release reaches into another's pods.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.deploy.chart import (
    RELEASE,
    Document,
    check,
    container,
    of_kind,
    pod_specs,
    render,
    rendered,
    settings_text,
    values_of,
    walk,
    workloads,
)


def test_large_numbers_stay_whole() -> None:
    documents = render({"gateway": {"replicas": 1_000_000}, "toolDefaults": {"replicas": 2_000_000}})
    check(documents)
    assert workloads(documents)["gateway"]["spec"]["replicas"] == 1_000_000
    documents = render({"config": {"trainer": {"seed": 2**53 - 1}}})
    assert f"seed: {2**53 - 1}\n" in settings_text(documents, "trainer")
    documents = render({"config": {"gateway": {"ledger": {"max_bytes": 123_456_789}}}})
    assert "max_bytes: 123456789\n" in settings_text(documents, "gateway")


def test_zero_and_five() -> None:
    none = {"tools": [{"name": "a", "tools": ["calculator"], "replicas": 0}], "gateway": {"replicas": 0}}
    documents = render(none)
    check(documents)
    assert not of_kind(documents, "PodDisruptionBudget")
    documents = render({"rollout": {"replicas": 5}})
    check(documents)
    assert settings_text(documents, "trainer").count(".demo-fermata-rollout.ml.svc:7010\n") == 5


def test_extra_environment_stands_in_the_place_of_the_charts() -> None:
    own = [{"name": "HOME", "value": "/x"}, {"name": "OMP_NUM_THREADS", "value": "3"}]
    documents = render({"rollout": {"gpus": 0, "extraEnv": own}})
    check(documents)
    env = container(pod_specs(documents)["rollout"])["env"]
    assert {v["name"]: v.get("value") for v in env if "value" in v} == {
        "HOME": "/x",
        "OMP_NUM_THREADS": "3",
        "USER": "fermata",
    }
    field = {"name": "FERMATA_RUNTIME__NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    (variable,) = [
        variable
        for variable in container(pod_specs(render({"gateway": {"extraEnv": [field]}}))["gateway"])["env"]
        if variable["name"] == field["name"]
    ]
    assert variable == field


def test_annotations_of_ones_own_do_not_touch_the_charts() -> None:
    mine = {"checksum/config": "mine", "note": "n"}
    documents = render({"gateway": {"annotations": mine}})
    annotations = workloads(documents)["gateway"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["note"] == "n"
    assert re.fullmatch("[0-9a-f]{64}", annotations["checksum/config"])


def test_a_roles_label_goes_before_everybodys() -> None:
    documents = render({"commonLabels": {"team": "all"}, "gateway": {"labels": {"team": "mine"}}})
    labels = {role: w["spec"]["template"]["metadata"]["labels"]["team"] for role, w in workloads(documents).items()}
    assert labels["gateway"] == "mine"
    assert labels["rollout"] == "all"


def test_a_spread_of_ones_own_keeps_its_selector() -> None:
    spread = {
        "maxSkew": 1,
        "topologyKey": "zone",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"team": "a"}},
    }
    pod = pod_specs(render({"gateway": {"topologySpreadConstraints": [spread]}}))["gateway"]
    assert pod["topologySpreadConstraints"] == [spread]


def test_security_contexts_of_a_role_go_over_the_charts_in_its_test_too() -> None:
    values = {
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        "gateway": {"podSecurityContext": {"fsGroup": 7}, "securityContext": {"readOnlyRootFilesystem": False}},
    }
    documents = render(values)
    check(documents)
    for role in ("gateway", "test"):
        pod = pod_specs(documents)[role]
        assert pod["securityContext"]["fsGroup"] == 7
        assert "runAsUser" not in pod["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container(pod)["securityContext"]["readOnlyRootFilesystem"] is False
        assert container(pod)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "fsGroup" not in pod_specs(documents)["rollout"]["securityContext"]


def test_a_tool_may_come_from_another_registry() -> None:
    tools = [
        {"name": "near", "tools": ["calculator"]},
        {"name": "far", "tools": ["a:b"], "image": {"registry": "far.example/x", "repository": "t", "tag": "1"}},
        {"name": "hub", "tools": ["a:b"], "image": {"registry": "", "repository": "me/t", "tag": "1"}},
        {"name": "own", "tools": ["a:b"], "image": {"repository": "far.example/x/t", "tag": "1"}},
        {"name": "port", "tools": ["a:b"], "image": {"repository": "far:5000/t", "tag": "1"}},
        {"name": "local", "tools": ["a:b"], "image": {"repository": "localhost/t", "tag": "1"}},
        {"name": "team", "tools": ["a:b"], "image": {"repository": "team/t.x", "tag": "1"}},
    ]
    pods = pod_specs(render({"image": {"registry": "near.example:5000/y"}, "tools": tools}))
    assert container(pods["tool-near"])["image"] == "near.example:5000/y/fermata-gateway:0.1.0"
    assert container(pods["tool-far"])["image"] == "far.example/x/t:1"
    assert container(pods["tool-hub"])["image"] == "me/t:1"
    assert container(pods["tool-own"])["image"] == "far.example/x/t:1"
    assert container(pods["tool-port"])["image"] == "far:5000/t:1"
    assert container(pods["tool-local"])["image"] == "localhost/t:1"
    assert container(pods["tool-team"])["image"] == "near.example:5000/y/team/t.x:1"


def test_zero_and_false_of_a_tool_go_over_what_all_tools_have() -> None:
    tool = {"name": "a", "tools": ["calculator"], "preStopSeconds": 0, "topologySpreadConstraints": []}
    pod = pod_specs(render({"tools": [tool], "toolDefaults": {"nodeSelector": {"a": "b"}}}))["tool-a"]
    assert "lifecycle" not in container(pod)
    assert "topologySpreadConstraints" not in pod
    assert pod["nodeSelector"] == {"a": "b"}


@pytest.mark.parametrize("other", ["rehearsal", "demo-2", "x" * 53])
def test_two_releases_share_a_namespace(other: str) -> None:
    first, second = rendered("tls"), tuple(render(values_of("tls"), release=other))

    def names(documents: tuple[Document, ...]) -> set[tuple[str, str]]:
        return {(d["kind"], d["metadata"]["name"]) for d in documents}

    assert not names(first) & names(second)
    pods = [workload["spec"]["template"]["metadata"]["labels"] for workload in workloads(second).values()]
    pods += [pod["metadata"]["labels"] for pod in of_kind(second, "Pod")]
    found = []

    def selects(path: str, value: Any) -> None:
        # Those of a Service, and of everything else.
        if re.search("/(selector|matchLabels)$", path) and "matchLabels" not in value:
            found.append(value)

    for document in first:
        walk(document, selects)
    assert len(found) > 20
    for selector in found:
        assert selector["app.kubernetes.io/instance"] == RELEASE
        assert not any(selector.items() <= labels.items() for labels in pods)


def test_a_release_of_the_longest_name_with_the_longest_tools() -> None:
    tools = [{"name": f"{'t' * 39}{n}", "tools": ["calculator"]} for n in range(3)]
    documents = render({"tools": tools, "networkPolicy": {"enabled": True}}, release="r" * 53)
    check(documents)
    assert len({(d["kind"], d["metadata"]["name"]) for d in documents}) == len(documents)
