"""How tool answers follow a sampled turn: the fixed text around them, with the proof that nothing before it changes.

Owns the proof. Invariant: a Bridge exists only where rendering a conversation with answers begins with the rendering
without them, the text around the answers is the same in the first and in later turns and for one and for several
answers, and what the template does to an answer's text is one of the known transformations. Then appending is exact.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout_node.turn.records import RenderError, TurnFormatError
from rollout_node.turn.sentences import quote
from rollout_node.turn.template import ChatTemplate
from rollout_node.turn.vocabulary import Piece, Slot, Vocabulary

NAME = Slot(1)  # the tool's name, for templates that write it beside the answer

# What templates do to the text of an answer.
TRANSFORMS: Mapping[str, Callable[[str], str]] = {
    "as it is": lambda text: text,
    "trimmed": str.strip,
    "JSON": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "ASCII JSON": lambda text: json.dumps(text)[1:-1],
}


@dataclass(frozen=True)
class Bridge:
    """Answer i is ``before`` (``between`` for i > 0), its text, ``after`` (``end`` for the last).

    ``before`` begins with what closes the sampled turn. ``form`` says for which kind of turn it was proven.
    """

    before: tuple[Piece, ...]
    after: tuple[Piece, ...]
    between: tuple[Piece, ...]
    end: tuple[Piece, ...]
    transform: str = "as it is"
    form: str = ""


@dataclass(frozen=True)
class _Frame:
    """The text around the answers of one rendering, with the tool's name replaced by its slot mark."""

    close: str
    before: str
    between: str | None
    end: str


class _UnprovenError(Exception):
    def __init__(self, stage: int, why: str) -> None:
        super().__init__(why)
        self.stage = stage  # how far the proof went: the furthest one says best what is wrong


_NAME_MARK = "fmtheirnameq"
_TOOL = {
    "type": "function",
    "function": {"name": "fmtoolq", "description": "fmtoolq", "parameters": {"type": "object", "properties": {}}},
}
PROBES = (
    "plain",
    "  edges \n\n",
    'quo"te \\ back',
    "two\n\nlines\n",
    "naïve 你好 🦊",
    "<b>&amp;</b>",
    "a</think>b",
    "<think>a</think>b",
    "<tool_response>\nx\n</tool_response>",
    '{"a": [1, 2.0]}',
    "12",
    "none",
)


def prove_bridge(template: ChatTemplate, vocabulary: Vocabulary, stop_ids: frozenset[int]) -> Bridge:
    """The bridge of a chat template, or a TurnFormatError that names what the template rewrites."""
    worst = _UnprovenError(-1, "the chat template renders no conversation with tool answers")
    for form, write in _FORMS.items():
        try:
            frame = _prove_form(template, vocabulary, stop_ids, write)
            transform = _prove_transform(template, vocabulary, write, frame)
        except _UnprovenError as unproven:
            worst = unproven if unproven.stage > worst.stage else worst
            continue
        return _cut(frame, vocabulary, transform, form)
    raise TurnFormatError(f"tool answers cannot be appended with this chat template: {worst}")


def _message(count: int, label: str, **extra: Any) -> dict[str, Any]:
    calls = [
        {
            "id": f"fmid{label}{i}q",
            "type": "function",
            "function": {"name": f"fmname{label}{i}q", "arguments": {"a": f"fmarg{label}{i}q"}},
        }
        for i in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **extra}


