"""Models that the `renderers` library knows: its code gives the structure, we give the tokens.

The library is handed a tokenizer that keeps plain text as text, so what it writes comes back in parts: control ids and
text. Invariant: untrusted text is encoded by us, as plain text, whatever the library does with it (its own bridge would
let a tool's output open a turn).
"""

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

from rollout_node.turn.bridge import NAME, PROBES, TRANSFORMS, Bridge, split_between
from rollout_node.turn.guard import Guard
from rollout_node.turn.prompt import protected_ids
from rollout_node.turn.records import Message, RenderError, ToolDefinition, TurnFormatError
from rollout_node.turn.vocabulary import CUT, Piece, Slot, Vocabulary

_ANSWER, _TOOL, _MARK = "fmanswer{}q", "fmname{}q", "fmbreakq"
_CALL = '<tool_call>\n{{"name": "fmname{0}q", "arguments": {{"a": "fmarg{0}q"}}}}\n</tool_call>'


class TextKeepingTokenizer:
    """Satisfies the library's `Tokenizer` protocol; each run of plain text is one negative id."""

    def __init__(self, vocabulary: Vocabulary, name: str, eos_token_id: int | None) -> None:
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id = eos_token_id
        self._vocabulary = vocabulary
        self._texts: list[str] = []
        self._kept = 0

    def keep(self) -> None:
        """What was encoded so far (the renderer's own constants) stays known."""
        self._kept = len(self._texts)

    def forget(self) -> None:
        """Drops the texts of the last rendering."""
        del self._texts[self._kept :]

    def encode(self, text: str, *_args: Any, **_kwargs: Any) -> list[int]:
        ids: list[int] = []
        for piece in self._vocabulary.split_control(text):
            if isinstance(piece, str):
                self._texts.append(piece)
                ids.append(-len(self._texts))
            elif isinstance(piece, int):
                ids.append(piece)
        return ids

    def decode(self, token_ids: Any, *_args: Any, **_kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return "".join(self._texts[-i - 1] if i < 0 else self._vocabulary.decode([i]) for i in ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._vocabulary.token_id(tokens)
        return [self._vocabulary.token_id(token) for token in tokens]

    def pieces(self, ids: Sequence[int]) -> list[Piece]:
        """The parts that the ids stand for; texts that were encoded apart stay apart."""
        out: list[Piece] = []
        for i in ids:
            if i < 0 and out and isinstance(out[-1], str):
                out.append(CUT)
            out.append(self._texts[-i - 1] if i < 0 else i)
        return out


class KnownModel:
    """One of the library's renderers over our vocabulary. ``name`` is the library's name of it, such as "qwen3"."""

    def __init__(self, vocabulary: Vocabulary, name: str, model_path: str, eos_token_id: int | None) -> None:
        from renderers import config_from_name, create_renderer

        self._vocabulary = vocabulary
        self._guard = Guard(vocabulary.control)
        self._lock = threading.Lock()
        self._tokenizer = TextKeepingTokenizer(vocabulary, model_path, eos_token_id)
        try:
            config = config_from_name(name)
            self._renderer: Any = create_renderer(self._tokenizer, config)
        except Exception as error:  # the library's renderers raise whatever they like when a token is missing
            raise TurnFormatError(f"the renderer {name!r} cannot be used with this tokenizer: {error}") from error
        self._tokenizer.keep()
        self.hash = hashlib.sha256(f"renderers/{name}/{config!r}".encode()).hexdigest()
        self.stop_token_ids: list[int] = list(self._renderer.get_stop_token_ids())
        self.bridge = self._prove()

    def render(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[int]:
        return protected_ids(self._vocabulary, self._guard, self._prompt_pieces, messages, tools)

    def _prompt_pieces(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[Piece]:
        with self._lock:  # the tokenizer's texts are those of one rendering
            self._tokenizer.forget()
            try:
                rendered = self._renderer.render(messages, tools=tools or None, add_generation_prompt=True)
            except (KeyError, TypeError, ValueError) as error:
                raise RenderError(f"the model's renderer refuses these messages: {str(error)[:300]}") from error
            return self._tokenizer.pieces(rendered.token_ids)

    def example_turn(self) -> tuple[list[int], str]:
        """The ids and text of a turn with one call, as the library writes it into a history."""
        self._tokenizer.forget()
        question = {"role": "user", "content": "fmquestionq"}
        call = {"type": "function", "function": {"name": "fmnamen0q", "arguments": {"a": "fmargn0q"}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        asked = self._renderer.render([question], tools=None, add_generation_prompt=True).token_ids
        whole = self._renderer.render([question, turn], tools=None, add_generation_prompt=False).token_ids
        texts = [self._tokenizer.decode([i]) for i in whole]
        start = next(
            (i for i, a in enumerate(asked) if i >= len(whole) or self._tokenizer.decode([a]) != texts[i]), len(asked)
        )
        return self._vocabulary.encode_pieces(self._tokenizer.pieces(whole[start:])), "".join(texts[start:])

    def _prove(self) -> Bridge:
        frames = {(e, n): self._frame(e, [_ANSWER.format(i) for i in range(n)]) for e in (0, 1) for n in (1, 2, 3)}
        split = {key: _split(pieces, key[1]) for key, pieces in frames.items()}
        before, end = split[0, 1][0], split[0, 1][-1]
        between = split[0, 2][1]
        for (_, count), parts in split.items():
            if parts != [before, *[between] * (count - 1), end]:
                raise TurnFormatError("the model's renderer writes different texts around answers of different turns")
        remaining = dict(TRANSFORMS)
        for probe in PROBES + tuple(f"a {token} b" for token in self._vocabulary.control):
            got = _join(self._frame(0, [self._guard.protect(probe, _MARK)])).replace(_MARK, "")
            for name, transform in list(remaining.items()):
                if got != _join([*before, transform(probe), *end]):
                    del remaining[name]
            if not remaining:
                raise TurnFormatError(
                    f"the model's renderer changes the text of an answer: {probe!r} does not come out whole"
                )
        after, between_rest = split_between(between, self._vocabulary)
        return Bridge(tuple(before), after, between_rest, tuple(end), next(iter(remaining)), "renderers")

    def _frame(self, earlier: int, contents: Sequence[str]) -> list[Piece]:
        """What the library appends to a turn that did not close itself, for these answers."""
        self._tokenizer.forget()
        question = {"role": "user", "content": "fmquestionq"}
        ids = list(self._renderer.render([question], tools=None, add_generation_prompt=True).token_ids)
        for _ in range(earlier):
            ids = self._bridged(ids, 1, ["fmearlierq"])[0]
        ids, length = self._bridged(ids, len(contents), contents)
        return self._tokenizer.pieces(ids[length:])

    def _bridged(self, prompt: list[int], calls: int, contents: Sequence[str]) -> tuple[list[int], int]:
        turn = [i for n in range(calls) for i in self._tokenizer.encode(_CALL.format(n))]
        messages = [{"role": "tool", "name": _TOOL.format(i), "content": text} for i, text in enumerate(contents)]
        bridged = self._renderer.bridge_to_next_turn(prompt, turn, messages, tools=None)
        sampled = prompt + turn
        if bridged is None or list(bridged.token_ids[: len(sampled)]) != sampled:
            raise TurnFormatError("the model's renderer has no bridge from a sampled turn to its tool answers")
        return list(bridged.token_ids), len(sampled)


def _split(pieces: list[Piece], count: int) -> list[list[Piece]]:
    """The parts around the answers' marks; a mark in the way of another answer is refused by not being found."""
    parts: list[list[Piece]] = [[]]
    for piece in pieces:
        if not isinstance(piece, str):
            parts[-1].append(piece)
            continue
        rest = piece
        while len(parts) <= count:
            before, mark, after = rest.partition(_ANSWER.format(len(parts) - 1))
            if not mark:
                break
            parts[-1] += _named(before, len(parts) - 1)
            parts.append([])
            rest = after
        parts[-1] += _named(rest, len(parts) - 1)
    if len(parts) != count + 1:
        raise TurnFormatError(f"the model's renderer does not write each of {count} answers once")
    return parts


def _named(text: str, index: int) -> list[Piece]:
    out: list[Piece] = []
    for i, part in enumerate(text.split(_TOOL.format(index))):
        out += ([NAME] if i else []) + ([part] if part else [])
    return out


def _join(pieces: Sequence[Piece]) -> str:
    """One comparable text: ids by number, slots by name, places where encoding stops."""
    return "".join(p if isinstance(p, str) else f"\0{p.index}/" if isinstance(p, Slot) else f"\0{p}." for p in pieces)
