"""The arguments of a tool call against the tool's JSON Schema.

Invariant: whatever bytes a model writes, check() answers in one sentence that names the argument and what would be
right, in time linear in their size; neither it nor the schema ever reaches the network or the file system.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Final, NoReturn

import jsonschema_rs

from node_runtime.errors import EXIT_USAGE, NodeError
from node_runtime.schema_cost import MOST, Visits

MAX_SCHEMA_BYTES: Final = 256 * 1024
MAX_ARGS_BYTES: Final = 1024 * 1024
MAX_DEPTH: Final = 64
_MAX_PROBLEMS: Final = 3
_ALL_ERRORS_BYTES: Final = 16 * 1024
_MAX_ERRORS: Final = 20_000
"""Of more errors than this, which a union's may hold, none is made."""
_MAX_BESIDE: Final = 10_000
_MAX_REGEX_BYTES: Final = 1024 * 1024


class SchemaError(NodeError):
    """A tool's schema cannot be used."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, EXIT_USAGE)


class _BadJson(ValueError):
    pass


def _refuse_constant(name: str) -> NoReturn:
    raise _BadJson(f"{name} is not a JSON number")


def _exact(text: str) -> float | Decimal:
    """The number as spelled: 9007199254740993.5 is no integer, though the nearest float is one."""
    value = float(text)
    if math.isinf(value):
        raise _BadJson(f"the number {_clip(text, 40)} is too large, write one below 1.8e308")
    # Of numbers with hundreds of digits the float is near enough, and cheap to handle whatever the exponent.
    if len(text) > 400:
        return value
    exact = Decimal(text)
    return exact if exact.adjusted() > -400 else value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _BadJson(f"the key {_quote(name)} stands twice, keep one of them")
            seen.add(name)
    return result


def _depth(text: str) -> int:
    """Brackets open at once, outside strings; linear and without recursion."""
    depth = deepest = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def _parse(data: bytes, noun: str, plural: bool = True) -> Any:
    """JSON as the wire has it. Raises _BadJson with a sentence about `noun`."""
    are, hold = ("are", "hold") if plural else ("is", "holds")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadJson(f"{noun} {are} not UTF-8 at byte {error.start}") from None
    # More brackets than this may still be shallow: only then is the exact count worth its time.
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise _BadJson(f"{noun} {are} nested more than {MAX_DEPTH} deep: use a flatter value")
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_exact, object_pairs_hook=_no_duplicates)
        if "\\ud" in text or "\\uD" in text:  # surrogates come in pairs or are no character
            json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
        return value
    except UnicodeEncodeError:
        raise _BadJson(f"{noun} {hold} half of a surrogate pair, which is no character: write both halves") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise _BadJson(f"{noun} {are} not JSON: {error.msg} at {where}") from None
    except _BadJson as error:
        raise _BadJson(f"{noun} {are} not right JSON: {error}") from None
    except ValueError:  # an integer of more digits than Python converts
        raise _BadJson(f"{noun} {hold} a number with too many digits: write a shorter number") from None


def _forbid(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is outside the schema")


class ArgumentValidator:
    """One tool's schema, compiled once; check() is safe to call from any thread."""

    def __init__(self, schema_json: bytes) -> None:
        """An empty schema accepts any object. Raises SchemaError with one sentence."""
        if len(schema_json) > MAX_SCHEMA_BYTES:
            raise SchemaError(f"the schema has {len(schema_json)} bytes, at most {MAX_SCHEMA_BYTES} are allowed")
        try:
            schema = _parse(schema_json or b"{}", "the schema", plural=False)
        except _BadJson as error:
            raise SchemaError(str(error)) from None
        if not isinstance(schema, dict):
            raise SchemaError(f"the schema must be a JSON object, got {_kind(schema)}")
        if (beside := Visits(schema).most_beside()) > _MAX_BESIDE:
            more = f"{beside} or more" if beside >= MOST else str(beside)
            raise SchemaError(
                f"the schema applies {more} of its parts to one value, at most {_MAX_BESIDE} are allowed: "
                "nest fewer anyOf, oneOf and allOf"
            )
        self._schema = schema
        self._visits = Visits(schema)
        try:
            self._validator = jsonschema_rs.validator_for(
                schema,  # without $schema: draft 2020-12
                retriever=_forbid,
                # An engine without backtracking: linear time for any pattern it accepts, and those it cannot run
                # (look-around, back-references) are refused here.
                pattern_options=jsonschema_rs.RegexOptions(
                    size_limit=_MAX_REGEX_BYTES, dfa_size_limit=_MAX_REGEX_BYTES
                ),
            )
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError, TypeError) as error:
            raise SchemaError(_schema_sentence(error)) from None

    def check(self, args_json: bytes) -> str | None:
        """None where the arguments fit; else one sentence for the model."""
        if len(args_json) > MAX_ARGS_BYTES:
            return f"arguments have {len(args_json)} bytes, at most {MAX_ARGS_BYTES} are allowed: send less"
        try:
            args = _parse(args_json, "arguments")
        except _BadJson as error:
            return str(error)
        if not isinstance(args, dict):
            return _not_an_object(args)
        if self._validator.is_valid(args):
            return None
        if self._too_many_errors(args_json.decode("utf-8")):
            return "the arguments fit none of the forms that this tool's schema allows: write a smaller, flatter value"
        return self._sentence(args, len(args_json))

    def _too_many_errors(self, text: str) -> bool:
        """The errors of a union's branches are all made with the first of them, so their number must be bounded."""
        visits = self._visits.at_most(min(_depth(text), MAX_DEPTH))
        return visits > 1 and visits * (text.count(",") + 1) > _MAX_ERRORS

    def _sentence(self, args: dict[str, Any], size: int) -> str:
        problems: list[str] = []
        for error in self._errors(args, size):
            problem = _problem(error, self._names_at(error))
            if problem not in problems:
                problems.append(problem)
            if len(problems) >= _MAX_PROBLEMS:
                break
        return "; ".join(problems)

    def _errors(self, args: dict[str, Any], size: int) -> Iterable[jsonschema_rs.ValidationError]:
        """The errors; of large arguments the first alone, as there may be one for each of their items."""
        if size <= _ALL_ERRORS_BYTES:
            return self._validator.iter_errors(args)
        try:
            self._validator.validate(args)
        except jsonschema_rs.ValidationError as error:
            return [error]
        return []

    def _names_at(self, error: jsonschema_rs.ValidationError) -> list[str]:
        """The properties declared beside the keyword that failed."""
        node: Any = self._schema
        for part in list(error.schema_path)[:-1]:
            try:
                node = node[part]
            except (LookupError, TypeError):
                return []
        properties = node.get("properties") if isinstance(node, dict) else None
        return [str(name) for name in properties] if isinstance(properties, Mapping) else []


