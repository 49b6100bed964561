"""The retry policy on virtual time: what follows which end of an attempt."""

from __future__ import annotations

import random

import pytest
from fermata.v1 import tool_pb2
from hypothesis import given
from hypothesis import strategies as st

from node_runtime.outcomes import make_final
from tool_gateway.policy import (
    MAX_DETAIL,
    MAX_REJOINS,
    Absent,
    AttemptEnd,
    Done,
    Finished,
    InstanceGone,
    Lost,
    NotSent,
    Rejoin,
    Retry,
    RetryPolicy,
    TimedOut,
    ToolTraits,
    cut_output,
    normalise,
    timeout_final,
    vouch,
)
from tool_gateway.settings import RetrySettings

ONCE = ToolTraits(idempotent=False)
AGAIN = ToolTraits(idempotent=True)
MODEL = ToolTraits(idempotent=False, timeout_fault=tool_pb2.FAULT_MODEL)
NO, YES, UNKNOWN = tool_pb2.STARTED_NO, tool_pb2.STARTED_YES, tool_pb2.STARTED_UNKNOWN


def policy() -> RetryPolicy:
    return RetryPolicy(RetrySettings(), random.Random(1))


def finished(outcome: tool_pb2.Outcome, started: tool_pb2.Started = UNKNOWN, **fields: object) -> Finished:
    return Finished(make_final(outcome, detail="d", started=started, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("end", [NotSent("down"), Absent(tombstoned=True), finished(tool_pb2.OUTCOME_NOT_STARTED, NO)])
@pytest.mark.parametrize("traits", [ONCE, AGAIN])
def test_a_proven_not_started_is_retried_for_any_tool(end: AttemptEnd, traits: ToolTraits) -> None:
    assert isinstance(policy().after(end, traits, attempt=1, remaining_s=60), Retry)
    last = policy().after(end, traits, attempt=3, remaining_s=60)
    assert isinstance(last, Done)
    assert (last.final.outcome, last.final.fault) == (tool_pb2.OUTCOME_NOT_STARTED, tool_pb2.FAULT_INFRA)


@pytest.mark.parametrize("end", [InstanceGone("gone"), Absent(tombstoned=False), TimedOut("slow")])
def test_what_may_have_started_is_retried_only_where_the_tool_is_idempotent(end: AttemptEnd) -> None:
    assert isinstance(policy().after(end, AGAIN, attempt=1, remaining_s=60), Retry)
    decision = policy().after(end, ONCE, attempt=1, remaining_s=60)
    assert isinstance(decision, Done)
    assert decision.final.fault == tool_pb2.FAULT_INFRA
    assert decision.final.started == UNKNOWN


def test_a_lost_connection_is_first_rejoined_for_less_long_where_another_run_does_no_harm() -> None:
    settings = RetrySettings()
    assert policy().after(Lost("cut"), ONCE, attempt=3, remaining_s=60) == Rejoin(settings.rejoin_s)
    assert policy().after(Lost("cut"), AGAIN, attempt=1, remaining_s=60) == Rejoin(settings.rejoin_idempotent_s)
    assert policy().after(Lost("cut"), ONCE, attempt=1, remaining_s=3) == Rejoin(3)
    given_up = policy().after(Lost("cut"), ONCE, attempt=1, remaining_s=60, rejoins=MAX_REJOINS)
    assert isinstance(given_up, Done)
    assert given_up.final.outcome == tool_pb2.OUTCOME_INDETERMINATE


def test_what_the_tool_or_the_model_did_is_never_retried() -> None:
    for outcome in (tool_pb2.OUTCOME_OK, tool_pb2.OUTCOME_TOOL_ERROR, tool_pb2.OUTCOME_INVALID_ARGS):
        assert isinstance(policy().after(finished(outcome, YES), AGAIN, attempt=1, remaining_s=60), Done)


def test_pushback_is_respected_and_not_waited_for_past_the_deadline() -> None:
    pushed = finished(tool_pb2.OUTCOME_OVERLOADED, NO, retry_after_ms=4000)
    decision = policy().after(pushed, ONCE, attempt=1, remaining_s=60)
    assert isinstance(decision, Retry)
    assert decision.delay_s == 4.0
    assert isinstance(policy().after(pushed, ONCE, attempt=1, remaining_s=3.9), Done)


def test_a_model_timeout_is_told_and_a_silent_backend_is_not_the_models_fault() -> None:
    slow = policy().after(TimedOut("slow"), MODEL, attempt=1, remaining_s=60)
    silent = policy().after(TimedOut("silent", heartbeat=True), MODEL, attempt=1, remaining_s=60)
    assert isinstance(slow, Done)
    assert isinstance(silent, Done)
    assert slow.final.fault == tool_pb2.FAULT_MODEL
    assert slow.final.parts[0].text == b"The tool did not answer in time."
    assert (silent.final.fault, len(silent.final.parts)) == (tool_pb2.FAULT_INFRA, 0)
    assert timeout_final(tool_pb2.OUTCOME_DEADLINE_EXCEEDED, MODEL, "d", infra=True).fault == tool_pb2.FAULT_INFRA


@given(attempt=st.integers(1, 100))
def test_pauses_are_full_jitter_under_a_doubling_ceiling(attempt: int) -> None:
    drawn = [policy().pause(attempt) for _ in range(5)]
    assert all(0 <= pause <= min(5.0, 0.2 * 2 ** (attempt - 1)) for pause in drawn)


@given(
    end=st.one_of(
        st.builds(NotSent, st.just("d")),
        st.builds(Lost, st.just("d"), st.booleans()),
        st.builds(TimedOut, st.just("d"), st.booleans()),
        st.builds(Absent, st.booleans(), st.booleans()),
        st.builds(InstanceGone, st.just("d")),
        st.builds(finished, st.sampled_from(tool_pb2.Outcome.values()), st.sampled_from(tool_pb2.Started.values())),
    ),
    attempt=st.integers(1, 5),
    remaining_s=st.floats(0, 100),
)
def test_a_tool_that_is_not_idempotent_runs_again_only_where_no_start_is_claimed(
    end: AttemptEnd, attempt: int, remaining_s: float
) -> None:
    decision = policy().after(end, ONCE, attempt=attempt, remaining_s=remaining_s)
    if isinstance(decision, Retry):
        assert policy().final_of(end, ONCE).started == NO
        assert attempt < 3
        assert decision.delay_s < remaining_s
    if isinstance(decision, Done):
        assert decision.final.outcome != tool_pb2.OUTCOME_UNSPECIFIED
        assert decision.final.fault != tool_pb2.FAULT_UNSPECIFIED


def test_a_backends_final_is_vouched_for_only_as_far_as_the_table_goes() -> None:
    lie = tool_pb2.Final(outcome=tool_pb2.OUTCOME_INTERNAL, fault=tool_pb2.FAULT_MODEL)
    assert normalise(lie, ONCE).fault == tool_pb2.FAULT_INFRA
    assert normalise(tool_pb2.Final(), ONCE).outcome == tool_pb2.OUTCOME_PROTOCOL
    unasked = normalise(tool_pb2.Final(outcome=tool_pb2.OUTCOME_CANCELLED, fault=tool_pb2.FAULT_CALLER), ONCE)
    assert unasked.fault == tool_pb2.FAULT_INFRA
    assert "nobody had asked" in unasked.detail
    assert normalise(tool_pb2.Final(outcome=tool_pb2.OUTCOME_TOOL_ERROR), ONCE).parts[0].text == b"The tool failed."


@given(texts=st.lists(st.text(max_size=20), max_size=4), most=st.integers(0, 60))
def test_cut_output_keeps_whole_characters_within_the_bound(texts: list[str], most: int) -> None:
    final = tool_pb2.Final(parts=[tool_pb2.ContentPart(text=text.encode("utf-8", "ignore")) for text in texts])
    size = sum(len(part.text) for part in final.parts)
    cut = cut_output(final, most)
    kept = b"".join(part.text for part in cut.parts)
    assert len(kept) <= max(most, 0) or size <= most
    assert b"".join(part.text for part in final.parts).startswith(kept)
    kept.decode()
    assert cut.truncated == (size > most)
    if cut.truncated:
        assert cut.total_bytes == size


def test_what_cannot_be_split_is_left_out_of_a_cut_output() -> None:
    final = tool_pb2.Final(parts=[tool_pb2.ContentPart(inline=b"x" * 20)], structured_json=b"{}", total_bytes=999)
    cut = cut_output(final, 10)
    assert (len(cut.parts), cut.truncated, cut.total_bytes, cut.structured_json) == (0, True, 999, b"{}")
    assert cut_output(final, 1).structured_json == b""


def test_a_text_that_is_all_there_is_not_said_to_lack_bytes_where_its_structured_twin_is_left_out() -> None:
    text = b'["' + b"x" * 20 + b'"]'
    final = tool_pb2.Final(parts=[tool_pb2.ContentPart(text=text)], structured_json=text, total_bytes=len(text))
    cut = cut_output(final, 30)
    assert (cut.parts[0].text, cut.structured_json) == (text, b"")
    assert (cut.truncated, cut.total_bytes) == (True, len(text))
    del final.parts[:]
    final.total_bytes = 0
    assert cut_output(final, 10).total_bytes == len(text)


def test_a_backends_detail_is_a_sentence_and_not_a_book() -> None:
    told = normalise(tool_pb2.Final(outcome=tool_pb2.OUTCOME_INTERNAL, detail="d" * 100_000), ONCE)
    assert len(told.detail) == MAX_DETAIL + 3


def test_not_started_speaks_for_every_attempt() -> None:
    """An idempotent tool: the first attempt was lost, the last refused. It may have started, at the first."""
    refused = make_final(tool_pb2.OUTCOME_NOT_STARTED, detail="refused", started=tool_pb2.STARTED_NO)
    assert vouch(refused, unproven=False) is refused
    doubtful = vouch(refused, unproven=True)
    assert doubtful.outcome == tool_pb2.OUTCOME_INDETERMINATE
    assert doubtful.started == tool_pb2.STARTED_UNKNOWN
    assert "refused" in doubtful.detail
    full = make_final(tool_pb2.OUTCOME_OVERLOADED, detail="full", started=tool_pb2.STARTED_NO)
    assert vouch(full, unproven=True).outcome == tool_pb2.OUTCOME_OVERLOADED
    assert vouch(full, unproven=True).started == tool_pb2.STARTED_UNKNOWN
    ran = make_final(tool_pb2.OUTCOME_OK, detail="", started=tool_pb2.STARTED_YES)
    assert vouch(ran, unproven=True) is ran
