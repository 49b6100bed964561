"""The notebooks as they are committed: pairs that agree, outputs that are there and tell nothing of a machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jupytext
import nbformat
import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PICTURES = {"01_in_loop_tool_calling": 5}
MACHINE = re.compile(r"(?<![\w.~/-])/(?:root|home|Users|tmp|var|work|opt|usr|mnt|data)/")


def images(notebook: nbformat.NotebookNode) -> list[str]:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]


def test_there_are_notebooks_and_each_has_its_text_half() -> None:
    assert NOTEBOOKS
    assert [path.stem for path in NOTEBOOKS] == [path.stem for path in sorted(FOLDER.glob("[0-9]*.py"))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_both_halves_have_the_same_cells(path: Path) -> None:
    halves = (jupytext.read(path), jupytext.read(path.with_suffix(".py")))
    notebook, text = ([(cell.cell_type, cell.source) for cell in half.cells] for half in halves)
    assert notebook == text, "run `make notebooks` after an edit of the .py, `jupytext --sync` after one of the .ipynb"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_as_it_ran_from_top_to_bottom(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"] == []
    assert len(images(notebook)) == PICTURES[path.stem]
    assert path.stat().st_size < 1_000_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_tells_nothing_of_the_machine_it_ran_on(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    told = path.read_text(encoding="utf-8")
    for image in images(notebook):
        told = told.replace(image, "")
    assert MACHINE.findall(told) == []
    assert str(REPOSITORY) not in told
    assert notebook.metadata.language_info == {"name": "python"}
    assert all(cell.metadata == {} for cell in notebook.cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_links_to_is_there(path: Path) -> None:
    texts = [cell["source"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "markdown"]
    links = re.findall(r"\]\(([^)#]+)", "\n".join("".join(text) for text in texts))
    assert links
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []
