"""``@tool``: a typed function and what it declares, as one object that can be described, checked and called.

Invariant: whatever can be wrong with a declaration is found when the tool is made, never in the middle of a call.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

from fermata.v1 import tool_pb2

from tool_backend.context import ToolContext
from tool_backend.errors import BackendStartError
from tool_backend.signature import Signature, read_signature

MAX_OUTPUT_BYTES = 16 * 1024 * 1024  # the most a tool may declare: what one message carries with room to spare
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_VISIBILITY = {
    "model": tool_pb2.VISIBILITY_MODEL,
    "grader": tool_pb2.VISIBILITY_GRADER,
    "hidden": tool_pb2.VISIBILITY_HIDDEN,
}
_FAULT = {None: tool_pb2.FAULT_UNSPECIFIED, "infra": tool_pb2.FAULT_INFRA, "model": tool_pb2.FAULT_MODEL}

Visibility = Literal["model", "grader", "hidden"]
TimeoutFault = Literal["infra", "model"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """What a tool declares beside its function. Seconds, bytes and counts.

    idempotent: may run again for the same key without harm; only then is it retried after a start that cannot be
        disproved. read_only: changes nothing (and is idempotent by that).
    default_timeout_s: for calls that bring no time of their own (None: 60, or max_timeout_s where that is less);
        max_timeout_s: this tool's own limit, whatever a call asks for. A call that meets either ends as TOOL_TIMEOUT.
    max_concurrency: calls that may run at once in this process, 0 for no bound; more are OVERLOADED.
    max_output_bytes: output beyond it is cut, and says so.
    visibility: offered to the model, called for rewards only ("grader"), or "hidden".
    timeout_fault: whom a time-out at the gateway blames: None and "infra" mask the sample, "model" shows the model a
        fixed sentence.
    """

    idempotent: bool = False
    read_only: bool = False
    default_timeout_s: float | None = None
    max_timeout_s: float = 300.0
    max_concurrency: int = 0
    max_output_bytes: int = 1024 * 1024
    visibility: Visibility = "model"
    timeout_fault: TimeoutFault | None = None
    cost_unit: str = ""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def default_seconds(self) -> float:
        """The time of a call that brings none of its own."""
        return min(60.0, self.max_timeout_s) if self.default_timeout_s is None else self.default_timeout_s

    def problem(self) -> str | None:
        """One clause that says which option is wrong, else None."""
        if not 0 < self.default_seconds <= self.max_timeout_s < math.inf:
            return (
                f"its time-outs must be 0 < default_timeout_s <= max_timeout_s, "
                f"got {self.default_seconds} and {self.max_timeout_s}"
            )
        if self.max_concurrency < 0:
            return f"max_concurrency must be 0 (no bound) or more, got {self.max_concurrency}"
        if not 0 < self.max_output_bytes <= MAX_OUTPUT_BYTES:
            return f"max_output_bytes must be from 1 to {MAX_OUTPUT_BYTES}, got {self.max_output_bytes}"
        if self.visibility not in _VISIBILITY:
            return f"visibility must be one of {', '.join(_VISIBILITY)}, got {self.visibility!r}"
        if self.timeout_fault not in _FAULT:
            return f"timeout_fault must be 'infra', 'model' or None, got {self.timeout_fault!r}"
        return None


class Tool:
    """A function that can be called by a model. Calling the object calls the function itself."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        schema: dict[str, Any] | None = None,
        options: ToolOptions | None = None,
    ) -> None:
        self.function = function
        self.name = name if name is not None else getattr(function, "__name__", type(function).__name__)
        self.options = options or ToolOptions()
        if not _NAME.fullmatch(self.name):
            raise BackendStartError(
                f"tool '{self.name}': a name is a letter, then up to 63 letters, digits, '_', '-' or '.'; "
                f"give one with @tool(name=...)"
            )
        if (problem := self.options.problem()) is not None:
            raise BackendStartError(f"tool '{self.name}': {problem}")
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise BackendStartError(
                f"tool '{self.name}': a generator cannot be a tool; return the whole result instead"
            )
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  (an object whose __call__ is async is a tool too)
        )
        self.signature: Signature = read_signature(function, self.name, schema)
        self.description = description if description is not None else self.signature.description
        self.spec = self._make_spec()
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"

    @property
    def idempotent(self) -> bool:
        """Whether it may run again for the same key without harm."""
        return self.options.idempotent or self.options.read_only

    def call(self, arguments: dict[str, Any], context: ToolContext) -> Any:
        """Call the function with bound arguments; an async tool gives a coroutine."""
        if self.signature.context_parameter is not None:
            arguments[self.signature.context_parameter] = context
        return self.function(**arguments)

    def _make_spec(self) -> tool_pb2.ToolSpec:
        options = self.options
        spec = tool_pb2.ToolSpec(
            name=self.name,
            description=self.description,
            input_schema_json=self.signature.input_schema_json,
            output_schema_json=self.signature.output_schema_json,
            idempotent=self.idempotent,
            read_only=options.read_only,
            visibility=_VISIBILITY[options.visibility],
            timeout_fault=_FAULT[options.timeout_fault],
            default_timeout_ms=max(1, round(options.default_seconds * 1000)),
            max_timeout_ms=max(1, round(options.max_timeout_s * 1000)),
            max_concurrency=options.max_concurrency,
            max_output_bytes=options.max_output_bytes,
            cost_unit=options.cost_unit,
            labels=dict(options.labels),
        )
        spec.version_hash = hashlib.sha256(spec.SerializeToString(deterministic=True)).hexdigest()[:16]
        return spec


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    schema: dict[str, Any] | None = None,
    idempotent: bool = False,
    read_only: bool = False,
    default_timeout_s: float | None = None,
    max_timeout_s: float = 300.0,
    max_concurrency: int = 0,
    max_output_bytes: int = 1024 * 1024,
    visibility: Visibility = "model",
    timeout_fault: TimeoutFault | None = None,
    cost_unit: str = "",
    labels: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    schema: dict[str, Any] | None = None,
    labels: Mapping[str, str] | None = None,
    **options: Any,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a typed function, sync or async.

    The name is the function's, the description its docstring, the schema comes from its type hints; each can be given
    instead. See ``ToolOptions`` for the options. ``BackendStartError`` says what keeps a function from being a tool.
    """

    def make(function: Callable[..., Any]) -> Tool:
        return Tool(
            function,
            name=name,
            description=description,
            schema=schema,
            options=ToolOptions(labels=dict(labels or {}), **options),
        )

    return make if function is None else make(function)
