"""The chart as real Helm renders it, and ways to walk what comes out.

Invariant: a document is read as Kubernetes reads it: a key given twice is an error, never the last one's win.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import kubernetes_validate.utils
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "fermata"
VALUES = {
    "default": None,
    "cpu": CHART / "values-cpu.yaml",
    **{path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))},
}
WORKLOADS = ("Deployment", "StatefulSet")
RELEASE, NAMESPACE = "demo", "ml"

Document = dict[str, Any]
Values = Mapping[str, Any]

# It reads and parses all definitions for each object anew.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


class _NoDuplicates(yaml.CSafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key stands twice", node.start_mark)
        return mapping


def values_of(name: str) -> Values:
    """One of VALUES, as -f gives it."""
    path = VALUES[name]
    return {} if path is None else helm_python.values_from_yaml(path.read_text())


def merged(*parts: Values) -> dict[str, Any]:
    """Later parts over earlier ones, key by key, as several -f do."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            old = result.get(key)
            result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return result


@functools.cache
def _load(chart: Path, _version: str) -> helm_python.Chart:
    return helm_python.Chart.load(chart)


def render(
    values: Values, *, chart: Path = CHART, release: str = RELEASE, namespace: str = NAMESPACE
) -> list[Document]:
    """The objects of `helm template`: values are checked against the schema first. Raises HelmError."""
    loaded = _load(chart, (chart / "Chart.yaml").read_text())
    loaded.validate_schema(loaded.merge_values(dict(values)))
    files = loaded.render(dict(values), name=release, namespace=namespace)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    documents = [document for text in texts for document in yaml.load_all(text, _NoDuplicates)]
    return [document for document in documents if document]


@functools.cache
def rendered(name: str) -> tuple[Document, ...]:
    """One of VALUES. Shared: not to be changed."""
    return tuple(render(values_of(name)))


def refusal(values: Values, **options: Any) -> str:
    """What Helm says of values that it must not take."""
    try:
        render(values, **options)
    except helm_python.HelmError as error:
        return str(error)
    raise AssertionError("the values were taken")


def notes(values: Values) -> str:
    """What Helm prints after an installation."""
    loaded = _load(CHART, (CHART / "Chart.yaml").read_text())
    return str(loaded.render(dict(values), name=RELEASE, namespace=NAMESPACE)["fermata/templates/NOTES.txt"])


def check(documents: tuple[Document, ...] | list[Document], version: str | None = None) -> None:
    """Every object against the strict schemas of a version of Kubernetes (default: the newest)."""
    for document in documents:
        if document["apiVersion"].startswith("monitoring.coreos.com/"):
            continue  # a resource of the Prometheus operator: test_the_pod_monitor
        kubernetes_validate.validate(document, version or kubernetes_validate.latest_version(), strict=True)
        walk(document, _taken_as_it_is)


# Kubernetes merges these lists by a key of their items; an item given twice is refused.
_KEYED = {"env": "name", "volumes": "name", "volumeMounts": "mountPath", "ports": "name", "imagePullSecrets": "name"}


def _taken_as_it_is(path: str, value: Any) -> None:
    """What the schemas let pass and the cluster does not."""
    assert value is not None, f"{path} is null"
    last = path.rpartition("/")[2]
    if isinstance(value, list) and last in _KEYED and all(isinstance(item, dict) for item in value):
        keys = [item.get(_KEYED[last]) for item in value]
        assert len(set(keys)) == len(keys), f"{path} has something twice: {keys}"


def of_kind(documents: tuple[Document, ...] | list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def component(document: Document) -> str:
    return str(document["metadata"]["labels"]["app.kubernetes.io/component"])


def workloads(documents: tuple[Document, ...] | list[Document]) -> dict[str, Document]:
    return {component(document): document for document in of_kind(documents, *WORKLOADS)}


def pod_specs(documents: tuple[Document, ...] | list[Document]) -> dict[str, Document]:
    """By component; the pod of `helm test` is "test"."""
    found = {name: workload["spec"]["template"]["spec"] for name, workload in workloads(documents).items()}
    return found | {component(document): document["spec"] for document in of_kind(documents, "Pod")}


def container(pod: Document) -> Document:
    (only,) = pod["containers"]
    return dict(only)


def settings_text(documents: tuple[Document, ...] | list[Document], name: str) -> str:
    """The settings file that the pods of a component mount, read through their volume as the kubelet would."""
    pod = pod_specs(documents)[name]
    (mount,) = [mount for mount in container(pod)["volumeMounts"] if mount["mountPath"] == "/etc/fermata"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
    wanted = volume["configMap"]["name"]
    (found,) = [d for d in of_kind(documents, "ConfigMap") if d["metadata"]["name"] == wanted]
    return str(found["data"]["fermata.yaml"])


def walk(node: Any, visit: Callable[[str, Any], None], path: str = "") -> None:
    """`visit(path, value)` for everything below `node`."""
    children: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(node, dict):
        children = iter(node.items())
    elif isinstance(node, list):
        children = iter(enumerate(node))
    for key, child in children:
        visit(f"{path}/{key}", child)
        walk(child, visit, f"{path}/{key}")
