"""A model's turns: prompts rendered, calls parsed by token ids and validated, tool results rendered as a suffix.

Owns everything between ids and messages. Invariants: ids are append-only and never re-tokenised; text which is not the
template's own (tasks, tool schemas, tool output) can never become a control token.
"""

from rollout_node.turn.format import TurnFormat
from rollout_node.turn.loading import load_turn_format
from rollout_node.turn.records import (
    BudgetExceeded,
    Message,
    ParsedCall,
    ParsedTurn,
    RenderedAnswer,
    RenderError,
    ToolAnswer,
    ToolDefinition,
    TurnFormatError,
)
from rollout_node.turn.stream import TurnStream
from rollout_node.turn.tool_set import ToolSet

__all__ = [
    "BudgetExceeded",
    "Message",
    "ParsedCall",
    "ParsedTurn",
    "RenderError",
    "RenderedAnswer",
    "ToolAnswer",
    "ToolDefinition",
    "ToolSet",
    "TurnFormat",
    "TurnFormatError",
    "TurnStream",
    "load_turn_format",
]
