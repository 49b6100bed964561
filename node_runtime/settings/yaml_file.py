"""YAML as settings use it: the 1.2 core scalars, no duplicate keys, and the line each key stood on.

Invariant: a scalar means what a reader expects of it. PyYAML's 1.1 rules read `5e-5` as text, `no` as false and `1:30`
as 90; each of these has changed somebody's learning rate.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from node_runtime.settings.schema import SettingsError

MAX_BYTES: Final = 4 * 1024 * 1024

Lines = dict[tuple[str | int, ...], int]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of the YAML 1.2 core schema."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012  (PyYAML copies it on the first addition)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="an alias (*name), which settings do not use", problem_mark=mark)
        return super().compose_node(parent, index)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def _construct_int(loader: _Loader, node: Any) -> int:
    text = str(loader.construct_scalar(node))
    if text.startswith(("0x", "0o")):
        return int(text, 0)
    return int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse_value(text: str) -> Any:
    """One value from a flag or a variable. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def read_file(path: Path) -> tuple[dict[str, Any], Lines]:
    """The mapping in a file and the line (from 1) of each key path. Raises SettingsError with one sentence."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file: give an existing settings file with --config") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise SettingsError(f"{path}: has {len(raw)} bytes, a settings file has at most {MAX_BYTES}")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SettingsError(f"{path}:{line}: is not UTF-8 (byte 0x{raw[error.start]:02x}): save it as UTF-8") from None
    lines: Lines = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}, lines
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
            raise SettingsError(f"{path}: holds {kind}, it must be a mapping of sections such as 'runtime:'")
        _walk(path, node, (), lines)
        data = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise SettingsError(f"{where}: is not YAML: {_flat(error.problem or error.context)}") from None
    except yaml.YAMLError as error:
        position = getattr(error, "position", None)
        where = f"{path}:{text.count(chr(10), 0, position) + 1}" if isinstance(position, int) else str(path)
        raise SettingsError(f"{where}: is not YAML: {_flat(getattr(error, 'reason', error))}") from None
    except (RecursionError, ValueError) as error:
        raise SettingsError(f"{path}: is not usable YAML: {_flat(error)}") from None
    return dict(data), lines


def _flat(text: object) -> str:
    return " ".join(str(text).split())


def _walk(path: Path, node: yaml.Node, at: tuple[str | int, ...], lines: Lines) -> None:
    """Notes the line of each key, refusing duplicates and keys that are not text."""
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:null":
                raise SettingsError(f"{path}:{line}: has a key that is not a name: write 'name: value'")
            # Keys are names: `7: x` in a mapping by name means the name "7".
            key_node.tag = "tag:yaml.org,2002:str"
            here = (*at, key_node.value)
            if here in lines:
                raise SettingsError(
                    f"{path}:{line}: {dotted(here)} stands twice (first on line {lines[here]}): keep one of them"
                )
            lines[here] = line
            _walk(path, value_node, here, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*at, index)] = item.start_mark.line + 1
            _walk(path, item, (*at, index), lines)


def dotted(path: tuple[str | int, ...]) -> str:
    """("gateway", "pools", 0, "tool") as "gateway.pools[0].tool"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")
