"""What is known of a running run: events and metrics go in, figures to be shown are held. Pure."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from fermata_cli.text import printable
from fermata_cli.view.follow import Sample, total

# Calls that took longer than this, or are held for longer, are called slow. One of the histogram's bounds.
SLOW_S = 0.25
_MESSAGES = 5

PHASES = {
    "startup": "starting the cluster",
    "start": "starting",
    "load": "loading the policy",
    "connect": "connecting to rollout nodes",
    "first_sync": "first weight sync",
    "eval_before": "held-out evaluation before training",
    "wait": "training: waiting for rollouts",
    "train": "training: a step",
    "sync": "training: weight sync",
    "eval": "held-out evaluation",
    "eval_after": "held-out evaluation after training",
    "eval_without_tools": "held-out evaluation without tools",
    "export": "writing the trained model",
    "checkpoint": "writing a checkpoint",
    "end": "ended",
    "stay": "the run is over, its cluster stays up until Ctrl-C",
    "stopping": "stopping the cluster",
}


@dataclasses.dataclass(slots=True)
class RunView:
    """The present state of a run. Figures that were not heard of yet are None."""

    steps: int | None = None
    step: int = 0
    phase: str = "startup"
    waiting_for: str = ""  # within the phase, where that is known
    rewards: list[float] = dataclasses.field(default_factory=list)
    accuracies: dict[str, float] = dataclasses.field(default_factory=dict)
    eval_progress: tuple[int, int] | None = None
    masked_share: float | None = None
    trajectories: int | None = None
    staleness: int | None = None
    tokens_per_second: float | None = None
    version: int | None = None
    states: dict[str, int] = dataclasses.field(default_factory=dict)
    calls_in_flight: int | None = None
    calls_done: int | None = None
    calls_slow: int | None = None
    messages: deque[str] = dataclasses.field(default_factory=lambda: deque(maxlen=_MESSAGES))
    _tokens_at: tuple[float, float] | None = None

    def say(self, sentence: str) -> None:
        self.messages.append(printable(sentence, 400))

    @property
    def now(self) -> str:
        """What goes on, in words."""
        words = PHASES.get(self.phase, self.phase)
        if self.eval_progress is not None:
            return "{}: {} of {} samples".format(words, *self.eval_progress)
        return f"{words}: {self.waiting_for}" if self.waiting_for else words

    @property
    def where(self) -> str:
        """How far the run has got."""
        if not self.step:
            return f"before the first step ({self.now})"
        return f"at step {self.step} of {_number(self.steps)} ({self.now})"

    def hear(self, event: Mapping[str, Any]) -> str | None:
        """Takes an event of the feed; a line worth telling, or None."""
        phase = event.get("phase")
        self.phase = phase if isinstance(phase, str) and phase in PHASES else self.phase
        kind = event["event"]
        if kind == "tick":
            self._tick(event)
            return None
        if kind == "step":
            return self._step(event)
        if kind == "eval":
            return self._eval(event)
        if kind == "waiting":
            return printable(str(event.get("message", "")), 300)
        if kind == "synced":
            return "the first weight sync is proven"
        return None

    def _tick(self, event: Mapping[str, Any]) -> None:
        self.steps = event.get("steps", self.steps)
        self.trajectories = event.get("trajectories", self.trajectories)
        self.masked_share = event.get("masked_share", self.masked_share)
        done, of = event.get("eval_done"), event.get("eval_total")
        self.eval_progress = (done, of) if done is not None and of else None

    def _step(self, event: Mapping[str, Any]) -> str:
        self.step, self.steps = event["step"], event.get("steps")
        reward = event.get("reward_mean")
        if reward is not None:
            self.rewards.append(reward)
        self.masked_share = event.get("masked_share")
        self.trajectories = event.get("trajectories")
        self.staleness = event.get("staleness_max")
        self.version = event.get("version")
        if event.get("accuracy") is not None:
            self.accuracies[f"step {self.step}"] = event["accuracy"]
        words = [
            f"step {self.step} of {self.steps}",
            f"reward {_share(reward)}",
            f"{_number(event.get('tokens_per_second'))} tokens/s",
            f"staleness {_number(self.staleness)}",
            f"masked {_percent(self.masked_share)}",
            f"{_number(event.get('step_seconds'), 1)} s",
        ]
        return ", ".join(words)

    def _eval(self, event: Mapping[str, Any]) -> str:
        name, accuracy = str(event.get("name", "")), event.get("accuracy")
        if accuracy is not None:
            self.accuracies[name] = accuracy
        self.eval_progress = None
        kinds = event.get("accuracy_by_kind") or {}
        by_kind = ", ".join(f"{printable(str(kind), 40)} {_share(value)}" for kind, value in kinds.items())
        return (
            f"held-out accuracy {name.replace('_', ' ')}: {_share(accuracy)} on {event.get('scored')} samples"
            f"{f' ({by_kind})' if by_kind else ''}, {_number(event.get('seconds'), 1)} s"
        )

    def measure(self, now: float, gateway: Iterable[Sample], nodes: Iterable[Sample]) -> None:
        """Takes what a look at /metrics of the gateway and of all rollout nodes gave."""
        gateway, nodes = list(gateway), list(nodes)
        if gateway:
            name = "fermata_gateway_call_duration_seconds"
            self.calls_in_flight = int(total(gateway, "fermata_gateway_calls_in_flight"))
            self.calls_done = int(total(gateway, f"{name}_count"))
            self.calls_slow = self.calls_done - int(total(gateway, f"{name}_bucket", le=str(SLOW_S)))
        if nodes:
            tokens = total(nodes, "fermata_rollout_tokens_total", kind="model")
            if self._tokens_at is not None and now > self._tokens_at[0]:
                self.tokens_per_second = max(0.0, tokens - self._tokens_at[1]) / (now - self._tokens_at[0])
            self._tokens_at = (now, tokens)
            for found, labels, _ in nodes:
                if found == "fermata_rollout_trajectories":
                    state = labels.get("state", "")
                    self.states[state] = int(total(nodes, found, state=state))


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
