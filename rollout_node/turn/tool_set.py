"""The tools of one trajectory: whether a call names one of them and whether its arguments fit.

Invariant: a call is judged before any backend sees it, by the same compiled schema each time, and the verdict is an
outcome plus one sentence for the model; nothing is coerced.
"""

from __future__ import annotations

from collections.abc import Mapping

from fermata.v1 import tool_pb2
from fermata.v1.tool_pb2 import Outcome

from node_runtime.schema import ArgumentValidator, SchemaError
from rollout_node.turn.call_json import Broken, read_call
from rollout_node.turn.records import ParsedCall, ToolDefinition, TurnFormatError
from rollout_node.turn.sentences import bounded, unknown_tool


class ToolSet:
    """Built once per offered set of tools; schemas are compiled here."""

    def __init__(self, tools: Mapping[str, ToolDefinition]) -> None:
        self.tools = dict(tools)
        self._validators: dict[str, ArgumentValidator] = {}
        for name, tool in self.tools.items():
            try:
                self._validators[name] = ArgumentValidator(tool.schema_json)
            except SchemaError as error:
                raise TurnFormatError(f"the schema of tool {name!r} cannot be used: {error}") from error

    def validate(self, name: str, args_json: bytes) -> tuple[Outcome.ValueType, str]:
        """(OK, "") or an outcome with the sentence that the model is shown."""
        validator = self._validators.get(name)
        if validator is None:
            return tool_pb2.OUTCOME_UNKNOWN_TOOL, unknown_tool(name, self.tools)
        wrong = validator.check(args_json)
        if wrong is None:
            return tool_pb2.OUTCOME_OK, ""
        return tool_pb2.OUTCOME_INVALID_ARGS, bounded(f"Invalid call of {name}: {wrong.rstrip('.')}.")

    def judge(self, ordinal: int, raw: str, span: tuple[int, int]) -> ParsedCall:
        """The verdict on the text between the tags of a closed call."""
        call = read_call(raw)
        if isinstance(call, Broken):
            return broken_call(ordinal, raw, span, call.sentence)
        args_json = call.arguments.encode("utf-8", "replace")
        outcome, sentence = self.validate(call.name, args_json)
        return ParsedCall(ordinal, call.name, args_json, raw, span, outcome, sentence)


def broken_call(ordinal: int, raw: str, span: tuple[int, int], sentence: str) -> ParsedCall:
    """A call that cannot be read: nobody can say which tool was meant."""
    return ParsedCall(ordinal, None, None, raw, span, tool_pb2.OUTCOME_PARSE_ERROR, bounded(sentence))
