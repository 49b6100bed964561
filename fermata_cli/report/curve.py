"""`learning_curve.png`: mean reward by step, and the held-out accuracies around it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fermata_cli.report.canvas import INK, new_figure, save
from fermata_cli.text import printable


def draw_curve(summary: Mapping[str, Any], path: Path) -> bool:
    """Draws from a run's summary; False where no step was made, and no picture."""
    curve = [row for row in summary.get("learning_curve") or () if row.get("reward_mean") is not None]
    if not curve:
        return False
    figure, axes = new_figure(8.0, 4.6)
    steps = [row["step"] for row in curve]
    axes.plot(steps, [row["reward_mean"] for row in curve], color=INK["generate"], marker="o", markersize=4,
              label="mean reward of the samples trained on")  # fmt: skip
    between = [(row["step"], row["accuracy"]) for row in curve if row.get("accuracy") is not None]
    last = steps[-1]
    marks = [(0, summary.get("accuracy_before")), *between, (last, summary.get("accuracy_after"))]
    held_out = [(step, accuracy) for step, accuracy in marks if accuracy is not None]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color=INK["text"], linestyle="--", marker="D", markersize=6,
                  label="held-out accuracy, sampled")  # fmt: skip
        for step, accuracy in held_out:
            # Inwards of the frame, at whichever side it stands.
            side = "left" if step == 0 else "right" if step == last else "center"
            _number(axes, step, accuracy, (0, 9), side)
    without = summary.get("accuracy_without_tools")
    if without is not None:
        axes.plot([last], [without], color=INK["slow"], marker="X", markersize=9, linestyle="none",
                  label="held-out accuracy after, tools switched off")  # fmt: skip
        _number(axes, last, without, (-9, 0), "right")
    margin = max(0.25, 0.025 * last)
    axes.set_ylim(-0.05, 1.1)
    axes.set_xlim(-margin, last + margin)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward, accuracy")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncol=3, fontsize=8, frameon=False)
    seconds = summary.get("seconds", {}).get("training")
    took = f", {seconds:.0f} s of training" if seconds is not None else ""
    axes.set_title(f"{printable(str(summary.get('name', '')), 60)}, seed {summary.get('seed')}{took}", loc="left")
    save(figure, path)
    return True


def _number(axes: Any, step: int, value: float, offset: tuple[float, float], side: str) -> None:
    """With the digits that the console tells."""
    axes.annotate(f"{value:.3f}", (step, value), textcoords="offset points", xytext=offset, ha=side,
                  va="bottom" if offset[1] else "center",
                  bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5})  # fmt: skip
