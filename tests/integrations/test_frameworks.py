"""Frameworks themselves run, each in a script of its own: what trains with torch.optim trains alike when attached."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from time_limits import limit

SCRIPTS = {
    "trainer_fit": ("accelerate", {"stages": 2, "resumed": 2, "frozen": 2, "refused": 2}),
    "accelerate_fit": ("accelerate", {"one": 1, "ranks": 2}),
    "lightning_fit": ("lightning", {"one": 1, "ranks": 2, "frozen": 2, "resumed": 2}),
    "peft_lora": ("peft", {"lora": 1}),
}
RUNS = [(script, package, what, n) for script, (package, runs) in SCRIPTS.items() for what, n in runs.items()]


@pytest.mark.integrations
@pytest.mark.timeout(limit(200))
@pytest.mark.parametrize("script, package, what, ranks", RUNS, ids=[f"{s}-{w}" for s, _, w, _ in RUNS])
def test_trains_as_with_torch_optim(tmp_path, script, package, what, ranks):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[test,integrations]'")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    # A script's own folder is where Python looks first, and holds none of what it imports.
    command = [sys.executable, *torchrun, str(Path(__file__).parent / f"{script}.py"), what, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=limit(150))
    assert run.returncode == 0, run.stderr[-6000:]
    assert run.stdout.count(f"right {what}") == ranks, run.stdout


# The scripts that the page shows: the package each needs, steps or epochs until it is cut off and in all, and the file
# with the weights at its end.
PAGES = Path(__file__).parents[2] / "docs" / "coming-from"
SHOWN = {"train": ("accelerate", 2, 6, "final/model.safetensors"), "fit": ("lightning", 2, 4, "last.ckpt")}


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".ckpt":
        return torch.load(path, weights_only=False)["state_dict"]
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.integrations
@pytest.mark.timeout(limit(300))
@pytest.mark.parametrize("name", SHOWN)
def test_the_scripts_of_the_page_resume_bit_for_bit(tmp_path, name):
    package, cut_off, every, weights = SHOWN[name]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[test,integrations]'")
    page = {"train": "trainer", "fit": "lightning"}[name]
    (text,) = re.findall(rf"```python no-run\n(# {name}\.py\n.*?)```", (PAGES / f"{page}.md").read_text(), re.S)
    (tmp_path / f"{name}.py").write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for folder, until in (("straight", every), ("resumed", cut_off), ("resumed", every)):
        command = [*torchrun, f"{name}.py", folder, str(until)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit(90), cwd=tmp_path)
        assert run.returncode == 0, run.stderr[-6000:]
        if until == cut_off:
            first = weights_in(tmp_path / folder / weights)
            shutil.rmtree(tmp_path / folder / "final", ignore_errors=True)
    straight, resumed = (weights_in(tmp_path / folder / weights) for folder in ("straight", "resumed"))
    assert straight.keys() == resumed.keys() and all(torch.equal(straight[k], resumed[k]) for k in straight)
    assert not all(torch.equal(straight[k], first[k]) for k in straight)
