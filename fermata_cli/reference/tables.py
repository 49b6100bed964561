"""Tables in Markdown. Invariant: whatever a cell holds, the table keeps its columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [_line(head), _line(["---"] * len(head)), *map(_line, rows)]


def code(text: str) -> str:
    """Set as code; nothing where there is nothing."""
    return f"`{text}`" if text else ""


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
