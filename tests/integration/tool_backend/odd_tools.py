"""Tools that behave as real ones do at their worst. Those with a ledger write one line to it per start."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from tool_backend import ToolContext, ToolError, tool

print("printed while the module is imported")  # noqa: T201


def note(ledger: str, key: str) -> None:
    """One line per start, written before anything else happens; O_APPEND keeps lines whole."""
    with open(ledger, "a") as lines:
        lines.write(f"{os.getpid()} {key}\n")


@tool
async def held(ctx: ToolContext, ledger: str, until: str) -> str:
    """Runs until a file is there. Not idempotent."""
    note(ledger, ctx.key)
    ctx.progress(0.25, "waiting")
    while not Path(until).exists():  # noqa: ASYNC110, ASYNC240  (a tool may be as plain as this)
        await asyncio.sleep(0.01)
    return f"held {ctx.key}"


@tool
def held_in_thread(ctx: ToolContext, ledger: str, until: str) -> str:
    """The same in a thread."""
    note(ledger, ctx.key)
    while not Path(until).exists():
        if ctx.cancelled:
            note(ledger, f"stopped {ctx.key}")
            return "stopped"
        time.sleep(0.01)
    return f"held {ctx.key}"


@tool(max_timeout_s=0.3)
def hangs() -> str:
    """Never returns and looks at nothing."""
    while True:
        time.sleep(1)


@tool(max_timeout_s=0.3)
async def hangs_async() -> str:
    """Never returns and swallows its cancellation."""
    while True:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            continue


@tool
def raises(message: str) -> str:
    """Raises what the model may not see."""
    raise RuntimeError(message)


@tool
def refuses(message: str) -> str:
    """Raises what the model should see."""
    raise ToolError(message)


@tool
async def leaves(code: int) -> str:
    """Tries to end the process."""
    sys.exit(code)


@tool
def rubbish(kind: str) -> Any:
    """Returns what no tool should."""
    return {"object": object(), "bytes": b"\xff\xfe\x00 tail", "nested": {"a": {1, 2, object}}, "nan": [float("nan")]}[
        kind
    ]


@tool(max_output_bytes=1024 * 1024)
async def large(megabytes: int) -> str:
    """Returns a lot."""
    return "ä" * (megabytes * 512 * 1024)


@tool
def prints(text: str) -> str:
    """Writes to standard output, by Python, by descriptor and by a child."""
    print(text)  # noqa: T201
    os.write(1, f"{text} by descriptor\n".encode())
    os.system(f"echo '{text} by a child'")
    return "printed"


@tool(max_concurrency=1)
async def one_at_a_time(ledger: str, until: str, ctx: ToolContext) -> str:
    """As held, one call at a time."""
    note(ledger, ctx.key)
    while not Path(until).exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.01)
    return "done"


everything = [
    held,
    held_in_thread,
    hangs,
    hangs_async,
    raises,
    refuses,
    leaves,
    rubbish,
    large,
    prints,
    one_at_a_time,
]
