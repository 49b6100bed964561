"""One training step: samples with advantages → gradients → a new policy.

Owns the optimiser. Invariant: the gradient of a minibatch does not depend on how it was cut into microbatches, and
the trainer is compared with the sampler only on tokens that exactly the present version sampled, before it changes.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from node_runtime.segments import Version
from trainer_node.batching import pad, plan_microbatches
from trainer_node.loss import aggregation_weights, policy_loss
from trainer_node.model import PolicyModel
from trainer_node.settings import TrainerSettings
from trainer_node.trajectory import Trajectory


class Interrupted(Exception):
    """The step was asked to stop; the policy has not changed since its last whole minibatch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One sequence of the batch."""

    trajectory: Trajectory
    advantage: float


@dataclasses.dataclass(slots=True)
class LogprobDiff:
    """|trainer − sampler| over tokens that the version compared has sampled; a running mean and the largest."""

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, differences: Tensor) -> None:
        if differences.numel():
            self.tokens += differences.numel()
            self.total += float(differences.double().sum())
            self.largest = max(self.largest, float(differences.max()))

    def merge(self, other: LogprobDiff) -> None:
        self.tokens += other.tokens
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float | None:
        return self.total / self.tokens if self.tokens else None


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did."""

    sequences: int
    tokens: int
    updates: int
    loss: float
    grad_norm: float
    clip_share: float
    ratio_max: float
    learning_rate: float
    diff: LogprobDiff


