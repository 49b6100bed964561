"""A turn parsed id by id: the moment of dispatch, independence of chunking, reasoning, both kinds of tags."""

from __future__ import annotations

import time

import pytest
from fermata.v1 import tool_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_node.turn.stream import TurnGrammar, TurnStream

from .support import tool_set, vocabulary

_STOP = "<|im_end|>"
_CALL = '<tool_call>\n{"name": "record", "arguments": {"number": 7}}\n</tool_call>'


def grammar(kind: str) -> TurnGrammar:
    vocab = vocabulary(kind)
    return TurnGrammar(vocab, [vocab.control[_STOP]])


def parse(ids: list[int], kind: str, chunks: list[int] | None = None, reason: str = "stop"):  # type: ignore[no-untyped-def]
    stream = TurnStream(grammar(kind), tool_set())
    early = []
    position = 0
    for size in chunks or []:
        early += stream.feed(ids[position : position + size])
        position += size
    early += stream.feed(ids[position:])
    return early, stream.finish(reason)


@pytest.mark.parametrize("kind", ["tags", "text"])
def test_a_call_comes_out_with_the_id_that_closes_it(kind: str) -> None:
    vocab = vocabulary(kind)
    ids = vocab.encode_trusted(f"Look: {_CALL}{_CALL} done")
    stream = TurnStream(grammar(kind), tool_set())
    closed = [(i, call) for i, token_id in enumerate(ids) for call in stream.feed([token_id])]
    assert [call.ordinal for _, call in closed] == [0, 1]
    for i, call in closed:
        start, end = call.token_span
        assert end == i + 1
        assert vocab.decode(ids[start:end]).strip() == _CALL
        assert call.args_json == b'{"number": 7}'
    assert stream.finish("stop").calls == tuple(call for _, call in closed)


_PARTS = st.sampled_from(
    [
        _CALL,
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "shell", "arguments": {"command": "echo </tool_call> \\" <tool_call>"}}',
        '{"name": "now"',
        '"',
        "\\",
        "\n",
        "<",
        "</tool_",
        "naïve 你好 🦊",
        "text ",
        _STOP,
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.tuples(_PARTS, st.booleans()), max_size=12),
    chunks=st.lists(st.integers(0, 7), max_size=60),
    kind=st.sampled_from(["tags", "text"]),
    reason=st.sampled_from(["stop", "length"]),
)
def test_what_comes_out_does_not_depend_on_the_chunks(
    parts: list[tuple[str, bool]], chunks: list[int], kind: str, reason: str
) -> None:
    vocab = vocabulary(kind)
    ids = [i for text, as_text in parts for i in (vocab.encode_plain if as_text else vocab.encode_trusted)(text)]
    early_once, once = parse(ids, kind, None, reason)
    early, turn = parse(ids, kind, chunks, reason)
    assert turn == once
    assert early == early_once
    # What is dispatched early stands in the whole turn; only a call that never closed may follow.
    assert list(turn.calls[: len(early)]) == early
    assert all(call.outcome == tool_pb2.OUTCOME_PARSE_ERROR for call in turn.calls[len(early) :])
    assert len(turn.calls) - len(early) <= (0 if reason == "length" and turn.finish != "stop" else 1)
    assert [call.ordinal for call in turn.calls] == list(range(len(turn.calls)))
    for call in turn.calls:
        assert 0 <= call.token_span[0] < call.token_span[1] <= len(ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, vocabulary().size - 1), max_size=60), kind=st.sampled_from(["tags", "text"]))
def test_any_ids_are_a_turn(ids: list[int], kind: str) -> None:
    ids = [i % vocabulary(kind).size for i in ids]
    _, turn = parse(ids, kind)
    for call in turn.calls:
        assert (call.outcome == tool_pb2.OUTCOME_OK) == (call.message == "")
        assert len(call.message) < 1500


@pytest.mark.parametrize("kind", ["tags", "text"])
def test_text_is_every_character_of_the_content(kind: str) -> None:
    vocab = vocabulary(kind)
    text = "a < b </ tool 你好 🦊 <tool <thin </tool_cal"
    ids = vocab.encode_plain(text)
    assert parse(ids, kind, [1] * len(ids))[1].text == text


@pytest.mark.parametrize("kind", ["tags", "text"])
def test_reasoning_that_the_prompt_opened_is_reasoning(kind: str) -> None:
    vocab = vocabulary(kind)
    prompt = vocab.encode_trusted("<|im_start|>assistant\n<think>\n")
    stream = TurnStream(grammar(kind), tool_set(), prompt)
    assert stream.feed(vocab.encode_trusted(f"maybe {_CALL}")) == []
    calls = stream.feed(vocab.encode_trusted(f"</think>\n{_CALL}"))
    assert [call.name for call in calls] == ["record"]
    closed = TurnStream(grammar(kind), tool_set(), prompt + vocab.encode_trusted("\n</think>\n\n"))
    assert len(closed.feed(vocab.encode_trusted(_CALL))) == 1


def test_the_length_limit_in_a_call_leaves_no_call() -> None:
    ids = vocabulary().encode_trusted(_CALL)
    _, turn = parse(ids[:-1], "tags", reason="length")
    assert turn.calls == ()
    assert turn.cut_call
    assert turn.finish == "length"


def test_a_stop_token_ends_the_turn_whatever_the_engine_says() -> None:
    vocab = vocabulary()
    ids = vocab.encode_trusted("42" + _STOP + _CALL)
    early, turn = parse(ids, "tags", reason="length")
    assert early == []
    assert turn.finish == "stop"
    assert turn.text == "42"


def test_an_unclosed_string_does_not_hide_the_next_call_where_tags_are_text() -> None:
    ids = vocabulary("text").encode_plain('<tool_call>\n{"name": "now, "arguments": "x}\n</tool_call>' + _CALL)
    early, _ = parse(ids, "text")
    assert [call.outcome for call in early] == [tool_pb2.OUTCOME_PARSE_ERROR, tool_pb2.OUTCOME_OK]


def test_bytes_that_are_no_text_do_not_hold_the_turn_up() -> None:
    vocab = vocabulary("text")
    broken = vocab.encode_plain("🦊")[:-1]
    ids = broken * 30 + vocab.encode_plain(_CALL)
    early, turn = parse(ids, "text", [1] * len(ids))
    assert len(early) == 1
    assert "�" in turn.text


@pytest.mark.parametrize("kind", ["tags", "text"])
def test_time_is_linear_in_the_ids(kind: str) -> None:
    vocab = vocabulary(kind)
    body = vocab.encode_plain("word < \\ ' ") * 400

    def seconds(times: int) -> float:
        ids = vocab.encode_trusted('<tool_call>{"name": "shell", "arguments": {"command": "') + body * times
        began = time.process_time()
        parse(ids, kind, [1] * len(ids))
        return time.process_time() - began

    seconds(1)
    assert seconds(8) < 40 * max(seconds(1), 0.002)
