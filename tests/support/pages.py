"""Fenced blocks of Markdown pages, so that what a page shows is run as it stands there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```\s*$", re.DOTALL | re.MULTILINE)
_NAMED = re.compile(r"^# (?P<name>[\w./-]+\.\w+)\n")


@dataclass(frozen=True, slots=True)
class Block:
    """`language` is the first word after the fence, `note` the rest."""

    language: str
    note: str
    body: str

    @property
    def file_name(self) -> str | None:
        """A block whose first line is "# name.ext" is that file."""
        named = _NAMED.match(self.body)
        return named["name"] if named else None


def blocks(page: Path, heading: str | None = None) -> list[Block]:
    """The blocks of a page, or of the part below one heading of the second level."""
    text = page.read_text(encoding="utf-8")
    if heading is not None:
        _, found, text = text.partition(f"\n## {heading}\n")
        assert found, f"{page} has no heading {heading!r}"
        text = text.partition("\n## ")[0]
    return [Block(*m["info"].strip().partition(" ")[::2], m["body"]) for m in _FENCE.finditer(text)]


def without_blocks(page: Path) -> str:
    """The prose."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))
