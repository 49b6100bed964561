"""Untrusted text made safe to pass through a chat template: its control tokens are broken by a mark.

Invariant: after ``protect`` no control token stands in the text, none can arise where the text meets what is around it,
and removing the mark gives the text back. Text without control tokens is left alone, so it renders as it always did.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class Guard:
    """For one vocabulary's control tokens."""

    def __init__(self, control: Iterable[str]) -> None:
        tokens = sorted({token for token in control if token.strip()}, key=lambda token: (-len(token), token))
        self._tokens = tokens
        self._longest = max((len(token) for token in tokens), default=0)
        self._inside = re.compile("(?=" + "|".join(map(re.escape, tokens)) + ")") if tokens else None
        self._suffixes = frozenset(token[k:] for token in tokens for k in range(1, len(token)))
        self._prefixes = frozenset(token[:k] for token in tokens for k in range(1, len(token)))

    def protect(self, text: str, mark: str) -> str:
        """The text with ``mark`` inside each control token and where one could be completed from outside."""
        if self._inside is None or not text:
            return text
        places = {match.start() + 1 for match in self._inside.finditer(text)}
        # Templates trim: what counts as the edge of the text is the edge without white space too.
        for start in {0, len(text) - len(text.lstrip())}:
            if self._completes(text[start:]):
                places.add(start)
        for end in {len(text), len(text.rstrip())}:
            if any(text[end - k : end] in self._prefixes for k in range(1, min(end, self._longest) + 1)):
                places.add(end)
        for place in sorted(places, reverse=True):
            text = text[:place] + mark + text[place:]
        return text

    def _completes(self, text: str) -> bool:
        """Whether the text can be the end or the middle of a control token that began before it."""
        if not text:
            return False
        if len(text) < self._longest and any(text in token[1:] for token in self._tokens):
            return True
        return any(text[:k] in self._suffixes for k in range(1, min(len(text), self._longest) + 1))


def pick_mark(texts: Iterable[str]) -> str:
    """A short word that stands in none of the texts, the same for the same texts.

    Letters and digits only, so that JSON encoding and trimming leave it alone; it cannot overlap with itself.
    """
    texts = list(texts)
    number = 0
    while any(f"fm{number}" in text for text in texts):
        number += 1
    return f"fm{number}q"


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON-like value with every string in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_strings(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(entry, change) for entry in value]
    return value


def strings_in(value: Any) -> list[str]:
    """Every string in a JSON-like value, keys too."""
    found: list[str] = []
    map_strings(value, lambda text: found.append(text) or text)  # type: ignore[func-returns-value]
    return found


def neutral(text: str, number: int) -> str:
    """A harmless word with the white space of ``text`` around it."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    return f"{text[:start]}x{number}{text[start + len(core) :]}"
