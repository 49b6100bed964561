"""What the pictures share: colours, and figures made without a window system.

Invariant: text is drawn as it stands; matplotlib's own mark-up (`$`) is switched off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from node_runtime.errors import EXIT_USAGE, NodeError

INK = {
    "generate": "#2c6fbb",
    "tool": "#8f8f8f",
    "wait": "#e3e3e3",
    "slow": "#d1495b",
    "queue": "#f0c987",
    "train": "#5b8c5a",
    "sync": "#8e5572",
    "text": "#222222",
}


def new_figure(width: float, height: float, **subplots: Any) -> tuple[Any, Any]:
    """(figure, axes), in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams["text.parse_math"] = False
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(**subplots)


def save(figure: Any, path: Path) -> None:
    """Raises NodeError where the file cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise NodeError(f"{path} cannot be written: {error.strerror or error}", EXIT_USAGE) from None
