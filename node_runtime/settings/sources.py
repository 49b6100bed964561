"""Merging file, environment and flags into one tree that remembers where each value came from.

Invariant: precedence is flags over environment over file, key by key (a mapping given later adds to, and never empties,
one given before); `origin` names the source of every value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from node_runtime.settings.schema import SECTIONS, Section, SettingsError, nearest
from node_runtime.settings.yaml_file import dotted, parse_value, read_file

ENV_PREFIX: Final = "FERMATA_"
ENV_CONFIG: Final = "FERMATA_CONFIG"  # names the settings file itself

KeyPath = tuple[str | int, ...]


@dataclass
class Merged:
    """The tree, with the source of each path and the untouched text of values from flags and variables."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    texts: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> str:
        """The source of a value: of its own path, else of the nearest one above it, else of one below it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        for known, origin in self.origins.items():
            if known[: len(path)] == path:
                return origin
        return "settings"

    def put(self, path: tuple[str, ...], value: Any, origin: str, text: str) -> None:
        node: dict[str, Any] = self.tree
        for depth, part in enumerate(path[:-1], start=1):
            child = node.get(part)
            if isinstance(child, list):
                raise SettingsError(
                    f"{origin}: {dotted(path[:depth])} is a list: give the whole list, not an item of it"
                )
            if not isinstance(child, dict):
                child = node[part] = {}
            node = child
        old = node.get(path[-1])
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(old, value)
        else:
            node[path[-1]] = value
            for known in [k for k in self.texts if k[: len(path)] == path]:
                del self.texts[known]
        self.texts[path] = text
        self.origins[path] = origin
        for below in _paths(value, path):
            self.origins[below] = origin


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(old, value)
        else:
            into[key] = value


def _paths(value: Any, at: KeyPath) -> list[KeyPath]:
    if isinstance(value, dict):
        return [p for key, child in value.items() for p in ((*at, key), *_paths(child, (*at, key)))]
    if isinstance(value, list):
        return [p for i, child in enumerate(value) for p in ((*at, i), *_paths(child, (*at, i)))]
    return []


def merge_sources(
    schema: Mapping[str, type[Section]], file: Path | None, env: Mapping[str, str], overrides: Sequence[str]
) -> Merged:
    """Raises SettingsError where a source cannot be read or names a section nobody has."""
    sections = list(dict.fromkeys((*schema, *SECTIONS)))
    merged = Merged()
    if file is not None:
        tree, lines = read_file(file)
        merged.tree = tree
        merged.origins = {path: f"{file}:{line}" for path, line in lines.items()}
        for name, value in tree.items():
            _check_section(name, sections, merged.origin((name,)))
            if value is None:  # "gateway:" with everything below it commented out
                tree[name] = {}
    for variable in sorted(env):
        if variable.startswith(ENV_PREFIX) and variable != ENV_CONFIG:
            path = tuple(variable.removeprefix(ENV_PREFIX).lower().split("__"))
            known = [f"{ENV_PREFIX}{name.upper()}__" for name in sections]
            if path[0] not in sections:
                hint = nearest(f"{ENV_PREFIX}{path[0].upper()}__", known)
                raise SettingsError(f"{variable}: no setting has this name; variables begin with a section: {hint}")
            _put_text(merged, path, env[variable], variable, f"{ENV_PREFIX}{path[0].upper()}__KEY=value")
    for override in overrides:
        key, separator, text = override.partition("=")
        path = tuple(key.strip().split("."))
        origin = f"--set {key.strip()}"
        if not separator:
            raise SettingsError(f"--set {override}: has no '=': write --set section.key=value")
        _check_section(path[0], sections, origin)
        _put_text(merged, path, text, origin, f"--set {path[0]}.key=value")
    return merged


def _check_section(name: str, sections: Sequence[str], origin: str) -> None:
    if name not in sections:
        raise SettingsError(f"{origin}: unknown section {name!r}: {nearest(name, sections)}")


def _put_text(merged: Merged, path: tuple[str, ...], text: str, origin: str, form: str) -> None:
    if len(path) < 2 or not all(path):
        raise SettingsError(f"{origin}: does not name a key: write {form}")
    try:
        value = parse_value(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        # Free text such as "a: b: c" or "[x" is no YAML value; where text is wanted it is right as it stands.
        value = text
    merged.put(path, value, origin, text)
