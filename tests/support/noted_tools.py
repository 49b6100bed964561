"""Tools of the SDK whose every start is one JSON line in the file that EXECUTIONS names, as the hand-made backend's."""

from __future__ import annotations

import asyncio
import json
import os

from tool_backend import ToolContext, tool


def _note(context: ToolContext) -> None:
    line = json.dumps({"key": context.key, "tool": context.tool, "pid": os.getpid()}).encode() + b"\n"
    descriptor = os.open(os.environ["EXECUTIONS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


@tool(idempotent=False)
async def pay(context: ToolContext, text: str = "", seconds: float = 0.0) -> str:
    """Take that long, then give the text back; must not run twice."""
    _note(context)
    await asyncio.sleep(seconds)
    return text


@tool(idempotent=True)
async def echo(context: ToolContext, text: str = "", seconds: float = 0.0) -> str:
    """Take that long, then give the text back."""
    _note(context)
    await asyncio.sleep(seconds)
    return text
