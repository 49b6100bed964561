"""Admission: holds back only while the engine is busy and parked prefixes would be pushed out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_node.admission import AdmissionPolicy, EngineView, Verdict

POLICY = AdmissionPolicy(busy_requests=4, max_trajectories=10)


@pytest.mark.parametrize(
    ("view", "verdict"),
    [
        (EngineView(0, 0, 10_000, 1000), Verdict.ADMIT),  # idle: whatever is parked
        (EngineView(3, 900, 10_000, 1000), Verdict.ADMIT),  # not busy
        (EngineView(4, 400, 400, 1000), Verdict.HOLD),  # 400 + 400 + 100 + 200 > 1000
        (EngineView(4, 400, 300, 1000), Verdict.ADMIT),  # fits exactly
        (EngineView(4, 5000, 0, 1000), Verdict.ADMIT),  # nothing parked: nothing to push out
        (EngineView(400, 5000, 5000, 0), Verdict.ADMIT),  # size unknown: the engine's own queue decides
    ],
)
def test_cases(view: EngineView, verdict: Verdict) -> None:
    assert POLICY.admit_new(view, prompt_tokens=100, turn_tokens=200) is verdict


numbers = st.integers(0, 10_000)


@given(numbers, numbers, numbers, numbers, numbers, numbers)
def test_an_idle_engine_never_waits_and_more_room_never_holds(
    running: int, live: int, parked: int, capacity: int, prompt: int, turn: int
) -> None:
    verdict = POLICY.admit_new(EngineView(running, live, parked, capacity), prompt, turn)
    if running < POLICY.busy_requests:
        assert verdict is Verdict.ADMIT
    if verdict is Verdict.ADMIT and capacity:
        assert POLICY.admit_new(EngineView(running, live, parked, capacity + 1), prompt, turn) is Verdict.ADMIT


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_returning_before_new_and_then_the_trainers_order(a: int, b: int) -> None:
    priority = AdmissionPolicy.priority
    assert priority(a, returning=True) < priority(b, returning=False)
    assert all(-(2**63) <= priority(a, returning=r) < 2**63 for r in (True, False))
    if a <= b:
        assert priority(a, returning=True) <= priority(b, returning=True)
        assert priority(a, returning=False) <= priority(b, returning=False)


def test_the_bound_and_its_pushback() -> None:
    assert POLICY.has_room(9)
    assert not POLICY.has_room(10)
    assert POLICY.retry_after_s(10, 2.0) == 2.0
    assert POLICY.retry_after_s(30, 2.0) == 6.0
