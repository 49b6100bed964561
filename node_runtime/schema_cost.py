"""How often a schema may be applied to one place of a document: what the errors of a failed check may cost.

A union's error holds the errors of all its branches. Where branches lead to one another (a tree of `Add | Mul | int`)
each level of the document multiplies them, and to list them would take for ever although the check itself is quick.

Invariant: the count is an upper bound, and takes bounded time whatever the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

MOST: Final = 1_000_000
"""Counts end here: this many, or nobody knows."""
_MAX_STEPS: Final = 100_000
_BRANCHES: Final = ("allOf", "anyOf", "oneOf")
_CONDITIONS: Final = ("not", "if", "then", "else")
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_OF_MEMBERS: Final = ("additionalProperties", "unevaluatedProperties", "propertyNames")
_OF_ITEMS: Final = ("items", "additionalItems", "unevaluatedItems", "contains")


class Visits:
    """Counts for one schema (parsed JSON)."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._counts: dict[tuple[int, int], int] = {}
        self._steps = 0
        self._at: dict[int, int] = {}

    def at_most(self, depth: int) -> int:
        """The most often that any value at most `depth` levels deep is looked at."""
        found = self._at.get(depth)
        if found is None:
            try:
                found = max(self._count(self._schema, level) for level in range(depth + 1))
            except RecursionError:
                found = MOST
            self._at[depth] = found = min(found, MOST)
        return found

    def most_beside(self) -> int:
        """The most schemas that any part of this one applies to a single value, references followed."""
        most = 0
        parts = [self._schema]
        try:
            while parts and most < MOST:
                part = parts.pop()
                if isinstance(part, dict):
                    most = max(most, self._count(part, 0))
                    parts.extend(part.values())
                elif isinstance(part, list):
                    parts.extend(part)
        except RecursionError:
            return MOST
        return most

    def _count(self, schema: Any, level: int) -> int:
        """Ways from this schema to one value `level` levels below."""
        if not isinstance(schema, dict):
            return 1
        place = (id(schema), level)
        known = self._counts.get(place)
        if known is not None:
            return known
        self._steps += 1
        if self._steps > _MAX_STEPS:
            return MOST
        self._counts[place] = 0  # a way back to here without a step down ends
        total = 1 if level == 0 else self._below(schema, level - 1)
        for other in self._beside(schema):
            # What is not followed is taken for one schema here, and for any number of them further down.
            total += (MOST if level else 1) if other is _UNKNOWN else self._count(other, level)
            if total >= MOST:
                break
        self._counts[place] = total = min(total, MOST)
        return total

    def _beside(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """Schemas applied to the same value."""
        for name in _BRANCHES:
            branches = schema.get(name)
            if isinstance(branches, list):
                yield from branches
        for name in _CONDITIONS:
            if name in schema:
                yield schema[name]
        for name in ("dependentSchemas", "dependencies"):
            if isinstance(schema.get(name), dict):
                yield from schema[name].values()
        for name in _REFERENCES:
            if name in schema:
                yield self._resolve(schema[name])

    def _below(self, schema: Mapping[str, Any], level: int) -> int:
        """Ways to one member or one item of the value, and on."""
        members = self._most(schema.get("properties"), level)
        patterns = schema.get("patternProperties")
        if isinstance(patterns, dict):
            members += sum(self._count(pattern, level) for pattern in patterns.values())
        members += sum(self._count(schema[name], level) for name in _OF_MEMBERS if name in schema)
        items = self._most(schema.get("prefixItems"), level)
        for name in _OF_ITEMS:
            if name in schema:
                value = schema[name]
                items += self._most(value, level) if isinstance(value, list) else self._count(value, level)
        return max(members, items, 1)

    def _most(self, schemas: Any, level: int) -> int:
        """Of schemas of which one value meets one."""
        values = schemas.values() if isinstance(schemas, dict) else schemas if isinstance(schemas, list) else ()
        return max((self._count(schema, level) for schema in values), default=0)

    def _resolve(self, reference: Any) -> Any:
        """What a reference into the schema itself leads to; other ones (anchors, ids) are not followed."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return _UNKNOWN
        node = self._schema
        for part in reference[2:].split("/") if len(reference) > 1 else ():
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(name)] if isinstance(node, list) else node[name]
            except (LookupError, TypeError, ValueError):
                return _UNKNOWN
        return node


_UNKNOWN: Final = object()
