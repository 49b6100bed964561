"""The settings files in the chart are what the processes read: all of them are fed to the processes' own loader."""

from __future__ import annotations

import fnmatch
import math
import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

import node_runtime.process
import rollout_node.main
import tool_gateway.process
from fermata_cli.main import main
from fermata_cli.schema import ALL_SECTIONS
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.settings import load
from rollout_node.settings import RolloutSettings
from tests.deploy.chart import (
    CHART,
    NAMESPACE,
    ROOT,
    VALUES,
    Document,
    container,
    merged,
    of_kind,
    pod_specs,
    render,
    rendered,
    settings_text,
    values_of,
    workloads,
)
from tool_gateway.settings import GatewaySettings
from trainer_node.settings import TrainerSettings

each_file = pytest.mark.parametrize("name", VALUES)
FIELDS = {"metadata.name": "demo-fermata-rollout-0", "status.podIP": "10.0.3.17"}


def shown(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `fermata config show` makes of a settings file."""
    path = tmp_path / "fermata.yaml"
    path.write_text(text)
    code = main(["config", "show", "--config", str(path)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return cast(dict[str, Any], yaml.safe_load(captured.out))


def loaded(documents: tuple[Document, ...] | list[Document], role: str, tmp_path: Path) -> dict[str, Any]:
    """The settings of a role's process: its sections of its file, and the FERMATA_* variables of its pod."""
    path = tmp_path / "fermata.yaml"
    path.write_text(settings_text(documents, role))
    env = {}
    for variable in container(pod_specs(documents)[role])["env"]:
        if variable["name"].startswith("FERMATA_"):
            env[variable["name"]] = FIELDS[variable["valueFrom"]["fieldRef"]["fieldPath"]]
    own = "backend" if role.startswith("tool-") else role
    return load({key: ALL_SECTIONS[key] for key in ("runtime", own)}, file=path, env=env)


@each_file
def test_fermata_config_show_takes_every_settings_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maps = [d for d in of_kind(rendered(name), "ConfigMap") if "fermata.yaml" in d["data"]]
    assert len(maps) == 1 + sum(role.startswith("tool-") for role in workloads(rendered(name)))
    for document in maps:
        text = document["data"]["fermata.yaml"]
        resolved = shown(text, tmp_path, capsys)
        for section, given in yaml.safe_load(text).items():
            assert given.keys() <= resolved[section].keys()


@each_file
def test_every_process_can_read_its_file_and_variables(name: str, tmp_path: Path) -> None:
    documents = rendered(name)
    for role in workloads(documents):
        runtime = cast(RuntimeSettings, loaded(documents, role, tmp_path)["runtime"])
        assert runtime.node_name == "demo-fermata-rollout-0"  # of FIELDS: each pod has its own
        assert runtime.metrics_host == "0.0.0.0"


@each_file
def test_the_kubelet_never_comes_before_the_process_itself(name: str, tmp_path: Path) -> None:
    documents = rendered(name)
    for role, pod in pod_specs(documents).items():
        if role == "test":
            continue
        settings = loaded(documents, role, tmp_path)
        grace = settings["runtime"].shutdown_grace_s
        hook = container(pod).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert hook[0] == "sleep"
        bound = float(hook[1]) + grace + 2 * node_runtime.process._CANCEL_GRACE_S
        assert pod["terminationGracePeriodSeconds"] >= bound + 5
        if role == "gateway":
            gateway = cast(GatewaySettings, settings["gateway"])
            assert gateway.drain_s <= grace - 2 * tool_gateway.process.CLOSE_S
        if role == "rollout":
            rollout = cast(RolloutSettings, settings["rollout"])
            assert rollout.handover_s <= grace * rollout_node.main._CLOSE_SHARE
            startup = container(pod)["startupProbe"]
            budget = startup["failureThreshold"] * startup["periodSeconds"]
            assert budget >= rollout.gateway_wait_s + rollout.engine.start_timeout_s
        if role == "trainer":
            trainer = cast(TrainerSettings, settings["trainer"])
            assert trainer.dispatch.stop_grace_s < grace


def test_longer_drains_lengthen_the_grace(tmp_path: Path) -> None:
    documents = render({"config": {"gateway": {"drain_s": 300.5}}})
    runtime = loaded(documents, "gateway", tmp_path)["runtime"]
    assert runtime.shutdown_grace_s == math.ceil(304.5)
    assert pod_specs(documents)["gateway"]["terminationGracePeriodSeconds"] == 5 + 305 + 10


@pytest.mark.parametrize(
    "config",
    [
        {"gateway": {"drain_s": 3596}, "trainer": {"dispatch": {"stop_grace_s": 0.001}}},
        {"rollout": {"handover_s": 2160.0, "engine": {"start_timeout_s": 1e7}}},
        {"rollout": {"gateway_wait_s": 2_500_000.5}, "gateway": {"ledger": {"max_entries": 1 << 40}}},
    ],
    ids=str,
)
def test_the_largest_and_smallest_are_still_settings(config: dict[str, Any], tmp_path: Path) -> None:
    documents = render({"config": config})
    for role in workloads(documents):
        grace = loaded(documents, role, tmp_path)["runtime"].shutdown_grace_s
        assert pod_specs(documents)[role]["terminationGracePeriodSeconds"] >= grace + 10
    startup = container(pod_specs(documents)["rollout"])["startupProbe"]
    rollout = cast(RolloutSettings, loaded(documents, "rollout", tmp_path)["rollout"])
    budget = startup["failureThreshold"] * startup["periodSeconds"]
    assert budget >= rollout.gateway_wait_s + rollout.engine.start_timeout_s
    trainer = cast(TrainerSettings, loaded(documents, "trainer", tmp_path)["trainer"])
    assert trainer.dispatch.startup_timeout_s > budget


def test_the_chart_knows_the_defaults_that_it_reckons_with() -> None:
    """They stand in templates where values.yaml says nothing."""
    checks = (CHART / "templates" / "_checks.tpl").read_text()
    assert f"| default {GatewaySettings().ledger.max_bytes} " in checks
    (grace,) = [each for each in RuntimeSettings.model_fields["shutdown_grace_s"].metadata if hasattr(each, "le")]
    assert f'(include "fermata.neededGrace" . | int64) {grace.le}' in checks


def service_names(documents: list[Document] | tuple[Document, ...]) -> set[str]:
    """Every address that a Service gives, with its ports."""
    found = set()
    for service in of_kind(documents, "Service"):
        base = f"{service['metadata']['name']}.{NAMESPACE}.svc"
        for port in service["spec"]["ports"]:
            found.add(f"{base}:{port['port']}")
            for workload in of_kind(documents, "StatefulSet"):
                if workload["spec"]["serviceName"] == service["metadata"]["name"]:
                    for number in range(workload["spec"]["replicas"]):
                        found.add(f"{workload['metadata']['name']}-{number}.{base}:{port['port']}")
    return found


@each_file
def test_processes_look_for_each_other_where_they_are(name: str, tmp_path: Path) -> None:
    documents = rendered(name)
    known = service_names(documents)
    gateway = cast(GatewaySettings, loaded(documents, "gateway", tmp_path)["gateway"])
    pools = {pool.name: pool.dns for pool in gateway.pools if pool.dns}
    assert {f"tool-{pool}" for pool in pools} == {role for role in workloads(documents) if role.startswith("tool-")}
    assert set(pools.values()) <= known
    assert set(cast(RolloutSettings, loaded(documents, "rollout", tmp_path)["rollout"]).gateway) <= known
    if "trainer" in workloads(documents):
        trainer = cast(TrainerSettings, loaded(documents, "trainer", tmp_path)["trainer"])
        assert set(trainer.rollout_nodes) <= known
        assert len(trainer.rollout_nodes) == workloads(documents)["rollout"]["spec"]["replicas"]
        assert trainer.sync.host == FIELDS["status.podIP"]
        assert trainer.sync.backend == ("nccl" if name in ("default", "gpu") else "gloo")
        assert trainer.stay
        assert trainer.resume


def test_what_people_set_wins(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "listenHost": "::",
        "config": {
            "gateway": {"port": 7100, "host": "10.1.1.1", "ledger": {"max_bytes": 1 << 32}},
            "rollout": {
                "gateway": ["far.example:7000"],
                "engine": {"enforce_eager": False, "extra": {"swap_space": 0}},
            },
            "trainer": {"adam_eps": 1e-8, "betas": [0.9, 0.95], "sync": {"host": "10.2.2.2"}, "export": False},
        },
        "gateway": {"resources": {"limits": {"memory": "6Gi"}}},
    }
    documents = render(values)
    gateway = cast(GatewaySettings, loaded(documents, "gateway", tmp_path)["gateway"])
    assert (gateway.port, gateway.host, gateway.ledger.max_bytes) == (7100, "10.1.1.1", 1 << 32)
    rollout = cast(RolloutSettings, loaded(documents, "rollout", tmp_path)["rollout"])
    assert (rollout.gateway, rollout.host, rollout.engine.extra) == (("far.example:7000",), "::", {"swap_space": 0})
    trainer = cast(TrainerSettings, loaded(documents, "trainer", tmp_path)["trainer"])
    assert (trainer.adam_eps, trainer.betas, trainer.export) == (1e-8, (0.9, 0.95), False)
    assert trainer.sync.host == "10.2.2.2"
    ports = {port["name"]: port["containerPort"] for port in container(pod_specs(documents)["gateway"])["ports"]}
    assert ports["grpc"] == 7100


def test_tensor_parallel_size_follows_the_gpus(tmp_path: Path) -> None:
    documents = render({"rollout": {"gpus": 8}, "config": {"rollout": {"engine": {"pipeline_parallel_size": 2}}}})
    engine = cast(RolloutSettings, loaded(documents, "rollout", tmp_path)["rollout"]).engine
    assert (engine.tensor_parallel_size, engine.pipeline_parallel_size) == (4, 2)


@each_file
def test_threads_are_those_that_the_pod_asks_for_where_there_are_no_gpus(name: str, tmp_path: Path) -> None:
    """vLLM would bind its threads to cores that it sees, and a container has a share of them."""
    documents = rendered(name)
    engine = cast(RolloutSettings, loaded(documents, "rollout", tmp_path)["rollout"]).engine
    limits = container(pod_specs(documents)["rollout"])["resources"]["limits"]
    assert engine.cpu_omp_threads_bind == (None if "nvidia.com/gpu" in limits else "nobind")


def test_tls_is_mutual_and_tokens_are_sent_and_asked(tmp_path: Path) -> None:
    documents = rendered("tls")
    for role in workloads(documents):
        runtime = cast(RuntimeSettings, loaded(documents, role, tmp_path)["runtime"])
        assert runtime.tls.require_client_cert
        assert runtime.tls.server_name == "fermata.internal"
        assert runtime.tls.ca_file == Path("/run/fermata/tls/ca.crt")
        assert runtime.tokens.accept_file == runtime.tokens.send_file == Path("/run/fermata/tokens/tokens")


def test_the_names_that_certificates_must_carry_are_those_that_are_called(tmp_path: Path) -> None:
    text = (CHART / "README.md").read_text()
    told = {name.replace("NAME", "*") for name in re.findall(r"`([*]?[.]?demo-fermata-[\w-]+\.ml\.svc)`", text)}
    assert len(told) == 3
    documents = rendered("tls")
    called = {
        *cast(RolloutSettings, loaded(documents, "rollout", tmp_path)["rollout"]).gateway,
        *cast(TrainerSettings, loaded(documents, "trainer", tmp_path)["trainer"]).rollout_nodes,
        *(pool.dns for pool in cast(GatewaySettings, loaded(documents, "gateway", tmp_path)["gateway"]).pools),
        container(pod_specs(documents)["test"])["args"][-1],
    }
    for address in called:
        assert any(fnmatch.fnmatch(address.rpartition(":")[0], name) for name in told), address
    (claim,) = re.findall(r"kubectl delete pvc (\S+)-0`", text)
    assert claim == f"state-{workloads(documents)['trainer']['metadata']['name']}"


def test_values_cpu_asks_for_what_the_pages_say() -> None:
    cpus, gib = 0.0, 0.0
    for workload in workloads(rendered("cpu")).values():
        asked = container(workload["spec"]["template"]["spec"])["resources"]["requests"]
        cpus += float(asked["cpu"].removesuffix("m")) / (1000 if asked["cpu"].endswith("m") else 1)
        gib += float(asked["memory"][:-2]) / {"Mi": 1024, "Gi": 1}[asked["memory"][-2:]]
    pages = (CHART / "values-cpu.yaml", CHART / "README.md", ROOT / "docs" / "deploy.md")
    for page in pages:
        said = re.search(
            r"([\d.]+)\s(?:CPUs|of them) and ([\d.]+) GiB are asked", page.read_text().replace("\n# ", " ")
        )
        assert said, page
        assert (float(said[1]), float(said[2])) == (pytest.approx(cpus), pytest.approx(gib)), page


def test_values_cpu_is_the_demo() -> None:
    """The same run as `fermata demo`: what the two say of one thing is one and the same."""
    demo = yaml.safe_load((ROOT / "fermata_cli" / "demo" / "fermata.yaml").read_text())
    values = cast(dict[str, Any], values_of("cpu"))
    for section in ("rollout", "trainer"):
        own = {key: value for key, value in demo[section].items() if key != "port"}
        assert merged(own, values["config"][section]) == values["config"][section], section
        assert merged(values["config"][section], own) == values["config"][section], section
    backends = [tool["config"]["backend"] for tool in values["tools"]]
    assert all(backend["delay"] == demo["backend"]["delay"] for backend in backends)
    assert backends[0]["calculator"] == demo["backend"]["calculator"]
    assert backends[1]["search"]["top_k"] == demo["backend"]["search"]["top_k"]
    assert [tool["tools"] for tool in values["tools"]] == [group["tools"] for group in demo["cluster"]["backends"]]
