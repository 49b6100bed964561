#!/usr/bin/env python3
"""Runs the notebooks of examples/notebooks/ and writes them with their outputs; `make notebooks` calls it.

Usage: scripts/notebooks.py [--into DIR] [TEXT_HALF.py ...]     none named: all of them

The text half of each pair (.py) is what is run, and the other half (.ipynb) is written anew. Invariant: a notebook is
written only where all of its cells ran without an error; its metadata hold nothing of the machine or the moment.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from traitlets.config import Config

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
CELL_TIMEOUT_S = 300
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of tracebacks


def run(text_half: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in the folder it stands in."""
    notebook = jupytext.read(text_half)
    began = time.monotonic()

    def tell(cell: nbformat.NotebookNode, cell_index: int, **_: object) -> None:
        seconds = time.monotonic() - began
        print(f"{seconds:7.1f} s  cell {cell_index + 1} of {len(notebook.cells)}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="fermata-") as sockets:  # of this user's alone: no port is opened
        NotebookClient(
            notebook,
            kernel_name="python3",
            config=Config(AsyncKernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),
            timeout=CELL_TIMEOUT_S,
            coalesce_streams=True,
            record_timing=False,
            on_cell_executed=tell,
            resources={"metadata": {"path": str(text_half.parent)}},
        ).execute()
    return normalised(notebook)


def normalised(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without versions, random ids and times, so that a new run changes what it measured and nothing else."""
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["kernelspec"] = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    representation = {"extension": ".py", "format_name": "percent"}
    notebook.metadata["jupytext"] = {"formats": "ipynb,py:percent", "text_representation": representation}
    notebook.nbformat_minor = 5
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
        cell["metadata"] = {}
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("halves", nargs="*", type=Path, metavar="TEXT_HALF.py", help="none: all of examples/notebooks/")
    parser.add_argument("--into", type=Path, help="the folder to write to; none: beside the text half")
    arguments = parser.parse_args()
    halves = arguments.halves or sorted(FOLDER.glob("[0-9]*.py"))
    for half in halves:
        if half.suffix != ".py" or not half.is_file():
            print(
                f"notebooks: {half} is no text half of a notebook: name a .py of examples/notebooks/", file=sys.stderr
            )
            return 2
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this environment's kernel, whatever others the user has installed
    for half in halves:
        print(f"notebooks: running {half.name}", file=sys.stderr)
        try:
            notebook = run(half.resolve())
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            why = _COLOURS.sub("", str(error))
            print(f"notebooks: {half.name} failed, nothing is written: {why}", file=sys.stderr)
            return 1
        written = (arguments.into or half.parent) / half.with_suffix(".ipynb").name
        nbformat.write(notebook, written)
        print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
