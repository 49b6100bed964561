"""The pictures of a run folder, from its summary and its spans."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fermata_cli.report.curve import draw_curve
from fermata_cli.report.timeline import draw_timeline
from node_runtime.spans import read_spans


def draw_pictures(run_dir: Path, summary: Mapping[str, Any]) -> list[Path]:
    """The files written: those there was something to draw for."""
    curve, timeline = run_dir / "learning_curve.png", run_dir / "timeline.png"
    drawn = []
    if draw_curve(summary, curve):
        drawn.append(curve)
    if draw_timeline(read_spans(run_dir / "spans"), timeline):
        drawn.append(timeline)
    return drawn
