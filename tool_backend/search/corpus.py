"""Documents from a JSON Lines file. Whatever is wrong is found at start, with file and line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tool_backend.errors import BackendStartError


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One document of the corpus."""

    id: str
    title: str
    text: str


def read_corpus(path: Path) -> list[Document]:
    """All documents of a file, in its order. Empty lines are passed over; ids must differ."""
    documents = []
    line_of_id: dict[str, int] = {}
    number = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                document = _document(line, f"{path}, line {number}")
                if (first := line_of_id.setdefault(document.id, number)) != number:
                    raise BackendStartError(
                        f"{path}, line {number}: id '{document.id}' is used in line {first} already"
                    )
                documents.append(document)
    except OSError as error:
        reason = error.strerror or error
        raise BackendStartError(
            f"the search corpus {path} cannot be read: {reason}; set backend.search.corpus"
        ) from error
    if not documents:
        raise BackendStartError(f"the search corpus {path} holds no documents; it needs at least one line")
    return documents


def _document(line: bytes, where: str) -> Document:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise BackendStartError(f"{where}: this is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BackendStartError(f"{where}: a document is an object with id, title and text, got {type(row).__name__}")
    for field in ("id", "title", "text"):
        if not isinstance(row.get(field), str):
            what = "is missing" if field not in row else f"must be a string, got {json.dumps(row[field])[:40]}"
            raise BackendStartError(f"{where}: '{field}' {what}; a document has id, title and text, all strings")
    return Document(row["id"], row["title"], row["text"])
