"""A typed function to the schema of its arguments, and argument bytes to the function's keyword arguments.

The schema is JSON Schema (draft 2020-12) of an object with one property per parameter and no others. Descriptions come
from the docstring: its text for the tool, its ``Args:`` section (Google style) for the parameters.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any

import pydantic
import typing_extensions
from pydantic.json_schema import GenerateJsonSchema

from node_runtime.schema import ArgumentValidator, SchemaError
from tool_backend.context import ToolContext
from tool_backend.errors import BackendStartError

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class InvalidArguments(Exception):
    """The arguments do not fit; the text is the one sentence that the model sees."""


class _UntitledSchema(GenerateJsonSchema):
    """Without the titles that pydantic makes from names: they cost the model tokens and say nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class Signature:
    """What is known of a tool's function."""

    description: str
    input_schema_json: bytes
    output_schema_json: bytes
    context_parameter: str | None
    _adapter: pydantic.TypeAdapter[dict[str, Any]] = dataclasses.field(repr=False)
    _validator: ArgumentValidator = dataclasses.field(repr=False)

    def check(self, args_json: bytes) -> str | None:
        """One sentence where the arguments do not fit the schema, else None."""
        return self._validator.check(args_json)

    def bind(self, args_json: bytes) -> dict[str, Any]:
        """Keyword arguments for the function, converted to its types (3.0 reaches an ``int`` parameter as 3)."""
        if (sentence := self._validator.check(args_json)) is not None:
            raise InvalidArguments(sentence)
        try:
            return self._adapter.validate_json(args_json)
        except pydantic.ValidationError:
            pass  # integers beyond 64 bits that are spelled as floats take the slower way
        try:
            return self._adapter.validate_python(json.loads(args_json, parse_float=_number))
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "arguments"
            raise InvalidArguments(f"argument '{where}' does not fit: {first['msg']}") from error
        except (ValueError, RecursionError) as error:  # more digits, or deeper, than can be read
            raise InvalidArguments(f"the arguments cannot be read: {error}") from error


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


def read_signature(function: Callable[..., Any], name: str, schema: dict[str, Any] | None = None) -> Signature:
    """The signature of a tool's function; ``schema`` replaces the one made from the type hints.

    ``BackendStartError`` says in one sentence what keeps the function from being a tool.
    """
    described_by = function if inspect.isroutine(function) else getattr(function, "func", type(function).__call__)
    try:
        hints = typing.get_type_hints(described_by, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise BackendStartError(f"tool '{name}': its type hints cannot be resolved: {error}") from error
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    context_parameter = None
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name)
        if hint is ToolContext:
            context_parameter = parameter.name
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BackendStartError(f"tool '{name}': parameter '{parameter}' cannot be given by name; use plain ones")
        if hint is None:
            raise BackendStartError(f"tool '{name}': parameter '{parameter.name}' needs a type hint")
        if text := described.get(parameter.name):
            hint = Annotated[hint, pydantic.Field(description=text)]
        required = parameter.default is parameter.empty
        fields[parameter.name] = (typing_extensions.Required if required else typing_extensions.NotRequired)[hint]
        if not required:
            defaults[parameter.name] = parameter.default
    # A typed dict and not a model: any name may be a parameter, and the function's own defaults stay its own.
    make_typed_dict: Any = typing_extensions.TypedDict
    typed_dict = make_typed_dict("Arguments", fields)
    typed_dict.__pydantic_config__ = pydantic.ConfigDict(extra="forbid")
    try:
        adapter = pydantic.TypeAdapter[dict[str, Any]](typed_dict)
        own_schema = adapter.json_schema(schema_generator=_UntitledSchema)
    except (pydantic.errors.PydanticUserError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise BackendStartError(f"tool '{name}': no JSON Schema can be made from its type hints: {reason}") from error
    own_schema.pop("title", None)
    for key, definition in own_schema.get("$defs", {}).items():
        if definition.get("title") == key:
            del definition["title"]
    own_schema.setdefault("properties", {})
    for key, value in defaults.items():
        _add_default(own_schema["properties"][key], value)
    schema_json = _dump(own_schema if schema is None else schema, name)
    try:
        validator = ArgumentValidator(schema_json)
    except SchemaError as error:
        raise BackendStartError(f"tool '{name}': its schema is not JSON Schema: {error}") from error
    output = _output_schema(hints.get("return"))
    return Signature(summary, schema_json, output, context_parameter, adapter, validator)


def _dump(schema: dict[str, Any], name: str) -> bytes:
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BackendStartError(f"tool '{name}': its schema is not JSON Schema: {error}") from error


def _add_default(schema: dict[str, Any], value: Any) -> None:
    try:
        schema["default"] = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return  # a default that JSON cannot say stays the function's own affair


def _output_schema(hint: Any) -> bytes:
    """The schema of results that are objects or lists; empty for tools that give text."""
    origin = typing.get_origin(hint) or hint
    structured = isinstance(origin, type) and (
        issubclass(origin, dict | list | pydantic.BaseModel) or dataclasses.is_dataclass(origin)
    )
    if not structured or getattr(origin, "__module__", "").startswith("tool_backend."):
        return b""
    try:
        schema = pydantic.TypeAdapter(hint).json_schema(mode="serialization", schema_generator=_UntitledSchema)
    except (pydantic.errors.PydanticUserError, TypeError):
        return b""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":")).encode()


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """The text before the first section, and what the ``Args:`` section says of each parameter."""
    summary: list[str] = []
    described: dict[str, list[str]] = {}
    section = None
    current: list[str] | None = None
    for line in doc.splitlines():
        if match := _SECTION.match(line):
            section, current = match[1], None
        elif section is None:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            indent = len(line) - len(line.lstrip())
            if (match := _ARGUMENT.match(line)) and indent <= 4:
                current = described.setdefault(match[1], [])
                current.append(match[2].strip())
            elif current is not None and line.strip():
                current.append(line.strip())
    return "\n".join(summary).strip(), {name: " ".join(lines).strip() for name, lines in described.items()}
