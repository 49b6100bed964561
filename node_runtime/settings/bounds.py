"""The bounds of a setting: read from its JSON schema, and said in words.

Invariant: what is said here is what validation refuses by. Bounds that a class checks in code of its own are told by
the description of the key alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_WORDS: Final = {
    "minimum": "at least {}",
    "exclusiveMinimum": "over {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "under {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "pattern": "matches {}",
}


def bounds_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds of one property of a JSON schema, those of the branches of a union among them."""
    found: dict[str, Any] = {}
    for branch in (*schema.get("anyOf", ()), schema):
        found.update({name: branch[name] for name in _WORDS if name in branch})
        if branch.get("type") == "integer" and "exclusiveMinimum" in found:
            least = found.pop("exclusiveMinimum") + 1
            found["minimum"] = max(least, found.get("minimum", least))
    return found


def in_words(bounds: Mapping[str, Any]) -> str:
    """The bounds as a reader wants them: "0 to 65535", "over 0", "not empty"; empty where there are none."""
    rest, words = dict(bounds), []
    if "minimum" in rest and "maximum" in rest:
        words.append(f"{_spell(rest.pop('minimum'))} to {_spell(rest.pop('maximum'))}")
    if "minItems" in rest and rest["minItems"] == rest.get("maxItems"):
        words.append(f"{rest.pop('minItems')} items")
        del rest["maxItems"]
    for name in ("minLength", "minItems"):
        if rest.get(name) == 1:
            del rest[name]
            words.append("not empty")
    return ", ".join(words + [form.format(_spell(rest[name])) for name, form in _WORDS.items() if name in rest])


def _spell(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
