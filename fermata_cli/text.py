"""Text that is not ours, made fit to be drawn: on a terminal, and in a picture.

Invariant: what `printable` returns moves no cursor, changes no colour, opens no markup and stays on one line.
"""

from __future__ import annotations

import unicodedata

_UNSHOWN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def printable(text: str | bytes, limit: int = 200, *, keep_lines: bool = False) -> str:
    """Control, format and undefined characters as escapes, at most `limit` of them. `keep_lines`: \\n and \\t stay."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    kept = {"\n", "\t"} if keep_lines else set()
    shown: list[str] = []
    length = 0
    for character in text:
        piece = character
        if character not in kept and unicodedata.category(character) in _UNSHOWN:
            piece = character.encode("unicode_escape", "backslashreplace").decode()
        length += len(piece)
        if length > limit:
            return "".join(shown)[: max(0, limit - 1)] + "…"
        shown.append(piece)
    return "".join(shown)
