"""The JSON of one call, `{"name": ..., "arguments": {...}}`, read without changing how the model spelled it.

Owns the grammar of a call. Invariant: the arguments come out as the very characters that stood in the text (numbers,
escapes and key order untouched), and whatever the text is, the result is a call or one sentence; never an exception.
"""

import json
import re
from dataclasses import dataclass

from rollout_node.turn.sentences import quote

MAX_DEPTH = 100  # of nested arrays and objects; JSON parsers down the line stop at 128
_IGNORED_KEYS = frozenset({"id", "type"})  # some models write them as in the OpenAI form
_BLANK = re.compile(r"[ \t\n\r]*")
_NESTING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)|([\[{])|([\]}])', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_WORD = re.compile(r"-?Infinity|NaN|nan|[A-Za-z_]+")


@dataclass(frozen=True, slots=True)
class CallText:
    """A call that is well formed; whether the tool exists and the arguments fit is not known yet."""

    name: str
    arguments: str  # as spelled; "{}" where there were none


@dataclass(frozen=True, slots=True)
class Broken:
    """``sentence`` says where the call breaks and what would be right."""

    sentence: str


class _BreaksError(Exception):
    def __init__(self, what: str, position: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.position = position


def read_call(text: str) -> CallText | Broken:
    """Reads the text between the tags of one call."""
    try:
        return _read(text)
    except _BreaksError as broken:
        where = "" if broken.position is None else f" at {_place(text, broken.position)}"
        return Broken(f"The call is not valid JSON: {broken.what}{where}." if where else broken.what)


def _read(text: str) -> CallText | Broken:
    start = _skip(text, 0)
    if start == len(text):
        return Broken('The call is empty; it must be a JSON object {"name": ..., "arguments": {...}}.')
    if text[start] == "\ufeff":
        raise _BreaksError("a byte order mark stands before the JSON object", start)
    _check_depth(text)
    if text[start] != "{":
        return _not_an_object(text, start)
    members, end = _members(text, start)
    end = _skip(text, end)
    if end != len(text):
        again = text[end] in "{["
        raise _BreaksError(
            f"{'another value' if again else 'text'} follows the JSON object"
            f"{'; write each call in tags of its own' if again else ''}, expected </tool_call>",
            end,
        )
    return _call(text, members)


def _call(text: str, members: dict[str, tuple[int, int, object]]) -> CallText | Broken:
    surrogate = _lone_surrogate(text)
    if surrogate is not None:
        raise _BreaksError(f"the escape {text[surrogate : surrogate + 6]} is half of a surrogate pair", surrogate)
    extra = next((key for key in members if key not in {"name", "arguments"} | _IGNORED_KEYS), None)
    if "name" not in members:
        hint = f", got {quote(extra)}" if extra is not None else ""
        return Broken(
            f'The JSON of the call has no key "name"{hint}; it must be {{"name": ..., "arguments": {{...}}}}.'
        )
    at, _, name = members["name"]
    if text[at] != '"':
        return Broken(f'The "name" of the call must be a JSON string, got {_kind_at(text, at)}.')
    if extra is not None:
        return Broken(
            f"The JSON of the call has the unknown key {quote(extra)}; "
            'it must be {"name": ..., "arguments": {...}} with everything for the tool inside arguments.'
        )
    span = members.get("arguments")
    if span is None or span[2] is None:
        return CallText(str(name), "{}")
    return CallText(str(name), text[span[0] : span[1]])


def _members(text: str, start: int) -> tuple[dict[str, tuple[int, int, object]], int]:
    """The members of the object at ``start`` (a "{") with the span and value of each, and where the object ends."""
    members: dict[str, tuple[int, int, object]] = {}
    position = _skip(text, start + 1)
    if text[position : position + 1] == "}":
        return members, position + 1
    while True:
        if text[position : position + 1] != '"':
            raise _BreaksError(f"expected a key in double quotes, {_found(text, position)}", position)
        key, end = _value(text, position)
        if key in members:
            raise _BreaksError(f"the key {quote(str(key))} stands twice in one object", position)
        position = _skip(text, end)
        if text[position : position + 1] != ":":
            raise _BreaksError(f'expected ":" after a key, {_found(text, position)}', position)
        position = _skip(text, position + 1)
        value, end = _value(text, position)
        members[str(key)] = (position, end, value)
        position = _skip(text, end)
        follows = text[position : position + 1]
        if follows == "}":
            return members, position + 1
        if follows != ",":
            raise _BreaksError(f'expected "," or "}}", {_found(text, position)}', position)
        position = _skip(text, position + 1)


class _Twice(Exception):
    def __init__(self, key: str) -> None:
        self.key = key


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(key)
            seen.add(key)
    return out


class _NotANumberError(Exception):
    pass


def _refuse_constant(word: str) -> object:
    raise _NotANumberError(word)


# Numbers stay text: they are only looked at by the schema validator, in the model's own spelling.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=str, parse_float=str, parse_constant=_refuse_constant, strict=True
)


