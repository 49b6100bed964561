"""The JSON of a call: read exactly, or one sentence; never an exception."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_node.turn.call_json import Broken, CallText, read_call
from rollout_node.turn.sentences import bounded, nearest_first, quote, unknown_tool

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(
    name=st.text(max_size=20),
    arguments=st.dictionaries(st.text(max_size=8), _JSON, max_size=5),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_arguments_come_out_as_spelled(name: str, arguments: dict, indent: int | None, ascii_only: bool) -> None:  # type: ignore[type-arg]
    spelled = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    call = read_call(f' {{"name" : {json.dumps(name)},\n"arguments":\t{spelled} }}\n')
    assert call == CallText(name, spelled)


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet='{}[]":,\\ \n\tnamergutse0123456789.-+eEINf\u0000é\ufeff', max_size=60))
def test_any_text_is_a_call_or_a_sentence(text: str) -> None:
    for candidate in (text, f'{{"name": "x", "arguments": {text}}}'):
        result = read_call(candidate)
        if isinstance(result, CallText):
            assert json.loads(result.arguments) is not None
        else:
            assert result.sentence.endswith(".")
            assert len(result.sentence) < 600
            assert result.sentence.isprintable()


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"name": "x", "arguments": [', '[{"b": ['])
def test_depth_is_refused_not_a_crash(opening: str) -> None:
    result = read_call(opening * 200_000)
    assert isinstance(result, Broken)
    assert "deep" in result.sentence


@pytest.mark.parametrize("number", ["3.0", "9007199254740993", "1e400", "-0", "0.10", "1E+2", "9" * 5000])
def test_numbers_stay_as_they_are(number: str) -> None:
    assert read_call(f'{{"name": "x", "arguments": {{"n": {number}}}}}') == CallText("x", f'{{"n": {number}}}')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"name": "x"', "the text ends at line 1, column 13"),
        ('{"name": "x",\n "arguments": {"a" 1}}', "expected ':' delimiter, found \"1\" at line 2, column 20"),
        ('{"name": "x", "arguments": {"a": 01}}', 'found "1"'),
        ('{"name": "x", "arguments": {"a": tru}}', 'found "tru"'),
        ('{"name": "x", "arguments": {"a": "\\x"}}', "escape"),
        ('{"name": "x", "arguments": {"a": .5}}', "expected value"),
        ('{"name": "x", "arguments": {"a": 1}}}', "follows the JSON object"),
        ('{"name": "x", "arguments": nan}', 'expected value, found "nan"'),
        ('{"name": "x\\ud800"}', "surrogate"),
        ('{"function": {"name": "x", "arguments": {}}}', 'no key "name", got "function"'),
        ("```json\n{}\n```", "found"),
    ],
)
def test_says_where_it_breaks(text: str, says: str) -> None:
    result = read_call(text)
    assert isinstance(result, Broken)
    assert says in result.sentence, result.sentence


def test_quotes_are_cut_and_escaped() -> None:
    assert quote('a"\n\u202e\U000e0001') == '"a\\"\\n\\u202e\\U000e0001"'
    assert quote("x" * 100) == '"' + "x" * 60 + '" (and 40 more characters)'
    assert len(bounded("\x00" * 10_000)) < 6000
    assert bounded("fine.") == "fine."


def test_the_nearest_tool_comes_first_and_the_list_is_bounded() -> None:
    names = [f"tool_{i}" for i in range(200)] + ["calculator"]
    assert nearest_first("calculater", names)[0] == "calculator"
    sentence = unknown_tool("calculater", names)
    assert "and 189 more" in sentence
    assert "no tools are offered" in unknown_tool("x", [])
