"""The tools there are: the union over all backends, with one version per name. Pure.

Invariant: calls of a tool go to backends of one version_hash only: the one that most connected backends serve, and
among equals the one whose backend stands first in the settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fermata.v1 import gateway_pb2, tool_pb2

from node_runtime.schema import ArgumentValidator, SchemaError

MAX_NAME: Final = 128


@dataclass(frozen=True, slots=True)
class Described:
    """What the catalogue needs of one backend, in the order of the settings."""

    address: str
    connected: bool
    serving: bool
    tools: tuple[tool_pb2.ToolSpec, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool as calls see it."""

    spec: tool_pb2.ToolSpec
    validator: ArgumentValidator
    addresses: frozenset[str]
    """Backends of the chosen version, connected or not."""
    serving: int

    def entry(self) -> gateway_pb2.CatalogueEntry:
        return gateway_pb2.CatalogueEntry(spec=self.spec, backends=len(self.addresses), backends_serving=self.serving)


class CatalogueBuilder:
    """Keeps compiled schemas over rebuilds. `complaints` of the last build are sentences, each new one once."""

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}
        """Tools that are served and cannot be called, with the sentence that says why."""
        self._validators: dict[bytes, ArgumentValidator | str] = {}
        self._told: set[str] = set()

    def build(self, backends: Iterable[Described]) -> tuple[dict[str, Tool], list[str]]:
        versions: dict[str, dict[str, list[tuple[Described, tool_pb2.ToolSpec]]]] = {}
        for backend in backends:
            for spec in backend.tools:
                versions.setdefault(spec.name, {}).setdefault(spec.version_hash, []).append((backend, spec))
        tools: dict[str, Tool] = {}
        complaints: list[str] = []
        self.left_out = {}
        for name, by_version in versions.items():
            # max() keeps the first of equals, and dicts keep the order of the settings.
            chosen = max(by_version, key=lambda version: sum(b.connected for b, _ in by_version[version]))
            served = by_version[chosen]
            spec = served[0][1]
            if len(by_version) > 1:
                others = [b.address for version, list_ in by_version.items() if version != chosen for b, _ in list_]
                there = ", ".join(backend.address for backend, _ in served)
                complaints.append(
                    f"the tool {name!r} is served in {len(by_version)} versions: its calls go to version {chosen!r} at "
                    f"{there} only, and not to {', '.join(others)}; bring all to one version"
                )
            validator = _name_problem(name) or self._validator(spec)
            if isinstance(validator, str):
                self.left_out[name] = f"the tool {name[:80]!r} of {served[0][0].address} is left out: {validator}"
                complaints.append(self.left_out[name])
                continue
            addresses = frozenset(backend.address for backend, _ in served)
            tools[name] = Tool(spec, validator, addresses, sum(backend.serving for backend, _ in served))
        new = [complaint for complaint in complaints if complaint not in self._told]
        self._told = set(complaints)
        return tools, new

    def _validator(self, spec: tool_pb2.ToolSpec) -> ArgumentValidator | str:
        schema = spec.input_schema_json
        if schema not in self._validators:
            if len(self._validators) >= 1024:
                self._validators.clear()
            try:
                self._validators[schema] = ArgumentValidator(schema)
            except SchemaError as error:
                self._validators[schema] = str(error)
        return self._validators[schema]


def _name_problem(name: str) -> str | None:
    """Names are metric labels and words in prompts."""
    if not name or len(name) > MAX_NAME or not name.isprintable() or " " in name:
        return f"a name has 1 to {MAX_NAME} printable characters and no blanks"
    return None


def unknown_tool_sentence(name: str, tools: Iterable[str]) -> str:
    """What the model reads; names what there is."""
    known = sorted(tools)
    there = f"the tools are: {', '.join(known)}" if known else "there are no tools"
    return f"there is no tool {name!r}; {there}"
