"""Keys: one spelling each, parse and str inverse, odd ids refused in a sentence."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_runtime.keys import MAX_KEY_LENGTH, CallKey, InvalidKey, args_sha256, check_id

ids = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=100).filter(str.isprintable)
numbers = st.integers(0, 2**32 - 1)


@given(ids, ids, numbers, numbers, numbers)
def test_parse_and_str_are_inverse(run: str, trajectory: str, generation: int, turn: int, ordinal: int) -> None:
    key = CallKey(run, trajectory, generation, turn, ordinal)
    assert CallKey.parse(str(key)) == key


@given(st.text(max_size=60) | st.from_regex(r"[a-z]*/[a-z]*/[0-9+ ]*/[0-9]*/[0-9]*", fullmatch=True))
def test_what_parses_is_spelled_back_the_same(text: str) -> None:
    try:
        key = CallKey.parse(text)
    except InvalidKey:
        return
    assert str(key) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a/b/1/2", "has 4 parts"),
        ("a/b/1/2/3/4", "has 6 parts"),
        ("a/b/01/2/3", "its generation '01' is not a plain number"),
        ("a/b/1/-2/3", "its turn '-2' is not a plain number"),
        ("a/b/1/2/٣", "its ordinal '٣' is not a plain number"),
        ("a/b/1/2/4294967296", "the ordinal of a key must be between 0 and 4294967295"),
        ("/b/1/2/3", "the run id is empty"),
        ("a//1/2/3", "the trajectory id is empty"),
        ("a/b\n/1/2/3", "contains a control or unprintable character"),
        ("a\x00/b/1/2/3", "contains a control or unprintable character"),
        ("x" * 600, "the key has 600 characters, at most 512 are allowed"),
    ],
)
def test_refusals_name_the_part(text: str, told: str) -> None:
    with pytest.raises(InvalidKey) as caught:
        CallKey.parse(text)
    assert told in str(caught.value)


def test_bounds() -> None:
    with pytest.raises(InvalidKey, match="contains '/'"):
        check_id("the run id", "a/b")
    with pytest.raises(InvalidKey, match="shorten the ids"):
        CallKey("r" * 300, "t" * 300, 0, 0, 0)
    longest = CallKey("r" * (MAX_KEY_LENGTH - 8), "t", 0, 0, 0)
    assert CallKey.parse(str(longest)) == longest


def test_digest_is_of_the_bytes_as_spelled() -> None:
    assert args_sha256(b'{"a": 1}') == hashlib.sha256(b'{"a": 1}').digest()
    assert args_sha256(b'{"a":1}') != args_sha256(b'{"a": 1}')
