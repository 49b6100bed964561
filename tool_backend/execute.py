"""Running one tool's function and turning whatever comes of it into a ``Final``.

Invariant: nothing a tool does (return, raise, exit) leaves here as anything but a ``Final``; the one exception is the
cancellation that the call's owner asked for.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fermata.v1 import tool_pb2

from node_runtime.logs import get_logger
from tool_backend.context import ToolContext
from tool_backend.errors import ToolError
from tool_backend.results import UnusableResult, error_final, limit_final, ok_final
from tool_backend.tool import Tool

_log = get_logger(__name__)


async def run_async(
    tool: Tool, arguments: dict[str, Any], context: ToolContext, delay_s: float, max_bytes: int
) -> tool_pb2.Final:
    """Run an async tool in the event loop."""
    try:
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        return ok_final(await tool.call(arguments, context), max_bytes=max_bytes)
    except asyncio.CancelledError as error:
        if context.cancelled:
            raise
        return _failed(tool, context, error, max_bytes)  # the tool's own affair: nobody cancelled this call
    except BaseException as error:
        if isinstance(error, GeneratorExit):
            raise
        return _failed(tool, context, error, max_bytes)


def run_sync(
    tool: Tool, arguments: dict[str, Any], context: ToolContext, delay_s: float, max_bytes: int
) -> tool_pb2.Final:
    """Run a sync tool in the thread this is called in."""
    try:
        if delay_s > 0 and context.wait_cancelled(delay_s):
            return error_final("", max_bytes=max_bytes, detail="the call was stopped before its function ran")
        return ok_final(tool.call(arguments, context), max_bytes=max_bytes)
    except BaseException as error:  # noqa: BLE001  (logged below; a tool's sys.exit must not end the thread)
        return _failed(tool, context, error, max_bytes)


def _failed(tool: Tool, context: ToolContext, error: BaseException, max_bytes: int) -> tool_pb2.Final:
    if isinstance(error, ToolError):
        return error_final(_text(error), max_bytes=max_bytes)
    detail = _text(error) if isinstance(error, UnusableResult) else f"it raised {type(error).__name__}: {_text(error)}"
    detail = f"tool '{tool.name}': {detail}"[:1000]
    _log.error("tool failed", tool=tool.name, key=context.key, exc_info=error)
    if isinstance(error, MemoryError):
        return limit_final(tool_pb2.OUTCOME_TOOL_OOM, detail)
    if isinstance(error, UnusableResult):
        sentence = f"The tool '{tool.name}' failed: it returned something that is not a result."
    else:
        sentence = f"The tool '{tool.name}' failed with an internal error ({type(error).__name__})."
    return error_final(sentence, max_bytes=max_bytes, detail=detail)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001  (whoever wrote the exception is not the one who reads it)
        return f"(its text cannot be had: its __str__ raised {type(second).__name__})"
