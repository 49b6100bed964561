"""Call a tool in a test: the same binding, limits and outcomes as in a backend process, without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from fermata.v1 import tool_pb2

from tool_backend.calls import Calls
from tool_backend.loading import as_tools
from tool_backend.settings import BackendSettings
from tool_backend.tool import Tool


def call(
    tool: Tool | Callable[..., Any],
    arguments: Mapping[str, Any] | bytes | None = None,
    *,
    timeout_s: float | None = None,
    context: Mapping[str, str] | None = None,
    key: str = "test/trajectory/0/0/0",
    settings: BackendSettings | None = None,
) -> tool_pb2.Final:
    """Call a tool once and give its ``Final``. Arguments may be bytes, exactly as a model wrote them.

    ``timeout_s`` is the time of the attempt (default: the tool's own); ``context`` reaches ``ctx.context``.
    """
    return asyncio.run(call_async(tool, arguments, timeout_s=timeout_s, context=context, key=key, settings=settings))


async def call_async(
    tool: Tool | Callable[..., Any],
    arguments: Mapping[str, Any] | bytes | None = None,
    *,
    timeout_s: float | None = None,
    context: Mapping[str, str] | None = None,
    key: str = "test/trajectory/0/0/0",
    settings: BackendSettings | None = None,
) -> tool_pb2.Final:
    """As ``call``, for tests that have an event loop."""
    [only] = as_tools(tool, "call")
    calls = Calls({only.name: only}, settings or BackendSettings(), instance_id="test")
    calls.open()
    args_json = arguments if isinstance(arguments, bytes) else json.dumps(dict(arguments or {})).encode()
    invocation = tool_pb2.Invocation(key=key, attempt=1, tool=only.name, args_json=args_json, context=context)
    if timeout_s is not None:
        invocation.attempt_timeout_ms = round(timeout_s * 1000)
    admission = calls.start_or_join(invocation)
    try:
        if admission.call is not None:
            return await admission.call.wait()
        assert admission.final is not None
        return admission.final
    finally:
        await calls.close(0.0)


def text(final: tool_pb2.Final) -> str:
    """The text of a ``Final``, as a model would read it."""
    return b"".join(part.text for part in final.parts).decode("utf-8", "replace")