def _arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    for call in message["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return message


def _spelled_out(count: int, label: str) -> dict[str, Any]:
    calls = [
        f'<tool_call>\n{{"name": "fmname{label}{i}q", "arguments": {{"a": "fmarg{label}{i}q"}}}}\n</tool_call>'
        for i in range(count)
    ]
    return {"role": "assistant", "content": "\n".join(calls)}


# Ways to hand a turn with calls to a template; templates differ in which they take. The plain ones come first.
_FORMS: Mapping[str, Callable[[int, str], dict[str, Any]]] = {
    "calls": _message,
    "calls with arguments as text": lambda n, label: _arguments_as_text(_message(n, label)),
    "calls without content": lambda n, label: _arguments_as_text(_message(n, label, content=None)),
    "calls after reasoning": lambda n, label: _message(n, label, reasoning_content="fmthoughtq"),
    "calls spelled out": _spelled_out,
}


def example_turns() -> list[list[dict[str, Any]]]:
    """A question and the turn with one call that answers it, in each form in which calls are handed to a template."""
    return [_conversation(write, 0, 1) for form, write in _FORMS.items() if write is not _spelled_out]


def _conversation(write: Callable[[int, str], dict[str, Any]], earlier: int, count: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "fmquestionq"}]
    for turn in range(earlier):
        messages.append(write(1, f"e{turn}"))
        messages.append(_answer(f"e{turn}", 0, f"fmearlier{turn}q"))
    return [*messages, write(count, "n")]


def _answer(label: str, index: int, content: str) -> dict[str, Any]:
    name = f"fmname{label}{index}q"
    return {"role": "tool", "name": name, "tool_call_id": f"fmid{label}{index}q", "content": content}


def _text(
    template: ChatTemplate, messages: list[dict[str, Any]], *, prompt: bool, stage: int, offered: bool = True
) -> str:
    try:
        return template.render(messages, [_TOOL] if offered else None, add_generation_prompt=prompt)
    except RenderError as error:
        raise _UnprovenError(stage, str(error)) from error


def _prove_form(
    template: ChatTemplate,
    vocabulary: Vocabulary,
    stop_ids: frozenset[int],
    write: Callable[[int, str], dict[str, Any]],
) -> _Frame:
    """The frame which all of (0, 1, 2 earlier turns) x (1, 2, 3 answers) x (tools offered or not) agree on."""
    first: _Frame | None = None
    between: str | None = None
    for offered in (True, False):
        for earlier, count in itertools.product((0, 1, 2), (1, 2, 3)):
            frame = _frame(template, vocabulary, stop_ids, write, earlier, count, offered)
            if first is None:
                first = frame
            for part in ("close", "before", "end"):
                was, now = getattr(first, part), getattr(frame, part)
                if was != now:
                    where = "in a later turn" if earlier else f"of {count} answers to one turn"
                    where = where if offered else "where no tools are offered"
                    raise _UnprovenError(
                        3, f"it writes {quote(now)} {where} where it wrote {quote(was)} for a first answer"
                    )
            if frame.between is not None:
                if between is not None and between != frame.between:
                    raise _UnprovenError(3, f"it writes {quote(frame.between)} and {quote(between)} between answers")
                between = frame.between
    assert first is not None
    return _Frame(first.close, first.before, between, first.end)


def _frame(
    template: ChatTemplate,
    vocabulary: Vocabulary,
    stop_ids: frozenset[int],
    write: Callable[[int, str], dict[str, Any]],
    earlier: int,
    count: int,
    offered: bool,
) -> _Frame:
    base_messages = _conversation(write, earlier, count)
    base = _text(template, base_messages, prompt=False, stage=0, offered=offered)
    marks = [f"fmanswer{i}q" for i in range(count)]
    answers = [_answer("n", i, mark) for i, mark in enumerate(marks)]
    stage = 0 if count == 1 else 2
    whole = _text(template, base_messages + answers, prompt=True, stage=stage, offered=offered)
    last_argument = f"fmargn{count - 1}q"
    if last_argument not in base:
        few = "it writes only the first of several calls of one turn" if count > 1 else "it does not write calls"
        raise _UnprovenError(min(count, 2) - 1, few)
    if not whole.startswith(base):
        raise _UnprovenError(2, _what_changes(base, whole))
    added = whole[len(base) :]
    if any(added.count(mark) != 1 for mark in marks):
        raise _UnprovenError(2, f"it does not write each of {count} answers once")
    parts: list[str] = []
    for i, mark in enumerate(marks):
        part, _, added = added.partition(mark)
        own = part.replace(f"fmnamen{i}q", _NAME_MARK)
        if "fmnamen" in own or "fmnamee" in own:
            raise _UnprovenError(2, "it names the tool of another call in an answer, so answers to several calls mix")
        if "fmidn" in own:
            raise _UnprovenError(2, "it writes the id of the call into the answer, and the model's calls have none")
        parts.append(own)
    if "fm" in added and any(mark in added for mark in ("fmname", "fmid", "fmanswer", "fmarg")):
        raise _UnprovenError(2, "it repeats the calls or answers after the answers")
    if len(set(parts[1:])) > 1:
        raise _UnprovenError(2, "it writes different texts between answers")
    return _Frame(_close(base, last_argument, vocabulary, stop_ids), parts[0], parts[1] if count > 1 else None, added)


