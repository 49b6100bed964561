"""The outcome table holds for every value of the enum and for those it does not know."""

from __future__ import annotations

import pytest
from fermata.v1 import tool_pb2
from fermata.v1.tool_pb2 import Fault, Outcome, Started
from hypothesis import given
from hypothesis import strategies as st

from node_runtime import outcomes
from node_runtime.outcomes import Retry

MODEL, INFRA, CALLER, NONE = (
    tool_pb2.FAULT_MODEL,
    tool_pb2.FAULT_INFRA,
    tool_pb2.FAULT_CALLER,
    tool_pb2.FAULT_NONE,
)
UNKNOWN = 4711

# The table as the design states it.
TABLE = {
    "OK": (NONE, Retry.NEVER, True),
    "TOOL_ERROR": (MODEL, Retry.NEVER, True),
    "INVALID_ARGS": (MODEL, Retry.NEVER, True),
    "UNKNOWN_TOOL": (MODEL, Retry.NEVER, True),
    "PARSE_ERROR": (MODEL, Retry.NEVER, True),
    "TOOL_TIMEOUT": (MODEL, Retry.NEVER, True),
    "TOOL_OOM": (MODEL, Retry.NEVER, True),
    "ATTEMPT_TIMEOUT": (INFRA, Retry.IDEMPOTENT, False),
    "DEADLINE_EXCEEDED": (INFRA, Retry.IDEMPOTENT, False),
    "OVERLOADED": (INFRA, Retry.PUSHBACK, False),
    "QUEUE_TIMEOUT": (INFRA, Retry.PUSHBACK, False),
    "QUOTA_EXCEEDED": (INFRA, Retry.PUSHBACK, False),
    "NOT_STARTED": (INFRA, Retry.ANY, False),
    "INDETERMINATE": (INFRA, Retry.IDEMPOTENT, False),
    "SESSION_LOST": (INFRA, Retry.NEVER, False),
    "RESULT_EXPIRED": (INFRA, Retry.NEVER, False),
    "KEY_CONFLICT": (INFRA, Retry.NEVER, False),
    "FENCED": (INFRA, Retry.NEVER, False),
    "CANCELLED": (CALLER, Retry.NEVER, False),
    "PERMISSION": (INFRA, Retry.NEVER, False),
    "INTERNAL": (INFRA, Retry.NEVER, False),
    "PROTOCOL": (INFRA, Retry.NEVER, False),
    "UNSPECIFIED": (INFRA, Retry.NEVER, False),
}


def test_the_table_has_every_value_of_the_enum() -> None:
    assert set(outcomes.TABLE) == set(Outcome.values()) == set(outcomes.FAULT_OF)
    assert {f"OUTCOME_{name}" for name in TABLE} == set(Outcome.keys())


@pytest.mark.parametrize("name", TABLE)
def test_a_row(name: str) -> None:
    fault, retry, shown = TABLE[name]
    outcome = Outcome.Value(f"OUTCOME_{name}")
    assert outcomes.fault_of(outcome) == fault
    assert outcomes.retry_class(outcome) is retry
    assert outcomes.shown_to_model(outcome) is shown
    assert outcomes.outcome_name(outcome) == name


@given(st.sampled_from(Outcome.values()), st.sampled_from([*Fault.values(), 99]))
def test_only_what_ran_or_timed_out_can_be_the_models_fault_on_somebodys_word(outcome: int, fault: int) -> None:
    resolved = outcomes.fault_of(outcome, fault)
    if resolved == MODEL and outcomes.FAULT_OF[outcome] != MODEL:
        assert outcome in (tool_pb2.OUTCOME_ATTEMPT_TIMEOUT, tool_pb2.OUTCOME_DEADLINE_EXCEEDED)
    assert resolved in (NONE, MODEL, INFRA, CALLER)
    assert (resolved == NONE) == (outcome == tool_pb2.OUTCOME_OK)
    # A fault of infrastructure never reaches the model.
    assert not (resolved == INFRA and outcomes.shown_to_model(outcome, fault))