def _value(text: str, position: int) -> tuple[object, int]:
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise _BreaksError(_expected(error, text), min(error.pos, len(text))) from None
    except _Twice as twice:
        raise _BreaksError(f"the key {quote(twice.key)} stands twice in one object", position) from None
    except _NotANumberError as constant:
        at = text.find(str(constant), position)
        raise _BreaksError(f"{constant} is not a JSON number", at if at >= 0 else position) from None


def _expected(error: json.JSONDecodeError, text: str) -> str:
    what = error.msg[:1].lower() + error.msg[1:]
    what = what.replace("expecting", "expected").replace(
        "property name enclosed in double quotes", "a key in double quotes"
    )
    if what.startswith("invalid control character"):
        return "a raw line break or control character stands in a string (write it as an escape)"
    if what.startswith("illegal trailing comma"):
        return "a comma stands before the closing bracket"
    if what.startswith("unterminated string"):
        return "a string that is never closed begins"
    what = what.removesuffix(" at")
    return f"{what}, {_found(text, error.pos)}" if what.startswith("expected") else what


def _found(text: str, position: int) -> str:
    if position >= len(text):
        return "the text ends"
    word = _WORD.match(text, position)
    return f"found {quote(word.group()[:30] if word else text[position])}"


def _not_an_object(text: str, start: int) -> Broken:
    value, _ = _value(text, start)
    if isinstance(value, list):
        return Broken(
            "The JSON of the call is an array; write one JSON object "
            '{"name": ..., "arguments": {...}} in each pair of tags.'
        )
    return Broken(
        f'The JSON of the call must be an object {{"name": ..., "arguments": {{...}}}}, got {_kind_at(text, start)}.'
    )


def _check_depth(text: str) -> None:
    depth = 0
    for match in _NESTING.finditer(text):
        if match.group(1):
            depth += 1
            if depth > MAX_DEPTH:
                raise _BreaksError(f"values are nested more than {MAX_DEPTH} deep", match.start())
        elif match.group(2):
            depth = max(0, depth - 1)


def _lone_surrogate(text: str) -> int | None:
    """Position of an escape that is half of a surrogate pair (no UTF-8 text can hold it)."""
    if "\\u" not in text:
        return None
    high: re.Match[str] | None = None
    for match in _ESCAPE.finditer(text):
        code = int(match.group(1), 16) if match.group(1) else 0
        low = 0xDC00 <= code <= 0xDFFF
        if high is not None:
            if not low or match.start() != high.end():
                return high.start()
            high = None
        elif low:
            return match.start()
        elif 0xD800 <= code <= 0xDBFF:
            high = match
    return high.start() if high is not None else None


def _skip(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _kind_at(text: str, position: int) -> str:
    """What a valid value is, by its first character."""
    kinds = {'"': "a string", "[": "an array", "{": "an object", "n": "null", "t": "a boolean", "f": "a boolean"}
    return kinds.get(text[position], "a number")


def _place(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return f"line {line}, column {column}"