def _close(base: str, last_argument: str, vocabulary: Vocabulary, stop_ids: frozenset[int]) -> str:
    """What the template writes from the stop token of the turn on; empty where the next message ends the turn."""
    rest = base[base.rindex(last_argument) + len(last_argument) :]
    found = [
        rest.find(token) for token, token_id in vocabulary.control.items() if token_id in stop_ids and token in rest
    ]
    return rest[min(found) :] if found else ""


def _what_changes(base: str, whole: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(base, whole, strict=False)) if a != b), min(len(base), len(whole)))
    start = max(0, at - 20)
    return (
        "it rewrites the turn once an answer follows: "
        f"{quote(base[start : at + 40])} becomes {quote(whole[start : at + 40])}"
    )


def _prove_transform(
    template: ChatTemplate, vocabulary: Vocabulary, write: Callable[[int, str], dict[str, Any]], frame: _Frame
) -> str:
    base_messages = _conversation(write, 0, 1)
    base = _text(template, base_messages, prompt=False, stage=4)
    before = frame.before.replace(_NAME_MARK, "fmnamen0q")
    probes = [*PROBES, *(f"a {token} b" for token in vocabulary.control)]
    remaining = dict(TRANSFORMS)
    for probe in probes:
        whole = _text(template, [*base_messages, _answer("n", 0, probe)], prompt=True, stage=4)
        for name, transform in list(remaining.items()):
            if whole != base + before + transform(probe) + frame.end:
                del remaining[name]
        if not remaining:
            raise _UnprovenError(
                4, f"it changes the text of an answer in its own way: {quote(probe)} does not come out"
            )
    return next(iter(remaining))


def _cut(frame: _Frame, vocabulary: Vocabulary, transform: str, form: str) -> Bridge:
    def pieces(text: str) -> list[Piece]:
        out: list[Piece] = []
        for piece in vocabulary.split_control(text):
            if isinstance(piece, str):
                for i, plain in enumerate(piece.split(_NAME_MARK)):
                    out += ([NAME] if i else []) + ([plain] if plain else [])
            else:
                out.append(piece)
        return out

    after, between = split_between(pieces(frame.between or ""), vocabulary)
    return Bridge(tuple(pieces(frame.close + frame.before)), after, between, tuple(pieces(frame.end)), transform, form)


def split_between(pieces: list[Piece], vocabulary: Vocabulary) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """What lies between two answers, cut where no token spans: each answer is encoded apart, as its ids are stamped
    with its call. That is after the first control token, else at the first place in the text where encoding the two
    sides apart gives the same ids."""
    for i, piece in enumerate(pieces):
        if isinstance(piece, int):
            return tuple(pieces[: i + 1]), tuple(pieces[i + 1 :])
    if len(pieces) == 1 and isinstance(pieces[0], str):
        text = pieces[0]
        for place in range(1, len(text)):
            if all(_parts_alike(vocabulary, answer + text, len(answer) + place, answer) for answer in _NEIGHBOURS):
                return (text[:place],), (text[place:],)
    return (), tuple(pieces)


_NEIGHBOURS = ("408", "moss: a plant.", "line\n", " ", "{}")


def _parts_alike(vocabulary: Vocabulary, text: str, place: int, follows: str) -> bool:
    text += follows
    apart = vocabulary.encode_plain(text[:place]) + vocabulary.encode_plain(text[place:])
    return apart == vocabulary.encode_plain(text)
