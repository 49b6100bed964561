"""Loading the settings of one process: merge, validate, and say what is wrong in sentences.

Invariant: no pydantic or YAML error text with a stack reaches the user; each problem is one sentence that names the
key, where it stood, what was given and what would be right.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import pydantic
import yaml
from pydantic_core import ErrorDetails

from node_runtime.errors import NodeError
from node_runtime.settings.schema import Section, SettingsError, known_names, nearest, schema_keys
from node_runtime.settings.sources import ENV_CONFIG, KeyPath, Merged, merge_sources
from node_runtime.settings.yaml_file import dotted


def load(
    schema: Mapping[str, type[Section]],
    *,
    file: Path | None,
    env: Mapping[str, str],
    overrides: Sequence[str] = (),
) -> dict[str, Section]:
    """One validated Section per name of `schema`.

    Precedence: overrides ("gateway.port=7010", value read as YAML) over env (FERMATA_GATEWAY__PORT) over file over
    defaults. Sections of SECTIONS that `schema` does not have are accepted by name; their owners validate them.
    Raises SettingsError.
    """
    merged = merge_sources(schema, file, env, overrides)
    loaded: dict[str, Section] = {}
    problems: list[str] = []
    for name, model in schema.items():
        result = _validate(name, model, merged, schema)
        if isinstance(result, Section):
            loaded[name] = result
        else:
            problems.extend(result)
    if problems:
        raise SettingsError(*problems)
    return loaded


def _validate(
    name: str, model: type[Section], merged: Merged, schema: Mapping[str, type[Section]]
) -> Section | list[str]:
    while True:
        data = merged.tree.get(name, {})
        try:
            # Strict as JSON is: "7" is no integer and true is no 1, while paths, enums and tuples are still read.
            return model.model_validate_json(json.dumps(data), strict=True)
        except NodeError as error:  # from a validator that uses the checks of other modules
            return [f"{merged.origin((name,))}: {name}: {line}" for line in str(error).splitlines()]
        except pydantic.ValidationError as error:
            details = error.errors(include_url=False)
            if _spell_defaults(name, details, merged):
                continue
            if not any(_take_text(merged, (name, *d["loc"])) for d in details if d["type"] in _WANTS_TEXT):
                return list(dict.fromkeys(_sentences(name, details, merged, schema)))


def _spell_defaults(section: str, details: list[ErrorDetails], merged: Merged) -> bool:
    """A default is checked as if it stood in the file, where a path is text. Whether there was one to be spelled so."""
    found = False
    for detail in details:
        path = (section, *map(str, detail["loc"]))
        if isinstance(detail["input"], PurePath) and _at(path, merged.tree) is None:
            text = str(detail["input"])
            merged.put(path, text, "settings", text)
            found = True
    return found


_WANTS_TEXT = frozenset({"string_type", "path_type", "enum", "literal_error"})


def _take_text(merged: Merged, loc: KeyPath) -> bool:
    """Text is wanted and the value came as text, from a flag or a variable: `--set runtime.node_name=7` means "7"."""
    path = _in_tree(loc, merged.tree)
    value = _at(path, merged.tree)
    if path not in merged.texts or isinstance(value, str) or value is None:
        return False
    merged.put(tuple(map(str, path)), merged.texts[path], merged.origins[path], merged.texts[path])
    return True


def _sentences(
    section: str, details: list[ErrorDetails], merged: Merged, schema: Mapping[str, type[Section]]
) -> list[str]:
    """One sentence per key; the branches of a union, which pydantic reports one by one, are joined with "or"."""
    wrong: dict[KeyPath, list[str]] = {}
    sentences = []
    for detail in details:
        loc: KeyPath = (section, *detail["loc"])
        path = _in_tree(loc, merged.tree)
        kind = detail["type"]
        if kind == "missing":
            path = (*path, loc[-1])
            parent = merged.origin(path[:-1])
            at = "" if parent == "settings" else f"{parent}: "
            sentences.append(f"{at}{dotted(path)} is missing: set it in the file or with --set {dotted(path)}=...")
        elif kind == "extra_forbidden":
            hint = nearest(str(path[-1]), known_names(schema, path[:-1]))
            sentences.append(f"{merged.origin(path)}: unknown key {dotted(path)!r}: {hint}")
        elif kind in ("value_error", "assertion_error"):
            text = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
            sentences.append(f"{merged.origin(path)}: {dotted(path)}: {' '.join(text.split())}")
        else:
            wrong.setdefault(path, []).append(_right(detail))
    for path, rights in wrong.items():
        given = _spell(_at(path, merged.tree))
        right = " or ".join(dict.fromkeys(rights))
        sentences.append(f"{merged.origin(path)}: {dotted(path)} must be {right}, got {given}")
    return sentences


def _right(detail: ErrorDetails) -> str:
    """What pydantic would have accepted, as the rest of "must be ..."."""
    kind = detail["type"]
    plain = {
        "string_type": "text",
        "int_type": "an integer",
        "int_from_float": "an integer",
        "float_type": "a number",
        "bool_type": "true or false",
        "list_type": "a list",
        "tuple_type": "a list",
        "set_type": "a list",
        "frozen_set_type": "a list",
        "dict_type": "a mapping",
        "model_type": "a mapping",
        "model_attributes_type": "a mapping",
        "path_type": "a path",
        "none_required": "null",
        "finite_number": "a finite number",
    }.get(kind)
    if plain:
        return plain
    text = " ".join(detail["msg"].split())
    for start in ("Input should be ", "Value should be "):
        if text.startswith(start):
            return text.removeprefix(start)
    for noun in ("String should have ", "List should have ", "Tuple should have ", "Dictionary should have "):
        if text.startswith(noun):
            return f"a value with {text.removeprefix(noun)}"
    return f"a right value ({text})"


def _in_tree(loc: KeyPath, tree: Mapping[str, Any]) -> KeyPath:
    """`loc` without what pydantic puts in beside the data: names of union branches and "[key]" marks."""
    node: Any = tree
    path: list[str | int] = []
    for part in loc:
        try:
            node = _child(node, part)
        except (LookupError, TypeError):
            continue
        path.append(part)
    return tuple(path) or loc[:1]


def _child(node: Any, part: str | int) -> Any:
    if not isinstance(node, dict | list):
        raise TypeError("no mapping and no list")
    return node[part]  # type: ignore[index]


def _at(path: KeyPath, tree: Mapping[str, Any]) -> Any:
    node: Any = tree
    for part in path:
        try:
            node = _child(node, part)
        except (LookupError, TypeError):
            return None
    return node


def _spell(value: Any) -> str:
    kind = {str: "the text ", bool: "", int: "", float: "", list: "a list ", dict: "a mapping "}.get(type(value), "")
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | dict) and len(text) > 80:
        return kind.strip()
    return kind + (text if len(text) <= 80 else text[:77] + "...")


def dump(sections: Mapping[str, Section]) -> str:
    """The resolved settings as YAML that load() accepts. Secrets are paths, so nothing needs hiding."""
    plain = {name: section.model_dump(mode="json") for name, section in sections.items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)


def load_for_process(
    prog: str, schema: Mapping[str, type[Section]], argv: Sequence[str] | None = None
) -> dict[str, Section]:
    """The settings of a process from its command line and os.environ.

    Wrong settings end the process here: their sentences on stderr, exit code 2.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=help_keys(schema),
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"settings file (YAML); also {ENV_CONFIG}")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="set one key; repeatable"
    )
    options = parser.parse_args(argv)
    file = options.config or (Path(os.environ[ENV_CONFIG]) if os.environ.get(ENV_CONFIG) else None)
    try:
        return load(schema, file=file, env=os.environ, overrides=options.overrides)
    except SettingsError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"{prog}: {line}\n")
        raise SystemExit(error.exit_code) from None


def help_keys(schema: Mapping[str, type[Section]]) -> str:
    """The keys of a schema as --help lists them."""
    lines = ["settings (FILE, FERMATA_SECTION__KEY, or --set section.key=value):"]
    for key in schema_keys(schema):
        within = f", {key.within}" if key.within else ""
        lines.append(f"  {key.key}  ({key.type}{within}; default {key.default})")
        if key.description:
            lines.append(f"      {key.description}")
    return "\n".join(lines)
