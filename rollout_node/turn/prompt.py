"""The prompt of a task as ids, by the model's own chat template.

Invariant: the control ids of a prompt are those that the template writes for harmless texts; what a message or a tool's
schema spells is encoded as plain text.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from rollout_node.turn.bridge import example_turns
from rollout_node.turn.guard import Guard, map_strings, neutral, pick_mark, strings_in
from rollout_node.turn.records import Message, RenderError, ToolDefinition, TurnFormatError
from rollout_node.turn.sentences import quote
from rollout_node.turn.stream import TurnGrammar, TurnStream
from rollout_node.turn.template import ChatTemplate
from rollout_node.turn.tool_set import ToolSet
from rollout_node.turn.vocabulary import Piece, Vocabulary

ROLES = ("system", "developer", "user", "assistant", "tool")

# (messages, tools) in the OpenAI form to parts.
RenderPieces = Callable[[list[dict[str, Any]], list[dict[str, Any]]], list[Piece]]


def openai_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The form templates expect. RenderError for what no template can mean."""
    if not messages:
        raise RenderError("a task needs at least one message")
    out: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise RenderError(f"message {i} has the role {quote(message.role)}; the roles are: {', '.join(ROLES)}")
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.name:
            entry["name"] = message.name
        if message.tool_call_id:
            entry["tool_call_id"] = message.tool_call_id
        out.append(entry)
    return out


def protected_ids(
    vocabulary: Vocabulary,
    guard: Guard,
    render: RenderPieces,
    messages: Sequence[Message],
    tools: Sequence[ToolDefinition],
) -> list[int]:
    """Renders with untrusted texts protected, then takes the protection off what is plain text."""
    plain_messages = openai_messages(messages)
    plain_tools = [tool.as_function() for tool in tools]
    mark = pick_mark([*strings_in(plain_messages), *strings_in(plain_tools)])

    def protect(text: str) -> str:
        return guard.protect(text, mark)

    protected = [{**m, **{k: protect(m[k]) for k in m if k != "role"}} for m in plain_messages]
    protected_tools = map_strings(plain_tools, protect)
    pieces = [
        piece.replace(mark, "") if isinstance(piece, str) else piece for piece in render(protected, protected_tools)
    ]
    if protected != plain_messages or protected_tools != plain_tools:
        _check_skeleton(pieces, render, plain_messages, plain_tools, protect)
    return vocabulary.encode_pieces(pieces)


def _check_skeleton(
    pieces: list[Piece],
    render: RenderPieces,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    protect: Callable[[str], str],
) -> None:
    """The control ids must be those of the same conversation with harmless words where control tokens were spelled."""
    numbers: dict[str, int] = {}

    def harmless(text: str) -> str:
        return text if protect(text) == text else neutral(text, numbers.setdefault(text, len(numbers)))

    harmless_messages = [{**m, **{k: harmless(m[k]) for k in m if k != "role"}} for m in messages]
    expected = [piece for piece in render(harmless_messages, map_strings(tools, harmless)) if isinstance(piece, int)]
    if [piece for piece in pieces if isinstance(piece, int)] != expected:
        raise RenderError(
            "the chat template makes control tokens out of the text of a message or tool that spells some; "
            "that text cannot be rendered safely with this model"
        )


class TemplatePrompt:
    """The route by the model's own chat template."""

    def __init__(self, template: ChatTemplate, vocabulary: Vocabulary) -> None:
        self._template = template
        self._vocabulary = vocabulary
        self._guard = Guard(vocabulary.control)
        example = template.render([{"role": "user", "content": "What is 12*34?"}], add_generation_prompt=True)
        if not vocabulary.agrees(example):
            raise TurnFormatError(
                "the tokenizer encodes the parts between control tokens differently from the whole prompt, "
                f"seen with {quote(example)}; a tokenizer that splits at its control tokens is needed"
            )

    def render(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[int]:
        return protected_ids(self._vocabulary, self._guard, self._pieces, messages, tools)

    def _pieces(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[Piece]:
        return self._vocabulary.split_control(self._template.render(messages, tools, add_generation_prompt=True))


def template_writes_hermes(template: ChatTemplate, vocabulary: Vocabulary, stop_ids: Sequence[int]) -> None:
    """Refuses a template that writes calls in another format than the parser reads.

    A template that knows no calls at all is taken: the task's own prompt tells the model how to write them.
    """
    for messages in example_turns():
        try:
            asked = template.render(messages[:1], add_generation_prompt=True)
            answered = template.render(messages, add_generation_prompt=False)
        except RenderError:
            continue
        if "fmargn0q" in answered:
            start = next((i for i, (a, b) in enumerate(zip(asked, answered, strict=False)) if a != b), len(asked))
            check_hermes(vocabulary, stop_ids, vocabulary.encode_trusted(answered[start:]), answered[start:])
            return


def check_hermes(vocabulary: Vocabulary, stop_ids: Sequence[int], turn_ids: list[int], written: str) -> None:
    """An example turn, as the model would write it, must parse to its one call."""
    tools = ToolSet({"fmnamen0q": ToolDefinition("fmnamen0q")})
    stream = TurnStream(TurnGrammar(vocabulary, stop_ids), tools)
    stream.feed(turn_ids)
    calls = stream.finish("stop").calls
    if len(calls) != 1 or calls[0].args_json is None or json.loads(calls[0].args_json) != {"a": "fmargn0q"}:
        raise TurnFormatError(
            f"this model writes a call as {quote(written.strip(), 120)}, which the parser 'hermes' does not read; "
            'it reads <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
        )
