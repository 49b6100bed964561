"""When a call that the ledger holds as running may start again: at its own instance, or anywhere, or not at all."""

from __future__ import annotations

import pytest
from fermata.v1 import tool_pb2

from tool_gateway.ledger import AttemptRecord
from tool_gateway.recovery import RecoveryDecision, StartAnywhere, decide, open_attempts
from tool_gateway.takeover import Answer, Found, Join, NotThere, Start, Undecidable, Unreachable

NO, UNKNOWN = tool_pb2.STARTED_NO, tool_pb2.STARTED_UNKNOWN


def attempt(number: int, instance: str, started: tool_pb2.Started = UNKNOWN) -> AttemptRecord:
    return AttemptRecord(number, instance, f"{instance}:1", 0.0, started=started)


def absent(instance: str, *, tombstoned: bool = False, **fields: float | bool) -> NotThere:
    given = {"uptime_s": 0.01, "age_s": 5.0, "retention_s": 600.0} | fields
    return NotThere(instance, tombstoned, **given)  # type: ignore[arg-type]


def ask(answers: dict[str, Answer], spared: str | None, *, join_only: bool = False) -> RecoveryDecision:
    attempts = [attempt(n, instance) for n, instance in enumerate(answers, start=1)]
    return decide(attempts, answers, spared=spared, join_only=join_only, margin_s=0.25)


def test_a_call_that_is_found_is_joined_whatever_else_is_known() -> None:
    assert ask({"a": Unreachable("down"), "b": Found()}, None) == Join("b")
    assert ask({"b": Found()}, "b", join_only=True) == Join("b")


def test_the_instance_that_was_named_may_start_it_however_young_it_is() -> None:
    assert ask({"a": absent("a")}, "a") == Start("a:1", "a")
    assert ask({"a": absent("a", tombstoned=True), "b": absent("b")}, "b") == Start("b:1", "b")


def test_once_every_instance_has_laid_a_tombstone_it_may_start_anywhere() -> None:
    both = {name: absent(name, tombstoned=True) for name in "ab"}
    assert ask({**both}, None) == StartAnywhere()
    assert ask({}, None) == StartAnywhere()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Unreachable("nobody answers there"), "the instance a at a:1, which cannot be asked: nobody answers there"),
        (absent("a", expired=True), "was run by the instance a at a:1, which no longer holds its result"),
        (absent("a", age_s=599.9), "remembers keys for 600.0 s: it may have run the call and forgotten it"),
        (absent("a"), "may still start at the instance a at a:1, which laid no tombstone"),
    ],
)
def test_one_instance_that_is_not_disproved_is_enough(answer: Answer, why: str) -> None:
    decision = ask({"a": answer, "b": absent("b", tombstoned=True)}, "b")
    assert isinstance(decision, Undecidable)
    assert why in decision.detail


def test_an_instance_that_was_not_asked_is_not_disproved() -> None:
    decision = decide([attempt(1, "a")], {}, spared="a", join_only=False, margin_s=0.25)
    assert isinstance(decision, Undecidable)


def test_what_may_only_be_joined_is_never_started() -> None:
    assert isinstance(ask({"a": absent("a")}, None, join_only=True), Undecidable)
    assert isinstance(ask({}, None, join_only=True), Undecidable)


def test_of_each_instance_the_last_attempt_counts_and_one_that_was_refused_does_not() -> None:
    attempts = [attempt(1, "a", NO), attempt(2, "b"), attempt(3, "a"), attempt(4, "c", NO)]
    assert [one.number for one in open_attempts(attempts, foreign=False)] == [2, 3]
    assert [one.number for one in open_attempts(attempts[:1], foreign=False)] == []
    # Another gateway's request may still be on its way to where ours was refused.
    assert [one.number for one in open_attempts(attempts[:1], foreign=True)] == [1]
