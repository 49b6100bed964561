"""BM25 over documents held in memory.

Words are runs of letters, digits and underscores, lower-cased: nothing is stemmed and no word is left out, so a made-up
name is found by exactly that name. A title counts twice, because a document about something should come before one that
mentions it. Equal scores keep the order of the corpus; a document without a word of the query is no hit.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import bm25s
import numpy as np

from tool_backend.errors import BackendStartError
from tool_backend.search.corpus import Document

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets its own level to DEBUG
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The words of a text, lower-cased."""
    return _WORD.findall(text.casefold())


class SearchIndex:
    """Immutable once built; safe to use from many threads."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = tuple(documents)
        vocabulary: dict[str, int] = {}
        ids = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in words(f"{each.title} {each.title} {each.text}")]
            for each in self._documents
        ]
        if not vocabulary:
            raise BackendStartError("the documents of the search corpus hold no words")
        self._vocabulary = vocabulary
        self._bm25 = bm25s.BM25(method="lucene")
        self._bm25.index((ids, dict(vocabulary)), show_progress=False)

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, query: str, top_k: int) -> list[tuple[Document, float]]:
        """Up to ``top_k`` documents with their scores, best first."""
        known = sorted({self._vocabulary[word] for word in words(query) if word in self._vocabulary})
        if not known:
            return []
        scores = np.asarray(self._bm25.get_scores_from_ids(known))
        hits = np.flatnonzero(scores > 0)
        if len(hits) > top_k:
            # All that reach the score of the last place, so that ties are decided by the order below alone.
            worst = np.partition(scores[hits], len(hits) - top_k)[len(hits) - top_k]
            hits = hits[scores[hits] >= worst]
        best = hits[np.argsort(-scores[hits], kind="stable")][:top_k]
        return [(self._documents[number], float(scores[number])) for number in best]
