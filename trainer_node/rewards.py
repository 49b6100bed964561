"""Rewards: what a finished trajectory is worth.

Owns the worker threads that compute them, so that a slow reward never holds up the event loop. Invariant: a reward that
raises, runs too long or gives no finite number is a masked sample with its cause, never a zero.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import importlib
import math
from collections.abc import Callable

from node_runtime.errors import EXIT_USAGE, NodeError
from trainer_node.tasks import Task
from trainer_node.trajectory import Trajectory

# (task, text of the last turn, the trajectory) → reward
RewardFunction = Callable[[Task, str, Trajectory], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    reward: float


@dataclasses.dataclass(frozen=True, slots=True)
class Unscored:
    """`cause` goes into counters: reward_error, reward_timeout, reward_not_finite."""

    cause: str
    reason: str


def exact_answer(task: Task, answer: str, trajectory: Trajectory) -> float:
    """1 where the text of the last turn, stripped, equals the task's answer; else 0."""
    return 1.0 if task.answer is not None and answer.strip() == task.answer.strip() else 0.0


def load_reward(name: str) -> RewardFunction:
    """`exact_answer`, or `module:function` from the import path. Raises NodeError (exit code 2)."""
    if name == "exact_answer":
        return exact_answer
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise NodeError(f"trainer.reward is {name!r}: it must be exact_answer or module:function", EXIT_USAGE)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise NodeError(
            f"trainer.reward {name!r}: module {module_name} cannot be imported ({type(error).__name__}: {error})",
            EXIT_USAGE,
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise NodeError(f"trainer.reward {name!r}: {module_name} has no function {function_name}", EXIT_USAGE)
    return function


class Rewarder:
    """Scores trajectories on worker threads."""

    def __init__(self, function: RewardFunction, *, workers: int, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="reward")

    async def score(self, task: Task, trajectory: Trajectory) -> Scored | Unscored:
        """Never raises for what the reward does. After a timeout its thread is left to end by itself."""
        future = asyncio.get_running_loop().run_in_executor(
            self._pool, self._function, task, trajectory.answer, trajectory
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                value = await future
        except TimeoutError as error:
            if not future.cancelled():
                return Unscored("reward_error", f"the reward of task {task.id} raised TimeoutError: {error}")
            return Unscored("reward_timeout", f"the reward of task {task.id} took more than {self._timeout_s:g} s")
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            return Unscored("reward_error", f"the reward of task {task.id} raised {type(error).__name__}: {error}")
        try:
            reward = float(value)
        except (TypeError, ValueError):
            return Unscored("reward_error", f"the reward of task {task.id} gave {value!r}, it must give a number")
        if not math.isfinite(reward):
            return Unscored("reward_not_finite", f"the reward of task {task.id} gave {reward}, it must be finite")
        return Scored(reward)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
