"""One turn parsed while it is sampled: hermes calls (`<tool_call>` JSON `</tool_call>`), reasoning and content.

Owns the grammar of a turn. Invariants: where the tokenizer has a tag as a control token, only that id is the tag and
the same characters sampled as text are data; where it has not, tags are found in the text, never inside a JSON string.
What comes out depends on the ids alone, not on how they were grouped, and the work is linear in their number.

A tag that opens a call inside an open call ends that call as broken; a closing tag outside a call is content; a call
inside reasoning is not a call, also where the reasoning is never closed; a stop token ends the turn wherever it stands.
"""

import re
from collections.abc import Iterable, Sequence
from enum import Enum

from rollout_node.turn.call_json import Broken, read_call
from rollout_node.turn.records import ParsedCall, ParsedTurn
from rollout_node.turn.tool_set import ToolSet, broken_call
from rollout_node.turn.vocabulary import TextReader, Vocabulary

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"


class _State(Enum):
    CONTENT = 1
    REASONING = 2
    CALL = 3


# In which state a tag means something; elsewhere it is text.
_MEANT = {
    _State.CONTENT: (OPEN, THINK),
    _State.REASONING: (THINK_END,),
    _State.CALL: (CLOSE, OPEN),
}


class TurnGrammar:
    """Which tags are control tokens of this vocabulary and which must be looked for in text. One per model."""

    def __init__(self, vocabulary: Vocabulary, stop_ids: Iterable[int]) -> None:
        self.vocabulary = vocabulary
        self.stop_ids = frozenset(stop_ids)
        ids = {tag: vocabulary.token_id(tag) for tag in (OPEN, CLOSE, THINK, THINK_END)}
        # A pair of which only one half is a control token is looked for in text, both halves.
        self.call_by_id = ids[OPEN] is not None and ids[CLOSE] is not None
        self.think_by_id = ids[THINK] is not None and ids[THINK_END] is not None
        by_id = ((OPEN, CLOSE) if self.call_by_id else ()) + ((THINK, THINK_END) if self.think_by_id else ())
        self.tag_of_id: dict[int, str] = {ids[tag]: tag for tag in by_id}  # type: ignore[misc]
        self.in_text: dict[_State, tuple[str, ...]] = {
            state: tuple(tag for tag in tags if tag not in by_id) for state, tags in _MEANT.items()
        }

    def opens_in_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the generation prompt left reasoning open (templates that end with `<think>`)."""
        tail = list(prompt_ids[-8:])
        if self.think_by_id:
            tags = [self.tag_of_id.get(token_id) for token_id in tail]
            last = max((i for i, tag in enumerate(tags) if tag in (THINK, THINK_END)), default=None)
            # Only white space may follow: a `<think>` further back belongs to something else.
            return last is not None and tags[last] == THINK and not self.vocabulary.decode(tail[last + 1 :]).strip()
        return self.vocabulary.decode(tail).rstrip().endswith(THINK)


class TurnStream:
    """Feed ids as they are sampled; each call comes out with the id that closed it."""

    def __init__(self, grammar: TurnGrammar, tools: ToolSet, prompt_ids: Sequence[int] = ()) -> None:
        self._grammar = grammar
        self._tools = tools
        self._state = _State.REASONING if grammar.opens_in_reasoning(prompt_ids) else _State.CONTENT
        self._count = 0  # ids taken, up to and without the stop token
        self._stopped = False
        self._calls: list[ParsedCall] = []
        self._reported = 0
        self._call_start = 0
        # Of the current state: ids where its tags are control tokens, text where they are looked for in text.
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self._content: list[str] = []
        self._scanner = _TextScanner(TextReader(grammar.vocabulary))

    def feed(self, new_ids: Iterable[int]) -> list[ParsedCall]:
        """Calls (good and bad) that these ids ended, in order."""
        for token_id in new_ids:
            if self._stopped:
                break
            self._take(token_id)
        fresh = self._calls[self._reported :]
        self._reported = len(self._calls)
        return fresh

    def finish(self, reason: str) -> ParsedTurn:
        """The whole turn. ``reason`` is the engine's: "stop", or "length" where the limit ended it.

        A call still open at "stop" is a PARSE_ERROR; at "length" it is no call at all.
        """
        self._flush()
        finish = "stop" if self._stopped else reason
        cut = self._state is _State.CALL
        if cut and finish != "length":
            self._end_call(self._count, f"The call is not closed: the turn ended where {CLOSE} was expected")
        elif not cut:
            self._leave()
        return ParsedTurn(
            calls=tuple(self._calls),
            text="".join(self._content),
            finish=finish,
            cut_call=cut and finish == "length",
            open_reasoning=self._state is _State.REASONING,
        )

    def _take(self, token_id: int) -> None:
        grammar = self._grammar
        if token_id in grammar.stop_ids:
            self._stopped = True
            return
        tag = grammar.tag_of_id.get(token_id)
        if tag is not None and tag in _MEANT[self._state]:
            self._flush()
            self._on_tag(tag, self._count, self._count + 1)
        elif grammar.in_text[self._state]:
            self._scanner.push(token_id, self._count)
            self._scan(self._count + 1)
        else:
            self._ids.append(token_id)
        self._count += 1

    def _scan(self, end: int) -> None:
        """Acts on every tag in the text read so far; a tag that is whole ended with the id before ``end``."""
        while tags := self._grammar.in_text[self._state]:
            text, found = self._scanner.next(tags, json_strings=self._state is _State.CALL)
            self._pieces.append(text)
            if found is None:
                return
            self._on_tag(found[0], found[1], end)

    def _flush(self) -> None:
        """No more text is coming for now: what the scanner holds back is text, not the beginning of a tag."""
        if self._grammar.in_text[self._state]:
            self._scanner.flush()
            self._scan(self._count)
            self._pieces.append(self._scanner.rest())

    def _on_tag(self, tag: str, start: int, end: int) -> None:
        if self._state is _State.CALL:
            if tag == CLOSE:
                raw = self._leave()
                self._calls.append(self._tools.judge(len(self._calls), raw, (self._call_start, end)))
                self._state = _State.CONTENT
                return
            self._end_call(start, f"The call is not closed: another {OPEN} stands where {CLOSE} was expected")
        else:
            self._leave()
        self._state = {OPEN: _State.CALL, THINK: _State.REASONING, THINK_END: _State.CONTENT}[tag]
        self._call_start = start

    def _end_call(self, end: int, sentence: str) -> None:
        raw = self._leave()
        # The tag is there, but as text of the call (in a string that never ends, say): the JSON says why.
        inner = read_call(raw) if CLOSE in raw else None
        if isinstance(inner, Broken):
            sentence += f"; {inner.sentence[0].lower()}{inner.sentence[1:].rstrip('.')}"
        self._calls.append(broken_call(len(self._calls), raw, (self._call_start, end), f"{sentence}."))

    def _leave(self) -> str:
        """The text of the state that ends here."""
        text = "".join(self._pieces) + self._grammar.vocabulary.decode(self._ids)
        self._pieces, self._ids = [], []
        if self._state is _State.CONTENT:
            self._content.append(text)
        return text


class _TextScanner:
    """Finds tags in text that arrives id by id, and says which id each began with.

    ``json_strings``: a tag inside a JSON string is data. A raw control character ends that: no JSON string can hold
    one, so the call is broken already and the next tag ends it.
    """

    def __init__(self, reader: TextReader) -> None:
        self._reader = reader
        self._buffer = ""
        self._marks: list[tuple[int, int]] = []  # (position in the buffer, index of the id whose text begins there)
        self._unread: int | None = None  # index of the first id whose text the reader still holds
        self._reset()

    def _reset(self) -> None:
        self._in_string = False
        self._broken = False

    def push(self, token_id: int, index: int) -> None:
        if self._unread is None:
            self._unread = index
        text = self._reader.push(token_id)
        if text:
            self._append(text)

    def flush(self) -> None:
        text = self._reader.flush()
        if text:
            self._append(text)
        self._unread = None

    def _append(self, text: str) -> None:
        assert self._unread is not None
        self._marks.append((len(self._buffer), self._unread))
        self._buffer += text
        self._unread = None

    def rest(self) -> str:
        """What ``next`` held back."""
        text, self._buffer, self._marks = self._buffer, "", []
        self._reset()
        return text

    def next(self, tags: tuple[str, ...], *, json_strings: bool) -> tuple[str, tuple[str, int] | None]:
        """(text before it, (tag, index of the id it began with)), or (text that cannot belong to a tag, None)."""
        position, tag = self._find_in_json(tags) if json_strings else self._find(tags, 0)
        text = self._buffer[:position]
        if tag is None:
            self._drop(position)
            return text, None
        began = max((index for start, index in self._marks if start <= position))
        self._drop(position + len(tag))
        self._reset()
        return text, (tag, began)

    def _drop(self, upto: int) -> None:
        if upto == 0:
            return
        self._buffer = self._buffer[upto:]
        if not self._buffer:
            self._marks = []
            return
        before = [index for start, index in self._marks if start <= upto]
        after = [(start - upto, index) for start, index in self._marks if start > upto]
        self._marks = [(0, before[-1]), *after]

    def _find(self, tags: tuple[str, ...], position: int) -> tuple[int, str | None]:
        """The first tag from ``position`` on, or where text begins that may become one."""
        while (position := self._buffer.find("<", position)) >= 0:
            tag = self._tag_at(tags, position)
            if tag is not None:
                return position, tag or None
            position += 1
        return len(self._buffer), None

    def _tag_at(self, tags: tuple[str, ...], position: int) -> str | None:
        """The tag at a "<", "" where the buffer ends before that can be known, None where there is none."""
        rest = self._buffer[position : position + max(map(len, tags))]
        for tag in tags:
            if rest.startswith(tag):
                return tag
            if tag.startswith(rest):
                return ""
        return None

    def _find_in_json(self, tags: tuple[str, ...]) -> tuple[int, str | None]:
        position, end = 0, len(self._buffer)
        while position < end:
            if self._broken:
                return self._find(tags, position)
            match = (_IN_STRING if self._in_string else _OUTSIDE).search(self._buffer, position)
            if match is None:
                return end, None
            position, char = match.start(), match.group()
            if char == "<":
                tag = self._tag_at(tags, position)
                if tag is not None:
                    return position, tag or None
            elif char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                if position + 1 == end:
                    return position, None
                position += 1
            else:
                self._broken = True
            position += 1
        return end, None


_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_OUTSIDE = re.compile(r'["<]')
