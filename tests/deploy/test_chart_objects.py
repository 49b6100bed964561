"""What the chart renders, for each of its values files, as the cluster would take it."""

from __future__ import annotations

import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest

import fermata_cli.main
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.settings import load
from tests.deploy.chart import (
    CHART,
    NAMESPACE,
    RELEASE,
    VALUES,
    Document,
    check,
    component,
    container,
    merged,
    notes,
    of_kind,
    pod_specs,
    render,
    rendered,
    values_of,
    walk,
    workloads,
)

each_file = pytest.mark.parametrize("name", VALUES)
OLDEST = "1.27"  # Chart.yaml: kubeVersion


@each_file
def test_helm_lints_it(name: str) -> None:
    report = helm_python.lint(str(CHART), dict(values_of(name)), strict=True)
    told = [message for message in report["messages"] if message["severity"] > 1]  # 1: "icon is recommended"
    assert not report["errors"]
    assert not told


def test_the_oldest_cluster_is_the_one_the_chart_names() -> None:
    assert (
        re.search(r'^kubeVersion: ">=([0-9.]+)\.0-0"$', (CHART / "Chart.yaml").read_text(), re.MULTILINE).group(1)
        == OLDEST
    )


@each_file
@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_every_object_is_valid(name: str, version: str) -> None:
    check(rendered(name), version)


def test_the_schemas_bite() -> None:
    (pod,) = of_kind(rendered("default"), "Pod")
    wrong = {**pod, "spec": {**pod["spec"], "enableServiceLink": False}}
    with pytest.raises(kubernetes_validate.ValidationError, match="enableServiceLink"):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)


@each_file
def test_what_is_installed(name: str) -> None:
    documents = rendered(name)
    found = {(d["kind"], component(d)) for d in documents}
    assert len({(d["kind"], d["metadata"]["name"]) for d in documents}) == len(documents)
    assert {("Deployment", "gateway"), ("StatefulSet", "rollout"), ("ConfigMap", "dashboards")} <= found
    assert (("StatefulSet", "trainer") in found) is (name != "multi-tool")
    assert (("PodMonitor", "pods") in found) is (name in ("gpu", "tls"))
    assert (("NetworkPolicy", "gateway") in found) is (name in ("gpu", "tls"))
    tools = [entry["name"] for entry in values_of(name).get("tools", [{"name": "calculator"}, {"name": "search"}])]
    assert {c.removeprefix("tool-") for kind, c in found if kind == "Deployment" and c != "gateway"} == set(tools)


@each_file
def test_services_lead_to_pods(name: str) -> None:
    """Every Service selects the pods of one workload, by ports which their container has."""
    documents = rendered(name)
    by_component = workloads(documents)
    headless = set()
    for service in of_kind(documents, "Service"):
        workload = by_component[component(service)]
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        ports = {
            port["name"]: port["containerPort"] for port in container(pod_specs(documents)[component(service)])["ports"]
        }
        for port in service["spec"]["ports"]:
            assert port["port"] == ports[port["targetPort"]]
        if service["spec"].get("clusterIP") == "None":
            headless.add(service["metadata"]["name"])
    for workload in by_component.values():
        if workload["kind"] == "StatefulSet":
            assert workload["spec"]["serviceName"] in headless
    assert len(headless) == len(by_component), "each workload has a headless Service"


@each_file
def test_every_container_is_confined(name: str) -> None:
    for pod in pod_specs(rendered(name)).values():
        whole = pod["securityContext"]
        assert whole["runAsNonRoot"] is True
        assert whole["runAsUser"] == whole["runAsGroup"] == whole["fsGroup"] == 10001
        assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
        own = container(pod)["securityContext"]
        assert own["readOnlyRootFilesystem"] is True
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"]["drop"] == ["ALL"]
        assert "privileged" not in own
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        writable = {m["mountPath"] for m in container(pod)["volumeMounts"] if not m.get("readOnly")}
        assert {"/tmp", "/home/fermata", "/var/lib/fermata"} <= writable


@pytest.mark.parametrize("name", ["default", "cpu", "tls"])
def test_a_namespace_may_enforce_the_restricted_standard(name: str) -> None:
    """What test_every_container_is_confined leaves of it: kinds of volumes, ports of the host, added capabilities."""
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    for pod in pod_specs(rendered(name)).values():
        assert {kind for volume in pod["volumes"] for kind in volume if kind != "name"} <= allowed
        assert not any("hostPort" in port for port in container(pod).get("ports", ()))
        assert "add" not in container(pod)["securityContext"]["capabilities"]