def _schema_sentence(error: Exception) -> str:
    if isinstance(error, jsonschema_rs.ValidationError):
        at = _path(error.instance_path) or "its top"
        text = error.message
        if 'is not a "regex"' in text:
            pattern = _clip(text.removesuffix(' is not a "regex"'))
            return (
                f"the schema's pattern {pattern} at {at} cannot be used: write it "
                "without look-around and back-references, and not too large"
            )
        outside = re.match(r"Resource '(.*)' is not present in a registry", text, re.DOTALL)
        if outside:
            return (
                f"the schema cannot be used: {_clip(outside[1], 200)} is outside the schema, and only references into "
                "the schema itself (#/$defs/...) are followed"
            )
        return f"the schema is wrong at {at}: {_clip(text, 300)}"
    return f"the schema cannot be used: {_clip(str(error), 300)}"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    for types, name in (
        (bool, "true or false"),
        (str, "a string"),
        (int, "an integer"),
        ((float, Decimal), "a number"),
        (list, "an array"),
        (dict, "an object"),
    ):
        if isinstance(value, types):
            return name if types is not bool else str(value).lower()
    return type(value).__name__


_ARTICLES: Final[Mapping[str, str]] = {
    "integer": "an integer",
    "array": "an array",
    "object": "an object",
    "null": "null",
    "boolean": "true or false",
}


def _not_an_object(args: Any) -> str:
    if isinstance(args, str):
        try:
            inner = json.loads(args)
        except (ValueError, RecursionError):
            return "arguments must be a JSON object, got a string"
        if isinstance(inner, dict):
            return "arguments must be a JSON object, got a string holding one (JSON encoded twice): write the object"
    return f"arguments must be a JSON object, got {_kind(args)}"


def _path(parts: list[str | int]) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return _clip(text, 120)


def _clip(text: str, length: int = 80) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else flat[: length - 3] + "..."


def _quote(name: str) -> str:
    return repr(_clip(name))


