"""The engines of `docs/engines.md`: a Slurm script that is checked and run without Slurm, and Ray Train."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from time_limits import limit

import zerofn as zf

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "train.slurm"


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path):
    """What Slurm sets and has, of a job on one machine, which is this one."""
    program(tmp_path, "scontrol", 'echo "$3" | tr "," "\\n"')
    # Its own options come first, then what it starts.
    program(tmp_path, "srun", 'echo srun "$1" >&2; shift; exec "$@"')
    program(tmp_path, "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    given = {"SLURM_JOB_NODELIST": "127.0.0.1", "SLURM_JOB_ID": "4242", "SLURM_JOB_NUM_NODES": "1"}
    return {**os.environ, **given, "PATH": f"{tmp_path}:{os.environ['PATH']}", "RANKS_PER_NODE": "2"}


def test_the_slurm_script_is_shell():
    assert subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True).returncode == 0


def test_the_slurm_script_run_dry(slurm, tmp_path):
    program(tmp_path, "torchrun", 'echo "$OMP_NUM_THREADS" torchrun "$@"')
    more = {"SLURM_JOB_NODELIST": "node7,node8", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "9"}
    run = subprocess.run(
        ["bash", str(SCRIPT), "train.py", "--zero", "3"], capture_output=True, text=True, env={**slurm, **more}
    )
    assert run.returncode == 0, run.stderr
    meeting = "--rdzv-id 4242 --rdzv-backend c10d --rdzv-endpoint node7:24242"
    assert run.stdout.strip() == f"4 torchrun --nnodes 2 --nproc-per-node 2 {meeting} train.py --zero 3"
    nothing = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, env=slurm)
    assert nothing.returncode == 2 and "which script?" in nothing.stderr


def norm(text: str) -> str:
    """Of the last gradients, which is the same on all ranks."""
    found = set(re.findall(r"'grad_norm': ([\d.]+)", text))
    assert len(found) == 1, text
    return found.pop()


@pytest.mark.slow
@pytest.mark.timeout(limit(200))
def test_the_slurm_script_trains_and_goes_on(slurm, tmp_path):
    command = ["bash", str(SCRIPT), str(ROOT / "examples" / "ray_train.py"), "--out", str(tmp_path / "run")]
    once = subprocess.run(
        [*command[:-1], str(tmp_path / "once"), "--steps", "6"],
        capture_output=True,
        text=True,
        env=slurm,
        timeout=limit(150),
    )
    assert once.returncode == 0, once.stderr[-3000:]
    for steps in ("4", "6"):
        again = subprocess.run(
            [*command, "--steps", steps], capture_output=True, text=True, env=slurm, timeout=limit(150)
        )
        assert again.returncode == 0, again.stderr[-3000:]
    # In two jobs as in one.
    assert norm(again.stdout) == norm(once.stdout)


@pytest.mark.integrations
@pytest.mark.timeout(limit(400))
def test_ray_train_trains_what_torchrun_does(tmp_path, slurm):
    if find_spec("ray") is None or find_spec("pyarrow") is None:
        pytest.skip("ray[train] is not installed: pip install '.[ray]'")
    script = str(ROOT / "examples" / "ray_train.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    plain = subprocess.run(
        ["bash", str(SCRIPT), script, "--steps", "6", "--out", str(tmp_path / "plain")],
        capture_output=True,
        text=True,
        env={**slurm, "PYTHONPATH": env["PYTHONPATH"]},
        timeout=limit(150),
    )
    for steps in ("4", "6"):
        run = subprocess.run(
            [sys.executable, script, "--steps", steps, "--out", str(tmp_path / "ray")],
            capture_output=True,
            text=True,
            env=env,
            timeout=limit(180),
        )
        assert run.returncode == 0, run.stderr[-3000:]
    # Two workers of Ray Train, in two jobs, and two ranks of torchrun in one.
    assert norm(run.stdout) == norm(plain.stdout)
    # What Ray Train keeps is a save of all ranks, for any number of them.
    kept = re.findall(r"kept by Ray Train: (.+)", run.stdout)
    saved, loaded = (_trained(path) for path in (tmp_path / "ray" / "step_000000006", *kept))
    assert all(torch.equal(saved[k], loaded[k]) for k in saved)


def _trained(directory: str | Path) -> dict[str, torch.Tensor]:
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    opt = zf.attach(model, zf.chain(zf.shard(), zf.clip_by_global_norm(1.0), zf.adamw(3e-3)))
    zf.load(directory, like=opt)
    assert int(opt.state.step) == 6
    return dict(opt.state.leaves)
