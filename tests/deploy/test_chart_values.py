"""Values that are wrong are refused by name, before anything is rendered."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CHART, ROOT, VALUES, merged, refusal, values_of

TYPOS: list[tuple[dict[str, Any], str, str]] = [
    ({"rolout": {}}, "", "rolout"),
    ({"rollout": {"replica": 2}}, "/rollout", "replica"),
    ({"image": {"engine": {"tags": "1"}}}, "/image/engine", "tags"),
    ({"trainer": {"persistence": {"sise": "1Gi"}}}, "/trainer/persistence", "sise"),
    ({"config": {"gatewy": {}}}, "/config", "gatewy"),
    ({"config": {"runtime": {"log_levl": "debug"}}}, "/config/runtime", "log_levl"),
    ({"config": {"rollout": {"engine": {"tensor_paralel_size": 2}}}}, "/config/rollout/engine", "tensor_paralel_size"),
    ({"config": {"trainer": {"eval": {"task": 3}}}}, "/config/trainer/eval", "task"),
    ({"config": {"gateway": {"pools": [{"name": "a", "adresses": []}]}}}, "/config/gateway/pools/0", "adresses"),
    ({"config": {"cluster": {}}}, "/config", "cluster"),
    ({"tools": [{"name": "a", "tools": ["calculator"], "replica": 2}]}, "/tools/0", "replica"),
    (
        {"tools": [{"name": "a", "tools": ["calculator"], "config": {"backend": {"thread": 1}}}]},
        "/tools/0/config/backend",
        "thread",
    ),
    ({"toolDefaults": {"resource": {}}}, "/toolDefaults", "resource"),
    ({"rollout": {"tolerations": [{"keys": "gpu"}]}}, "/rollout/tolerations/0", "keys"),
    ({"rollout": {"resources": {"limit": {}}}}, "/rollout/resources", "limit"),
    ({"trainer": {"extraVolumes": [{"name": "a", "configmap": {}}]}}, "/trainer/extraVolumes/0", "configmap"),
    ({"securityContext": {"readOnlyRootFileSystem": True}}, "/securityContext", "readOnlyRootFileSystem"),
    ({"tls": {"existingsecret": "a"}}, "/tls", "existingsecret"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rollout": {"replicas": "2"}}, r"'/rollout/replicas': got string, want integer"),
    ({"rollout": {"shmSize": "8 GB"}}, r"'/rollout/shmSize': '8 GB' does not match pattern"),
    ({"trainer": {"gpus": 8}}, r"'/trainer/gpus': maximum: got 8, want 1"),
    ({"image": {"pullPolicy": "Sometimes"}}, r"'/image/pullPolicy': value must be one of 'IfNotPresent'"),
    ({"config": {"trainer": {"learning_rate": "fast"}}}, r"'/config/trainer/learning_rate': got string, want number"),
    ({"config": {"trainer": {"betas": [0.9]}}}, r"'/config/trainer/betas': minItems: got 1, want 2"),
    ({"config": {"runtime": {"metrics_port": 0}}}, r"'/config/runtime/metrics_port': minimum: got 0, want 1"),
    ({"config": {"runtime": {"metrics_port": None}}}, r"'/config/runtime': missing property 'metrics_port'"),
    ({"config": {"gateway": None}}, r"'/config': missing property 'gateway'"),
    ({"config": {"trainer": {"seed": 2**53 + 3}}}, r"'/config/trainer/seed': maximum: got 9.007199254740996"),
    ({"tools": [{"tools": ["calculator"]}]}, r"'/tools/0': missing property 'name'"),
    ({"tools": [{"name": "A_b", "tools": ["calculator"]}]}, r"'/tools/0/name': 'A_b' does not match pattern"),
    ({"tools": [{"name": "a", "probe": "exec"}]}, r"'/tools/0/probe': value must be one of 'http', 'grpc', 'tcp'"),
    (
        {"config": {"gateway": {"pools": [{"addresses": ["a:1"]}]}}},
        r"'/config/gateway/pools/0': missing property 'name'",
    ),
]


@pytest.mark.parametrize(("values", "where", "key"), TYPOS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_misspelt_key_is_refused_by_name(values: dict[str, Any], where: str, key: str) -> None:
    assert f"at '{where}': additional properties '{key}' not allowed" in refusal(values)


@pytest.mark.parametrize(("values", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_a_wrong_value_is_refused_by_place(values: dict[str, Any], sentence: str) -> None:
    assert re.search(sentence, refusal(values))


@pytest.mark.parametrize("name", VALUES)
def test_one_wrong_key_spoils_any_values_file(name: str) -> None:
    assert "additional properties 'stepz' not allowed" in refusal(
        merged(values_of(name), {"config": {"trainer": {"stepz": 1}}})
    )


def test_the_schema_is_what_the_script_makes() -> None:
    spec = importlib.util.spec_from_file_location("chart_schema", ROOT / "scripts" / "chart_schema.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.TARGET.read_text() == script.render(), "run: .venv/bin/python scripts/chart_schema.py"


def test_every_object_of_the_schema_is_closed() -> None:
    """Where keys are free, they are somebody else's names: labels, a resource, what vLLM or Helm hands on."""
    free = set()

    def look(node: Any, path: str) -> None:
        if isinstance(node, dict):
            if "properties" in node:
                assert node.get("additionalProperties") is False, path
            elif node.get("type") == "object" and node.get("additionalProperties") in (None, True):
                free.add(path)
            for key, child in node.items():
                look(child, f"{path}/{key}")
        elif isinstance(node, list):
            for number, child in enumerate(node):
                look(child, f"{path}/{number}")

    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    look({key: value for key, value in schema.items() if key != "definitions"}, "")
    assert free == {
        "/properties/global",
        "/properties/config/properties/rollout/properties/engine/properties/extra",
    }
    for name, definition in schema["definitions"].items():
        if "properties" in definition:
            assert definition.get("additionalProperties") is False, name


@pytest.mark.parametrize("path", [CHART / "values.yaml"], ids=lambda path: Path(path).name)
def test_every_value_has_a_comment(path: Path) -> None:
    """Its own line, or the one above the keys it stands among; a block that explains itself as a whole counts too."""
    commented = False
    bare = []
    for line in path.read_text().splitlines():
        if not line.strip():
            commented = False
        elif line.lstrip().startswith("#"):
            commented = True
        elif re.match(r"^ *[A-Za-z_]+:", line) and not commented and "#" not in line:
            bare.append(line)
    allowed = {"image:", "gateway:", "rollout:", "trainer:", "serviceAccount:", "probes:", "podDisruptionBudget:"}
    allowed |= {"networkPolicy:", "podMonitor:", "dashboards:"}
    assert not [line for line in bare if line not in allowed]
