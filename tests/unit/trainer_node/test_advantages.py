import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_node.advantages import group_advantages


def test_group_std_by_hand():
    # mean 0.25, population deviation sqrt(3/16)
    result = group_advantages([1.0, 0.0, 0.0, 0.0], epsilon=0.0)
    deviation = math.sqrt(3 / 16)
    assert result.mean == 0.25
    assert result.advantages == pytest.approx((0.75 / deviation, *[-0.25 / deviation] * 3))
    assert result.dropped is None


def test_without_normalisation_only_the_mean_is_taken():
    assert group_advantages([3.0, 1.0], normalisation="none").advantages == (1.0, -1.0)


@pytest.mark.parametrize("rewards", [[0.0] * 8, [1.0] * 8, [0.1] * 3, [1 / 3] * 7])
def test_a_group_without_variance_is_dropped(rewards):
    result = group_advantages(rewards)
    assert (result.advantages, result.dropped) == (None, "zero_variance")


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_a_group_of_less_than_two_is_dropped(rewards):
    assert group_advantages(rewards).dropped == "too_small"


def test_masked_samples_do_not_enter_mean_or_deviation():
    # A group of eight where three were masked is a group of five, not one with three zeros.
    assert group_advantages([1, 1, 0, 0, 0], epsilon=0).mean == pytest.approx(0.4)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16))
def test_advantages_are_centred_and_of_unit_deviation(rewards):
    result = group_advantages(rewards, epsilon=0.0)
    if result.advantages is None or result.deviation < 1e-6:
        return
    assert sum(result.advantages) == pytest.approx(0, abs=1e-6)
    assert sum(a * a for a in result.advantages) / len(rewards) == pytest.approx(1, rel=1e-6)
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert [result.advantages[i] for i in order] == sorted(result.advantages)
