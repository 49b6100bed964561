#!/usr/bin/env python3
"""values.schema.json of the chart. Usage: scripts/chart_schema.py [--check]

The chart's own keys are written here by hand; settings come from the processes' own models, and what is handed on to
Kubernetes (tolerations, volumes, ...) from its published schemas. Invariant: an object takes the keys it names and no
others, at any depth, so a misspelt key is refused by name before anything is rendered; a name has the form that the
cluster asks of it; what has a default that is not empty may be changed and not taken away (null); of settings nothing
is required that the chart fills in by itself.
"""

from __future__ import annotations

import importlib.resources
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fermata_cli.schema import ALL_SECTIONS

TARGET = Path(__file__).parents[1] / "deploy" / "helm" / "fermata" / "values.schema.json"
VALUES = TARGET.with_name("values.yaml")
# The newest that kubernetes-validate has: a key that an older cluster does not know is refused there.
KUBERNETES = "kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"

Schema = dict[str, Any]


def text(pattern: str, longest: int | None = None) -> Schema:
    return {"type": "string", "pattern": pattern, **({} if longest is None else {"maxLength": longest})}


TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
AMOUNT = "[0-9]+(\\.[0-9]+)?"
SIZE: Schema = text(f"^{AMOUNT}([EPTGMk]|[EPTGMK]i)?$")
SIZE_OR_NONE: Schema = text(f"^({AMOUNT}([EPTGMk]|[EPTGMK]i)?)?$")
DURATION: Schema = text("^([0-9]+(ms|s|m|h|d|w|y))+$")
# Of an object in the cluster; empty: none.
OBJECT: Schema = text("^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", 253)
LABEL_VALUE: Schema = text("^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", 63)
LABEL_KEY: Schema = text("^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$", 317)
LABELS: Schema = {"type": "object", "propertyNames": LABEL_KEY, "additionalProperties": LABEL_VALUE}
ANNOTATIONS: Schema = {"type": "object", "propertyNames": LABEL_KEY, "additionalProperties": TEXT}
KEY_OF_SECRET: Schema = text("^[-._a-zA-Z0-9]+$", 253)
DNS_NAME: Schema = text("^([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?)?$", 253)
ADDRESS: Schema = text("^[0-9A-Fa-f.:]+$")  # a number: names of this machine are no good in a pod
FOLDER: Schema = text("^/[^\\n]*$")
PATH: Schema = text("^/[^:\\n]*$")  # where something is mounted
PATH_OR_NONE: Schema = text("^(/[^:\\n]*)?$")
PATH_WITHIN: Schema = {**text("^([^/\\n][^\\n]*)?$"), "not": {"pattern": "(^|/)\\.\\.(/|$)"}}
REGISTRY: Schema = text("^([A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*/?)?$")
REPOSITORY: Schema = text("^([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$")
TAG: Schema = text("^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$")
DIGEST: Schema = text("^(sha256:[0-9a-f]{64})?$")
# The cluster's own form of a quantity, which its schemas do not tell.
QUANTITY: Schema = {
    "type": ["string", "number"],
    "pattern": "^[0-9]+(\\.[0-9]*)?([eE][+-]?[0-9]+|[EPTGMk]|[EPTGMK]i|[num])?$",
    "minimum": 0,
}
# Helm reckons with floats: beyond this a whole number would become another one.
LARGEST_WHOLE = 2**53
# Nothing, or nothing more, without these: a null stands for empty.
MAY_BE_TAKEN_AWAY = frozenset(
    {"resources", "topologySpreadConstraints", "podSecurityContext", "securityContext", "tools"}
)


def strict(properties: Mapping[str, Schema], *required: str) -> Schema:
    schema: Schema = {"type": "object", "additionalProperties": False, "properties": dict(properties)}
    return {**schema, "required": list(required)} if required else schema


