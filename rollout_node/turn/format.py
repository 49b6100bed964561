"""One model's way to write turns: prompts, calls and tool answers, all as exact ids.

Owns the choice of the route: `renderers` where it knows the model, else the model's own chat template with our bridge.
Invariant: a TurnFormat exists only for a model whose bridge is proven and whose calls the parser reads.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from rollout_node.turn.answers import AnswerRenderer
from rollout_node.turn.bridge import Bridge, prove_bridge
from rollout_node.turn.prompt import TemplatePrompt, template_writes_hermes
from rollout_node.turn.records import Message, RenderedAnswer, ToolAnswer, ToolDefinition, TurnFormatError
from rollout_node.turn.stream import TurnGrammar, TurnStream
from rollout_node.turn.template import ChatTemplate
from rollout_node.turn.tool_set import ToolSet
from rollout_node.turn.vocabulary import Vocabulary

PARSERS = ("hermes", "hermes-text")


class PromptRoute(Protocol):
    """What renders the prompt of a task."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[int]: ...


class TurnFormat:
    """Built once per model, by `load_turn_format` or from parts by `from_template`."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        prompt: PromptRoute,
        bridge: Bridge,
        stop_token_ids: Iterable[int],
        template_hash: str,
        route: str,
    ) -> None:
        self.vocabulary = vocabulary
        self.bridge = bridge
        self.route = route
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stop_token_ids))
        self.tokenizer_hash = vocabulary.hash
        self.template_hash = template_hash
        self._prompt = prompt
        self._grammar = TurnGrammar(vocabulary, self.stop_token_ids)
        self._answers = AnswerRenderer(vocabulary, bridge)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolDefinition] = ()) -> "array[int]":
        """Ids of the task with the generation prompt. RenderError where the template refuses the messages."""
        return array("i", self._prompt.render(messages, tools))

    def stream(self, tools: ToolSet, prompt_ids: Sequence[int] = ()) -> TurnStream:
        """A parser for one turn. ``prompt_ids``: everything before it (whether reasoning is open already)."""
        return TurnStream(self._grammar, tools, prompt_ids)

    def render_results(
        self, ids: Sequence[int], answers: Sequence[ToolAnswer], budget_tokens: int
    ) -> list[RenderedAnswer]:
        """The suffix after ``ids`` (prompt and sampled so far), split per answer; see `AnswerRenderer.render`."""
        return self._answers.render(ids[-1] if len(ids) else None, answers, budget_tokens)

    @classmethod
    def from_template(
        cls,
        tokenizer: Tokenizer,
        template: str,
        *,
        stop_tokens: Sequence[str],
        variables: Mapping[str, Any] | None = None,
        parser: str = "hermes",
    ) -> "TurnFormat":
        """From a fast tokenizer and a chat template. ``stop_tokens``: what ends a turn, the usual one first."""
        check_parser(parser)
        vocabulary = Vocabulary(tokenizer)
        stop_ids = [_stop_id(vocabulary, token) for token in stop_tokens]
        chat_template = ChatTemplate(template, variables)
        bridge = prove_bridge(chat_template, vocabulary, frozenset(stop_ids))
        template_writes_hermes(chat_template, vocabulary, stop_ids)
        return cls(
            vocabulary,
            prompt=TemplatePrompt(chat_template, vocabulary),
            bridge=bridge,
            stop_token_ids=stop_ids,
            template_hash=chat_template.hash,
            route="template",
        )


def check_parser(parser: str) -> None:
    if parser not in PARSERS:
        raise TurnFormatError(f"there is no parser {parser!r}; the parsers are: {', '.join(PARSERS)}")


def _stop_id(vocabulary: Vocabulary, token: str) -> int:
    token_id = vocabulary.token_id(token)
    if token_id is None:
        raise TurnFormatError(f"the stop token {token!r} is not a control token of the tokenizer")
    return token_id
