"""From tasks to scored samples and groups: what keeps the rollout nodes busy while the trainer trains.

Invariant: at most `open_groups` groups are being generated or wait to be trained; every sample is counted in the mask
tally once; a masked sample is replaced by a fresh one, as often as its group may.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable

from fermata.v1 import rollout_pb2 as pb

from node_runtime.segments import Version
from node_runtime.spans import Span, SpanWriter
from trainer_node import metrics
from trainer_node.dispatcher import Dispatcher, Masked
from trainer_node.masks import MaskTally
from trainer_node.rewards import Rewarder, Unscored
from trainer_node.settings import TrainerSettings
from trainer_node.tasks import Task, TaskStream
from trainer_node.trajectory import Group, Sample, Trajectory, reason_name


@dataclasses.dataclass(slots=True)
class RolloutStats:
    """Sums over finished trajectories."""

    trajectories: int = 0
    model_tokens: int = 0
    generate_us: int = 0
    tool_wait_us: int = 0
    queue_us: int = 0
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, trajectory: Trajectory) -> None:
        self.trajectories += 1
        self.model_tokens += trajectory.model_tokens
        self.generate_us += trajectory.generate_us
        self.tool_wait_us += trajectory.tool_wait_us
        self.queue_us += trajectory.queue_us
        self.reasons[reason_name(trajectory.reason)] += 1

    @property
    def parked_share(self) -> float | None:
        """Share of the trajectories' time that they spent waiting for tools."""
        total = self.generate_us + self.tool_wait_us + self.queue_us
        return self.tool_wait_us / total if total else None


class Sampler:
    """Runs one task once: start, trajectory, reward."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        rewarder: Rewarder,
        settings: TrainerSettings,
        masks: MaskTally,
        spans: SpanWriter,
        *,
        suffix: str = "",
    ) -> None:
        """`suffix` ends every trajectory's id: a run whose id outlives its trainer must not use one twice, because call
        keys are made of them and gateways still know the predecessor's."""
        self.stats = RolloutStats()
        self.eval_stats = RolloutStats()
        self._dispatcher = dispatcher
        self._rewarder = rewarder
        self._settings = settings
        self._masks = masks
        self._spans = spans
        self._suffix = suffix
        self._numbers = itertools.count(1)

    async def sample(
        self,
        task: Task,
        *,
        group_id: str,
        min_version: Version,
        temperature: float,
        evaluation: bool = False,
        tools: bool = True,
    ) -> Sample | Masked:
        """`tools=False`: none is offered, whatever the task names."""
        number = next(self._numbers)
        limits = self._settings.limits
        start = pb.RunRequest.Start(
            run_id=self._dispatcher.run_id,
            trajectory_id=f"{'e' if evaluation else 't'}{number:06d}{self._suffix}",
            order=number,
            min_weight_version=min_version.to_proto(),
            sampling=pb.Sampling(
                temperature=temperature, max_tokens_per_turn=limits.max_tokens_per_turn, logprobs=True
            ),
            mode=pb.MODE_SUSPEND,
            tools=task.tools if tools else (),
            limits=pb.Limits(
                max_turns=limits.max_turns,
                max_context_tokens=limits.max_context_tokens,
                max_calls_per_turn=limits.max_calls_per_turn,
                max_consecutive_invalid_calls=limits.max_consecutive_invalid_calls,
                max_calls=limits.max_calls,
            ),
            group_id=group_id,
            eval=evaluation,
            messages=[to_message(role, content) for role, content in task.messages],
        )
        ended = await self._dispatcher.run(start, deadline_s=limits.deadline_s)
        if isinstance(ended, Masked):
            return self._mask(task, ended)
        trajectory = ended.trajectory
        (self.eval_stats if evaluation else self.stats).add(trajectory)
        begun = time.time()
        scored = await self._rewarder.score(task, trajectory)
        self._spans.record(
            Span(
                kind="reward",
                node=self._spans.node,
                start=begun,
                end=time.time(),
                trajectory=trajectory.trajectory_id,
                generation=trajectory.generation,
                outcome="OK" if not isinstance(scored, Unscored) else scored.cause,
            )
        )
        if isinstance(scored, Unscored):
            return self._mask(task, Masked(scored.cause, "", scored.reason))
        self._masks.add_scored(task.kind)
        return Sample(trajectory, scored.reward, task.id, task.kind)

    def _mask(self, task: Task, masked: Masked) -> Masked:
        self._masks.add_masked(
            cause=masked.cause, tool=masked.tool, task_id=task.id, kind=task.kind, reason=masked.reason
        )
        metrics.MASKED_SAMPLES.labels(cause=masked.cause).inc()
        return masked


def to_message(role: str, content: str) -> pb.ChatMessage:
    message = pb.ChatMessage(role=role)
    message.parts.add(text=content.encode(), mime="text/plain")
    return message


class GroupSampler:
    """Keeps groups in flight and hands out the finished ones, in the order in which they finish."""

    def __init__(
        self, sampler: Sampler, tasks: TaskStream, settings: TrainerSettings, version: Callable[[], Version]
    ) -> None:
        self._sampler = sampler
        self._tasks = tasks
        self._settings = settings
        self._version = version
        self._slots = asyncio.Semaphore(settings.open_groups)
        # Never full: a group keeps its slot until it is taken.
        self._ready: asyncio.Queue[Group] = asyncio.Queue(settings.open_groups)
        self._numbers = itertools.count(1)
        self._untaken: set[int] = set()  # positions of tasks whose groups are open or ready
        self.in_flight = 0

    @property
    def ready(self) -> int:
        return self._ready.qsize()

    @property
    def frontier(self) -> int:
        """Where to go on after a restart, once what is `untrained` has been made up for."""
        return self._tasks.frontier

    @property
    def untrained(self) -> tuple[int, ...]:
        """Positions of tasks before the frontier whose groups nobody has taken yet."""
        return tuple(sorted({*self._untaken, *self._tasks.untrained}))

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._slots.acquire()
                position, task = self._tasks.take()
                self._untaken.add(position)
                tasks.create_task(self._group(position, task))

    async def take(self) -> Group:
        """The next finished group; its place is free for another."""
        group = await self._ready.get()
        self._untaken.discard(group.position)
        self._slots.release()
        return group

    async def _group(self, position: int, task: Task) -> None:
        group = Group(f"g{next(self._numbers):05d}", task.id, task.kind, [], position=position)
        self.in_flight += 1
        try:
            async with asyncio.TaskGroup() as samples:
                for _ in range(self._settings.group_size):
                    samples.create_task(self._one(task, group))
        finally:
            self.in_flight -= 1
        self._ready.put_nowait(group)

    async def _one(self, task: Task, group: Group) -> None:
        """One place of a group: filled, or left empty once the group's refills are used up."""
        while True:
            version = self._version()
            oldest = max(1, version.number - self._settings.max_staleness)
            result = await self._sampler.sample(
                task,
                group_id=group.group_id,
                min_version=Version(version.lineage, oldest),
                temperature=self._settings.temperature,
            )
            if isinstance(result, Sample):
                group.samples.append(result)
                return
            group.masked += 1
            if group.masked > self._settings.masked.max_refills:
                return