@each_file
def test_every_process_is_probed(name: str) -> None:
    for role, pod in pod_specs(rendered(name)).items():
        if role == "test":
            continue
        only = container(pod)
        scheme = "HTTPS" if name == "tls" else "HTTP"
        if role == "tool-compiler":
            assert {only[f"{probe}Probe"]["grpc"]["port"] for probe in ("startup", "liveness", "readiness")} == {7020}
        else:
            metrics = {"port": "metrics", "scheme": scheme}
            assert only["livenessProbe"]["httpGet"] == {"path": "/healthz", **metrics}
            assert only["readinessProbe"]["httpGet"] == {"path": "/readyz", **metrics}
            assert only["startupProbe"]["httpGet"] == {"path": "/startupz", **metrics}
        startup = only["startupProbe"]
        budget = startup["failureThreshold"] * startup["periodSeconds"]
        assert budget >= (1200 if role == "rollout" else 60)


@each_file
def test_no_image_is_latest(name: str) -> None:
    for pod in pod_specs(rendered(name)).values():
        image = container(pod)["image"]
        repository, at, digest = image.partition("@")
        assert (at and re.fullmatch("sha256:[0-9a-f]{64}", digest)) or re.search(r":(?!latest)[\w.-]+$", repository), (
            image
        )


@pytest.mark.parametrize(
    ("values", "role", "image"),
    [
        ({}, "rollout", "fermata:0.1.0-cuda"),
        ({"rollout": {"gpus": 0}}, "rollout", "fermata:0.1.0-cpu"),
        ({"rollout": {"gpus": 0}}, "trainer", "fermata:0.1.0-cuda"),
        ({"image": {"registry": "r.example/a/"}}, "gateway", "r.example/a/fermata-gateway:0.1.0"),
        ({"image": {"gateway": {"tag": "x"}}}, "tool-search", "fermata-gateway:x"),
        ({"image": {"engine": {"digest": f"sha256:{'0' * 64}"}}}, "trainer", f"fermata@sha256:{'0' * 64}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_which_image(values: dict[str, Any], role: str, image: str) -> None:
    assert container(pod_specs(render(values))[role])["image"] == image


@each_file
def test_gpus_and_shared_memory(name: str) -> None:
    pods = pod_specs(rendered(name))
    expected = {"default": (1, 1), "gpu": (2, 1)}.get(name, (0, 0))
    for role, gpus in zip(("rollout", "trainer"), expected, strict=True):
        if role not in pods:
            continue
        only = container(pods[role])
        for kind in ("limits", "requests"):
            assert only["resources"][kind].get("nvidia.com/gpu", 0) == gpus
        assert ("OMP_NUM_THREADS" in {variable["name"] for variable in only["env"]}) is (gpus == 0)
    for pod in pods.values():
        shm = [mount for mount in container(pod)["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        for mount in shm:
            (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
            assert volume["emptyDir"]["medium"] == "Memory"
            assert volume["emptyDir"]["sizeLimit"]
    assert any("/dev/shm" in str(container(pod)["volumeMounts"]) for pod in pods.values())


def test_where_pods_run() -> None:
    pod = pod_specs(rendered("gpu"))["rollout"]
    assert pod["nodeSelector"] == {"accelerator": "h100"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["priorityClassName"] == "training"
    (spread,) = pod["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "rollout"
    assert container(pod)["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in container(pod)["volumeMounts"]


def test_tls_and_tokens_come_from_secrets() -> None:
    for role, pod in pod_specs(rendered("tls")).items():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        expected = "fermata-gateway-tls" if role in ("gateway", "test") else "fermata-tls"
        assert volumes["tls"]["secret"] == {"secretName": expected, "defaultMode": 0o440}
        assert volumes["tokens"]["secret"] == {"secretName": "fermata-tokens", "defaultMode": 0o440}
        mounts = {mount["name"]: mount for mount in container(pod)["volumeMounts"]}
        assert mounts["tls"] == {"name": "tls", "mountPath": "/run/fermata/tls", "readOnly": True}
        assert mounts["tokens"] == {"name": "tokens", "mountPath": "/run/fermata/tokens", "readOnly": True}


@pytest.mark.parametrize("name", ["gpu", "tls"])
def test_the_pod_monitor(name: str) -> None:
    documents = rendered(name)
    (monitor,) = of_kind(documents, "PodMonitor")
    assert monitor["spec"].keys() == {"selector", "podMetricsEndpoints"}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    assert endpoint.get("scheme", "http") == ("https" if name == "tls" else "http")
    for relabelling in endpoint["relabelings"]:
        assert relabelling.keys() <= {"sourceLabels", "regex", "replacement", "targetLabel"}
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    for workload in workloads(documents).values():
        template = workload["spec"]["template"]
        assert wanted <= template["metadata"]["labels"].items()
        assert endpoint["port"] in {port["name"] for port in container(template["spec"])["ports"]}
    job = endpoint["relabelings"][0]
    pattern = re.compile(job["regex"] + "$")
    jobs = {c: pattern.sub(job["replacement"].replace("$", "\\"), c) for c in ("gateway", "rollout", "tool-search")}
    assert jobs == {"gateway": "gateway", "rollout": "rollout", "tool-search": "tool"}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["one release", "parts of it elsewhere"])
def test_who_may_reach_what(elsewhere: bool) -> None:
    """Weights go from trainer to workers, and between workers, on ports that are free at the time."""
    peers = [{"podSelector": {"matchLabels": {"app": "other"}}}] if elsewhere else []
    documents = render(merged(values_of("gpu"), {"networkPolicy": {"peers": peers}}))
    policies = {component(d): d["spec"]["ingress"] for d in of_kind(documents, "NetworkPolicy")}
    assert policies.keys() == workloads(documents).keys()
    more = {"other"} if elsewhere else set()

    def allowed(target: str, port: str) -> set[str]:
        found = set()
        for rule in policies[target]:
            if "ports" not in rule or {"port": port} in rule["ports"]:
                labels = [peer["podSelector"]["matchLabels"] for peer in rule.get("from", ())]
                found |= {label.get("app.kubernetes.io/component", label.get("app")) for label in labels} or {"all"}
        return found

    assert allowed("gateway", "grpc") == {"rollout", "notebook", "test"}
    assert allowed("gateway", "40001") == allowed("tool-search", "40001") == set()
    assert allowed("tool-search", "grpc") == {"gateway"} | more
    assert allowed("rollout", "grpc") == allowed("rollout", "40001") == {"trainer", "rollout"} | more
    assert allowed("trainer", "40001") == {"rollout"} | more
    assert all("all" in allowed(target, "metrics") for target in policies)


def test_a_release_may_have_no_tools_and_no_dashboards() -> None:
    documents = render({"tools": [], "dashboards": {"enabled": False}})
    assert {component(d) for d in of_kind(documents, "ConfigMap")} == {"config"}
    assert set(workloads(documents)) == {"gateway", "rollout", "trainer"}


def test_disruption_budgets_are_for_more_than_one_pod() -> None:
    found = of_kind(rendered("multi-tool"), "PodDisruptionBudget")
    assert {component(d): d["spec"]["maxUnavailable"] for d in found} == {
        "gateway": 1,
        "tool-calculator": 1,
        "tool-search": 1,
    }
    # Rollout nodes that wait for weights are not ready for as long as no trainer is there: machines can be drained.
    found += of_kind(rendered("gpu"), "PodDisruptionBudget")
    assert "rollout" in {component(d) for d in found}
    assert {d["spec"]["unhealthyPodEvictionPolicy"] for d in found} == {"AlwaysAllow"}


def test_the_run_folder_is_on_a_volume() -> None:
    def state(values: dict[str, Any]) -> Document:
        spec = workloads(render(values))["trainer"]["spec"]
        volumes = [v for v in spec["template"]["spec"]["volumes"] if v["name"] == "state"]
        claims = [c for c in spec.get("volumeClaimTemplates", ()) if c["metadata"]["name"] == "state"]
        (only,) = [*volumes, *claims]
        return only

    assert state({})["spec"]["resources"] == {"requests": {"storage": "50Gi"}}
    assert state({"trainer": {"persistence": {"enabled": False}}})["emptyDir"] == {}
    claimed = state({"trainer": {"persistence": {"existingClaim": "mine"}}})
    assert claimed["persistentVolumeClaim"] == {"claimName": "mine"}


def test_dashboards_are_for_grafanas_sidecar(tmp_path: Path) -> None:
    (found,) = [d for d in of_kind(rendered("default"), "ConfigMap") if component(d) == "dashboards"]
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["annotations"] == {"grafana_folder": "Fermata"}
    boards = {path.name: path.read_text().strip() for path in (CHART / "dashboards").glob("*.json")}
    assert {name: text.strip() for name, text in found["data"].items()} == boards
    assert sum(map(len, boards.values())) < 1 << 20, "a ConfigMap holds no more"
    other = {"label": "board", "labelValue": "yes", "folderAnnotation": "where", "folder": "RL"}
    (found,) = [d for d in of_kind(render({"dashboards": other}), "ConfigMap") if component(d) == "dashboards"]
    assert found["metadata"]["labels"]["board"] == "yes"
    assert found["metadata"]["annotations"] == {"where": "RL"}


@pytest.mark.parametrize("release", ["r" * 53, "a-" * 26 + "a", "team.one"], ids=len)
def test_names_fit(release: str) -> None:
    """53 characters is the longest name that Helm takes; pods, revisions and labels add to an object's name."""
    documents = render(values_of("multi-tool"), release=release)
    assert len({(d["kind"], d["metadata"]["name"]) for d in documents}) == len(documents)
    for document in documents:
        name = document["metadata"]["name"]
        assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name), name
        assert len(name) <= (52 if document["kind"] in ("StatefulSet", "Deployment") else 63), name

        def fits(path: str, value: Any) -> None:
            if isinstance(value, str) and re.search("/(matchLabels|labels|selector)/", path):
                assert len(value) <= 63, f"{path}: {value}"

        walk(document, fits)


def test_the_test_pod_is_there_for_its_logs() -> None:
    (pod,) = of_kind(rendered("default"), "Pod")
    assert pod["metadata"]["annotations"] == {
        "helm.sh/hook": "test",
        "helm.sh/hook-delete-policy": "before-hook-creation",
    }


@each_file
def test_what_helm_says_at_the_end_is_there(name: str) -> None:
    said = notes(values_of(name))
    documents = rendered(name)
    known = {(d["kind"].lower(), d["metadata"]["name"]) for d in documents}
    commands = [line.strip() for line in said.splitlines() if line.startswith("  ")]
    named = [word for line in commands for word in re.findall(r"(statefulset|service)/(\S+)", line)]
    assert set(named) <= known
    for line in commands:
        for service, port in re.findall(r"port-forward service/(\S+) (\d+)", line):
            (found,) = [d for d in of_kind(documents, "Service") if d["metadata"]["name"] == service]
            assert component(found) == "gateway"
            assert int(port) in [each["port"] for each in found["spec"]["ports"]]
    pods = [pod for line in commands for pod in re.findall(r"(?:logs -f|exec) (\S+)-0(?= |$)", line)]
    assert {("statefulset", pod) for pod in pods} <= known
    assert bool(pods) is ("trainer" in workloads(documents))
    assert all("-n ml" in line for line in commands if line.startswith(("kubectl", "helm")))
    assert "helm test demo -n ml --logs" in commands
    for line in commands:
        if line.startswith("fermata "):
            words = line.removeprefix("fermata ").split()
            assert fermata_cli.main.main([*words[:2], "--help"]) == 0
            port = container(pod_specs(documents)["gateway"])["ports"][0]
            assert words[-1] == f"127.0.0.1:{port['containerPort']}"
    assert any(line.startswith("fermata tools") for line in commands) is ("gateway" in workloads(documents))
    variables = dict(re.findall(r"(FERMATA_\w+)=(\S+)", said))
    assert load({"runtime": RuntimeSettings}, file=None, env=variables)
    assert ("FERMATA_RUNTIME__TLS__SERVER_NAME" in variables) is (name == "tls")
    assert ("in clear" in said) is (name != "tls")
    assert not re.search(r"<no value>|%!|\{\{", said)


def test_where_the_run_is_read_is_where_the_trainer_writes_it() -> None:
    assert "cat /var/lib/fermata/second/trainer_summary.json" in notes(
        {"config": {"trainer": {"run_dir": "/var/lib/fermata/second"}}}
    )
    tls = {"config": {"runtime": {"tls": {"cert_file": "/c/crt", "key_file": "/c/key"}}}}
    assert "in clear" not in notes(tls)


def test_the_package_holds_the_chart_and_no_more(tmp_path: Path) -> None:
    archive = Path(helm_python.package(str(CHART), destination=str(tmp_path)))
    with tarfile.open(archive) as opened:
        inside = {Path(member.name).relative_to("fermata") for member in opened.getmembers()}
    tracked = subprocess.run(["git", "ls-files"], cwd=CHART, capture_output=True, text=True, check=True).stdout
    assert inside == {Path(line) for line in tracked.splitlines() if not line.startswith("ci/")}
    assert Path("dashboards/fermata.json") in inside
    loaded = helm_python.Chart.load_archive(archive.read_bytes())
    packed = loaded.render({}, name=RELEASE, namespace=NAMESPACE)
    unpacked = helm_python.Chart.load(CHART).render({}, name=RELEASE, namespace=NAMESPACE)
    assert packed == unpacked
    assert not helm_python.lint(str(archive), {}, strict=True)["errors"]


def test_a_name_that_no_service_may_have_is_refused() -> None:
    with pytest.raises(helm_python.HelmError, match=r'objects would be named "1st-fermata": .* set fullnameOverride'):
        render({}, release="1st")
    assert component(render({"fullnameOverride": "first"}, release="1st")[0])
