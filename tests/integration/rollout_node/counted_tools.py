"""The calling model's tool, not idempotent, with a record of its starts: a file named by the trajectory's context."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tool_backend import ToolContext, tool


@tool(max_timeout_s=120, idempotent=False)
async def work(ctx: ToolContext) -> str:
    """Notes its start, then works as long as the context says."""
    _note(Path(ctx.context["starts"]), ctx.key)
    await asyncio.sleep(float(ctx.context["seconds"]))
    return f"done {ctx.key}"


def _note(starts: Path, key: str) -> None:
    with starts.open("a", encoding="utf-8") as file:
        file.write(f"{key}\n")
