"""Rewards: what a finished trajectory is worth.

Owns the worker threads that compute them, so that a slow reward never holds up the event loop. Invariant: a reward that
raises, runs too long or gives no finite number is a masked sample with its cause, never a zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

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
        self._slots = asyncio.Semaphore(workers)
        self._threads = _Threads(workers)

    async def score(self, task: Task, trajectory: Trajectory) -> Scored | Unscored:
        """Never raises for what the reward does. The time counts from when a thread takes it up."""
        async with self._slots:
            job = self._threads.submit(lambda: self._function(task, trajectory.answer, trajectory))
            try:
                done, _ = await asyncio.wait((job.future,), timeout=self._timeout_s)
                if not done:
                    self._threads.abandon(job)
            finally:
                # Cancelled or too late: whatever the thread still gives, nobody waits for it.
                job.future.cancel()
        if not done:
            return Unscored("reward_timeout", f"the reward of task {task.id} took more than {self._timeout_s:g} s")
        error = job.future.exception()
        if error is not None:
            return Unscored("reward_error", f"the reward of task {task.id} raised {type(error).__name__}: {error}")
        value = job.future.result()
        try:
            reward = float(value)
        except (TypeError, ValueError):
            return Unscored("reward_error", f"the reward of task {task.id} gave {value!r}, it must give a number")
        if not math.isfinite(reward):
            return Unscored("reward_not_finite", f"the reward of task {task.id} gave {reward}, it must be finite")
        return Scored(reward)

    def close(self) -> None:
        self._threads.close()


@dataclasses.dataclass(slots=True)
class _Job:
    work: Callable[[], object]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    abandoned: bool = False


class _Threads:
    """Daemon threads: a reward that hangs must not keep the process from ending, as an executor's threads would."""

    def __init__(self, count: int) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._count = count
        for _ in range(count):
            self._begin()

    def submit(self, work: Callable[[], object]) -> _Job:
        loop = asyncio.get_running_loop()
        job = _Job(work, loop, loop.create_future())
        self._jobs.put(job)
        return job

    def abandon(self, job: _Job) -> None:
        """Its thread is taken for lost and replaced; should it come back, it ends."""
        job.abandoned = True
        self._begin()

    def close(self) -> None:
        for _ in range(self._count):
            self._jobs.put(None)

    def _begin(self) -> None:
        threading.Thread(target=self._work, name="reward", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            result: object = None
            error: BaseException | None = None
            try:
                result = job.work()
            except BaseException as raised:  # noqa: BLE001 - a user's function may raise anything, SystemExit too
                error = raised
            if job.abandoned:
                return
            # The loop may be closed by now: then nobody waits for this.
            with contextlib.suppress(RuntimeError):
                job.loop.call_soon_threadsafe(_settle, job.future, result, error)


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
        return
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        # A future cannot carry these: SystemExit would end the loop, StopIteration is refused.
        error = RuntimeError(f"{type(error).__name__}: {error}")
    future.set_exception(error)
