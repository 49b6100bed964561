"""What a function returns or raises, and the ``Final`` that travels."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
from typing import Any

import pytest
from fermata.v1 import tool_pb2
from hypothesis import given
from hypothesis import strategies as st

from tool_backend import ToolContext, ToolError, ToolResult, tool
from tool_backend.results import ok_final
from tool_backend.testing import call, text


@pytest.mark.parametrize(
    ("value", "body", "structured"),
    [
        ("grüße", "grüße".encode(), None),
        (b"raw", b"raw", None),
        ("", b"", None),
        (3, b"3", None),
        (2**80, str(2**80).encode(), None),
        (0.1, b"0.1", None),
        (1.0, b"1.0", None),
        (float("nan"), b"nan", None),
        (True, b"true", None),
        (None, b"null", None),
        ({"a": [1, 2**70]}, b'{"a": [1, 1180591620717411303424]}', {"a": [1, 2**70]}),
        ([1, "é"], '[1, "é"]'.encode(), [1, "é"]),
        ((1, 2), b"[1, 2]", [1, 2]),
        (ToolResult("text", structured={"n": 1}), b"text", {"n": 1}),
        (ToolResult(b"\x00"), b"\x00", None),
    ],
)
def test_returned_values(value: Any, body: bytes, structured: Any) -> None:
    final = ok_final(value, max_bytes=1000)
    assert final.outcome == tool_pb2.OUTCOME_OK
    assert final.fault == tool_pb2.FAULT_NONE
    assert final.started == tool_pb2.STARTED_YES
    [part] = final.parts
    assert part.text == body
    assert part.sha256 == hashlib.sha256(body).digest()
    assert final.total_bytes == len(body)
    assert not final.truncated
    assert not final.invalid_utf8
    assert (json.loads(final.structured_json) if final.structured_json else None) == structured


def test_bytes_that_are_no_text_travel_untouched() -> None:
    final = ok_final(b"ok \xff\xfe \x00", max_bytes=1000)
    assert final.parts[0].text == b"ok \xff\xfe \x00"
    assert final.invalid_utf8
    assert ok_final("lone \ud800", max_bytes=1000).invalid_utf8


@given(st.text(min_size=1, max_size=200), st.integers(1, 100))
def test_a_cut_never_splits_a_character(value: str, bound: int) -> None:
    body = value.encode()
    final = ok_final(value, max_bytes=bound)
    kept = final.parts[0].text
    assert not final.invalid_utf8
    assert body.startswith(kept)
    assert bound - 4 < len(kept) <= bound or kept == body
    assert final.truncated == (len(body) > bound)
    assert final.total_bytes == len(body)


@given(st.binary(min_size=1, max_size=200), st.integers(1, 100))
def test_a_cut_of_any_bytes_keeps_their_beginning(body: bytes, bound: int) -> None:
    kept = ok_final(body, max_bytes=bound).parts[0].text
    assert body.startswith(kept)
    assert bound - 4 < len(kept) <= bound or kept == body


def test_structured_output_beyond_the_bound_is_left_out_whole() -> None:
    final = ok_final({"a": "x" * 100}, max_bytes=50)
    assert final.structured_json == b""
    assert final.truncated
    assert final.total_bytes == 109
    assert len(final.parts[0].text) == 50


def test_a_text_that_is_all_there_is_not_said_to_lack_bytes_where_its_structured_twin_is_left_out() -> None:
    final = ok_final(ToolResult("short", structured=["x" * 100]), max_bytes=50)
    assert (final.parts[0].text, final.structured_json) == (b"short", b"")
    assert (final.truncated, final.total_bytes) == (True, 5)


def test_is_error_and_cost() -> None:
    @tool(cost_unit="cents")
    def costly() -> ToolResult:
        return ToolResult("no such page", is_error=True, cost=1.5)

    final = call(costly)
    assert (final.outcome, final.fault) == (tool_pb2.OUTCOME_TOOL_ERROR, tool_pb2.FAULT_MODEL)
    assert text(final) == "no such page"
    assert (final.usage.cost, final.usage.cost_unit) == (1.5, "cents")
    assert final.usage.run_us > 0


class Exits(BaseException):
    pass


def raising(error: BaseException, *, in_thread: bool) -> Any:
    if in_thread:

        @tool
        def fails() -> str:
            raise error

        return fails

    @tool(name="fails")
    async def fails_async() -> str:
        raise error

    return fails_async


@pytest.mark.parametrize("in_thread", [True, False])
def test_a_tool_error_is_what_the_model_sees(in_thread: bool) -> None:
    final = call(raising(ToolError("no seat is left"), in_thread=in_thread))
    assert (final.outcome, final.fault) == (tool_pb2.OUTCOME_TOOL_ERROR, tool_pb2.FAULT_MODEL)
    assert final.started == tool_pb2.STARTED_YES
    assert text(final) == "no seat is left"


@pytest.mark.parametrize("in_thread", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("secret path /etc/x"),
        KeyError("x"),
        SystemExit(3),
        KeyboardInterrupt(),
        Exits("odd"),
        StopIteration(1),
        TimeoutError("own"),
        asyncio.CancelledError("own"),
        RecursionError("deep"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_other_exception_is_logged_whole_and_told_in_one_sentence(
    error: BaseException, in_thread: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        final = call(raising(error, in_thread=in_thread))
    assert (final.outcome, final.fault) == (tool_pb2.OUTCOME_TOOL_ERROR, tool_pb2.FAULT_MODEL)
    assert final.started == tool_pb2.STARTED_YES
    assert text(final).startswith("The tool 'fails' failed with an internal error (")
    assert "secret" not in text(final)
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None or "exc_info" in str(caplog.records[0].msg)


@pytest.mark.parametrize("in_thread", [True, False])
def test_memory_gone_is_tool_oom(in_thread: bool) -> None:
    final = call(raising(MemoryError(), in_thread=in_thread))
    assert (final.outcome, final.fault) == (tool_pb2.OUTCOME_TOOL_OOM, tool_pb2.FAULT_MODEL)
    assert text(final) == "The tool ran out of memory."


def circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep() -> Any:
    value: Any = []
    for _ in range(sys.getrecursionlimit() * 3):
        value = [value]
    return value


@pytest.mark.parametrize(
    "rubbish",
    [object(), {"a": object()}, {"a": float("nan")}, circular(), deep(), {1, 2} - {1}, 10**5000, ToolResult(3)],  # type: ignore[arg-type]
    ids=["object", "nested object", "nan", "circular", "deep", "set", "huge integer", "no text"],
)
def test_rubbish_is_told_in_one_sentence(rubbish: Any) -> None:
    @tool
    def returns() -> Any:
        return rubbish

    final = call(returns)
    if isinstance(rubbish, set):  # pydantic knows how to spell it
        assert final.outcome == tool_pb2.OUTCOME_OK
        return
    assert final.outcome == tool_pb2.OUTCOME_TOOL_ERROR
    assert text(final) == "The tool 'returns' failed: it returned something that is not a result."
    assert final.detail.startswith("tool 'returns': it")


def test_the_context() -> None:
    @tool
    def look(ctx: ToolContext) -> dict[str, Any]:
        return {
            "key": ctx.key,
            "tool": ctx.tool,
            "attempt": ctx.attempt,
            "left": ctx.remaining(),
            "cancelled": ctx.cancelled,
            "context": dict(ctx.context),
        }

    seen = json.loads(text(call(look, timeout_s=7, context={"user": "u1"}, key="r/t/1/2/3")))
    assert 6 < seen.pop("left") <= 7
    assert seen == {
        "key": "r/t/1/2/3",
        "tool": "look",
        "attempt": 1,
        "cancelled": False,
        "context": {"user": "u1"},
    }


def test_progress_takes_fractions_only() -> None:
    context = ToolContext(key="k", tool="t", deadline=0.0)
    context.progress(0.5, "half")
    context.progress(None, "unknown")
    with pytest.raises(ValueError, match="from 0 to 1"):
        context.progress(50)
    assert context.remaining() == 0.0
