"""What each pod runs and with what, how peers find it, and how it is replaced."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.deploy.chart import (
    VALUES,
    container,
    merged,
    of_kind,
    pod_specs,
    render,
    rendered,
    values_of,
    workloads,
)

each_file = pytest.mark.parametrize("name", VALUES)
MODULES = {"gateway": "tool_gateway", "rollout": "rollout_node", "trainer": "trainer_node"}
CONFIG = ["--config", "/etc/fermata/fermata.yaml"]


@each_file
def test_each_role_runs_its_own_process(name: str) -> None:
    entries = {tool["name"]: tool for tool in values_of(name).get("tools", ())}
    for role, pod in pod_specs(rendered(name)).items():
        command = container(pod)["command"]
        if role in MODULES:
            assert command == ["python", "-m", MODULES[role], *CONFIG]
            assert importlib.util.find_spec(f"{MODULES[role]}.__main__")
        elif role == "test":
            assert command[:3] == ["fermata", "tools", "list"]
        else:
            tool = entries.get(role.removeprefix("tool-"), {"tools": [role.removeprefix("tool-")]})
            expected = tool.get("command", ["python", "-m", "tool_backend", *tool.get("tools", ()), *CONFIG])
            assert command == expected
            assert container(pod).get("args") == tool.get("args")
            assert "command" in tool or importlib.util.find_spec("tool_backend.__main__")


@each_file
def test_who_is_found_when(name: str) -> None:
    """Nodes and trainer are found before they are ready, for weights make them so; others while they are ready."""
    for service in of_kind(rendered(name), "Service"):
        role = service["metadata"]["labels"]["app.kubernetes.io/component"]
        spec = service["spec"]
        assert spec.get("publishNotReadyAddresses", False) is (role in ("rollout", "trainer"))
        # A client comes back to the gateway that holds its session.
        assert spec.get("sessionAffinity") == ("ClientIP" if spec.get("clusterIP") != "None" else None)
        for port in spec["ports"]:
            assert port.get("appProtocol") == ("grpc" if port["name"] == "grpc" else None)


@each_file
def test_how_pods_are_replaced(name: str) -> None:
    for role, workload in workloads(rendered(name)).items():
        spec = workload["spec"]
        if workload["kind"] == "Deployment":
            assert spec["strategy"] == {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        elif role == "rollout":
            assert spec["podManagementPolicy"] == "Parallel", "engines load side by side"
        else:
            assert spec["replicas"] == 1, "two trainers would train the same run"


@each_file
def test_what_the_environment_says(name: str) -> None:
    for role, pod in pod_specs(rendered(name)).items():
        only = container(pod)
        said = {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in only["env"]}
        writable = {mount["mountPath"] for mount in only["volumeMounts"] if not mount.get("readOnly")}
        assert said["HOME"] in writable
        if role != "test":
            assert said["USER"], "torch asks who it runs as"
            assert said["FERMATA_RUNTIME__NODE_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
        threads = said.get("OMP_NUM_THREADS", {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1"}})
        assert threads == {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1"}}


def test_the_model_is_read_by_those_who_run_it_and_written_by_nobody() -> None:
    for role, pod in pod_specs(render(merged(values_of("gpu"), {"model": {"subPath": "a/b"}}))).items():
        mounts = {mount["mountPath"]: mount for mount in container(pod)["volumeMounts"]}
        if role in ("rollout", "trainer"):
            assert mounts["/models"] == {"name": "model", "mountPath": "/models", "subPath": "a/b", "readOnly": True}
            (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "model"]
            assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
        else:
            assert "/models" not in mounts


def test_a_folder_of_the_machine_or_any_other_volume_may_hold_the_model() -> None:
    for source, expected in (
        ({"hostPath": "/srv/models"}, {"hostPath": {"path": "/srv/models", "type": "Directory"}}),
        ({"volume": {"nfs": {"server": "f", "path": "/m"}}}, {"nfs": {"server": "f", "path": "/m"}}),
    ):
        pod = pod_specs(render({"model": {"path": "/models/a", **source}}))["trainer"]
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "model"]
        assert volume == {"name": "model", **expected}


def test_images_are_pulled_as_is_said() -> None:
    values = {"image": {"pullPolicy": "Always", "pullSecrets": [{"name": "a"}, {"name": "b"}]}}
    for pod in pod_specs(render(values)).values():
        assert container(pod)["imagePullPolicy"] == "Always"
        assert pod["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


@pytest.mark.parametrize("role", ["gateway", "rollout", "trainer", "tool-search"])
def test_each_role_takes_what_every_role_takes(role: str) -> None:
    block: dict[str, Any] = {
        "preStopSeconds": 7,
        "shmSize": "16Mi",
        "labels": {"a": "b"},
        "annotations": {"c": "d"},
        "nodeSelector": {"e": "f"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "p",
        "runtimeClassName": "r",
        "extraEnv": [{"name": "E", "value": "1"}],
        "extraEnvFrom": [{"configMapRef": {"name": "x"}}],
        "extraVolumes": [{"name": "v", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
        "resources": {"requests": {"cpu": "77m"}, "limits": {"memory": "3Gi"}},
    }
    values = {role: block} if not role.startswith("tool-") else {"toolDefaults": block}
    template = workloads(render(values))[role]["spec"]["template"]
    pod, only = template["spec"], container(template["spec"])
    assert template["metadata"]["labels"]["a"] == "b"
    assert template["metadata"]["annotations"]["c"] == "d"
    for key in ("nodeSelector", "tolerations", "affinity", "priorityClassName", "runtimeClassName"):
        assert pod[key] == block[key], key
    assert only["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert only["env"][-1] == block["extraEnv"][0]
    assert only["envFrom"] == block["extraEnvFrom"]
    assert only["volumeMounts"][-1] == block["extraVolumeMounts"][0]
    assert {"name": "v", "emptyDir": {}} in pod["volumes"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}} in pod["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in only["volumeMounts"]
    assert only["resources"]["requests"]["cpu"] == "77m"
    assert pod["serviceAccountName"] == "demo-fermata"


def test_the_account_says_nothing_to_the_cluster() -> None:
    (account,) = of_kind(render({"serviceAccount": {"name": "mine", "annotations": {"a": "b"}}}), "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert account["metadata"]["name"] == "mine"
    assert account["metadata"]["annotations"] == {"a": "b"}
    documents = render({"serviceAccount": {"create": False}})
    assert not of_kind(documents, "ServiceAccount")
    assert {pod["serviceAccountName"] for pod in pod_specs(documents).values()} == {"default"}


def test_a_pod_has_a_name_for_the_dashboard() -> None:
    (monitor,) = of_kind(rendered("gpu"), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert [r["targetLabel"] for r in endpoint["relabelings"]] == ["job", "node"]
    assert endpoint["relabelings"][0]["sourceLabels"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_component"]
    assert endpoint["relabelings"][1]["sourceLabels"] == ["__meta_kubernetes_pod_name"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_metrics_may_be_for_some_alone() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
    documents = render({"networkPolicy": {"enabled": True, "metricsFrom": peers}})
    for policy in of_kind(documents, "NetworkPolicy"):
        rules = [rule for rule in policy["spec"]["ingress"] if {"port": "metrics"} in rule.get("ports", ())]
        assert [rule["from"] for rule in rules] == [peers]
