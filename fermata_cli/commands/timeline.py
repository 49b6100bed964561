"""`fermata timeline`: the pictures of a run, drawn anew."""

from __future__ import annotations

import sys
from pathlib import Path

from fermata_cli.report.files import read_json
from fermata_cli.report.pictures import draw_pictures
from node_runtime.errors import EXIT_OK, EXIT_USAGE, NodeError


def redraw(run_dir: Path) -> int:
    """Prints the path of each picture. A run that wrote no summary still has its timeline."""
    if not run_dir.is_dir():
        raise NodeError(f"{run_dir} is no folder: give the folder of a run, as runs/demo", EXIT_USAGE)
    summary_file = run_dir / "summary.json"
    summary = read_json(summary_file) if summary_file.exists() else {}
    drawn = draw_pictures(run_dir, summary)
    if not drawn:
        raise NodeError(
            f"there is nothing to draw in {run_dir}: it holds neither spans nor a learning curve", EXIT_USAGE
        )
    for path in drawn:
        print(path)
    if len(drawn) == 1:
        print(f"fermata: only {drawn[0].name} could be drawn, the run recorded nothing for the other", file=sys.stderr)
    return EXIT_OK
