"""The pages that put two whole scripts side by side: both run, and give the same losses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from time_limits import limit

import zerofn as zf

PAGES = Path(__file__).parents[2] / "docs" / "coming-from"
# DDP is compared by default by the example of a GPT.
PLAIN = [pytest.param("torch", 2, marks=pytest.mark.slow), ("fsdp2", 2)]
# Page, the package that it needs, ranks.
FRAMEWORKS = [
    ("deepspeed", "deepspeed", 2),
    ("accelerate", "accelerate", 2),
    ("lightning", "lightning", 1),
    ("trainer", "accelerate", 1),
    ("optax", "optax", 1),
]


def scripts_of(page: str) -> list[str]:
    text = (PAGES / f"{page}.md").read_text()
    return [re.findall(rf"```python no-run\n# {which}\.py\n(.*?)```", text, re.S)[0] for which in ("before", "after")]


def losses_of(scripts: list[str], folder: str) -> list[list[float]]:
    """On a rank of `zf.launch`, which has what torchrun gives."""
    import torch.distributed as dist

    os.chdir(folder)
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    # The rank's group is there already.
    dist.init_process_group = lambda *args, **more: None
    return [here(script) for script in scripts]


def here(script: str) -> list[float]:
    names: dict = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(script, names)
    return names["losses"]


def alone(script: str, folder: Path) -> list[float]:
    """In a process without ranks, as trainers ask the environment for them."""
    (folder / "script.py").write_text(f"{script}\nprint(*losses)\n")
    run = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=limit(100), cwd=folder)
    assert run.returncode == 0, run.stderr[-3000:]
    return [float(x) for x in run.stdout.splitlines()[-1].split()]


def check(page: str, ranks: int, folder: Path) -> None:
    scripts = scripts_of(page)
    if ranks == 1:
        found = [[alone(script, folder) for script in scripts]]
    else:
        found = zf.launch(losses_of, ranks, scripts, str(folder), timeout=limit())
    compare(found)


def compare(found: list[list[list[float]]]) -> None:
    for before, after in found:
        assert after == pytest.approx(before, rel=1e-4) and len(set(before)) == len(before) > 5


@pytest.mark.parametrize(("page", "ranks"), PLAIN)
def test_plain_torch(page, ranks, tmp_path):
    check(page, ranks, tmp_path)


def test_torchopt():
    pytest.importorskip("torchopt")
    compare([[here(script) for script in scripts_of("torchopt")]])


@pytest.mark.integrations
@pytest.mark.timeout(limit(200))
@pytest.mark.parametrize(("page", "package", "ranks"), FRAMEWORKS)
def test_frameworks(page, package, ranks, tmp_path):
    pytest.importorskip(package)
    check(page, ranks, tmp_path)