def _problem(error: jsonschema_rs.ValidationError, names: list[str]) -> str:
    """One failed keyword in words."""
    kind: Any = error.kind
    instance: Any = error.instance
    path = list(error.instance_path)
    subject = f"argument {_quote(_path(path))}" if path else "the arguments"
    match kind.name:
        case "required":
            return f"argument {_quote(_path([*path, kind.property]))} is missing"
        case "additionalProperties" | "unevaluatedProperties":
            return _unexpected(path, list(kind.unexpected), names)
        case "type":
            return f"{subject} must be {_types(kind.types)}, got {_got(instance)}"
        case "enum":
            options = ", ".join(
                _clip(json.dumps(option, ensure_ascii=False, default=str)) for option in kind.options[:10]
            )
            more = ", ..." if len(kind.options) > 10 else ""
            return f"{subject} must be one of {options}{more}, got {_got(instance)}"
        case "const":
            return f"{subject} must be {_clip(json.dumps(kind.expected_value, ensure_ascii=False, default=str))}"
        case "minimum":
            return f"{subject} must be at least {kind.limit}, got {_got(instance)}"
        case "maximum":
            return f"{subject} must be at most {kind.limit}, got {_got(instance)}"
        case "exclusiveMinimum":
            return f"{subject} must be more than {kind.limit}, got {_got(instance)}"
        case "exclusiveMaximum":
            return f"{subject} must be less than {kind.limit}, got {_got(instance)}"
        case "minLength" | "maxLength":
            bound = "at least" if kind.name == "minLength" else "at most"
            return f"{subject} must have {bound} {kind.limit} characters, got {len(instance)}"
        case "minItems" | "maxItems" | "minProperties" | "maxProperties":
            bound = "at least" if kind.name.startswith("min") else "at most"
            what = "items" if kind.name.endswith("Items") else "keys"
            return f"{subject} must have {bound} {kind.limit} {what}, got {len(instance)}"
        case "pattern":
            return f"{subject} must match the pattern {_clip(kind.pattern)}, got {_got(instance)}"
        case "format":
            return f"{subject} must be a right {kind.format}, got {_got(instance)}"
        case "multipleOf":
            return f"{subject} must be a multiple of {kind.multiple_of}, got {_got(instance)}"
        case "falseSchema":
            known = ", ".join(names[:12]) if names else "none"
            return f"{subject} is not allowed" if path else f"the tool takes no such arguments: it takes {known}"
        case "propertyNames":
            return f"{subject} must not have a key that is not allowed: {_clip(kind.error.message, 200)}"
        case "contains":
            return f"{subject} must hold at least one item of the form asked for, got {_got(instance)}"
        case "uniqueItems":
            return f"{subject} must not hold the same item twice"
        case "anyOf" | "oneOf" if types := _types_wanted(kind, path):
            return f"{subject} must be {_types(types)}, got {_got(instance)}"
        case "anyOf" | "oneOf":
            return f"{subject} must fit {'one' if kind.name == 'oneOf' else 'at least one'} of the forms allowed" + (
                _branches(kind, names) or f", got {_got(instance)}"
            )
        case _:
            return f"{subject} must fit the schema: {_clip(error.message, 200)}"


def _types_wanted(kind: Any, path: list[str | int]) -> list[str]:
    """The types of all branches of a union where each branch fails for its type alone (optional values do)."""
    wanted: list[str] = []
    for branch in getattr(kind, "context", None) or []:
        for error in branch:
            if error.kind.name != "type" or list(error.instance_path) != path:
                return []
            wanted.extend(error.kind.types)
    return list(dict.fromkeys(wanted))


def _types(names: list[str]) -> str:
    """ "an integer or null"."""
    return " or ".join(_ARTICLES.get(name, f"a {name}") for name in sorted(names, key=lambda name: name == "null"))


def _branches(kind: Any, names: list[str]) -> str:
    """The first problem of each branch of a union, where they are few."""
    context = getattr(kind, "context", None) or []
    told: list[str] = []
    for branch in context[:4]:
        for error in branch[:1]:
            problem = _problem(error, names)
            if problem not in told:
                told.append(problem)
    return f" ({', or '.join(told)})" if told and len(context) <= 4 else ""


def _unexpected(path: list[str | int], unexpected: list[str], names: list[str]) -> str:
    told = []
    for name in unexpected[:_MAX_PROBLEMS]:
        close = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.5)
        told.append(f"{_quote(_path([*path, name]))}" + (f" (did you mean {close[0]!r}?)" if close else ""))
    if len(unexpected) > _MAX_PROBLEMS:
        told.append(f"{len(unexpected) - _MAX_PROBLEMS} more")
    verb = "is not an argument" if len(unexpected) == 1 else "are not arguments"
    known = ", ".join(names[:12]) if names else "none"
    return f"{', '.join(told)} {verb} of this tool: it takes {known}"


def _got(value: Any) -> str:
    if isinstance(value, str):
        return f"the string {_clip(json.dumps(value, ensure_ascii=False))}"
    if isinstance(value, bool) or value is None:
        return _kind(value)
    if isinstance(value, int | float | Decimal):
        return _clip(str(value))
    return _kind(value)
