"""Held-out evaluation through the same rollout nodes.

Invariant: every sample of an evaluation is made by exactly the weights it evaluates (no others are synced meanwhile),
and an accuracy is taken over scored samples only; how many were masked stands beside it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from node_runtime.errors import EXIT_UNAVAILABLE, NodeError
from node_runtime.segments import Version
from trainer_node import metrics
from trainer_node.sampling import Sampler
from trainer_node.settings import EvalSettings
from trainer_node.tasks import Task
from trainer_node.trajectory import Sample


@dataclasses.dataclass(frozen=True, slots=True)
class EvalResult:
    """`accuracy`: share of scored samples whose reward is at least `success_reward`."""

    name: str
    accuracy: float
    reward_mean: float
    scored: int
    masked: int
    accuracy_by_kind: dict[str, float]
    seconds: float
    samples: list[Sample]

    def report(self) -> dict[str, object]:
        fields = ("name", "accuracy", "reward_mean", "scored", "masked", "accuracy_by_kind", "seconds")
        return {field: getattr(self, field) for field in fields}


class Evaluator:
    """Evaluates one version of the weights at a time."""

    def __init__(self, sampler: Sampler, settings: EvalSettings) -> None:
        self._sampler = sampler
        self._settings = settings
        self.done = 0  # samples of the running evaluation
        self.total = 0

    async def evaluate(self, name: str, tasks: Sequence[Task], version: Version, *, tools: bool = True) -> EvalResult:
        """Raises NodeError where the time runs out or nothing could be scored."""
        settings = self._settings
        begun = time.monotonic()
        self.done, self.total = 0, len(tasks) * settings.samples
        slots = asyncio.Semaphore(settings.in_flight)
        samples: list[Sample] = []
        masked = 0
        reason = ""

        async def one(task: Task) -> None:
            nonlocal masked, reason
            async with slots:
                for _ in range(1 + settings.max_refills):
                    result = await self._sampler.sample(
                        task,
                        group_id=name,
                        min_version=version,
                        temperature=settings.temperature,
                        evaluation=True,
                        tools=tools,
                    )
                    if isinstance(result, Sample):
                        samples.append(result)
                        break
                    masked += 1
                    reason = result.reason
                self.done += 1

        try:
            async with asyncio.timeout(settings.timeout_s), asyncio.TaskGroup() as group:
                for task in tasks:
                    for _ in range(settings.samples):
                        group.create_task(one(task))
        except TimeoutError:
            raise NodeError(
                f"the evaluation {name} had {self.done} of {self.total} samples after {settings.timeout_s:g} s: look "
                "at the rollout nodes, or raise trainer.eval.timeout_s",
                EXIT_UNAVAILABLE,
            ) from None
        if not samples:
            raise NodeError(
                f"the evaluation {name} has no sample to score: all {masked} were masked, the last because {reason}",
                EXIT_UNAVAILABLE,
            )
        result = summarise(name, samples, masked, settings.success_reward, time.monotonic() - begun)
        if tools:
            metrics.EVAL_ACCURACY.set(result.accuracy)
        return result


def summarise(name: str, samples: Sequence[Sample], masked: int, success_reward: float, seconds: float) -> EvalResult:
    """Accuracy and mean reward over scored samples, in all and by kind of task."""
    solved = [sample.reward >= success_reward for sample in samples]
    kinds = sorted({sample.kind for sample in samples})
    by_kind = {}
    for kind in kinds:
        of_kind = [done for done, sample in zip(solved, samples, strict=True) if sample.kind == kind]
        by_kind[kind] = sum(of_kind) / len(of_kind)
    return EvalResult(
        name=name,
        accuracy=sum(solved) / len(solved),
        reward_mean=sum(sample.reward for sample in samples) / len(samples),
        scored=len(samples),
        masked=masked,
        accuracy_by_kind=by_kind,
        seconds=seconds,
        samples=list(samples),
    )
