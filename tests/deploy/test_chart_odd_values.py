"""Values as people really write them: nulls, words that YAML reads as something else, text with quotes and colons.

Invariant: what is taken reaches the cluster as it was written, in objects that it accepts; the rest is refused where it
stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from fermata_cli.schema import ALL_SECTIONS
from node_runtime.settings import load
from tests.deploy.chart import (
    CHART,
    check,
    component,
    container,
    merged,
    of_kind,
    pod_specs,
    refusal,
    render,
    settings_text,
    workloads,
)

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
ROLES = ("gateway", "rollout", "trainer", "toolDefaults")


def paths(node: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Of every value of values.yaml, blocks included."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield (*at, key)
            yield from paths(child, (*at, key))


def put(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return dict(value)


def default(path: tuple[str, ...]) -> Any:
    value: Any = DEFAULTS
    for key in path:
        value = value[key]
    return value


# -- Nulls: "take the default away", or a key under which nothing is left ----------------------------------------------

MAY_BE_NULL = [
    path
    for path in paths(DEFAULTS)
    if default(path) in ("", [], {})
    or path[-1] in ("resources", "topologySpreadConstraints", "podSecurityContext", "securityContext", "tools")
    or any(key in path[:-1] for key in ("resources", "podSecurityContext", "securityContext"))
]
FREE_SETTINGS = [
    ("config", "runtime", "log_format"),
    *(("config", "trainer", key) for key in ("eval_tasks", "checkpoint_every", "resume")),
    ("config", "trainer", "dispatch", "tools_timeout_s"),
]
NEEDED = [path for path in paths(DEFAULTS) if path not in [*MAY_BE_NULL, *FREE_SETTINGS]]


def test_what_is_empty_may_be_null() -> None:
    kinds = ("seccompProfile",)  # a profile without a type is none
    everything = merged(*(put(path, None) for path in MAY_BE_NULL if path[-2:-1] != kinds))
    documents = render(everything)
    check(documents)
    assert set(workloads(documents)) == {"gateway", "rollout", "trainer"}
    check(render(merged(*(put(path, None) for path in FREE_SETTINGS))))


def test_a_role_may_be_left_blank_under_its_keys() -> None:
    blank = dict.fromkeys(("labels", "annotations", "nodeSelector", "tolerations", "extraEnv", "extraVolumes"))
    check(render({role: blank for role in ROLES}))


@pytest.mark.parametrize("depth", sorted({len(path) for path in NEEDED}))
def test_what_templates_rely_on_cannot_be_taken_away(depth: int) -> None:
    gone = [path for path in NEEDED if len(path) == depth]
    said = refusal(merged(*(put(path, None) for path in gone)))
    for *parents, key in gone:
        where = "".join(f"/{parent}" for parent in parents)
        assert re.search(f"at '{where}': missing propert(y|ies) .*'{key}'", said), (where, key)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"tools": [{"name": "a", "tools": ["calculator"], "resources": None}]}, "/tools/0/resources"),
        ({"tools": [{"name": "a", "tools": ["calculator"], "config": None}]}, "/tools/0/config"),
        ({"rollout": {"tolerations": [{"key": None}]}}, "/rollout/tolerations/0/key"),
        ({"gateway": {"extraEnv": [{"name": "A", "value": 1}]}}, "/gateway/extraEnv/0/value"),
        ({"config": {"trainer": {"learning_rate": None}}}, "/config/trainer/learning_rate"),
        ({"networkPolicy": {"clients": [{"podSelektor": {}}]}}, "/networkPolicy/clients/0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_null_in_a_list_or_a_number_for_a_text_is_refused_by_place(values: dict[str, Any], where: str) -> None:
    assert f"at '{where}':" in refusal(values)


# -- Words that YAML reads as numbers, truth or nothing ----------------------------------------------------------------

NAMES = [
    ("image", "gateway", "tag"),
    ("image", "engine", "tag"),
    ("model", "existingClaim"),
    ("tls", "existingSecret"),
    ("tls", "caKey"),
    ("tls", "serverName"),
    ("tokens", "existingSecret"),
    ("tokens", "sendKey"),
    *((role, key) for role in ROLES for key in ("tlsSecret", "priorityClassName", "runtimeClassName")),
    ("trainer", "persistence", "storageClass"),
    ("serviceAccount", "name"),
    ("dashboards", "labelValue"),
    ("nameOverride",),
]


def with_names(word: str) -> dict[str, Any]:
    named = merged(*(put(path, word) for path in NAMES))
    more = {
        "fullnameOverride": "f",
        "model": {"path": f"/models/{word}", "subPath": word},
        "commonLabels": {"a": word},
        "config": {"runtime": {"metrics_tls": True}},
        "podMonitor": {"enabled": True, "labels": {"b": word}},
        "gateway": {
            "annotations": {"c": word},
            "nodeSelector": {"d": word},
            "extraEnv": [{"name": "E", "value": word}],
        },
        "tools": [{"name": word.replace(".", "-"), "tools": [word], "labels": {"e": word}}],
    }
    return merged(named, more)


@pytest.mark.parametrize("word", ["123", "1e5", "0x1f", "1.5", "2026-01-01", "true", "on", "no", "null"])
def test_a_word_stays_a_word(word: str) -> None:
    name = word.replace(".", "-")
    documents = render(with_names(word), release=name, namespace=name)
    check(documents)  # a text that became a number, truth or nothing is of the wrong type
    for document in documents:
        labels = document["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == name
        assert labels["app.kubernetes.io/name"] == labels["a"] == word
        assert document["metadata"]["namespace"] == name
    trainer = workloads(documents)["trainer"]["spec"]
    assert trainer["volumeClaimTemplates"][0]["spec"]["storageClassName"] == word
    for role, pod in pod_specs(documents).items():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["tls"]["secret"]["secretName"] == volumes["tokens"]["secret"]["secretName"] == word
        assert pod["serviceAccountName"] == word
        assert role == "test" or pod["priorityClassName"] == pod["runtimeClassName"] == word
        assert container(pod)["image"].endswith(f":{word}")
    assert container(pod_specs(documents)["rollout"])["volumeMounts"][-1]["subPath"] == word
    assert container(pod_specs(documents)[f"tool-{name}"])["command"][3] == word
    (monitor,) = of_kind(documents, "PodMonitor")
    tls = monitor["spec"]["podMetricsEndpoints"][0]["tlsConfig"]
    assert tls == {"ca": {"secret": {"name": word, "key": word}}, "serverName": word}
    assert monitor["metadata"]["labels"]["b"] == word


# -- Text that would break a document it is pasted into ---------------------------------------------------------------

ODD = [
    "a: b",
    "a #b",
    "it's",
    '"q"',
    "{a}",
    "[a",
    "- a",
    "*a",
    "!a",
    "%a",
    "@a",
    "`a`",
    "a\nb: c",
    " a ",
    "Grün 日本",
    "{{ .V }}",
]


@pytest.mark.parametrize("odd", ODD)
def test_odd_text_arrives_as_it_was_written(odd: str, tmp_path: Any) -> None:
    tool = {"name": "a", "command": ["/bin/t", odd], "args": [odd], "probe": "tcp", "config": {"backend": {}}}
    path = "/models/" + odd.replace("\n", " ")
    values = {
        "model": {"existingClaim": "c", "path": path, "subPath": odd.replace("\n", " ")},
        "config": {"trainer": {"train_tasks": odd}},
        "gateway": {"annotations": {"note": odd}, "extraEnv": [{"name": "NOTE", "value": odd}]},
        "dashboards": {"folder": odd},
        "tools": [tool],
    }
    documents = render(values)
    check(documents)
    assert workloads(documents)["gateway"]["spec"]["template"]["metadata"]["annotations"]["note"] == odd
    assert {"name": "NOTE", "value": odd} in container(pod_specs(documents)["gateway"])["env"]
    assert container(pod_specs(documents)["tool-a"])["command"] == ["/bin/t", odd]
    assert container(pod_specs(documents)["tool-a"])["args"] == [odd]
    (board,) = [d for d in of_kind(documents, "ConfigMap") if component(d) == "dashboards"]
    assert board["metadata"]["annotations"]["grafana_folder"] == odd
    file = tmp_path / "fermata.yaml"
    file.write_text(settings_text(documents, "trainer"))
    loaded = load({"trainer": ALL_SECTIONS["trainer"]}, file=file, env={})
    assert str(loaded["trainer"].train_tasks) == odd
    assert str(loaded["trainer"].model) == path


NAMED = [
    *NAMES,
    ("listenHost",),
    ("image", "registry"),
    ("image", "gateway", "repository"),
    ("image", "engine", "digest"),
    ("model", "hostPath"),
    ("gateway", "shmSize"),
    ("trainer", "persistence", "size"),
    ("trainer", "persistence", "existingClaim"),
    ("podMonitor", "interval"),
    ("dashboards", "label"),
    ("gpuResource",),
    ("gateway", "resources", "limits", "memory"),
]


def test_what_the_cluster_would_not_take_for_a_name_is_refused_by_place() -> None:
    said = refusal(merged(*(put(path, "a b") for path in NAMED)))
    for path in NAMED:
        assert f"at '/{'/'.join(path)}': 'a b' does not match pattern" in said


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"commonLabels": {"a b": "c"}}, "'a b'"),
        ({"commonLabels": {"a": "c d"}}, "/commonLabels/a"),
        ({"gateway": {"labels": {"a": "-"}}}, "/gateway/labels/a"),
        ({"rollout": {"nodeSelector": {"a": "b" * 64}}}, "/rollout/nodeSelector/a"),
        ({"trainer": {"annotations": {"-a": "b"}}}, "'-a'"),
        ({"model": {"subPath": "a/../../b"}}, "/model/subPath"),
        ({"rollout": {"resources": {"limits": {"memory": "64GB"}}}}, "/rollout/resources/limits/memory"),
        ({"image": {"gateway": {"digest": "sha256:12"}}}, "/image/gateway/digest"),
        ({"image": {"engine": {"repository": "Fermata"}}}, "/image/engine/repository"),
        ({"trainer": {"persistence": {"accessModes": []}}}, "/trainer/persistence/accessModes"),
        ({"tools": [{"name": "a.b", "tools": ["calculator"]}]}, "/tools/0/name"),
        ({"tools": [{"name": "ä", "tools": ["calculator"]}]}, "/tools/0/name"),
        ({"tools": [{"name": 7, "tools": ["calculator"]}]}, "/tools/0/name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keys_and_values_have_the_clusters_form(values: dict[str, Any], key: str) -> None:
    assert key in refusal(values)


def test_a_wrong_kind_of_value_is_refused_by_place_anywhere() -> None:
    everywhere = [path for path in paths(DEFAULTS) if not isinstance(default(path), dict)]
    said = refusal(merged(*(put(path, [{"x": 1}]) for path in everywhere)))
    for path in everywhere:
        assert f"at '/{'/'.join(path)}" in said