def test_where_a_sender_may_say_otherwise() -> None:
    assert outcomes.fault_of(tool_pb2.OUTCOME_DEADLINE_EXCEEDED, MODEL) == MODEL
    assert outcomes.fault_of(tool_pb2.OUTCOME_TOOL_ERROR, INFRA) == INFRA
    assert outcomes.fault_of(tool_pb2.OUTCOME_CANCELLED, INFRA) == INFRA
    assert outcomes.fault_of(tool_pb2.OUTCOME_OVERLOADED, MODEL) == INFRA
    assert outcomes.fault_of(tool_pb2.OUTCOME_OK, INFRA) == NONE
    # A time-out that is the model's own fault is its answer, not a reason to try again.
    assert not outcomes.is_retryable(tool_pb2.OUTCOME_ATTEMPT_TIMEOUT, MODEL, idempotent=True)


def test_an_unknown_outcome_goes_by_its_fault() -> None:
    assert outcomes.fault_of(UNKNOWN, MODEL) == MODEL
    assert outcomes.shown_to_model(UNKNOWN, MODEL)
    assert outcomes.fault_of(UNKNOWN, CALLER) == CALLER
    for fault in (INFRA, NONE, tool_pb2.FAULT_UNSPECIFIED, 99):
        assert outcomes.fault_of(UNKNOWN, fault) == INFRA
        assert not outcomes.shown_to_model(UNKNOWN, fault)
    assert outcomes.is_retryable(UNKNOWN, INFRA, idempotent=True)
    assert not outcomes.is_retryable(UNKNOWN, INFRA, idempotent=False)
    assert outcomes.outcome_name(UNKNOWN) == "OUTCOME_4711"
    assert outcomes.fault_name(99) == "FAULT_99"
    assert outcomes.fault_name(INFRA) == "INFRA"


@given(
    st.sampled_from([*Outcome.values(), UNKNOWN]),
    st.sampled_from([*Fault.values(), 99]),
    st.sampled_from(Started.values()),
)
def test_a_tool_that_is_not_idempotent_is_retried_only_where_no_start_is_claimed(
    outcome: int, fault: int, started: int
) -> None:
    again = outcomes.is_retryable(outcome, fault, idempotent=False, started=started)
    if again:
        assert started not in (tool_pb2.STARTED_YES, tool_pb2.STARTED_UNKNOWN)
        assert outcomes.is_retryable(outcome, fault, idempotent=True, started=started)
    if outcomes.retry_class(outcome, fault) is Retry.NEVER:
        assert not outcomes.is_retryable(outcome, fault, idempotent=True, started=started)


def test_make_final() -> None:
    final = outcomes.make_final(tool_pb2.OUTCOME_NOT_STARTED, detail="d", started=tool_pb2.STARTED_NO, retry_after_ms=0)
    assert (final.fault, final.started, final.detail) == (INFRA, tool_pb2.STARTED_NO, "d")
    assert final.HasField("retry_after_ms")
    assert not final.parts
    text = outcomes.make_final(tool_pb2.OUTCOME_OK, text="408")
    assert (text.fault, text.parts[0].text, text.total_bytes, text.invalid_utf8) == (NONE, b"408", 3, False)
    assert outcomes.make_final(tool_pb2.OUTCOME_OK, text=b"\xff").invalid_utf8
    assert outcomes.make_final(tool_pb2.OUTCOME_OK, text="\ud800").invalid_utf8


def test_each_model_fault_has_a_sentence() -> None:
    for outcome in Outcome.values():
        if outcome != tool_pb2.OUTCOME_OK and MODEL in outcomes.TABLE[outcome].may_say:
            assert outcomes.model_sentence(outcome) != outcomes.model_sentence(UNKNOWN)
