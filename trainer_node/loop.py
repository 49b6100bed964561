"""The training loop: wait for groups, train on them, give the nodes the new weights, now and then evaluate.

Asynchronous: generation goes on during all of it. Invariants: a sample's age is checked when it is consumed; the policy
changes only in `train`, and right after that every node has proven the change or the run has stopped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from node_runtime.errors import EXIT_FAILED, NodeError
from node_runtime.logs import get_logger
from trainer_node import metrics
from trainer_node.advantages import group_advantages
from trainer_node.dispatcher import Dispatcher
from trainer_node.evaluation import EvalResult, Evaluator
from trainer_node.masks import MaskTally
from trainer_node.publish import Publisher
from trainer_node.record import RunRecord
from trainer_node.sampling import GroupSampler, RolloutStats
from trainer_node.settings import TrainerSettings
from trainer_node.tasks import Task
from trainer_node.trajectory import Group, Trajectory, consume
from trainer_node.update import Item, PolicyUpdate, StepReport
from trainer_node.worker import ModelThread

log = get_logger(__name__)


@dataclasses.dataclass(slots=True)
class Batch:
    """What one step consumes."""

    items: list[Item] = dataclasses.field(default_factory=list)
    rewards: list[float] = dataclasses.field(default_factory=list)
    ages: list[int] = dataclasses.field(default_factory=list)
    groups: int = 0
    dropped_groups: dict[str, int] = dataclasses.field(default_factory=dict)
    stale: int = 0

    @property
    def reward_mean(self) -> float:
        return sum(self.rewards) / len(self.rewards) if self.rewards else float("nan")


class TrainingLoop:
    """Steps from `first_step` to the last one, or until a target is reached."""

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        groups: GroupSampler,
        stats: RolloutStats,
        update: PolicyUpdate,
        thread: ModelThread,
        publisher: Publisher,
        dispatcher: Dispatcher,
        masks: MaskTally,
        record: RunRecord,
        evaluator: Evaluator,
        eval_tasks: Sequence[Task],
        save: Callable[[int], Coroutine[Any, Any, None]],
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._stats = stats
        self._update = update
        self._thread = thread
        self._publisher = publisher
        self._dispatcher = dispatcher
        self._masks = masks
        self._record = record
        self._evaluator = evaluator
        self._eval_tasks = eval_tasks
        self._save = save
        self._recent: deque[float] = deque(maxlen=settings.target_window)
        self._begun = time.monotonic()
        self.collected = 0  # groups of the step under way

    async def run(self, first_step: int = 1) -> bool:
        """Returns whether a target ended it early. Raises NodeError where the run must stop."""
        begun, tokens = time.monotonic(), self._stats.model_tokens
        self._begun = begun
        generation = asyncio.create_task(self._groups.run(), name="groups")
        try:
            for step in range(first_step, self._settings.steps + 1):
                if await self._step(step, generation):
                    return True
            return False
        finally:
            seconds = time.monotonic() - begun
            self._record.training_tokens_per_second = (self._stats.model_tokens - tokens) / seconds
            self._record.seconds["training"] = self._record.seconds.get("training", 0.0) + seconds
            generation.cancel()
            await asyncio.gather(generation, return_exceptions=True)

    async def _step(self, step: int, generation: asyncio.Task[None]) -> bool:
        settings, record = self._settings, self._record
        begun = time.monotonic()
        tokens = self._stats.model_tokens
        with record.phase("wait"):
            batch = await self._collect(generation)
        version = self._publisher.version
        report: StepReport | None = None
        if batch.items:
            with record.phase("train", version=version.number):
                try:
                    report = await self._thread.run(self._update.step, batch.items, version)
                except FloatingPointError as error:
                    raise NodeError(f"step {step} cannot be trained on: {error}", EXIT_FAILED) from error
            record.add_diff(report.diff)
            self._publisher.probe_with([item.trajectory for item in batch.items])
            with record.phase("sync", version=version.number + 1):
                await self._publisher.publish()
        record.steps = step
        metrics.STEPS.inc()
        metrics.REWARD_MEAN.set(batch.reward_mean)
        metrics.CALLS_LOST.set(self._dispatcher.calls.lost_total)
        evaluated: EvalResult | None = None
        if settings.eval.every and step % settings.eval.every == 0 and step < settings.steps and self._eval_tasks:
            with record.phase("eval", version=self._publisher.version.number):
                evaluated = await self.evaluate(f"step_{step}", self._eval_tasks[: settings.eval.every_tasks])
        if settings.checkpoint_every and step % settings.checkpoint_every == 0:
            with record.phase("checkpoint"):
                await self._save(step)
        self._tell(step, batch, report, evaluated, time.monotonic() - begun, self._stats.model_tokens - tokens)
        self._recent.append(batch.reward_mean)
        return self._reached(evaluated)

    async def evaluate(self, name: str, tasks: Sequence[Task], *, tools: bool = True) -> EvalResult:
        """Evaluate the present weights, and compare trainer and sampler on what the evaluation sampled."""
        version = self._publisher.version
        evaluation = asyncio.create_task(self._evaluator.evaluate(name, tasks, version, tools=tools), name="evaluate")
        supply = asyncio.create_task(self._keep_supplied(), name="supply nodes that join")
        try:
            await asyncio.wait((evaluation, supply), return_when=asyncio.FIRST_COMPLETED)
            if supply.done():
                await supply  # it ends by an error alone
            result = await evaluation
        finally:
            for task in (evaluation, supply):
                task.cancel()
            await asyncio.gather(evaluation, supply, return_exceptions=True)
        if self._settings.eval.temperature == self._settings.temperature:
            trajectories: list[Trajectory] = [sample.trajectory for sample in result.samples[:64]]
            self._record.add_diff(await self._thread.run(self._update.compare, trajectories, version))
        self._stop_if_masked()
        return result

    async def _supply(self) -> None:
        """Nodes that joined get the present weights, under the present number."""
        with self._record.phase("sync", version=self._publisher.version.number):
            await self._publisher.publish(changed=False)

    async def _keep_supplied(self) -> None:
        """Until cancelled. An evaluation whose nodes were all lost goes on with those that come."""
        while True:
            await self._dispatcher.joined.wait()
            await self._supply()

    async def _collect(self, generation: asyncio.Task[None]) -> Batch:
        """Groups until a step is full. Nodes that join meanwhile are given the weights at once."""
        batch = Batch()
        self.collected = 0
        take = asyncio.create_task(self._groups.take(), name="take a group")
        joined = asyncio.create_task(self._dispatcher.joined.wait(), name="a node joined")
        try:
            while batch.groups < self._settings.groups_per_step:
                await asyncio.wait((take, joined, generation), return_when=asyncio.FIRST_COMPLETED)
                if generation.done():
                    await generation
                if joined.done():
                    await self._supply()
                    joined = asyncio.create_task(self._dispatcher.joined.wait(), name="a node joined")
                if take.done():
                    self._add(batch, take.result())
                    self.collected = batch.groups
                    take = asyncio.create_task(self._groups.take(), name="take a group")
                self._stop_if_masked()
            return batch
        finally:
            for task in (take, joined):
                task.cancel()
            await asyncio.gather(take, joined, return_exceptions=True)

    def _add(self, batch: Batch, group: Group) -> None:
        settings = self._settings
        consumption = consume(group.samples, self._publisher.version, settings.max_staleness)
        batch.stale += consumption.dropped
        metrics.STALE_SAMPLES.inc(consumption.dropped)
        for age in consumption.ages:
            metrics.STALENESS.observe(age)
        rewards = [sample.reward for sample in consumption.kept]
        advantages = group_advantages(rewards, normalisation=settings.advantage_normalisation)
        if advantages.dropped is not None:
            batch.dropped_groups[advantages.dropped] = batch.dropped_groups.get(advantages.dropped, 0) + 1
        if advantages.dropped == "too_small":
            return
        batch.groups += 1
        batch.rewards.extend(rewards)
        batch.ages.extend(consumption.ages)
        if advantages.advantages is not None:
            batch.items.extend(
                Item(sample.trajectory, advantage)
                for sample, advantage in zip(consumption.kept, advantages.advantages, strict=True)
            )

    def _tell(
        self,
        step: int,
        batch: Batch,
        report: StepReport | None,
        evaluated: EvalResult | None,
        seconds: float,
        tokens: int,
    ) -> None:
        record = self._record
        record.stale_dropped += batch.stale
        for why, count in batch.dropped_groups.items():
            record.groups_dropped[why] = record.groups_dropped.get(why, 0) + count
        accuracy = evaluated.accuracy if evaluated is not None else None
        row = {
            "step": step,
            "reward_mean": batch.reward_mean,
            "accuracy": accuracy,
            "seconds": time.monotonic() - self._begun,
        }
        record.curve.append(row)
        fields: dict[str, Any] = {
            **row,
            "steps": self._settings.steps,
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else None,
            "staleness_mean": sum(batch.ages) / len(batch.ages) if batch.ages else None,
            "staleness_max": max(batch.ages, default=None),
            "stale_dropped": batch.stale,
            "groups_dropped": batch.dropped_groups,
            "masked_share": self._masks.share,
            "masked": dict(self._masks.by_cause),
            "trajectories": self._stats.trajectories,
            "calls": dict(self._dispatcher.calls.by_outcome),
            "calls_lost": self._dispatcher.calls.lost_total,
            "version": self._publisher.version.number,
        }
        if report is not None:
            fields.update(
                loss=report.loss,
                grad_norm=report.grad_norm,
                clip_share=report.clip_share,
                ratio_max=report.ratio_max,
                sequences=report.sequences,
                trained_tokens=report.tokens,
                logprob_diff_mean=report.diff.mean,
                logprob_diff_max=report.diff.largest if report.diff.tokens else None,
                logprob_diff_tokens=report.diff.tokens,
            )
        record.feed.write("step", "train", **fields)
        log.info(
            f"step {step} of {self._settings.steps}",
            reward=round(batch.reward_mean, 3),
            seconds=round(seconds, 2),
            staleness=fields["staleness_max"],
            masked=round(self._masks.share, 4),
        )

    def _reached(self, evaluated: EvalResult | None) -> bool:
        settings = self._settings
        if (
            evaluated is not None
            and settings.target_accuracy is not None
            and evaluated.accuracy >= settings.target_accuracy
        ):
            return True
        if settings.target_reward is None or len(self._recent) < settings.target_window:
            return False
        return sum(self._recent) / len(self._recent) >= settings.target_reward

    def _stop_if_masked(self) -> None:
        sentence = self._masks.too_many()
        if sentence is not None:
            raise NodeError(sentence, EXIT_FAILED)
