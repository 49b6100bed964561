"""The records that rendering and parsing exchange with the rest of the node; no behaviour of their own.

Invariant: a record never holds text that was re-encoded: ``token_span`` and ``token_ids`` speak of ids exactly as they
were sampled or as they are to be submitted.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fermata.v1 import tool_pb2
from fermata.v1.tool_pb2 import Outcome

from node_runtime.errors import EXIT_USAGE, NodeError


class TurnFormatError(NodeError):
    """The model's tokenizer or template cannot be used as asked; the sentence says what and what would be right."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, EXIT_USAGE)


class RenderError(ValueError):
    """These messages or tools cannot be rendered; concerns the one task, not the model."""


class BudgetExceeded(Exception):
    """Not even the markers of the answers fit into the tokens that are left."""

    def __init__(self, needed_tokens: int, budget_tokens: int, answers: int) -> None:
        self.needed_tokens = needed_tokens
        self.budget_tokens = budget_tokens
        super().__init__(
            f"{answers} tool answer{'s' if answers != 1 else ''} need at least {needed_tokens} tokens, "
            f"{max(budget_tokens, 0)} are left in the context"
        )


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a task. ``content`` is untrusted: whatever it spells, it stays text."""

    role: str
    content: str
    name: str = ""
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A tool as the model is told of it; ``schema_json`` is the JSON Schema of its arguments object."""

    name: str
    description: str = ""
    schema_json: bytes = b'{"type": "object"}'

    def as_function(self) -> dict[str, Any]:
        """The OpenAI form that chat templates expect."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": json.loads(self.schema_json or b'{"type": "object", "properties": {}}'),
            },
        }

    @classmethod
    def from_mapping(cls, entry: Mapping[str, Any]) -> ToolDefinition:
        """From ``{"name", "description", "parameters"}``, bare or under ``"function"``."""
        spec = entry.get("function", entry)
        if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str) or not spec["name"]:
            raise ValueError('a tool is an object with a string "name", an optional "description" and "parameters"')
        parameters = spec.get("parameters", {"type": "object"})
        return cls(spec["name"], str(spec.get("description", "")), json.dumps(parameters, ensure_ascii=False).encode())


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One attempt of the model to call a tool.

    ``token_span`` is half-open in the sampled ids of the turn, tags included. ``args_json`` is spelled as the model
    spelled it. ``outcome`` OK: may run; else ``message`` is the one sentence that the model is shown as the answer.
    """

    ordinal: int
    name: str | None
    args_json: bytes | None
    raw: str
    token_span: tuple[int, int]
    outcome: Outcome.ValueType = tool_pb2.OUTCOME_OK
    message: str = ""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A whole turn. ``text`` is its content without calls, reasoning and the stop token.

    ``finish`` is "stop" or "length"; ``cut_call`` says that the length limit fell into a call (which is not in
    ``calls``), ``open_reasoning`` that the turn ended inside its reasoning.
    """

    calls: tuple[ParsedCall, ...]
    text: str
    finish: str
    cut_call: bool = False
    open_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What is to be shown to the model for one call, in call order.

    ``data`` is the tool's output, or the validation sentence where the outcome says so. ``total_bytes``: size of the
    output before somebody upstream cut it; 0 or ``len(data)``: nothing is missing.
    """

    call_key: str
    data: bytes = b""
    outcome: Outcome.ValueType = tool_pb2.OUTCOME_OK
    total_bytes: int = 0
    tool: str = ""


@dataclass(frozen=True, slots=True)
class RenderedAnswer:
    """Ids to append for one answer. All answers of a turn, joined in order, are the suffix after the sampled ids; the
    first begins with what closes the turn, the last ends with the generation prompt."""

    call_key: str
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    invalid_utf8: bool = False
    left_out_chars: int = 0