class PolicyUpdate:
    """GRPO updates on a policy. Runs on a worker thread; `stop` lets another thread end a step between microbatches."""

    def __init__(self, model: PolicyModel, settings: TrainerSettings) -> None:
        self.model = model
        self._settings = settings
        self.optimizer = model.make_optimizer(
            learning_rate=settings.learning_rate,
            betas=settings.betas,
            eps=settings.adam_eps,
            weight_decay=settings.weight_decay,
        )
        self.updates = 0
        self.stop = threading.Event()

    def step(self, items: Sequence[Item], version: Version) -> StepReport:
        """Train on `items`; `version` is the one that the policy is at. Raises Interrupted."""
        settings = self._settings
        items = [item for item in items if item.trajectory.trained_tokens]
        diff = LogprobDiff()
        recomputed = self._recompute(items, version, diff) if settings.old_policy == "recompute" else None
        loss = grad_norm = ratio_max = rate = 0.0
        clipped = tokens = updates = 0
        for chunk in _chunks(list(range(len(items))), settings.minibatches):
            # Only before the first update is the policy still the version that sampled.
            compare = diff if recomputed is None and not updates else None
            outcome = self._minibatch(items, chunk, version, recomputed, compare)
            rate = self._apply_rate()
            norm = self._clip()
            if not math.isfinite(norm):
                self.optimizer.zero_grad(set_to_none=True)
                raise FloatingPointError(
                    f"the gradient norm is {norm} at update {self.updates + 1}: the policy was left as it was"
                )
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.updates += 1
            updates += 1
            loss += outcome.loss
            clipped += outcome.clipped
            tokens += outcome.tokens
            ratio_max = max(ratio_max, outcome.ratio_max)
            grad_norm = max(grad_norm, norm)
        return StepReport(
            sequences=len(items),
            tokens=tokens,
            updates=updates,
            loss=loss / updates if updates else 0.0,
            grad_norm=grad_norm,
            clip_share=clipped / tokens if tokens else 0.0,
            ratio_max=ratio_max,
            learning_rate=rate,
            diff=diff,
        )

    def compare(self, trajectories: Sequence[Trajectory], version: Version) -> LogprobDiff:
        """Trainer against sampler over whole trajectories that `version` alone sampled."""
        diff = LogprobDiff()
        whole = [t for t in trajectories if t.recomputed and t.staleness(version) == 0 and t.trained_tokens]
        for indices in plan_microbatches([len(t) for t in whole], self.model.tokens_per_microbatch):
            self._check_stop()
            chosen = [whole[i] for i in indices]
            batch = pad([t.ids for t in chosen], [t.mask for t in chosen], self.model.device)
            with torch.no_grad():
                logprobs_T = self.model.selected_logprobs_T(batch, self._settings.temperature)
            diff.add((logprobs_T - self._flat(chosen)).abs())
        return diff

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]

    def _minibatch(
        self,
        items: Sequence[Item],
        chunk: Sequence[int],
        version: Version,
        recomputed: dict[int, Tensor] | None,
        diff: LogprobDiff | None,
    ) -> _Outcome:
        settings = self._settings
        trajectories = [items[i].trajectory for i in chunk]
        weights = aggregation_weights(
            [t.trained_tokens for t in trajectories], settings.loss_aggregation, dr_grpo_tokens=settings.dr_grpo_tokens
        )
        outcome = _Outcome()
        for indices in plan_microbatches([len(t) for t in trajectories], self.model.tokens_per_microbatch):
            self._check_stop()
            chosen = [trajectories[i] for i in indices]
            batch = pad([t.ids for t in chosen], [t.mask for t in chosen], self.model.device)
            advantages = torch.tensor([items[chunk[i]].advantage for i in indices], device=self.model.device)
            weight = torch.tensor([weights[i] for i in indices], device=self.model.device)
            sampler_T = self._flat(chosen)
            old_T = torch.cat([recomputed[chunk[i]] for i in indices]) if recomputed is not None else None
            logprobs_T = self.model.selected_logprobs_T(batch, settings.temperature)
            terms = policy_loss(
                logprobs_T,
                sampler_T,
                advantages[batch.rows_T],
                weight[batch.rows_T],
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
                old_logprobs_T=old_T,
                tis_cap=settings.tis_cap,
            )
            terms.loss.backward()
            if diff is not None:
                self._compare(chosen, logprobs_T.detach(), sampler_T, version, diff)
            outcome.loss += float(terms.loss.detach())
            outcome.clipped += int(terms.clipped)
            outcome.tokens += int(batch.rows_T.numel())
            outcome.ratio_max = max(outcome.ratio_max, float(terms.ratio_max))
        return outcome

    @torch.no_grad()
    def _recompute(self, items: Sequence[Item], version: Version, diff: LogprobDiff) -> dict[int, Tensor]:
        """The old policy's log-probabilities: the trainer's own, before the first update on this batch."""
        old: dict[int, Tensor] = {}
        for indices in plan_microbatches([len(item.trajectory) for item in items], self.model.tokens_per_microbatch):
            self._check_stop()
            chosen = [items[i].trajectory for i in indices]
            batch = pad([t.ids for t in chosen], [t.mask for t in chosen], self.model.device)
            logprobs_T = self.model.selected_logprobs_T(batch, self._settings.temperature)
            self._compare(chosen, logprobs_T, self._flat(chosen), version, diff)
            counts = [t.trained_tokens for t in chosen]
            old.update(zip(indices, logprobs_T.split(counts), strict=True))
        return old

    def _flat(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """The sampler's log-probabilities of trained tokens, in the layout of `pad`."""
        parts = [
            torch.frombuffer(t.logprobs, dtype=torch.float32)[torch.frombuffer(t.mask, dtype=torch.uint8).bool()]
            for t in trajectories
        ]
        return torch.cat(parts).to(self.model.device)

    def _compare(
        self,
        trajectories: Sequence[Trajectory],
        logprobs_T: Tensor,
        sampler_T: Tensor,
        version: Version,
        diff: LogprobDiff,
    ) -> None:
        same_T = torch.cat(
            [
                torch.frombuffer(t.made_by(version) if t.recomputed else bytearray(len(t)), dtype=torch.uint8)[
                    torch.frombuffer(t.mask, dtype=torch.uint8).bool()
                ]
                for t in trajectories
            ]
        ).bool()
        diff.add((logprobs_T - sampler_T)[same_T.to(logprobs_T.device)].abs())

    def _apply_rate(self) -> float:
        warmup = self._settings.warmup_steps
        rate = self._settings.learning_rate * min(1.0, (self.updates + 1) / warmup if warmup else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _clip(self) -> float:
        limit = self._settings.grad_clip
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit if limit else math.inf))

    def _check_stop(self) -> None:
        if self.stop.is_set():
            self.optimizer.zero_grad(set_to_none=True)
            raise Interrupted


@dataclasses.dataclass(slots=True)
class _Outcome:
    loss: float = 0.0
    clipped: int = 0
    tokens: int = 0
    ratio_max: float = 0.0


def _chunks(indices: list[int], parts: int) -> list[list[int]]:
    """Contiguous chunks of nearly equal size; fewer than `parts` where there are fewer indices."""
    parts = min(parts, len(indices))
    if not parts:
        return []
    size, rest = divmod(len(indices), parts)
    chunks, start = [], 0
    for part in range(parts):
        stop = start + size + (part < rest)
        chunks.append(indices[start:stop])
        start = stop
    return chunks
