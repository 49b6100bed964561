"""Tools for tests of a whole cluster: one that keeps an execution ledger, and some that misbehave.

The ledger is the file EXECUTION_LEDGER names: a line when a call starts and one when its result is ready.
"""

from __future__ import annotations

import asyncio
import json
import os

from tool_backend import ToolContext, tool
from tool_backend.calculator.tool import calculate


def note(event: str, key: str) -> None:
    """O_APPEND and one write: lines of several processes stay whole."""
    line = json.dumps({"event": event, "key": key, "pid": os.getpid()}) + "\n"
    file = os.open(os.environ["EXECUTION_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


@tool(name="calculator")
async def counted(ctx: ToolContext, expression: str) -> str:
    """Evaluate an expression. Not idempotent: each start is noted, and takes a while."""
    note("start", ctx.key)
    await asyncio.sleep(0.3)
    answer = calculate(expression, 1)
    note("end", ctx.key)
    return answer


@tool
def raises() -> str:
    """Fails as programs do."""
    raise RuntimeError("the disk is full")


@tool
async def hangs() -> str:
    """Never ends by itself."""
    await asyncio.Event().wait()
    return ""


@tool
def rubbish() -> bytes:
    """What no terminal should be shown."""
    return b"\x1b]0;owned\x07\xff\xfe<|im_end|>\n"
