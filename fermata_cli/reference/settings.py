"""The settings reference, from the classes that validate the settings.

Invariant: every key that a process accepts stands in it once, with the default and the bounds that hold.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

from fermata_cli.reference.tables import code, table
from fermata_cli.schema import ALL_SECTIONS
from node_runtime.settings import SettingKey, schema_keys, schema_sections
from node_runtime.settings.sources import ENV_PREFIX

INTRO = """\
# Settings

<!-- Made by `fermata config reference`; a test compares. Change the descriptions in the settings classes instead. -->

One YAML file serves all processes. Each validates the sections it owns and passes over the others:

| section | read by |
| --- | --- |
| `runtime` | every process, and commands that speak to a running cluster |
| `gateway` | `python -m tool_gateway` |
| `backend` | `python -m tool_backend`, and tools that call `serve` |
| `rollout` | `python -m rollout_node` |
| `trainer` | `python -m trainer_node` |
| `cluster` | `fermata demo` |

A key can be given in three ways; flags win over variables, variables over the file, the file over defaults:

| where | how |
| --- | --- |
| file, named by `--config FILE` or the variable `FERMATA_CONFIG` | `gateway: {retry: {attempts: 5}}` |
| variable: `FERMATA_`, capitals, two underscores between levels | `FERMATA_GATEWAY__RETRY__ATTEMPTS=5` |
| flag, repeatable | `--set gateway.retry.attempts=5` |

Values of variables and flags are read as YAML. A list is given whole:
`--set 'gateway.pools=[{name: words, addresses: ["127.0.0.1:7020"]}]'`. In the tables `[]` stands for each item of a
list. An unknown key is refused with the nearest known name. What ends in `_s` is in seconds, `_bytes` in bytes, `_gib`
in GiB; paths are relative to the working directory. `fermata config show` prints what holds in the end, and
`fermata config reference --json` this page for programs.
"""


def as_markdown() -> str:
    """The page docs/settings.md."""
    groups: defaultdict[str, list[SettingKey]] = defaultdict(list)
    for key in schema_keys(ALL_SECTIONS):
        groups[key.key.rpartition(".")[0]].append(key)
    lines = [INTRO]
    for path, model in schema_sections(ALL_SECTIONS):
        lines += ["#" * (2 if path in ALL_SECTIONS else 3) + f" {path}", "", _first_paragraph(model), ""]
        rows = [
            (
                code(key.key),
                key.type,
                "**required**" if key.required else code(key.default),
                key.within,
                key.description,
            )
            for key in groups[path]
        ]
        if rows:
            lines += [*table(("key", "type", "default", "bounds", "meaning"), rows), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def as_data() -> list[dict[str, Any]]:
    """The same for programs; `bounds` in the words of JSON Schema, `variable` null where a list is in the way."""
    return [
        {
            "key": key.key,
            "variable": None if set(key.key) & set("[<") else ENV_PREFIX + key.key.replace(".", "__").upper(),
            "type": key.type,
            "required": key.required,
            "default": key.value,
            "bounds": dict(key.bounds),
            "description": key.description,
        }
        for key in schema_keys(ALL_SECTIONS)
    ]


def _first_paragraph(model: type) -> str:
    return " ".join((inspect.getdoc(model) or "").split("\n\n")[0].split())
