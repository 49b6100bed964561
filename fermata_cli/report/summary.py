"""`summary.json`: what a run measured.

Invariant: each figure comes from the trainer's own summary or was measured by this command; one that nobody measured is
null.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fermata_cli.text import printable

# Taken over from the trainer as they are.
_FROM_TRAINER = (
    "accuracy_before",
    "accuracy_after",
    "accuracy_without_tools",
    "steps",
    "trajectories",
    "calls",
    "calls_lost",
    "tokens_per_second",
    "parked_share",
    "syncs",
    "checksums_verified",
    "logprob_diff_mean",
    "logprob_diff_max",
    "masked_share",
)
# `logprob_diff_from`: "trajectories", or "probes" where no trained token was of the version compared.
_ALSO = (
    "eval_trajectories",
    "calls_by_tool",
    "masked",
    "stale_dropped",
    "logprob_diff_from",
    "logprob_diff_tokens",
    "learning_curve",
)


def make_summary(
    trainer: Mapping[str, Any],
    *,
    name: str,
    outcome: str,
    seed: int,
    seconds: Mapping[str, float],
    peak_rss_bytes: int | None,
    high_water_bytes: Mapping[str, int],
    gateway_restarts: int,
    versions: Mapping[str, str],
    tls: bool = False,
    always_offered: Collection[str] = (),
) -> dict[str, Any]:
    """`seconds`: what the command timed (startup, shutdown, total); the trainer's phases are put in between.

    `trainer` is empty where the trainer did not get so far as to write anything. `always_offered`: tools that
    every task offers.
    """
    phases = {key: value for key, value in trainer.get("seconds", {}).items() if key != "total"}
    timed = {"startup": seconds.get("startup"), **phases, "trainer": trainer.get("seconds", {}).get("total")}
    timed.update((key, value) for key, value in seconds.items() if key != "startup")
    return {
        "name": name,
        "outcome": outcome,
        **{field: trainer.get(field) for field in _FROM_TRAINER},
        "seconds": {key: round(value, 3) for key, value in timed.items() if value is not None},
        "peak_rss_bytes": peak_rss_bytes,
        "seed": seed,
        "versions": dict(trainer.get("versions") or versions),
        "high_water_bytes": dict(high_water_bytes),
        "gateway_restarts": gateway_restarts,
        "tls": tls,
        **{field: trainer.get(field) for field in _ALSO},
        "calls_without_tools": _calls_without_tools(trainer, always_offered),
    }


def _calls_without_tools(trainer: Mapping[str, Any], always_offered: Collection[str]) -> Any:
    """Those of `calls` that the evaluation with the tools switched off made, by outcome; None where nobody can tell.

    A tool that every task offers is unknown nowhere but there.
    """
    if "calls_without_tools" in trainer:
        return trainer["calls_without_tools"]
    if trainer.get("accuracy_without_tools") is None:
        return None
    by_tool = trainer.get("calls_by_tool") or {}
    unknown = {tool: outcomes["UNKNOWN_TOOL"] for tool, outcomes in by_tool.items() if "UNKNOWN_TOOL" in outcomes}
    return {"UNKNOWN_TOOL": sum(count for tool, count in unknown.items() if tool in always_offered)}


def final_lines(summary: Mapping[str, Any]) -> list[str]:
    """The figures in a few lines for people."""
    seconds = summary["seconds"]
    calls = summary.get("calls") or {}
    without = {outcome: count for outcome, count in (summary.get("calls_without_tools") or {}).items() if count}
    offered = {outcome: count - without.get(outcome, 0) for outcome, count in calls.items()}
    switched_off = f"; with the tools switched off: {_by_outcome(without)}" if without else ""
    checksums = summary.get("checksums_verified") or {}
    evaluated = any(summary[key] is not None for key in ("accuracy_before", "accuracy_after", "accuracy_without_tools"))
    lines = [
        f"held-out accuracy: {_share(summary['accuracy_before'])} before, {_share(summary['accuracy_after'])} after "
        f"{summary['steps'] or 0} steps, {_share(summary['accuracy_without_tools'])} with the tools switched off"
        if evaluated
        else f"{summary['steps'] or 0} steps, without held-out tasks to measure accuracy on",
        f"training {_seconds(seconds.get('training'))}, of {_seconds(seconds.get('total'))} in all; "
        f"{summary['trajectories'] or 0} trajectories, {_whole(summary['tokens_per_second'])} tokens/s, "
        f"{_percent(summary['parked_share'])} of their time held at tools",
        f"tool calls: {_by_outcome(offered) or 'none'}{switched_off}; {_whole(summary['calls_lost'])} lost; "
        f"{_percent(summary['masked_share'])} of samples masked",
        f"weight syncs: {_whole(summary['syncs'])}, {_whole(checksums.get('count'))} checksums "
        f"{'equal' if checksums.get('equal') else 'NOT proven equal'}; log-probabilities of trainer and sampler differ "
        f"by {_small(summary['logprob_diff_mean'])} on average, {_small(summary['logprob_diff_max'])} at most",
    ]
    if summary["peak_rss_bytes"] is not None:
        lines.append(f"peak memory {summary['peak_rss_bytes'] / 2**30:.2f} GiB over all processes")
    return lines


def _by_outcome(calls: Mapping[str, int]) -> str:
    return ", ".join(f"{printable(str(outcome), 40)} {count}" for outcome, count in sorted(calls.items()) if count)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _small(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
