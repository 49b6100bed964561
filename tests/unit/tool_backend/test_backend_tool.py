"""``@tool``: what is declared, how arguments reach the function, and what keeps a function from being a tool."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Annotated, Any, Literal

import pydantic
import pytest
from fermata.v1 import tool_pb2

from tool_backend import BackendStartError, Tool, ToolContext, tool
from tool_backend.testing import call, text
from tool_backend.tool import ToolOptions


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(pydantic.BaseModel):
    x: int
    y: int = 0


@dataclasses.dataclass
class Size:
    width: int


@tool(
    idempotent=True,
    default_timeout_s=2.5,
    max_timeout_s=30,
    max_concurrency=4,
    max_output_bytes=100,
    timeout_fault="model",
    cost_unit="cents",
    labels={"team": "core"},
)
def book(
    ctx: ToolContext, count: int, where: Point, colour: Colour = Colour.RED, mode: Literal["a", "b"] = "a"
) -> dict[str, Any]:
    """Book seats.

    They are held for a day.

    Args:
        count: how many seats,
            at least one
        where (Point): the place
    Returns:
        What was booked.
    """
    return {"count": count, "x": where.x, "colour": colour.value, "mode": mode, "key": ctx.key}


def test_the_declaration() -> None:
    spec = book.spec
    assert spec.name == "book"
    assert spec.description == "Book seats.\n\nThey are held for a day."
    schema = json.loads(spec.input_schema_json)
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["count", "where"]
    assert list(schema["properties"]) == ["count", "where", "colour", "mode"]
    assert schema["properties"]["count"] == {"type": "integer", "description": "how many seats, at least one"}
    assert schema["properties"]["mode"]["enum"] == ["a", "b"]
    assert schema["properties"]["mode"]["default"] == "a"
    assert "title" not in spec.input_schema_json.decode()
    assert json.loads(spec.output_schema_json)["type"] == "object"
    assert (spec.idempotent, spec.read_only, spec.stateful) == (True, False, False)
    assert spec.visibility == tool_pb2.VISIBILITY_MODEL
    assert spec.timeout_fault == tool_pb2.FAULT_MODEL
    assert (spec.default_timeout_ms, spec.max_timeout_ms) == (2500, 30_000)
    assert (spec.max_concurrency, spec.max_output_bytes, spec.cost_unit) == (4, 100, "cents")
    assert dict(spec.labels) == {"team": "core"}


def test_the_version_hash_changes_with_anything_declared() -> None:
    def add(a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    def other(a: int, b: int = 2) -> int:
        """Add."""
        return a + b

    one = Tool(add)
    assert one.spec.version_hash == Tool(add).spec.version_hash
    assert len(one.spec.version_hash) == 16
    variants = [
        Tool(add, name="sum"),
        Tool(add, description="Sum."),
        Tool(other, name="add"),
        Tool(add, options=ToolOptions(idempotent=True)),
        Tool(add, options=ToolOptions(max_output_bytes=10)),
    ]
    assert len({each.spec.version_hash for each in [one, *variants]}) == 6


def test_defaults_are_the_careful_ones() -> None:
    @tool
    def plain(a: int) -> str:
        return str(a)

    assert plain.spec.idempotent is False
    assert plain.spec.read_only is False
    assert plain.spec.timeout_fault == tool_pb2.FAULT_UNSPECIFIED
    assert plain.spec.output_schema_json == b""
    assert plain(3) == "3"
    assert Tool(plain.function, options=ToolOptions(read_only=True)).spec.idempotent is True
    assert Tool(plain.function, options=ToolOptions(max_timeout_s=5)).spec.default_timeout_ms == 5000


def test_arguments_reach_the_function_in_its_own_types() -> None:
    final = call(book, {"count": 3, "where": {"x": 7}, "colour": "blue"}, key="r/t/0/0/5")
    assert json.loads(text(final)) == {"count": 3, "x": 7, "colour": "blue", "mode": "a", "key": "r/t/0/0/5"}


def test_a_float_that_is_an_integer_reaches_an_int_as_an_integer() -> None:
    @tool
    def kind(n: int, f: float = 0.5, anything: Any = None) -> str:
        return f"{type(n).__name__} {n} {type(f).__name__} {f} {anything!r}"

    assert text(call(kind, b'{"n": 3.0, "anything": 1.0}')) == "int 3 float 0.5 1.0"
    assert text(call(kind, b'{"n": 3, "f": 2}')) == "int 3 float 2.0 None"
    assert text(call(kind, b'{"n": 9007199254740993}')) == "int 9007199254740993 float 0.5 None"
    assert text(call(kind, b'{"n": 123456789012345678901234567890}')).startswith("int 123456789012345678901234567890 ")
    assert text(call(kind, b'{"n": 1e19}')).startswith("int 10000000000000000000 ")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (b'{"count": "3", "where": {"x": 1}}', "count"),
        (b'{"count": 3.5, "where": {"x": 1}}', "count"),
        (b'{"count": true, "where": {"x": 1}}', "count"),
        (b'{"count": 3}', "where"),
        (b'{"count": 3, "where": {"x": 1}, "extra": 1}', "extra"),
        (b'{"count": 3, "where": {"x": 1}, "ctx": 1}', "ctx"),
        (b'{"count": 3, "where": {"x": 1}, "mode": "c"}', "mode"),
        (b'"{\\"count\\": 3}"', "object"),
        (b"[1]", "object"),
        (b"null", "object"),
        (b"", ""),
        (b'{"count": ', ""),
        (b'{"count": NaN, "where": {"x": 1}}', "NaN"),
        (b'{"count": ' + b"9" * 10_000 + b', "where": {"x": 1}}', ""),
        (b'{"where": ' + b"[" * 100_000, ""),
        (b"\xff\xfe", ""),
    ],
)
def test_arguments_that_do_not_fit_are_one_sentence_and_start_nothing(arguments: bytes, part: str) -> None:
    final = call(book, arguments)
    assert final.outcome == tool_pb2.OUTCOME_INVALID_ARGS
    assert final.fault == tool_pb2.FAULT_MODEL
    assert final.started == tool_pb2.STARTED_NO
    assert part in text(final)
    assert text(final)
    assert "\n" not in text(final)


def test_no_parameters_and_odd_names() -> None:
    @tool
    def nothing() -> str:
        return "done"

    @tool
    def odd(schema: str, copy: int, model_config: int, self: int, _private: int = 4) -> str:
        return f"{schema} {copy} {model_config} {self} {_private}"

    assert json.loads(nothing.spec.input_schema_json) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    assert text(call(nothing, {})) == "done"
    assert call(nothing, {"a": 1}).outcome == tool_pb2.OUTCOME_INVALID_ARGS
    assert text(call(odd, {"schema": "s", "copy": 1, "model_config": 2, "self": 3})) == "s 1 2 3 4"


def test_keyword_only_annotated_and_mutable_defaults() -> None:
    @tool
    def collect(*, items: list[int] = [], top: Annotated[int, pydantic.Field(ge=1, le=5)] = 2) -> list[int]:  # noqa: B006
        items.append(top)
        return items

    assert json.loads(text(call(collect, {"items": [1], "top": 3}))) == [1, 3]
    assert call(collect, {"top": 6}).outcome == tool_pb2.OUTCOME_INVALID_ARGS
    assert json.loads(collect.spec.input_schema_json)["properties"]["items"]["default"] == []


def test_a_schema_of_ones_own() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}, "required": ["n"]}

    @tool(schema=schema)
    def own(n: int) -> int:
        return n

    assert json.loads(own.spec.input_schema_json) == schema
    assert call(own, {"n": 2}).outcome == tool_pb2.OUTCOME_INVALID_ARGS
    assert text(call(own, {"n": 3})) == "3"


def test_a_callable_object_may_be_a_tool() -> None:
    class Adder:
        """Adds."""

        async def __call__(self, a: int) -> int:
            """Add one."""
            return a + 1

    adder = Tool(Adder(), name="adder")
    assert adder.is_async
    assert text(call(adder, {"a": 1})) == "2"


def untyped(a) -> str:  # type: ignore[no-untyped-def]
    return str(a)


def starred(*a: int) -> str:
    return str(a)


def unresolvable(a: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821
    return str(a)


def no_schema(a: Tool) -> str:
    return str(a)


def generator(a: int) -> Any:
    yield a


def fine(a: int) -> str:
    return str(a)


@pytest.mark.parametrize(
    ("function", "options", "part"),
    [
        (untyped, {}, "parameter 'a' needs a type hint"),
        (starred, {}, "cannot be given by name"),
        (unresolvable, {}, "type hints cannot be resolved"),
        (no_schema, {}, "no JSON Schema"),
        (generator, {}, "a generator cannot be a tool"),
        (lambda a: a, {}, "a name is a letter"),
        (fine, {"name": "no spaces"}, "a name is a letter"),
        (fine, {"schema": {"type": "strin"}}, "is not JSON Schema"),
        (fine, {"schema": {"type": "object", "properties": 3}}, "is not JSON Schema"),
        (fine, {"schema": {"type": "object", "default": object()}}, "is not JSON Schema"),
        (fine, {"default_timeout_s": 10, "max_timeout_s": 5}, "time-outs must be"),
        (fine, {"max_timeout_s": float("inf")}, "time-outs must be"),
        (fine, {"max_concurrency": -1}, "max_concurrency"),
        (fine, {"max_output_bytes": 0}, "max_output_bytes"),
        (fine, {"max_output_bytes": 1 << 30}, "max_output_bytes"),
        (fine, {"visibility": "everybody"}, "visibility"),
        (fine, {"timeout_fault": "nobody"}, "timeout_fault"),
    ],
)
def test_what_cannot_be_a_tool_is_one_sentence(function: Any, options: dict[str, Any], part: str) -> None:
    with pytest.raises(BackendStartError) as caught:
        tool(**options)(function)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_output_schema_of_typed_results() -> None:
    @tool
    def size() -> Size:
        return Size(3)

    @tool
    def points() -> list[Point]:
        return [Point(x=1)]

    assert json.loads(size.spec.output_schema_json)["properties"]["width"] == {"type": "integer"}
    assert json.loads(points.spec.output_schema_json)["type"] == "array"
    final = call(size, {})
    assert json.loads(final.structured_json) == {"width": 3}
    assert json.loads(call(points, {}).structured_json) == [{"x": 1, "y": 0}]
