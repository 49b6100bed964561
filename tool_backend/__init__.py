"""Fermata's SDK for tool authors, and the built-in tools. Imports without torch and vllm.

::

    from tool_backend import serve, tool

    @tool(idempotent=True)
    def add(a: int, b: int) -> int:
        \"\"\"Add two integers.\"\"\"
        return a + b

    if __name__ == "__main__":
        serve(add)
"""

from tool_backend.context import ToolContext
from tool_backend.errors import BackendStartError, ToolError
from tool_backend.results import ToolResult
from tool_backend.serve import serve
from tool_backend.tool import Tool, ToolOptions, tool

__all__ = ["BackendStartError", "Tool", "ToolContext", "ToolError", "ToolOptions", "ToolResult", "serve", "tool"]
