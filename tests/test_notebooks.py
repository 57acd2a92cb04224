"""Every notebook runs from a fresh kernel, is small, uses public names, and is kept with what it puts out."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from types import ModuleType

import pytest
from time_limits import limit

import zerofn as zf

with warnings.catch_warnings():
    # Deprecations among jupyter's own packages say nothing about a notebook.
    warnings.simplefilter("ignore")
    import nbformat
    from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
ids = [path.name for path in NOTEBOOKS]
INSTALL = """\
try:
    import zerofn as zf
except ImportError:
    from pathlib import Path

    # A wheel that you uploaded (in a clone: pip wheel --no-deps .), or the clone around.
    place = next(Path().glob("zerofn-*.whl"), "..")
    %pip install --quiet '{place}[notebooks]'
    import zerofn as zf

"""
# There is no public copy of the notebooks that a badge could open, so it opens Colab's upload dialog. Its picture is in
# the notebook, since pages fetch nothing from elsewhere.
BADGE = """
[![Open in Colab](attachment:colab.svg)](https://colab.research.google.com/#upload=true)

The first cell installs zerofn if it is missing."""
# Folders that are those of one machine.
PLACES = r"(?<![\w.])/(home|root|tmp|Users|dev|private|var|opt|usr)/|[A-Z]:\\\\"


def code_of(path: Path) -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def kinds(cell) -> set[str]:
    """What a cell has put out: its streams, and the forms of what it shows."""
    return {kind for o in cell.outputs for kind in o.get("data", [o.get("name", o.output_type)])}


def texts(cell) -> list[str]:
    """All that was put out, without pictures."""
    shown = [(kind, text) for o in cell.outputs for kind, text in o.get("data", {"text": o.get("text", "")}).items()]
    return [text for kind, text in shown if not kind.startswith("image/")]


def private_names(source: str) -> list[str]:
    """Attributes and imports with an underscore in front, of whatever object; `__file__` and the like are public."""
    found = []
    for node in ast.walk(ast.parse(re.sub(r"(?m)^( *)%.*", r"\1pass", source))):
        if isinstance(node, ast.Attribute):
            found.append(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [part for name in names for part in name.split(".")]
    return [name for name in found if name.startswith("_") and not name.endswith("__")]


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
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel shows pictures in the notebook
    return "here"


def test_there_are_notebooks():
    assert "01_pipeline.ipynb" in ids and ids == list(SMALLER)


# By default with fewer steps and ranks, and without a kernel, by which all run before a release.
RANKS_OF_ITS_OWN = "02_zero_by_composition.ipynb"
SMALLER = {
    "01_pipeline.ipynb": [("steps=300", "steps=60"), ("iterations=50", "iterations=30")],
    "02_zero_by_composition.ipynb": [
        ("RANKS, WINDOW, STEPS = 4, 4, 3", "RANKS, WINDOW, STEPS = 2, 2, 2"),
        ("range(6)", "range(2)"),
    ],
    "03_from_deepspeed.ipynb": [("range(400)", "range(200)")],
    "04_learning_to_learn.ipynb": [("range(120)", "range(40)"), ("range(25)", "range(15)"), ("0.1 * way", "0.9 * way")],
    "05_low_precision.ipynb": [("SEEDS, STEPS = 10, 400", "SEEDS, STEPS = 2, 60")],
    "06_your_own_optimizer.ipynb": [
        ("STEPS, RATES = 200", "STEPS, RATES = 20"),
        ("zf.launch(on_a_rank, 2, name, 2)", "[on_a_rank(name, 1)]"),
    ],
    "07_ensembles.ipynb": [
        ("torch.logspace(-3.5, 0, 8), 8, 300", "torch.logspace(-3.5, 0, 8), 8, 21"),
        ("compiled = torch.compile(step", "compiled = step or torch.compile(step"),
    ],
    "08_fine_tune.ipynb": [("BASE, STEPS = 300, 200", "BASE, STEPS = 20, 20")],
}


def smaller(name):
    """The cells of a notebook, with fewer steps."""
    cells = [cell.source for cell in code_of(NOTEBOOKS[0].parent / name)]
    for old, new in SMALLER[name]:
        assert any(old in cell for cell in cells), old
        cells = [cell.replace(old, new) for cell in cells]
    return [re.sub(r"(?m)^( *)%.*", r"\1pass", cell) for cell in cells]


def cells_run(codes, folder):
    """What is raised by name of a notebook.

    All run in one rank, which has imported torch: an interpreter of its own takes longer than most notebooks, and
    imports of theirs take a second.
    """
    import matplotlib

    matplotlib.use("Agg")
    raised = {}
    for name, cells in codes.items():
        os.mkdir(os.path.join(folder, name))
        os.chdir(os.path.join(folder, name))
        notebook = sys.modules["notebook"] = ModuleType("notebook")  # where pickle looks for functions
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "`torch.jit")
            try:
                for cell in cells:
                    exec(cell, vars(notebook))
            except Exception:
                raised[name] = traceback.format_exc()
    return raised


def test_cells_of_notebooks_run(tmp_path):
    codes = {name: smaller(name) for name in SMALLER if name != RANKS_OF_ITS_OWN}
    (raised,) = zf.launch(cells_run, 1, codes, str(tmp_path), timeout=limit())
    assert not raised, "\n".join(f"{name}: {error}" for name, error in raised.items())


def test_cells_run_that_start_ranks(tmp_path, monkeypatch):
    """Functions of a notebook are those of no file, and travel by value."""
    import matplotlib

    matplotlib.use("Agg")
    notebook = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.chdir(tmp_path)
    for cell in smaller(RANKS_OF_ITS_OWN):
        exec(cell, vars(notebook))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_notebook_runs(path, kernel, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=int(limit()), kernel_name=kernel, resources={"metadata": {"path": str(tmp_path)}}
    )
    with tempfile.TemporaryDirectory() as sockets:
        # No port, which another process may have taken by the time the kernel opens it.
        kernels = client.create_kernel_manager()
        kernels.transport, kernels.ip = "ipc", f"{sockets}/kernel"
        client.execute()
    # A cell that warns would teach a warning.
    told = [o["text"] for c in notebook.cells for o in c.get("outputs", []) if o.get("name") == "stderr"]
    # Of torch's own making, as in the settings of the whole suite.
    noise = [text for text in told if "`torch.jit" not in text]
    assert not noise, noise
    # Numbers differ by the last digit from machine to machine; what kinds of things are shown does not.
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [kinds(cell) - {"stderr"} for cell in code] == [kinds(cell) for cell in code_of(path)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_notebook_is_kept_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) < 15
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert not any(cell.metadata for cell in notebook.cells), "times and settings of one run"
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_notebook_is_kept_with_its_outputs(path):
    code = code_of(path)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert sum(bool(cell.outputs) for cell in code) >= len(code) / 2 and code[-1].outputs
    for cell in code:
        assert not kinds(cell) & {"error", "stderr"}, cell.outputs
        for text in texts(cell):
            assert not re.search(PLACES, text) and str(Path(__file__).parent.parent) not in text, text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_notebook_installs_the_package_where_it_is_missing(path):
    cells = nbformat.read(path, as_version=4).cells
    assert BADGE in cells[0].source and cells[0].attachments["colab.svg"]
    assert code_of(path)[0].source.startswith(INSTALL)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_notebook_uses_no_private_name(path):
    assert [name for cell in code_of(path) for name in private_names(cell.source)] == []
