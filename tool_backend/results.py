"""What a function returned to the ``Final`` that travels. Output is bytes, cut to its bound, never changed otherwise.

=====================  ================================================================
returned               content
=====================  ================================================================
str                    its UTF-8
bytes                  the bytes themselves (``invalid_utf8`` where they are not UTF-8)
int, float, bool       as JSON spells them
None                   ``null``
dict, list, tuple,     JSON text, and the same as ``structured_json``
dataclass, BaseModel
ToolResult             its text, and its structured value as ``structured_json``
=====================  ================================================================
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import Any

import pydantic_core
from fermata.v1 import tool_pb2

from node_runtime.outcomes import make_final, model_sentence, sendable

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=pydantic_core.to_jsonable_python)


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """A result with more to say than its text.

    ``text`` is what the model reads; ``structured`` any JSON value for programs; ``is_error`` marks the content as the
    report of a failure (TOOL_ERROR) without raising; ``cost`` is counted in the tool's ``cost_unit``.
    """

    text: str | bytes = ""
    structured: Any = None
    mime: str = "text/plain"
    is_error: bool = False
    cost: float = 0.0


class UnusableResult(Exception):
    """The function returned something that cannot travel; the text says what, for the log."""


def ok_final(value: Any, *, max_bytes: int) -> tool_pb2.Final:
    """The ``Final`` of a call whose function returned ``value``. Bytes beyond ``max_bytes`` are cut and counted."""
    result = value if isinstance(value, ToolResult) else _as_result(value)
    final = tool_pb2.Final(
        outcome=tool_pb2.OUTCOME_TOOL_ERROR if result.is_error else tool_pb2.OUTCOME_OK,
        fault=tool_pb2.FAULT_MODEL if result.is_error else tool_pb2.FAULT_NONE,
        started=tool_pb2.STARTED_YES,
    )
    _put_text(final, _to_bytes(result.text), result.mime, max_bytes)
    if result.structured is not None:
        structured = _to_json(result.structured)
        # Half of a JSON document is of no use to anybody: beyond the bound it is left out as a whole.
        if len(structured) <= max_bytes:
            final.structured_json = structured
        else:
            final.truncated = True
            final.total_bytes = final.total_bytes or len(structured)  # of the text, where there is one
    if result.cost:
        final.usage.cost = result.cost
    return final


def error_final(sentence: str, *, max_bytes: int, detail: str = "") -> tool_pb2.Final:
    """The ``Final`` of a call that ran and failed; the sentence is what the model sees, ``detail`` what people read."""
    final = tool_pb2.Final(
        outcome=tool_pb2.OUTCOME_TOOL_ERROR,
        fault=tool_pb2.FAULT_MODEL,
        started=tool_pb2.STARTED_YES,
        detail=sendable(detail),
    )
    text = sentence or model_sentence(tool_pb2.OUTCOME_TOOL_ERROR)
    _put_text(final, _to_bytes(text), "text/plain", max_bytes)
    return final


def limit_final(outcome: tool_pb2.Outcome, detail: str) -> tool_pb2.Final:
    """The ``Final`` of a call that met a limit of this backend: a fixed sentence for the model."""
    return make_final(outcome, text=model_sentence(outcome), started=tool_pb2.STARTED_YES, detail=detail)


def _as_result(value: Any) -> ToolResult:
    if isinstance(value, str | bytes):
        return ToolResult(value)
    if isinstance(value, bytearray | memoryview):
        return ToolResult(bytes(value))
    if isinstance(value, float) and not math.isfinite(value):
        return ToolResult(str(value))
    text = _to_json(value)
    structured = None if value is None or isinstance(value, bool | int | float) else value
    return ToolResult(text, structured, mime="text/plain" if structured is None else "application/json")


def _to_bytes(text: object) -> bytes:
    if isinstance(text, str):
        return text.encode("utf-8", "surrogatepass")
    if isinstance(text, bytes):
        return text
    raise UnusableResult(f"its text is {type(text).__name__}; a text is str or bytes")


def _to_json(value: Any) -> bytes:
    try:
        text = _JSON.encode(value)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise UnusableResult(
            f"it returned {type(value).__name__}, which cannot be turned into JSON: {error}"
        ) from error
    return text.encode("utf-8", "surrogatepass")


def _put_text(final: tool_pb2.Final, body: bytes, mime: str, max_bytes: int) -> None:
    final.total_bytes = len(body)
    if len(body) > max_bytes:
        final.truncated = True
        body = _cut(body, max_bytes)
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        final.invalid_utf8 = True
    final.parts.append(tool_pb2.ContentPart(text=body, mime=mime, sha256=hashlib.sha256(body).digest()))


def _cut(body: bytes, max_bytes: int) -> bytes:
    """At most ``max_bytes`` of the body, not in the middle of a character."""
    end = max_bytes
    while end > max(0, max_bytes - 4) and body[end] & 0xC0 == 0x80:
        end -= 1
    # Bytes that are no text at all have no characters to spare: cut where the bound is.
    return body[:end] if body[end] & 0xC0 != 0x80 else body[:max_bytes]
