"""Arguments against schemas: the sentences a model reads, and the bounds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_runtime.schema import MAX_ARGS_BYTES, MAX_DEPTH, MAX_SCHEMA_BYTES, ArgumentValidator, SchemaError

SEARCH = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "top_k": {"type": "integer", "minimum": 1, "maximum": 20}},
    "required": ["query"],
    "additionalProperties": False,
}
LOOKUP = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "ratio": {"type": "number"}},
    "required": ["id"],
    "additionalProperties": False,
}
NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def check(schema: Any, args: str | bytes) -> str | None:
    told = ArgumentValidator(json.dumps(schema).encode()).check(args.encode() if isinstance(args, str) else args)
    assert told is None or "\n" not in told
    return told


@pytest.mark.parametrize(
    ("schema", "args"),
    [
        (SEARCH, '{"query": "x", "top_k": 3.0}'),
        (SEARCH, '{"query": "\\u00e9\\ud83d\\ude00 </tool_call>"}'),
        (LOOKUP, '{"id": 9007199254740993}'),
        (LOOKUP, '{"id": 123456789012345678901234567890, "ratio": 1.0}'),
        (LOOKUP, '{"id": -0, "ratio": 1e-400}'),
        (NONE, "{}"),
        ({}, '{"anything": [1, null]}'),
        ({"properties": {"a": {"enum": [0.1, 2]}}}, '{"a": 2.0}'),
        ({"properties": {"a": {"multipleOf": 0.1}}}, '{"a": 0.3}'),
        ({"$ref": "#/$defs/a", "$defs": {"a": SEARCH}}, '{"query": ""}'),
        ({"$schema": "http://json-schema.org/draft-07/schema#", **LOOKUP}, '{"id": 1}'),
    ],
)
def test_what_fits(schema: Any, args: str) -> None:
    assert check(schema, args) is None


@pytest.mark.parametrize(
    ("schema", "args", "told"),
    [
        (SEARCH, '{"top_k": 3}', "argument 'query' is missing"),
        (SEARCH, '{"query": "x", "top_k": "3"}', "argument 'top_k' must be an integer, got the string \"3\""),
        (SEARCH, '{"query": "x", "top_k": 3.5}', "argument 'top_k' must be an integer, got 3.5"),
        (SEARCH, '{"query": "x", "top_k": true}', "argument 'top_k' must be an integer, got true"),
        (SEARCH, '{"query": null}', "argument 'query' must be a string, got null"),
        (SEARCH, '{"query": "x", "top_k": 0}', "argument 'top_k' must be at least 1, got 0"),
        (SEARCH, '{"query": "x", "top_k": 21}', "argument 'top_k' must be at most 20, got 21"),
        (
            SEARCH,
            '{"query": "x", "topk": 1}',
            "'topk' (did you mean 'top_k'?) is not an argument of this tool: it takes query, top_k",
        ),
        (
            SEARCH,
            '{"a": 1, "b": 2}',
            "'a', 'b' are not arguments of this tool: it takes query, top_k; argument 'query' is missing",
        ),
        (NONE, '{"x": 1}', "'x' is not an argument of this tool: it takes none"),
        (LOOKUP, '{"id": 9007199254740993.5}', "argument 'id' must be an integer, got 9007199254740993.5"),
        (SEARCH, "[]", "arguments must be a JSON object, got an array"),
        (SEARCH, "null", "arguments must be a JSON object, got null"),
        (SEARCH, '"query"', "arguments must be a JSON object, got a string"),
        (
            SEARCH,
            json.dumps('{"query": "x"}'),
            "arguments must be a JSON object, got a string holding one (JSON encoded twice): write the object",
        ),
        ({"properties": {"m": {"enum": ["x", "y"]}}}, '{"m": "z"}', 'argument \'m\' must be one of "x", "y", got'),
        ({"properties": {"m": {"const": "x"}}}, '{"m": "z"}', "argument 'm' must be \"x\""),
        (
            {"properties": {"u": {"anyOf": [{"type": "null"}, {"type": "integer"}]}}},
            '{"u": "s"}',
            "argument 'u' must be an integer or null, got the string \"s\"",
        ),
        (
            {"properties": {"u": {"type": ["null", "string"]}}},
            '{"u": 1}',
            "argument 'u' must be a string or null, got 1",
        ),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "{}", "fit at least one of the forms allowed ("),
        (
            {"properties": {"l": {"items": {"$ref": "#/$defs/q"}}}, "$defs": {"q": SEARCH}},
            '{"l": [{"query": "x"}, {"query": "x", "topk": 1}]}',
            "'l[1].topk' (did you mean 'top_k'?) is not an argument of this tool",
        ),
        ({"properties": {"s": {"minLength": 2}}}, '{"s": "x"}', "argument 's' must have at least 2 characters, got 1"),
        (
            {"properties": {"s": {"pattern": "^[a-z]+$"}}},
            '{"s": "1"}',
            "must match the pattern ^[a-z]+$, got the string",
        ),
        ({"properties": {"s": False}}, '{"s": 1}', "argument 's' is not allowed"),
        ({"properties": {"s": {"contains": {"const": 1}}}}, '{"s": [2]}', "must hold at least one item of the form"),
        ({"propertyNames": {"pattern": "^x"}}, '{"a": 1}', "must not have a key that is not allowed"),
        ({"properties": {"s": {"uniqueItems": True}}}, '{"s": [1, 1.0]}', "must not hold the same item twice"),
    ],
)
def test_what_does_not_fit_is_named(schema: Any, args: str, told: str) -> None:
    assert told in (check(schema, args) or "")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (b"", "arguments are not JSON: Expecting value at line 1 column 1"),
        (b'{"id": 1,}', "arguments are not JSON: "),
        (b"{'id': 1}", "arguments are not JSON: "),
        (b'{"id": 1} x', "arguments are not JSON: Extra data at line 1 column 11"),
        (b'{"id": NaN}', "arguments are not right JSON: NaN is not a JSON number"),
        (b'{"id": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"id": 1e400}', "the number 1e400 is too large"),
        (b'{"id": 1, "id": 2}', "the key 'id' stands twice, keep one of them"),
        (b'{"id": "\xff"}', "arguments are not UTF-8 at byte 8"),
        (b'{"id": "\\ud800"}', "arguments hold half of a surrogate pair"),
        (b'{"\\uDFFF": 1}', "arguments hold half of a surrogate pair"),
        (b'{"id": ' + b"1" * 5000 + b"}", "arguments hold a number with too many digits"),
        (b"[" * 100_000, f"arguments are nested more than {MAX_DEPTH} deep"),
        (b'{"id":' * 65 + b"1" + b"}" * 65, f"arguments are nested more than {MAX_DEPTH} deep"),
        (b" " * MAX_ARGS_BYTES + b"{}", f"at most {MAX_ARGS_BYTES} are allowed"),
    ],
)
def test_rubbish_is_one_sentence(args: bytes, told: str) -> None:
    assert told in (check(LOOKUP, args) or "")


def test_depth_counts_brackets_outside_strings_only() -> None:
    deepest = b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH
    assert check({}, deepest) is None
    assert check({}, json.dumps({"a": '[{"\\' * 1000, "b": [[]] * 1000})) is None


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (b'{"$ref": "http://127.0.0.1:1/x"}', "http://127.0.0.1:1/x is outside the schema"),
        (b'{"$ref": "file:///etc/passwd"}', "file:///etc/passwd is outside the schema"),
        (b'{"properties": {"a": {"$ref": "other.json"}}}', "other.json is outside the schema"),
        (b'{"$dynamicRef": "http://127.0.0.1:1/x"}', "http://127.0.0.1:1/x"),
        (b'{"$schema": "http://127.0.0.1:1/x"}', "http://127.0.0.1:1/x"),
        (b'{"$ref": "#/$defs/b"}', "'/$defs/b' does not exist"),
        (b'{"properties": {"a": {"pattern": "(?=a)b"}}}', 'pattern "(?=a)b" at properties.a.pattern cannot be used'),
        (b'{"properties": {"a": {"pattern": "(a{1000}){1000}"}}}', "cannot be used"),
        (b'{"patternProperties": {"(a)\\\\1": {}}}', "cannot be used"),
        (b'{"type": "objekt"}', "the schema is wrong at type: "),
        (b"[]", "the schema must be a JSON object, got an array"),
        (b"{", "the schema is not JSON: "),
        (b'{"a": "' + b"x" * MAX_SCHEMA_BYTES + b'"}', f"at most {MAX_SCHEMA_BYTES} are allowed"),
        (b'{"not":' * 70 + b"{}" + b"}" * 70, "the schema is nested more than 64 deep"),
    ],
)
def test_schemas_that_are_refused(schema: bytes, told: str) -> None:
    with pytest.raises(SchemaError) as caught:
        ArgumentValidator(schema)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_schema_takes_any_object() -> None:
    assert ArgumentValidator(b"").check(b'{"a": 1}') is None
    assert ArgumentValidator(b"").check(b"1") is not None


@pytest.mark.parametrize(
    ("schema", "args"),
    [
        ({"properties": {"a": {"pattern": "^(a+)+$"}}}, {"a": "a" * 200_000 + "!"}),
        ({"properties": {"a": {"items": {"type": "string"}}}}, {"a": [{"b": i} for i in range(60_000)]}),
        ({"additionalProperties": False, "properties": {"abc": {}}}, {"x" * 900_000: 1}),
    ],
)
def test_large_arguments_are_told_in_bounded_words_and_time(schema: Any, args: Any) -> None:
    begun = time.process_time()
    told = check(schema, json.dumps(args))
    assert told is not None
    assert len(told) < 500
    # Backtracking would take for ever here; the bound is generous for a loaded machine.
    assert time.process_time() - begun < 3


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["query", "top_k", "topk", "id", "ratio"]), values))
def test_what_is_said_agrees_with_a_second_judge(args: dict[str, Any]) -> None:
    """The plain rules of SEARCH and LOOKUP, written out."""

    def integer(value: Any) -> bool:
        return not isinstance(value, bool) and isinstance(value, int | float) and value == int(value)

    fits_search = (
        set(args) <= {"query", "top_k"}
        and isinstance(args.get("query"), str)
        and ("top_k" not in args or (integer(args["top_k"]) and 1 <= args["top_k"] <= 20))
    )
    ratio = args.get("ratio", 0)
    fits_lookup = (
        set(args) <= {"id", "ratio"}
        and "id" in args
        and integer(args["id"])
        and isinstance(ratio, int | float)
        and not isinstance(ratio, bool)
    )
    text = json.dumps(args)
    assert (check(SEARCH, text) is None) == fits_search
    assert (check(LOOKUP, text) is None) == fits_lookup


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_get_an_answer(args: bytes) -> None:
    told = ArgumentValidator(json.dumps(LOOKUP).encode()).check(args)
    assert told is None or told


def test_a_tree_of_unions_is_answered_at_once_however_deep_it_is_wrong() -> None:
    """Each level doubles the errors of the one below: to make them all would take for ever."""
    branch = {"type": "object", "properties": {"l": {"$ref": "#/$defs/E"}, "r": {"$ref": "#/$defs/E"}}}
    expression = {"anyOf": [{"type": "integer"}, branch, {**branch, "required": ["op"]}]}
    schema = {"type": "object", "properties": {"e": {"$ref": "#/$defs/E"}}, "$defs": {"E": expression}}
    wrong: Any = "x"
    for depth in range(40):
        if depth == 2:
            assert "'e'" in (check(schema, json.dumps({"e": wrong})) or ""), "a small one is still told where"
        wrong = {"l": wrong, "r": 1}
    begun = time.monotonic()
    told = check(schema, json.dumps({"e": wrong}))
    assert told is not None
    assert "forms" in told
    assert time.monotonic() - begun < 2.0


def test_arguments_of_a_tool_that_takes_none_are_told_so() -> None:
    assert check({"additionalProperties": False}, '{"a": 1}') == "the tool takes no such arguments: it takes none"


def test_many_wrong_items_in_a_union_are_answered_at_once() -> None:
    items = {"type": "object", "properties": {"xs": {"items": {"type": "integer"}}}}
    begun = time.monotonic()
    told = check({"anyOf": [items, {**items, "required": ["y"]}]}, json.dumps({"xs": ["a"] * 150_000}))
    assert told is not None
    assert time.monotonic() - begun < 2.0


def test_a_schema_whose_branches_multiply_is_refused() -> None:
    definitions: dict[str, Any] = {"a0": {"type": "integer"}}
    for number in range(1, 40):
        below = {"$ref": f"#/$defs/a{number - 1}"}
        definitions[f"a{number}"] = {"anyOf": [below, below]}
    with pytest.raises(SchemaError, match="nest fewer anyOf"):
        check({"properties": {"x": {"$ref": "#/$defs/a39"}}, "$defs": definitions}, '{"x": "s"}')


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#"}}}],
)
def test_a_schema_that_leads_back_to_itself_is_taken(schema: dict[str, Any]) -> None:
    check(schema, "{}")


OWN = Path(__file__).parents[2] / "cases"
SHARED = Path(__file__).parents[4] / "shared" / "cases"
"""Cases that may lie beside the checkout."""


def _rows() -> list[tuple[str, Path, str, bytes]]:
    """Calls of the cases that reach validation and fit: id, folder, tool, arguments."""
    rows = []
    for folder in (OWN, SHARED):
        for line in (folder / "turns.jsonl").read_text(encoding="utf-8").splitlines() if folder.is_dir() else []:
            row = json.loads(line)
            for call in row["calls"]:
                if "args" in call:
                    rows.append((row["id"], folder, call["tool"], call["args"].encode()))
    return rows


@pytest.mark.parametrize(("case", "folder", "tool", "args"), _rows())
def test_cases_that_must_reach_the_backend_fit(case: str, folder: Path, tool: str, args: bytes) -> None:
    tools = {spec["name"]: spec["parameters"] for spec in json.loads((folder / "tools.json").read_text())}
    assert check(tools[tool], args) is None, case
