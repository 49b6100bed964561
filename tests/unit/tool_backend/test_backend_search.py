"""The search tool: names found as spelled, a fixed order, and one sentence for a corpus that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fermata.v1 import tool_pb2
from hypothesis import given
from hypothesis import strategies as st

from tool_backend.errors import BackendStartError
from tool_backend.search.corpus import Document, read_corpus
from tool_backend.search.index import SearchIndex, words
from tool_backend.search.tool import make_search
from tool_backend.settings import SearchSettings
from tool_backend.testing import call, text


def documents(*pairs: tuple[str, str]) -> list[Document]:
    return [Document(str(number), title, body) for number, (title, body) in enumerate(pairs)]


def ids(index: SearchIndex, query: str, top_k: int = 20) -> list[str]:
    return [document.id for document, _ in index.search(query, top_k)]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_made_up_name_is_found_by_exactly_that_name() -> None:
    index = SearchIndex(
        documents(("zorblas", "417"), ("zorbla", "418"), ("zorbl", "419"), ("the", "a stop word"), ("Is", "another"))
    )
    assert ids(index, "zorbla") == ["1"]
    assert ids(index, "ZORBLA?") == ["1"]
    assert ids(index, "the") == ["3"]
    assert ids(index, "is") == ["4"]
    assert ids(index, "zor") == []


def test_titles_are_searched_and_come_before_mentions() -> None:
    index = SearchIndex(documents(("other", "mentions quendor once"), ("quendor", "is the subject here")))
    assert ids(index, "quendor") == ["1", "0"]


def test_equal_scores_keep_the_order_of_the_corpus() -> None:
    index = SearchIndex(documents(*[("same", "words")] * 50))
    assert ids(index, "words", 20) == [str(number) for number in range(20)]
    assert ids(index, "words", 3) == ["0", "1", "2"]


def test_what_shares_no_word_is_no_hit() -> None:
    index = SearchIndex(documents(("one", "two"), ("three", "four")))
    assert ids(index, "five") == []
    assert ids(index, "!?") == []
    assert ids(index, "") == []
    assert ids(index, "two five") == ["0"]


def test_one_document_alone_is_found() -> None:
    assert ids(SearchIndex(documents(("only", "one"))), "only") == ["0"]


name = st.text("abcdefgh", min_size=1, max_size=6)


@given(st.lists(st.tuples(name, st.lists(name, max_size=5).map(" ".join)), min_size=1, max_size=30), name, st.data())
def test_every_word_of_every_document_finds_it(pairs: list[tuple[str, str]], missing: str, data: st.DataObject) -> None:
    corpus = documents(*pairs)
    index = SearchIndex(corpus)
    for document in corpus:
        for word in words(f"{document.title} {document.text}"):
            assert document.id in ids(index, word, len(corpus))
    hits = index.search(data.draw(st.lists(name, max_size=4).map(" ".join)), 5)
    assert [score for _, score in hits] == sorted((score for _, score in hits), reverse=True)
    assert all(score > 0 for _, score in hits)


def test_as_a_tool(tmp_path: Path) -> None:
    corpus = write(
        tmp_path / "corpus.jsonl",
        {"id": "1", "title": "zorbla", "text": "The code of zorbla\nis 417."},
        "",
        {"id": "2", "title": "quendor", "text": "Knows zorbla.", "extra": 1},
    )
    search = make_search(SearchSettings(corpus=corpus, top_k=1))
    assert text(call(search, {"query": "zorbla"})) == "zorbla: The code of zorbla is 417."
    assert text(call(search, {"query": "zorbla", "top_k": 2})).splitlines()[1] == "quendor: Knows zorbla."
    assert text(call(search, {"query": "zorbla", "top_k": 2.0})).count("\n") == 1
    assert text(call(search, {"query": "nobody"})) == "no results"
    for wrong in ({"query": "x", "top_k": 0}, {"query": "x", "top_k": 21}, {"query": "x", "k": 1}, {}):
        assert call(search, wrong).outcome == tool_pb2.OUTCOME_INVALID_ARGS
    assert json.loads(search.spec.input_schema_json)["properties"]["top_k"]["default"] == 1


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"id": "2", "title": ', "not JSON"),
        ("[1]", "got list"),
        ('{"id": "2", "title": "t"}', "'text' is missing"),
        ('{"id": 2, "title": "t", "text": "x"}', "'id' must be a string, got 2"),
        ('{"id": "1", "title": "t", "text": "x"}', "id '1' is used in line 1"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, part: str) -> None:
    path = write(tmp_path / "corpus.jsonl", {"id": "1", "title": "t", "text": "x"}, "", line)
    with pytest.raises(BackendStartError) as caught:
        read_corpus(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert part in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_corpus_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(BackendStartError, match=r"missing\.jsonl cannot be read: No such file"):
        read_corpus(tmp_path / "missing.jsonl")
    with pytest.raises(BackendStartError, match="cannot be read: Is a directory"):
        read_corpus(tmp_path)
    with pytest.raises(BackendStartError, match="holds no documents"):
        read_corpus(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(BackendStartError, match=r"set backend\.search\.corpus"):
        make_search(SearchSettings())
    with pytest.raises(BackendStartError, match="hold no words"):
        SearchIndex(documents(("...", "!")))


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"id": "1", "title": "\xff", "text": "x"}\n')
    with pytest.raises(BackendStartError, match="line 1: this is not JSON"):
        read_corpus(path)
