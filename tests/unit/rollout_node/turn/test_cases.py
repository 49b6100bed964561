"""Every row of the case files gives what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout_node.turn import check
from rollout_node.turn.check import CaseFileError, check_cases, format_results

from .support import CASE_FOLDERS, OWN


@pytest.mark.parametrize("folder", CASE_FOLDERS, ids=lambda path: path.parent.name)
def test_every_row_of_a_case_file_holds(folder: Path) -> None:
    results = check_cases(folder / "tools.json", folder / "turns.jsonl")
    assert results
    assert all(result.passed and not result.note for result in results), format_results(results, only_misses=True)


# What only the control tokens can tell: with tags in plain text the two ways to sample them look the same.
_ONLY_BY_ID = {
    "all-tags-as-text",
    "think-as-text",
}


@pytest.mark.parametrize("folder", CASE_FOLDERS, ids=lambda path: path.parent.name)
def test_rows_hold_where_the_tags_are_plain_text(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from .support import vocabulary

    text = vocabulary("text")
    monkeypatch.setattr(check, "_vocabulary", lambda _model: (text, (text.control["<|im_end|>"],)))
    results = check_cases(folder / "tools.json", folder / "turns.jsonl")
    missed = {result.case_id for result in results if not result.passed}
    assert missed <= _ONLY_BY_ID, format_results([r for r in results if not r.passed])
    assert {r.case_id for r in results if r.note} <= {
        "close-tag-as-data",
        "close-tag-as-text-after-json",
        "control-close-in-string",
        "control-close-tag",
        "literal-close-tag",
        "stop-token-in-string",
        *_ONLY_BY_ID,
    }


def test_a_miss_says_what_was_expected(tmp_path: Path) -> None:
    case = {
        "id": "x",
        "completion": "<tool_call>{}</tool_call>",
        "finish": "stop",
        "calls": [{"tool": "now", "args": "{}"}],
    }
    (tmp_path / "c.jsonl").write_text(json.dumps(case) + "\n")
    (result,) = check_cases(OWN / "tools.json", tmp_path / "c.jsonl")
    assert not result.passed
    assert "expected OK, got PARSE_ERROR" in " ".join(result.misses)
    assert "1 cases, 1 missed" in format_results([result])


def test_numbers_must_be_spelled_as_expected(tmp_path: Path) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"place": "x", "days": 2.0}}</tool_call>'
    case = {"completion": text, "calls": [{"tool": "weather", "args": '{"place": "x", "days": 2}'}]}
    (tmp_path / "c.jsonl").write_text(json.dumps(case) + "\n")
    (result,) = check_cases(OWN / "tools.json", tmp_path / "c.jsonl")
    assert not result.passed


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "c.jsonl:2 is not JSON"),
        ("[]", "c.jsonl:2 is not a case"),
        ('{"completion": "x"}', "c.jsonl:2 is not a case"),
        ('{"completion": "x", "calls": [], "finish": "eos"}', "c.jsonl:2 is not a case"),
        ('{"completion": "x", "calls": [], "format": "xml"}', "the formats are: hermes"),
        ('{"pieces": [{"ctrl": "x"}], "calls": []}', "pieces are"),
        ('{"pieces": ["x"], "calls": []}', "a piece that is neither"),
        ('{"completion": "<tool_call></tool_call>", "calls": [{"outcome": "BAD"}]}', "there is no outcome 'BAD'"),
        ('{"completion": "<tool_call></tool_call>", "calls": [{}]}', "an expected call has"),
    ],
)
def test_a_broken_case_file_is_one_sentence(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "c.jsonl").write_text("\n" + line + "\n")
    with pytest.raises(CaseFileError) as caught:
        check_cases(OWN / "tools.json", tmp_path / "c.jsonl")
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", "must be a JSON array"),
        ("[", "is not JSON"),
        ('[{"description": "x"}]', "tool 0"),
        ('[{"name": "a"}, {"name": "a"}]', "tool 1"),
        (None, "cannot be read"),
    ],
)
def test_a_broken_tools_file_is_one_sentence(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(CaseFileError, match=says):
        check_cases(tmp_path / "t.json", OWN / "turns.jsonl")
