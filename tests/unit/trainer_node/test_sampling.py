"""Groups and the ids of what is sampled: which tasks a restart makes up for, and names that are used once."""

from __future__ import annotations

import asyncio
from typing import Any

from node_runtime.spans import SpanWriter
from tests.unit.trainer_node.builders import sample, version
from trainer_node.dispatcher import Masked
from trainer_node.masks import MaskTally
from trainer_node.sampling import GroupSampler, RolloutStats, Sampler
from trainer_node.settings import TrainerSettings
from trainer_node.tasks import Task, TaskStream

TASKS = [Task(f"task{i}", (("user", "x"),), (), None, "k", {}) for i in range(8)]


def settings() -> TrainerSettings:
    return TrainerSettings.model_validate(
        {
            "model": "m", "train_tasks": "t", "rollout_nodes": ("a:1",),
            "groups_per_step": 2, "group_size": 2, "in_flight_groups": 4,
        }
    )  # fmt: skip


class HeldSampler:
    """Samples of a task come once the test lets that task go."""

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = {}

    async def sample(self, task: Task, **_: Any) -> Any:
        await self.gates.setdefault(task.id, asyncio.Event()).wait()
        return sample()


async def test_a_restart_makes_up_for_exactly_the_groups_that_were_not_taken() -> None:
    held = HeldSampler()
    stream = TaskStream(TASKS, seed=3)
    order = [TaskStream(TASKS, seed=3, frontier=i).next().id for i in range(8)]
    groups = GroupSampler(held, stream, settings(), lambda: version(1))  # type: ignore[arg-type]
    running = asyncio.create_task(groups.run())
    try:
        for late in (1, 2, 3):  # the first is held by its tools
            async with asyncio.timeout(5):
                while order[late] not in held.gates:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            held.gates[order[late]].set()
            assert (await groups.take()).task_id == order[late]
        async with asyncio.timeout(5):
            while groups.in_flight < 4:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert groups.frontier == 7
        assert groups.untrained == (0, 4, 5, 6)
        resumed = TaskStream(TASKS, 3, groups.frontier, groups.untrained)
        assert [resumed.next().id for _ in range(5)] == [order[i] for i in (0, 4, 5, 6, 7)]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Recorder:
    """A dispatcher that only notes what it was asked to run."""

    run_id = "run"

    def __init__(self) -> None:
        self.started: list[str] = []

    async def run(self, start: Any, *, deadline_s: float) -> Masked:
        self.started.append(start.trajectory_id)
        return Masked("INTERNAL", "", "not run")


async def test_the_next_trainer_of_a_run_uses_no_trajectory_id_again() -> None:
    recorder, masks = Recorder(), MaskTally(share_limit=1, window=8, min_samples=8)
    for suffix in ("-a", "-b"):
        sampler = Sampler(recorder, None, settings(), masks, SpanWriter(None, "t"), suffix=suffix)  # type: ignore[arg-type]
        for evaluation in (True, False):
            await sampler.sample(TASKS[0], group_id="g", min_version=version(1), temperature=1.0, evaluation=evaluation)
    assert len(set(recorder.started)) == 4


def test_a_finish_reason_of_a_newer_node_is_counted_by_its_number() -> None:
    import dataclasses

    stats = RolloutStats()
    stats.add(sample().trajectory)
    stats.add(dataclasses.replace(sample().trajectory, reason=77))  # type: ignore[arg-type]
    assert stats.reasons == {"STOP": 1, "REASON_77": 1}
