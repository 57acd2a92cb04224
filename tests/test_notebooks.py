"""Every notebook runs from a fresh kernel to its end, is small, and is kept without output or with all of it."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
from time_limits import limit

with warnings.catch_warnings():
    # Deprecations among jupyter's own packages say nothing about a notebook.
    warnings.simplefilter("ignore")
    import nbformat
    from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
ids = [path.name for path in NOTEBOOKS]


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> str:
    """A kernel that is this very interpreter: what is installed as `python3` may be another one."""
    folder = tmp_path / "kernels" / "here"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "here", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    return "here"


def test_there_are_notebooks():
    assert "01_pipeline.ipynb" in ids


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_notebook_runs(path, kernel, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=int(limit()), kernel_name=kernel, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    # A cell that warns would teach a warning.
    told = [o["text"] for c in notebook.cells for o in c.get("outputs", []) if o.get("name") == "stderr"]
    # Of torch's own making, as in the settings of the whole suite.
    noise = [text for text in told if "`torch.jit" not in text]
    assert not noise, noise


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_notebook_is_kept_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) < 15
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    if not any(cell.outputs for cell in code):
        assert not any(counts)
        return
    assert counts == list(range(1, len(code) + 1)) and path.stat().st_size < 200_000
    for output in (output for cell in code for output in cell.outputs):
        assert output.output_type != "error" and output.get("name") != "stderr", output
        assert str(Path(__file__).parent.parent) not in json.dumps(output)
