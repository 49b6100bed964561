"""The tool ``search``: a query in, one line per hit out."""

from __future__ import annotations

import time
from typing import Annotated

import pydantic

from node_runtime.logs import get_logger
from tool_backend.errors import BackendStartError
from tool_backend.search.corpus import read_corpus
from tool_backend.search.index import SearchIndex
from tool_backend.settings import SearchSettings
from tool_backend.tool import Tool, ToolOptions

_log = get_logger(__name__)

DESCRIPTION = "Search the documents by words. Gives the best hits, one per line, as title: text."
NO_HIT = "no results"

Query = Annotated[str, pydantic.Field(max_length=1000)]
TopK = Annotated[int, pydantic.Field(ge=1, le=20)]


def make_search(settings: SearchSettings) -> Tool:
    """The tool over its corpus, read and indexed here."""
    if settings.corpus is None:
        raise BackendStartError("the search tool needs a corpus; set backend.search.corpus to a JSON Lines file")
    began = time.monotonic()
    index = SearchIndex(read_corpus(settings.corpus))
    _log.info("corpus indexed", documents=len(index), seconds=round(time.monotonic() - began, 1))

    def search(query: Query, top_k: TopK = settings.top_k) -> str:
        """Args:
        query: the words to look for
        top_k: how many hits at most
        """
        hits = index.search(query, top_k)
        return "\n".join(_line(f"{document.title}: {document.text}") for document, _ in hits) or NO_HIT

    return Tool(
        search,
        description=DESCRIPTION,
        options=ToolOptions(read_only=True, default_timeout_s=30.0, max_timeout_s=60.0, max_output_bytes=256 * 1024),
    )


def _line(text: str) -> str:
    return " ".join(text.split())
