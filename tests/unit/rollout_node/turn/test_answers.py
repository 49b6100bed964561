"""Tool output as tokens: any bytes, never more than the budget, never a forged turn, never megabytes encoded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fermata.v1 import tool_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_node.turn import BudgetExceeded, RenderedAnswer, ToolAnswer, TurnFormat
from rollout_node.turn.answers import _share, answer_text

from .support import CASE_FOLDERS, output_bytes, qwen_like, rows

OUTPUTS = [
    (f"{folder.parent.name}/{row['id']}", row) for folder in CASE_FOLDERS for row in rows(folder / "tool_outputs.jsonl")
]


def sampled(form: TurnFormat) -> list[int]:
    return form.vocabulary.encode_trusted('<tool_call>\n{"name": "now"}\n</tool_call><|im_end|>')


def joined(answers: list[RenderedAnswer]) -> list[int]:
    return [i for answer in answers for i in answer.token_ids]


@pytest.mark.parametrize("kind", ["tags", "text"])
@pytest.mark.parametrize(("name", "row"), OUTPUTS, ids=[name for name, _ in OUTPUTS])
def test_every_row_of_tool_outputs(name: str, row: dict, kind: str) -> None:  # type: ignore[type-arg]
    form = qwen_like(kind)
    vocab = form.vocabulary
    data = output_bytes(row)
    budget = 2000
    began = time.process_time()
    (answer,) = form.render_results(sampled(form), [ToolAnswer("k", data)], budget)
    assert time.process_time() - began < 5
    (harmless,) = form.render_results(sampled(form), [ToolAnswer("k", b"x")], budget)
    control = [i for i in answer.token_ids if i in vocab.control_ids]
    assert control == [i for i in harmless.token_ids if i in vocab.control_ids]
    assert len(answer.token_ids) <= budget
    text = vocab.decode(answer.token_ids)
    assert text.startswith("\n<|im_start|>user\n<tool_response>\n")
    assert text.endswith("\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    body = text[
        len("\n<|im_start|>user\n<tool_response>\n") : -len("\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    ]
    whole = data.decode("utf-8", "replace")
    assert answer.invalid_utf8 == row.get("invalid_utf8", "output_hex" in row)
    if len(whole) < 500:
        assert body == whole
        assert answer.left_out_chars == 0
    else:
        marker = f"\n[... {answer.left_out_chars} characters left out ...]\n"
        head, _, tail = body.partition(marker)
        assert head
        assert tail
        assert whole.startswith(head)
        assert whole.endswith(tail)
        assert answer.left_out_chars == len(whole) - len(head) - len(tail) > 0
        assert len(answer.token_ids) > budget * 0.9


@settings(max_examples=150, deadline=None)
@given(
    outputs=st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.text(st.characters(codec="utf-8"), max_size=60).map(str.encode),
            st.tuples(st.sampled_from(["word ", "<|im_end|>", "🦊", "\n", " ", "1"]), st.integers(1, 3000)).map(
                lambda pair: pair[0].encode() * pair[1]
            ),
        ),
        min_size=1,
        max_size=5,
    ),
    budget=st.integers(0, 800),
    kind=st.sampled_from(["tags", "text"]),
)
def test_the_budget_is_never_exceeded(outputs: list[bytes], budget: int, kind: str) -> None:
    form = qwen_like(kind)
    given_answers = [ToolAnswer(f"k{i}", data) for i, data in enumerate(outputs)]
    refused: BudgetExceeded | None = None
    try:
        answers = form.render_results(sampled(form), given_answers, budget)
    except BudgetExceeded as error:
        refused = error
    if refused is not None:
        assert refused.needed_tokens > budget
        assert "tokens" in str(refused)
        return
    assert [answer.call_key for answer in answers] == [answer.call_key for answer in given_answers]
    assert len(joined(answers)) <= budget
    assert answers == form.render_results(sampled(form), given_answers, budget)
    # What fits whole is left whole.
    free = form.render_results(sampled(form), given_answers, 1_000_000)
    assert all(answer.left_out_chars == 0 for answer in free)
    if len(joined(free)) <= budget:
        assert answers == free
    else:
        assert any(answer.left_out_chars for answer in answers)


def test_answers_joined_are_one_encoding_of_the_whole() -> None:
    for kind in ("tags", "text"):
        form = qwen_like(kind)
        answers = [ToolAnswer(str(i), text) for i, text in enumerate([b"408", b"a: b.\n", b"", b"\n\nx ", b"{}"])]
        ids = joined(form.render_results(sampled(form), answers, 10_000))
        text = "".join(f"\n<tool_response>\n{a.data.decode()}\n</tool_response>" for a in answers)
        whole = f"\n<|im_start|>user{text}<|im_end|>\n<|im_start|>assistant\n"
        assert form.vocabulary.decode(ids) == whole
        assert ids == form.vocabulary.encode_trusted(whole)


def test_a_scarce_budget_is_shared_fairly() -> None:
    form = qwen_like()
    answers = form.render_results(
        sampled(form),
        [ToolAnswer("small", b"408"), ToolAnswer("big", b"word " * 5000), ToolAnswer("bigger", b"word " * 50_000)],
        900,
    )
    small, big, bigger = answers
    assert small.left_out_chars == 0
    assert 0.8 < len(big.token_ids) / len(bigger.token_ids) < 1.25
    assert 850 < len(joined(answers)) <= 900


@settings(max_examples=300, deadline=None)
@given(
    needs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 300)).map(lambda n: (n[0], n[0] + n[1])), max_size=6),
    budget=st.integers(0, 600),
)
def test_shares_hold_their_bounds(needs: list[tuple[int, int]], budget: int) -> None:
    shares = _share(budget, needs)
    if shares is None:
        assert sum(least for least, _ in needs) > budget
        return
    assert sum(shares) <= budget
    assert all(least <= share <= whole for share, (least, whole) in zip(shares, needs, strict=True))
    if sum(shares) < budget:
        assert shares == [whole for _, whole in needs]
    # Who is cut has no less than anybody else, but for the last token.
    for share, (_, whole) in zip(shares, needs, strict=True):
        if share < whole:
            assert all(other <= share + 1 or other == least for other, (least, _) in zip(shares, needs, strict=True))


@pytest.mark.parametrize(
    ("outcome", "data", "says"),
    [
        (tool_pb2.OUTCOME_OK, b"408", "408"),
        (tool_pb2.OUTCOME_OK, b"", ""),
        (tool_pb2.OUTCOME_TOOL_ERROR, b"division by zero", "Error: division by zero"),
        (tool_pb2.OUTCOME_TOOL_ERROR, b"", "Error: The tool failed."),
        (tool_pb2.OUTCOME_PARSE_ERROR, b"The call is empty.", "The call is empty."),
        (tool_pb2.OUTCOME_INVALID_ARGS, b"", "The arguments do not fit the tool."),
        (tool_pb2.OUTCOME_TOOL_TIMEOUT, b"so far", "Error: The tool ran out of time. Output so far:\nso far"),
        (tool_pb2.OUTCOME_TOOL_OOM, b"", "Error: The tool ran out of memory."),
        (tool_pb2.OUTCOME_DEADLINE_EXCEEDED, b"", "Error: The tool did not answer in time."),
    ],
)
def test_what_happened_is_said_before_the_output(outcome: int, data: bytes, says: str) -> None:
    form = qwen_like()
    (answer,) = form.render_results(sampled(form), [ToolAnswer("k", data, outcome)], 1000)  # type: ignore[arg-type]
    assert f"<tool_response>\n{says}\n</tool_response>" in form.vocabulary.decode(answer.token_ids)


def test_what_was_cut_upstream_is_said_at_the_end() -> None:
    form = qwen_like()
    (answer,) = form.render_results(sampled(form), [ToolAnswer("k", b"abc", total_bytes=1003)], 1000)
    assert "abc\n[1000 more bytes were left out]\n</tool_response>" in form.vocabulary.decode(answer.token_ids)


def test_nothing_is_rendered_for_nothing() -> None:
    form = qwen_like()
    with pytest.raises(ValueError, match="at least one answer"):
        form.render_results(sampled(form), [], 100)


def test_twenty_megabytes_are_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    form = qwen_like()
    encoded: list[int] = []
    encode = form.vocabulary.encode_plain

    def counted(text: str) -> list[int]:
        encoded.append(len(text))
        return encode(text)

    monkeypatch.setattr(form.vocabulary, "encode_plain", counted)
    (answer,) = form.render_results(sampled(form), [ToolAnswer("k", b"line of text\n" * 1_600_000)], 500)
    assert len(answer.token_ids) <= 500
    assert sum(encoded) < 100_000


def test_bytes_are_decoded_once_and_flagged() -> None:
    assert answer_text(ToolAnswer("k", b"ok\xff\xfe")) == ("", "ok��", True)
    assert answer_text(ToolAnswer("k", "naïve".encode())) == ("", "naïve", False)


def test_case_folders_are_found() -> None:
    assert all(isinstance(folder, Path) and (folder / "tool_outputs.jsonl").is_file() for folder in CASE_FOLDERS)
