"""`timeline.png`: a row for each trajectory, with what it did: generated, had a tool run, waited.

Around a slow call one sees its trajectory held, everybody else going on, and it going on by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

from fermata_cli.report.canvas import INK, new_figure, save
from fermata_cli.report.lanes import SLOW_S, Lane, Scene, choose_scene
from fermata_cli.text import printable
from node_runtime.spans import Span

_HEIGHT = 0.72
_KINDS = re.compile(r"[te]\d")  # how the trainer names its trajectories


def draw_timeline(spans: Iterable[Span], path: Path) -> bool:
    """False where there is nothing to draw, and no picture."""
    scene = choose_scene(spans)
    if scene is None:
        return False
    rows = len(scene.lanes)
    figure, axes = new_figure(11.0, 2.0 + 0.24 * rows)
    used = _trainer(axes, scene, rows)
    for row, lane in enumerate(scene.lanes):
        used |= _lane(axes, scene, row, lane)
    labels = [printable(lane.trajectory, 24) for lane in scene.lanes]
    axes.set_yticks([*range(rows), rows], [*labels, "trainer"], fontsize=7)
    axes.set_ylim(rows + 0.6, -1.15)  # room for the words above the first lane
    axes.set_xlim(0.0, scene.end - scene.start)
    axes.set_xlabel("seconds")
    kinds = (
        " (t…: of training, e…: of an evaluation)" if all(_KINDS.match(lane.trajectory) for lane in scene.lanes) else ""
    )
    axes.set_ylabel(f"trajectory{kinds}")
    axes.set_title(_title(scene), loc="left", fontsize=9)
    _legend(figure, used)
    save(figure, path)
    return True


def _lane(axes: Any, scene: Scene, row: int, lane: Lane) -> set[str]:
    """The inks that were used."""
    used = {"queue" for span in lane.queues if _bar(axes, scene, row, span.start, span.end, "queue", 0.30)}
    for call in lane.tools:
        start, end = lane.run_of(call)
        ink = "slow" if lane.is_slow(call) else "tool"
        for part in ((call.start, start), (end, call.end)):
            if _bar(axes, scene, row, *part, "wait", 0.34):
                used.add("wait")
        if _bar(axes, scene, row, start, end, ink, 0.34):
            used.add(ink)
        if ink == "slow" and scene.slow is not None and call.call_key == scene.slow.call_key:
            middle = (max(start, scene.start) + min(end, scene.end)) / 2 - scene.start
            text = f"{printable(call.tool, 30)} ran {end - start:.2f} s"
            axes.text(middle, row - 0.44, text, ha="center", va="bottom", fontsize=7, color=INK["slow"])
    used |= {"generate" for s in lane.generations if _bar(axes, scene, row, s.start, s.end, "generate", _HEIGHT)}
    return used


def _bar(axes: Any, scene: Scene, row: float, start: float, end: float, ink: str, height: float) -> bool:
    """False where nothing of it lies in the window."""
    start, end = max(start, scene.start), min(end, scene.end)
    if end <= start:
        return False
    # What takes milliseconds is made wide enough to be seen all the same, but for mere waits.
    least = 0.0 if ink == "wait" else (scene.end - scene.start) / 900
    axes.barh(row, max(end - start, least), left=start - scene.start, height=height, color=INK[ink], linewidth=0)
    return True


def _trainer(axes: Any, scene: Scene, row: int) -> set[str]:
    used = {"train" for s in scene.trainings if _bar(axes, scene, row, s.start, s.end, "train", _HEIGHT)}
    for span in scene.syncs:
        start, end = max(span.start, scene.start) - scene.start, min(span.end, scene.end) - scene.start
        axes.axvspan(start, end, color=INK["sync"], alpha=0.25, linewidth=0)
        used.add("sync")
    return used


def _title(scene: Scene) -> str:
    if scene.slow is None:
        return "trajectories from their start"
    held = scene.slow.end - scene.slow.start
    return (
        f"While one call of {printable(scene.slow.trajectory, 24)} was held for {held:.2f} s, "
        f"other trajectories finished {scene.turns_meanwhile} turns; then it went on by itself"
    )


def _legend(figure: Any, used: Set[str]) -> None:
    """What was drawn, and nothing else."""
    from matplotlib.patches import Patch

    names = {
        "generate": "generating",
        "tool": "tool running",
        "slow": f"tool running, slow call ({SLOW_S:g} s or more)",
        "wait": "call or result on its way, or waiting for the node's loop",
        "queue": "waiting for the engine",
        "train": "training step",
        "sync": "weight sync",
    }
    handles = [
        Patch(color=INK[ink], label=label, alpha=0.35 if ink == "sync" else 1.0)
        for ink, label in names.items()
        if ink in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncol=4, fontsize=7, frameon=False)
