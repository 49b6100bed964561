"""`timeline.png`: a row for each trajectory, with what it did: generated, waited for a tool, waited for a place.

Around a slow call one sees its trajectory held, everybody else going on, and it going on by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fermata_cli.report.canvas import INK, new_figure, save
from fermata_cli.report.lanes import SLOW_S, Lane, Scene, choose_scene, is_slow
from fermata_cli.text import printable
from node_runtime.spans import Span

_HEIGHT = 0.72


def draw_timeline(spans: Iterable[Span], path: Path) -> bool:
    """False where there is nothing to draw, and no picture."""
    scene = choose_scene(spans)
    if scene is None:
        return False
    rows = len(scene.lanes)
    figure, axes = new_figure(11.0, 2.0 + 0.24 * rows)
    for row, lane in enumerate(scene.lanes):
        _lane(axes, scene, row, lane)
    _trainer(axes, scene, rows)
    labels = [printable(lane.trajectory, 24) for lane in scene.lanes]
    axes.set_yticks([*range(rows), rows], [*labels, "trainer"], fontsize=7)
    axes.set_ylim(rows + 0.6, -0.7)
    axes.set_xlim(0.0, scene.end - scene.start)
    axes.set_xlabel("seconds")
    axes.set_title(_title(scene), loc="left", fontsize=9)
    _legend(axes)
    save(figure, path)
    return True


def _lane(axes: Any, scene: Scene, row: int, lane: Lane) -> None:
    bars = (
        (lane.queues, "queue", 0.30),
        (lane.tools, "tool", 0.34),
        (lane.generations, "generate", _HEIGHT),
    )
    for spans, ink, height in bars:
        for span in spans:
            slow = ink == "tool" and is_slow(span)
            _bar(axes, scene, row, span, INK["slow"] if slow else INK[ink], height)
            if slow and scene.slow is not None and span.call_key == scene.slow.call_key:
                middle = (max(span.start, scene.start) + min(span.end, scene.end)) / 2 - scene.start
                text = f"{printable(span.tool, 30)} held {span.end - span.start:.2f} s"
                axes.text(middle, row - 0.28, text, ha="center", va="bottom", fontsize=7, color=INK["slow"])


def _bar(axes: Any, scene: Scene, row: float, span: Span, colour: str, height: float) -> None:
    start, end = max(span.start, scene.start), min(span.end, scene.end)
    if end > start:
        # A turn of a tiny model takes milliseconds: wide enough to be seen all the same.
        width = max(end - start, (scene.end - scene.start) / 900)
        axes.barh(row, width, left=start - scene.start, height=height, color=colour, linewidth=0)


def _trainer(axes: Any, scene: Scene, row: int) -> None:
    for span in scene.trainings:
        _bar(axes, scene, row, span, INK["train"], _HEIGHT)
    for span in scene.syncs:
        start, end = max(span.start, scene.start) - scene.start, min(span.end, scene.end) - scene.start
        axes.axvspan(start, end, color=INK["sync"], alpha=0.25, linewidth=0)


def _title(scene: Scene) -> str:
    if scene.slow is None:
        return "trajectories from their start"
    held = scene.slow.end - scene.slow.start
    return (
        f"While one call of {printable(scene.slow.trajectory, 24)} was held for {held:.2f} s, "
        f"other trajectories finished {scene.turns_meanwhile} turns; then it went on by itself"
    )


def _legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    names = {
        "generate": "generating",
        "tool": "waiting for a tool",
        "slow": f"waiting for a slow call (over {SLOW_S:g} s)",
        "queue": "waiting for the engine",
        "train": "training step",
        "sync": "weight sync",
    }
    handles = [Patch(color=INK[ink], label=label, alpha=0.35 if ink == "sync" else 1.0) for ink, label in names.items()]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.09), ncol=6, fontsize=7, frameon=False)
