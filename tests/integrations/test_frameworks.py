"""Frameworks themselves run, each in a script of its own: what trains with torch.optim trains alike when attached."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from time_limits import limit

SCRIPTS = {
    "trainer_on_ranks": ("accelerate", {"stages": 2, "resumed": 2, "refused": 2}),
    "accelerate_on_ranks": ("accelerate", {"one": 1, "ranks": 2}),
    "lightning_fit": ("lightning", {"one": 1, "ranks": 2}),
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
