"""The groups of `examples/disaggregated_vlm.py`: what they train, what ends them, and what goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest
from time_limits import limit

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ["--width", "16", "--layers", "1", "--batch", "16", "--compare", "2"]
ENGINES = [
    pytest.param("launch", marks=pytest.mark.slow),
    pytest.param("ray", marks=pytest.mark.integrations),
]


@pytest.fixture
def workers(monkeypatch):
    """The module of the workers, found as Python finds it when it runs the script."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import vlm_workers

    return vlm_workers


def run(*args: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(EXAMPLES / "disaggregated_vlm.py"), *SMALL, *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=limit(250))


def record(out: Path) -> dict:
    return json.loads((out / "run.json").read_text())


@pytest.fixture(params=ENGINES)
def engine(request):
    if find_spec(request.param) is None and request.param == "ray":
        pytest.skip("ray is not installed: pip install '.[ray]'")
    return request.param


@pytest.mark.timeout(limit(600))
def test_trains_what_one_process_does_dies_by_name_and_resumes(engine, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = run("--engine", engine, "--steps", 4, "--out", whole)
    assert done.returncode == 0, done.stderr[-3000:]
    # In fp16 and bf16: the bound of the script, and of what is trained over ranks with 16 bits at all.
    assert 0 < record(whole)["difference"] <= 0.05, done.stdout
    # Of sums of squares that are mostly in fp32.
    assert record(whole)["of_norms"] <= 1e-3, done.stdout
    # 16 embeddings of 4 x 16 in fp32, each way, four times; and those that captions are made of at the end.
    assert record(whole)["vision"]["bytes"] == 4 * (4 * 16 + 297) * 4 * 16
    assert record(whole)["text"]["bytes"] == 4 * 4 * 16 * 4 * 16

    died = run("--engine", engine, "--steps", 4, "--out", cut, "--save-every", 2, "--die", "text:1:2")
    assert died.returncode == 1 and "text[1] died" in died.stderr, died.stderr[-3000:]
    assert "--resume goes on from the last save" in died.stderr
    # By the clock of files: the run has ended, with all that it had started, soon after the worker.
    assert time.time() - (cut / "died").stat().st_mtime < limit(30)

    went_on = run("--engine", engine, "--steps", 4, "--out", cut, "--resume")
    assert went_on.returncode == 0, went_on.stderr[-3000:]
    # The same ranks and rows: the same bits.
    assert record(cut)["loss"] == record(whole)["loss"] and record(cut)["first"] == 2


@pytest.mark.slow
@pytest.mark.timeout(limit(300))
def test_the_ranks_of_one_group_share_sequences_and_groups_differ_in_size(tmp_path):
    done = run("--sequence-parallel", "--vision", 1, "--text", 2, "--steps", 2, "--out", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0 < record(tmp_path)["difference"] <= 0.05 and record(tmp_path)["of_norms"] <= 1e-3, done.stdout


@pytest.mark.slow
def test_a_batch_that_ranks_cannot_share_is_refused(tmp_path):
    refused = run("--vision", 3, "--out", tmp_path)
    assert refused.returncode == 2 and "cannot be shared by --vision 3" in refused.stderr


class Post:
    """Values stay where they are."""

    put = staticmethod(lambda parcel: parcel)
    get = staticmethod(list)
    meet = staticmethod(lambda tag, group, value: value)


def options(**other) -> Namespace:
    given = {"width": 16, "layers": 1, "seed": 0, "lr": 1e-3, "batch": 4, "resume": False, "die": ""}
    return Namespace(**{**given, "sequence_parallel": False, **other})


def test_gradients_that_are_late_doubled_or_of_another_form_are_refused(workers):
    pytest.importorskip("sklearn")
    vision = workers.VisionWorker("vision", 0, 1, options(), Post())
    vision.start()
    first = vision.embed(0)
    second = vision.embed(1)
    with pytest.raises(workers.StepMismatch, match=r"step 0 came .* waits for that of step 1: it is late"):
        vision.backward(0, [first], 1)
    with pytest.raises(workers.StepMismatch, match="at step 1 and was given a value of 0"):
        vision.backward(1, [first], 1)
    with pytest.raises(workers.StepMismatch, match=r"came as \(4, 4, 8\) torch.float32"):
        vision.backward(1, [second._replace(values=second.values[:, :, :8])], 1)
    with pytest.raises(workers.StepMismatch, match=r"came as \(4, 4, 16\) torch.float64"):
        vision.backward(1, [second._replace(values=second.values.astype("float64"))], 1)
    vision.backward(1, [second], 1)
    with pytest.raises(workers.StepMismatch, match="waits for that of step none: it is late, or came twice"):
        vision.backward(1, [second], 1)
    vision.opt.detach()
