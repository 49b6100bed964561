import sys
import threading
import types

import pytest

from node_runtime.errors import NodeError
from tests.unit.trainer_node.builders import trajectory
from trainer_node.rewards import Rewarder, Scored, Unscored, exact_answer, load_reward
from trainer_node.tasks import Task

TASK = Task("a", (("user", "12*34"),), ("calculator",), "408", "one_call", {})


@pytest.mark.parametrize(
    ("answer", "reward"), [("408", 1.0), (" 408\n", 1.0), ("4080", 0.0), ("", 0.0), ("the answer is 408", 0.0)]
)
def test_exact_answer(answer, reward):
    assert exact_answer(TASK, answer, trajectory()) == reward


def test_loading_by_name(monkeypatch):
    module = types.ModuleType("my_rewards")
    module.half = lambda task, answer, trajectory: 0.5
    module.number = 3
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    assert load_reward("exact_answer") is exact_answer
    assert load_reward("my_rewards:half") is module.half


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_reward", "must be exact_answer or module:function"),
        (":x", "must be exact_answer or module:function"),
        ("no.such.module:f", "cannot be imported"),
        ("math:no_such_function", "has no function no_such_function"),
        ("math:pi", "has no function pi"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_one_sentence(name, says):
    with pytest.raises(NodeError, match=says) as caught:
        load_reward(name)
    assert caught.value.exit_code == 2


async def score(function, timeout_s=5.0, **fields):
    rewarder = Rewarder(function, workers=1, timeout_s=timeout_s)
    try:
        return await rewarder.score(TASK, trajectory(**fields))
    finally:
        rewarder.close()


async def test_it_runs_off_the_event_loop():
    threads = []

    def reward(task, answer, trajectory):
        threads.append(threading.current_thread())
        return 1

    assert await score(reward) == Scored(1.0)
    assert threads != [threading.current_thread()]


def stop(*_):
    raise StopIteration


def leave(*_):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "cause", "says"),
    [
        (lambda *_: 1 / 0, "reward_error", "ZeroDivisionError"),
        (lambda *_: None, "reward_error", "gave None, it must give a number"),
        (lambda *_: "many", "reward_error", "it must give a number"),
        (lambda *_: float("nan"), "reward_not_finite", "must be finite"),
        (stop, "reward_error", "StopIteration"),
        (leave, "reward_error", "SystemExit"),
    ],
)
async def test_a_reward_that_fails_is_masked_with_its_cause_and_never_nought(function, cause, says):
    result = await score(function)
    assert isinstance(result, Unscored)
    assert result.cause == cause
    assert says in result.reason
    assert "task a" in result.reason


async def test_a_reward_that_hangs_costs_its_time_once():
    hang = threading.Event()
    rewarder = Rewarder(
        lambda task, answer, trajectory: hang.wait() if answer == "hang" else 1.0, workers=1, timeout_s=0.1
    )
    try:
        result = await rewarder.score(TASK, trajectory(answer="hang"))
        assert result == Unscored("reward_timeout", "the reward of task a took more than 0.1 s")
        assert await rewarder.score(TASK, trajectory()) == Scored(1.0)
    finally:
        hang.set()
        rewarder.close()
