"""An sdist and a wheel work, without a compiler and without a home to write to; and what the doctor tells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from time_limits import limit

import zerofn as zf
from zerofn.contrib import doctor  # inside: what it says is compared with what is there

ROOT = Path(zf.__file__).parent.parent

SMOKE = """
import os, pathlib, sys, warnings
import torch, zerofn as zf
from importlib.metadata import version
assert pathlib.Path(zf.__file__).is_relative_to(sys.argv[1]), zf.__file__
assert version("zerofn") == zf.__version__
tx = zf.chain(zf.shard(), zf.precision(store_dtype=torch.bfloat16), zf.low_precision_adam(lr=1e-2))
model = torch.nn.Linear(4, 1)
opt = zf.attach(model, tx)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        opt.step()
        opt.zero_grad()
assert any("C kernel" in str(w.message) or "compiler" in str(w.message) for w in said), said
zf.save(sys.argv[2], opt)
zf.load(sys.argv[2], like=opt)
print("smoke", int(opt.state.step), zf.testing.check_transform.__name__)
"""


def run(*command, cwd, **env):
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=limit(120), env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_sdist_and_the_wheel_that_is_built_from_it(tmp_path):
    source = tmp_path / "source"
    keep = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
    shutil.copytree(ROOT / "zerofn", source / "zerofn", ignore=shutil.ignore_patterns("__pycache__"))
    for name in keep:
        shutil.copy(ROOT / name, source / name)
    hook = "from setuptools import build_meta; print(build_meta.{}({!r}))"
    run(sys.executable, "-c", hook.format("build_sdist", str(tmp_path)), cwd=source)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        sdist.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    assert (unpacked / "LICENSE").is_file() and (unpacked / "zerofn" / "kernels" / "squares.c").is_file()
    run(sys.executable, "-c", hook.format("build_wheel", str(tmp_path)), cwd=unpacked)
    wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        about = next(n for n in names if n.endswith("METADATA"))
        text = files.read(about).decode()
        # What a wheel is when it is installed: its files.
        files.extractall(tmp_path / "site")
    own = {str(p.relative_to(ROOT)) for p in (ROOT / "zerofn").rglob("*.py")}
    assert own | {"zerofn/py.typed", "zerofn/kernels/squares.c", "zerofn/kernels/native_codes.h"} <= names
    assert f"Version: {zf.__version__}\n" in text and "License-Expression: Apache-2.0" in text
    for field in ("Keywords: ", "Classifier: Operating System :: ", "Classifier: Development Status"):
        assert field in text, field
    # No compiler is found, and the home directory cannot be written to, nor be made.
    home = {"HOME": "/proc/1/home", "XDG_CACHE_HOME": "", "PATH": str(tmp_path / "nowhere"), "CC": ""}
    env = {**home, "PYTHONPATH": str(tmp_path / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
    told = run(sys.executable, "-c", SMOKE, str(tmp_path / "site"), str(tmp_path / "save"), cwd=tmp_path, **env)
    assert told.split() == ["smoke", "2", "check_transform"]


@pytest.mark.slow
def test_the_doctor_from_the_command_line():
    told = run(sys.executable, "-m", "zerofn", "doctor", cwd=ROOT).splitlines()
    about = [line[6:16].strip() for line in told if not line.startswith(" " * 10)]
    gpu = ["on a GPU", "on GPUs"]
    assert about == ["versions", "processor", "devices", *gpu, "kernel", "cache", "optional", "ranks"]
    assert f"torch {torch.__version__}" in told[0] and "2 local ranks took" in told[-1]
    assert not [line for line in told if line.startswith("FAIL")]


def test_what_would_be_slow_is_told_with_a_remedy(monkeypatch):
    monkeypatch.setenv("ZEROFN_NATIVE", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    found = {f.about: f for f in doctor.examine(nproc=0)}
    assert "ZEROFN_NATIVE=0" in found["kernel"].remedy and not found["kernel"].broken
    assert found["processor"].remedy.startswith("OMP_NUM_THREADS=1")
    assert str(found["kernel"]).startswith("slow")


def test_what_does_not_work_is_told_and_ends_with_1(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise zf.RankError("rank 1 died")

    monkeypatch.setattr(doctor, "launch", broken)
    monkeypatch.setattr(doctor, "_kernel", lambda: doctor.Finding("kernel", "native"))
    assert doctor.main(2) == 1
    assert "FAIL  ranks      2 local ranks: rank 1 died" in capsys.readouterr().out


# What is missing on a machine, and what the doctor says of a GPU there: without one, with one, and on two.
NOTHING_MISSING = "triton 3.9.0, one launch for all leaves"
MISSING = {
    "nothing": (NOTHING_MISSING, None, None),
    "triton": ("triton is not installed", "pip install triton", None),
    "compiler": ("no C compiler for its launchers", "a C compiler", None),
    "nccl": (NOTHING_MISSING, None, "lacks nccl"),
    "gloo": (NOTHING_MISSING, None, "lacks gloo"),
}


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_what_a_gpu_would_use_is_told(monkeypatch, missing, gpus):
    kernel, remedy, lacks = MISSING[missing]
    versions = {"triton": "3.9.0"} if missing != "triton" else {}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "not installed"))
    monkeypatch.setattr(doctor, "_c_compiler", lambda: None if missing == "compiler" else "cc")
    monkeypatch.setattr(doctor, "available", lambda: [name for name in ("gloo", "nccl") if name != missing])
    monkeypatch.setattr(doctor, "_updates", lambda device, *how: lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "a GPU")
    devices, update, ranks = doctor._devices(), doctor._gpu_kernel(), doctor._gpu_ranks()
    assert devices.result.startswith(", ".join(["a GPU"] * gpus) or "no GPU")
    assert kernel in update.result and update.remedy.startswith((remedy or "") if gpus else "")
    assert bool(update.remedy) == (gpus > 0 and remedy is not None) and not update.broken
    assert (lacks or "ranks use nccl for tensors, gloo") in ranks.result
    assert ranks.broken == bool(ranks.remedy) == (gpus > 1 and lacks is not None)


@pytest.mark.parametrize("wrong", ["warns", "raises"])
def test_a_kernel_that_does_not_run_on_the_gpu_here_is_told(monkeypatch, wrong):
    def update() -> None:
        if wrong == "raises":
            raise RuntimeError("no kernel image")
        warnings.warn("zerofn: triton gives other bits", UserWarning, stacklevel=1)

    monkeypatch.setattr(doctor, "_version", lambda name: "3.9.0")
    monkeypatch.setattr(doctor, "_c_compiler", lambda: "cc")
    monkeypatch.setattr(doctor, "_gpus", lambda: 1)
    monkeypatch.setattr(doctor, "_updates", lambda device, *how: update)
    told = doctor._gpu_kernel()
    assert told.broken == (wrong == "raises") and told.remedy
    assert ("no kernel image" in told.result) if wrong == "raises" else ("other bits" in told.remedy)


def test_a_wrong_setting_is_told(monkeypatch):
    monkeypatch.setenv("ZEROFN_NATIVE", "perhaps")
    assert doctor._kernel().broken
