"""What a settings class is, and the walk over its keys.

Invariant: the names a schema knows are found here only, for validation, for hints and for the documentation alike.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Union

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from node_runtime.errors import EXIT_USAGE, NodeError
from node_runtime.settings.bounds import bounds_of, in_words

# One file serves all processes; each process validates the sections it owns.
SECTIONS: Final = ("runtime", "gateway", "backend", "rollout", "trainer", "cluster")


def _printable(sentence: str) -> str:
    """What was given may hold line breaks and terminal codes; a sentence does not."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)


class SettingsError(NodeError):
    """The settings cannot be used; one sentence a line."""

    def __init__(self, *sentences: str) -> None:
        super().__init__("\n".join(map(_printable, sentences)), EXIT_USAGE)


class Section(pydantic.BaseModel):
    """Base of all settings classes: immutable, no unknown keys, defaults checked like given values."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class SettingKey:
    """One dotted key: `<name>` stands for any key of a mapping, `[]` for each item of a list."""

    key: str
    type: str
    required: bool
    value: Any  # the default, as JSON has it; None where the key is required
    bounds: Mapping[str, Any]  # in the words of JSON Schema: minimum, exclusiveMinimum, minItems, pattern, ...
    description: str

    @property
    def default(self) -> str:
        """As YAML would spell it, or "required"."""
        return "required" if self.required else _spell(self.value)

    @property
    def within(self) -> str:
        """The bounds in words; empty where there are none."""
        return in_words(self.bounds)


def schema_keys(schema: Mapping[str, type[Section]]) -> list[SettingKey]:
    """All dotted keys of a schema, section by section in the order in which the classes name them."""
    return [key for section, model in schema.items() for key in _keys_of(model, section)]


def schema_sections(schema: Mapping[str, type[Section]]) -> list[tuple[str, type[pydantic.BaseModel]]]:
    """Every settings class with the path at which its keys stand ("gateway", "gateway.pools[]"), outer ones first."""
    return [found for section, model in schema.items() for found in _models_of(model, section)]


def _models_of(model: type[pydantic.BaseModel], prefix: str) -> Iterator[tuple[str, type[pydantic.BaseModel]]]:
    yield prefix, model
    for name, field in model.model_fields.items():
        for suffix, child in _sections_in(field.annotation):
            yield from _models_of(child, f"{prefix}.{name}{suffix}")


def _keys_of(model: type[pydantic.BaseModel], prefix: str) -> Iterator[SettingKey]:
    properties = model.model_json_schema()["properties"] if model.model_fields else {}
    for name, field in model.model_fields.items():
        path = f"{prefix}.{name}"
        nested = list(_sections_in(field.annotation))
        if not nested or any(suffix for suffix, _ in nested):  # a list or mapping of sections is a key of its own too
            required, value = _default(field)
            bounds = bounds_of(properties[name])
            yield SettingKey(path, type_name(field.annotation), required, value, bounds, field.description or "")
        for suffix, child in nested:
            yield from _keys_of(child, path + suffix)


def _sections_in(annotation: Any) -> Iterator[tuple[str, type[pydantic.BaseModel]]]:
    """The settings classes an annotation holds, each with what its keys are reached through ("", "[]", ".<name>")."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield "", annotation
        return
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from _sections_in(args[0])
    elif origin in (Union, types.UnionType):
        for arg in args:
            yield from _sections_in(arg)
    elif isinstance(origin, type) and issubclass(origin, Mapping) and args:
        yield from ((".<name>" + suffix, child) for suffix, child in _sections_in(args[1]))
    elif isinstance(origin, type) and issubclass(origin, Sequence | set | frozenset) and args:
        yield from (("[]" + suffix, child) for suffix, child in _sections_in(args[0]))


def _default(field: FieldInfo) -> tuple[bool, Any]:
    """Whether the key is required, and else its default."""
    if field.is_required():
        return True, None
    value = field.get_default(call_default_factory=True, validated_data={})
    return (True, None) if value is PydanticUndefined else (False, to_jsonable_python(value))


def _spell(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_spell(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence | set | frozenset):
        return "[" + ", ".join(map(_spell, value)) + "]"
    return str(value)


_NAMES: Final[Mapping[Any, str]] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    Any: "any",
}


def type_name(annotation: Any) -> str:
    """The type in the words of the settings file: "integer or null", "list of string", "one of json, console"."""
    if annotation in _NAMES:
        return _NAMES[annotation]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return type_name(args[0])
    if origin is Literal:
        return "one of " + ", ".join(_spell(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"mapping of {type_name(args[0])} to {type_name(args[1])}" if args else "mapping"
    if isinstance(origin, type) and issubclass(origin, Sequence | set | frozenset):
        inner = [type_name(arg) for arg in args if arg is not Ellipsis]
        return f"list of {inner[0]}" if len(set(inner)) == 1 else f"list of ({', '.join(inner)})"
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return "mapping"
    name = getattr(annotation, "__name__", str(annotation))
    return {"Path": "path", "list": "list", "dict": "mapping", "tuple": "list"}.get(name, name)


def known_names(schema: Mapping[str, type[Section]], path: Sequence[str | int]) -> list[str]:
    """The keys that may stand at `path` (which begins with a section); empty where the schema leaves them open."""
    if not path:
        return list(schema)
    models: list[type[pydantic.BaseModel]] = [schema[str(path[0])]] if str(path[0]) in schema else []
    rest: list[str | int] = list(path[1:])
    while rest and models:
        fields = [m.model_fields[str(rest[0])] for m in models if str(rest[0]) in m.model_fields]
        rest.pop(0)
        found = [pair for field in fields for pair in _sections_in(field.annotation)]
        models = []
        for suffix, model in found:
            # "[]" and ".<name>" each use up one step of the path.
            depth = suffix.count("[]") + suffix.count(".<name>")
            if depth <= len(rest):
                models.append(model)
                rest = rest[depth:] if model is found[-1][1] else rest
    return [] if rest else sorted({name for m in models for name in m.model_fields})


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a refusal: the nearest known name, or all of them where none is near."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    if not names:
        return "nothing may stand there."
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"known there: {shown}."