def whole(minimum: int, maximum: int | None = None) -> Schema:
    return {"type": "integer", "minimum": minimum, **({} if maximum is None else {"maximum": maximum})}


def listed(items: Schema, *, unique: bool = False) -> Schema:
    return {"type": "array", "items": items, **({"uniqueItems": True} if unique else {})}


# -- Kubernetes' own types ---------------------------------------------------------------------------------------------


def of_kubernetes(kind: str) -> Schema:
    return {"$ref": f"#/definitions/{kind}"}


def kubernetes_definitions(schema: Any) -> Schema:
    """The definitions that `schema` refers to, with all that those refer to, under their short names."""
    body = importlib.resources.files("kubernetes_validate").joinpath(KUBERNETES).read_text()
    known = {name.rpartition(".")[2]: body for name, body in json.loads(body)["$defs"].items() if _current(name)}
    found: Schema = {}
    wanted = sorted(_references(schema))
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = QUANTITY if name == "Quantity" else _shortened(known[name])
            wanted += sorted(_references(found[name]))
    return dict(sorted(found.items()))


def _current(name: str) -> bool:
    return name.startswith(("io.k8s.api.core.v1.", "io.k8s.api.networking.v1.", "io.k8s.apimachinery."))


def _references(node: Any) -> Iterable[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"].rpartition("/")[2].rpartition(".")[2]
        for child in node.values():
            yield from _references(child)
    elif isinstance(node, list):
        for child in node:
            yield from _references(child)


def _shortened(node: Any) -> Any:
    """Without prose and extensions, references by short name, nulls refused: what is left out is left out."""
    if isinstance(node, list):
        return [_shortened(child) for child in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("$ref"), str):
        return of_kubernetes(next(iter(_references({"$ref": node["$ref"]}))))
    if isinstance(node.get("type"), list):
        (kind,) = [kind for kind in node["type"] if kind != "null"]
        node = {**node, "type": kind}
    return {
        key: {name: _shortened(child) for name, child in value.items()} if key == "properties" else _shortened(value)
        for key, value in node.items()
        if not key.startswith("x-") and key not in ("description", "format", "default")
    }


# -- Settings ----------------------------------------------------------------------------------------------------------


def settings(section: str, **overlay: Schema) -> Schema:
    """The section as its owner reads it, of which people may set any part. `overlay` replaces keys of it."""
    model = ALL_SECTIONS[section].model_json_schema()
    schema = _partial(model, model.get("$defs", {}), in_list=False)
    unknown = overlay.keys() - schema["properties"].keys()
    if unknown:
        raise KeyError(f"{section} has no {', '.join(sorted(unknown))}")
    schema["properties"].update(overlay)
    return schema


def _partial(node: Any, known: Schema, *, in_list: bool) -> Any:
    """pydantic's schema as draft 7, references put in place. Items of lists are given whole: they keep `required`."""
    if isinstance(node, list):
        return [_partial(child, known, in_list=in_list) for child in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _partial(known[node["$ref"].rpartition("/")[2]], known, in_list=in_list)
    schema: Schema = {}
    for key, value in node.items():
        if key == "properties":
            schema[key] = {name: _partial(child, known, in_list=in_list) for name, child in value.items()}
        elif key == "prefixItems":
            schema |= {"items": _partial(value, known, in_list=True), "additionalItems": False}
        elif key == "items":
            schema[key] = _partial(value, known, in_list=True)
        elif key == "required":
            schema |= {key: value} if in_list else {}
        elif key not in ("title", "$defs", "format", "default"):
            schema[key] = _partial(value, known, in_list=in_list)
    if schema.get("type") == "integer" and not {"maximum", "exclusiveMaximum"} & schema.keys():
        schema["maximum"] = LARGEST_WHOLE
    return schema


def requiring(schema: Schema, *keys: str) -> Schema:
    """values.yaml gives them and templates read them: only a null can take them away."""
    return {**schema, "required": list(keys)}


def shared_config() -> Schema:
    rollout = settings("rollout", port=PORT)
    rollout["properties"]["engine"] = requiring(rollout["properties"]["engine"], "start_timeout_s")
    trainer = settings("trainer")
    trainer["properties"]["dispatch"] = requiring(trainer["properties"]["dispatch"], "stop_grace_s")
    return strict(
        {
            "runtime": requiring(settings("runtime", metrics_port=PORT), "metrics_port"),
            "gateway": requiring(settings("gateway", port=PORT), "port", "drain_s"),
            "rollout": requiring(rollout, "port", "handover_s", "gateway_wait_s", "engine"),
            "trainer": requiring(trainer, "train_tasks", "stay", "dispatch"),
        },
        "runtime",
        "gateway",
        "rollout",
        "trainer",
    )


def tool_config() -> Schema:
    return strict(
        {"runtime": settings("runtime", metrics_port=PORT), "backend": settings("backend", port=PORT)},
    )


# -- The chart's own keys ----------------------------------------------------------------------------------------------


def image(*required: str, **more: Schema) -> Schema:
    return strict({"repository": REPOSITORY, "tag": TAG, "digest": DIGEST, **more}, *required)


def role(**more: Schema) -> Schema:
    """What gateway, rollout, trainer and each tool have in common, and what this one has besides."""
    return {
        "preStopSeconds": whole(0, 3600),
        "shmSize": SIZE_OR_NONE,
        "tlsSecret": OBJECT,
        "labels": LABELS,
        "annotations": ANNOTATIONS,
        "resources": of_kubernetes("ResourceRequirements"),
        "nodeSelector": LABELS,
        "tolerations": listed(of_kubernetes("Toleration")),
        "affinity": of_kubernetes("Affinity"),
        "topologySpreadConstraints": listed(of_kubernetes("TopologySpreadConstraint")),
        "priorityClassName": OBJECT,
        "runtimeClassName": OBJECT,
        "podSecurityContext": of_kubernetes("PodSecurityContext"),
        "securityContext": of_kubernetes("SecurityContext"),
        "extraEnv": listed(of_kubernetes("EnvVar")),
        "extraEnvFrom": listed(of_kubernetes("EnvFromSource")),
        "extraVolumes": listed(of_kubernetes("Volume")),
        "extraVolumeMounts": listed(of_kubernetes("VolumeMount")),
        **more,
    }


def tool_role() -> Schema:
    return role(replicas=whole(0), startupSeconds=whole(1), probe={"type": "string", "enum": ["http", "grpc", "tcp"]})


def tool() -> Schema:
    # With "tool-" before it a part of names and labels.
    name = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 40}
    words = listed({"type": "string", "minLength": 1})
    return strict(
        {
            "name": name,
            "tools": listed({"type": "string", "pattern": "^[^-]"}, unique=True),
            "image": image("repository", registry=REGISTRY),
            "command": words,
            "args": words,
            "config": tool_config(),
            **tool_role(),
        },
        "name",
    )


def claim() -> Schema:
    return strict(
        {
            "enabled": FLAG,
            "size": SIZE,
            "storageClass": OBJECT,
            "accessModes": {
                **listed({"enum": ["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]}, unique=True),
                "minItems": 1,
            },
            "existingClaim": OBJECT,
        }
    )


def probe(**more: Schema) -> Schema:
    return strict({"periodSeconds": whole(1), "timeoutSeconds": whole(1), **more})


def volume_source() -> Schema:
    """A volume without its name."""
    body = kubernetes_definitions(of_kubernetes("Volume"))["Volume"]
    return strict({name: child for name, child in body["properties"].items() if name != "name"})


def chart() -> Schema:
    peers = listed(of_kubernetes("NetworkPolicyPeer"))
    return strict(
        {
            "global": {"type": "object"},  # Helm hands it to every chart
            "nameOverride": LABEL_VALUE,
            "fullnameOverride": TEXT,
            "commonLabels": LABELS,
            "listenHost": ADDRESS,
            "image": strict(
                {
                    "registry": REGISTRY,
                    "pullPolicy": {"enum": ["IfNotPresent", "Always", "Never"]},
                    "pullSecrets": listed(of_kubernetes("LocalObjectReference")),
                    "engine": image(),
                    "gateway": image(),
                }
            ),
            "config": shared_config(),
            "model": strict(
                {
                    "path": FOLDER,
                    "mountPath": PATH,
                    "existingClaim": OBJECT,
                    "hostPath": PATH_OR_NONE,
                    "volume": volume_source(),
                    "subPath": PATH_WITHIN,
                }
            ),
            "tls": strict(
                {
                    "existingSecret": OBJECT,
                    "caKey": KEY_OF_SECRET,
                    "certKey": KEY_OF_SECRET,
                    "keyKey": KEY_OF_SECRET,
                    "mutual": FLAG,
                    "serverName": DNS_NAME,
                }
            ),
            "tokens": strict({"existingSecret": OBJECT, "acceptKey": KEY_OF_SECRET, "sendKey": KEY_OF_SECRET}),
            "gpuResource": {"type": "string", "pattern": "^[a-z0-9.-]+/[A-Za-z0-9._-]+$"},
            "gateway": strict(role(enabled=FLAG, replicas=whole(0), startupSeconds=whole(1))),
            "rollout": strict(role(enabled=FLAG, replicas=whole(0), gpus=whole(0))),
            "trainer": strict(role(enabled=FLAG, gpus=whole(0, 1), startupSeconds=whole(1), persistence=claim())),
            "tools": listed(tool()),
            "toolDefaults": strict(tool_role()),
            "podSecurityContext": of_kubernetes("PodSecurityContext"),
            "securityContext": of_kubernetes("SecurityContext"),
            "serviceAccount": strict({"create": FLAG, "name": OBJECT, "annotations": ANNOTATIONS}),
            "probes": strict(
                {
                    "liveness": probe(failureThreshold=whole(1)),
                    "readiness": probe(failureThreshold=whole(1)),
                    "startup": probe(),
                }
            ),
            "podDisruptionBudget": strict({"enabled": FLAG}),
            "networkPolicy": strict({"enabled": FLAG, "clients": peers, "peers": peers, "metricsFrom": peers}),
            "podMonitor": strict({"enabled": FLAG, "interval": DURATION, "scrapeTimeout": DURATION, "labels": LABELS}),
            "dashboards": strict(
                {
                    "enabled": FLAG,
                    "label": LABEL_KEY,
                    "labelValue": LABEL_VALUE,
                    "folderAnnotation": LABEL_KEY,
                    "folder": TEXT,
                }
            ),
        }
    )


def kept(schema: Schema, defaults: Mapping[str, Any]) -> Schema:
    """`schema`, with what values.yaml gives required where it is not empty: templates rely on it."""
    if "properties" not in schema:
        return schema
    properties = {
        name: kept(child, defaults[name]) if isinstance(defaults.get(name), dict) and name != "config" else child
        for name, child in schema["properties"].items()
    }
    needed = [name for name in properties if defaults.get(name) not in (None, "", [], {})]
    needed = [name for name in needed if name not in MAY_BE_TAKEN_AWAY]
    return {**schema, "properties": properties, **({"required": needed} if needed else {})}


def render() -> str:
    values = kept(chart(), yaml.safe_load(VALUES.read_text()))
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart fermata. Made by scripts/chart_schema.py: change that, not this.",
        **values,
        "definitions": kubernetes_definitions(values),
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    text = render()
    if arguments == ["--check"]:
        if TARGET.read_text() != text:
            print(f"{TARGET.name} is not what scripts/chart_schema.py makes: run it", file=sys.stderr)
            return 1
        return 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
