"""The tool that the calling model calls. What it does is up to the trajectory's context, never to the model."""

from __future__ import annotations

import asyncio

from tool_backend import ToolContext, ToolError, tool


@tool(max_timeout_s=120)
async def work(ctx: ToolContext) -> str:
    """Works as long as the context says, and fails where it says so."""
    await asyncio.sleep(float(ctx.context.get("seconds", "0.05")))
    if "error" in ctx.context:
        raise ToolError(ctx.context["error"])
    return f"done {ctx.key}"
