"""The notebooks are run: every cell, with the assertions in them, on real processes and a real engine."""

from __future__ import annotations

import time
from pathlib import Path

import nbformat
import pytest

from tests.integration.cluster.processes import Fermata
from tests.unit.examples.test_notebooks import FOLDER, PICTURES, images

pytestmark = pytest.mark.integration


class Notebooks(Fermata):
    program = ("scripts/notebooks.py",)


@pytest.mark.vllm
@pytest.mark.timeout(360)
@pytest.mark.parametrize("name", PICTURES)
def test_a_notebook_runs_from_top_to_bottom_and_leaves_no_process(name: str, tmp_path: Path) -> None:
    with Notebooks("--into", str(tmp_path), str(FOLDER / f"{name}.py"), folder=tmp_path) as command:
        code, out = command.finish(300)
        assert code == 0, command.err
        assert out.strip() == str(tmp_path / f"{name}.ipynb")
        deadline = time.monotonic() + 10  # helpers of the kernel end a moment after it
        while command.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert command.left() == []
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code_cells] == list(range(1, len(code_cells) + 1))
    outputs = [output for cell in code_cells for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"] == []
    assert len(images(notebook)) == PICTURES[name]


def test_a_notebook_that_fails_is_told_and_not_written(tmp_path: Path) -> None:
    half = tmp_path / "02_fails.py"
    half.write_text("# %%\nnumber = 1\n\n# %%\nassert number == 2, 'it is one'\n\n# %%\nopen('never', 'w')\n")
    with Notebooks(str(half), folder=tmp_path) as command:
        code, out = command.finish(60)
    assert (code, out) == (1, "")
    assert "02_fails.py failed, nothing is written" in command.err
    assert "AssertionError: it is one" in command.err
    assert not (tmp_path / "never").exists()
    assert not half.with_suffix(".ipynb").exists()


def test_what_is_no_notebook_is_told(tmp_path: Path) -> None:
    with Notebooks(str(tmp_path / "none.py"), folder=tmp_path) as command:
        code, _ = command.finish(60)
    assert code == 2
    assert "none.py is no text half of a notebook" in command.err
