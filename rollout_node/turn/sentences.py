"""Sentences for the model: what was wrong with its call, bounded and printable whatever the model wrote.

Invariant: no sentence is longer than a few hundred characters, and what it quotes is cut and escaped.
"""

import difflib
from collections.abc import Collection

QUOTE_LIMIT = 60
NAMES_LIMIT = 12
SENTENCE_LIMIT = 600


def quote(text: str, limit: int = QUOTE_LIMIT) -> str:
    """The text in double quotes, cut to ``limit`` characters, unprintable characters escaped."""
    out = []
    for char in text[:limit]:
        if char in '"\\':
            out.append("\\" + char)
        elif char.isprintable():
            out.append(char)
        else:
            code = ord(char)
            out.append(
                {10: "\\n", 13: "\\r", 9: "\\t"}.get(code) or (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
            )
    more = f'" (and {len(text) - limit} more characters)' if len(text) > limit else '"'
    return '"' + "".join(out) + more


def bounded(sentence: str) -> str:
    """A sentence made elsewhere (a schema validator may echo values), escaped and cut."""
    flat = "".join(char if char.isprintable() else quote(char)[1:-1] for char in sentence[:SENTENCE_LIMIT])
    return flat if len(sentence) <= SENTENCE_LIMIT else flat + " …"


def nearest_first(name: str, names: Collection[str]) -> list[str]:
    """The names ordered by likeness to ``name``, equals by alphabet."""
    wanted = name[:200].casefold()

    def distance(candidate: str) -> tuple[float, str]:
        return (-difflib.SequenceMatcher(None, wanted, candidate.casefold(), autojunk=False).ratio(), candidate)

    return sorted(names, key=distance)


def list_names(names: list[str]) -> str:
    shown = ", ".join(
        name if name.isprintable() and len(name) <= QUOTE_LIMIT else quote(name) for name in names[:NAMES_LIMIT]
    )
    return shown + (f" and {len(names) - NAMES_LIMIT} more" if len(names) > NAMES_LIMIT else "")


def unknown_tool(name: str, names: Collection[str]) -> str:
    if not names:
        return f"There is no tool {quote(name)}; no tools are offered here, answer without calling one."
    return f"There is no tool {quote(name)}; the tools are: {list_names(nearest_first(name, names))}."
