"""The examples do what they say: both routes, comparison, interruption, resumption, the benchmark."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from time_limits import limit

import zerofn as zf

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = [*("--d-model", "16", "--layers", "1", "--heads", "2", "--seq", "16", "--batch", "4"), "--sample", "8"]
# A short text: validation goes through a part of it.
TINY += ["--lr", "0.01", "--seed", "3", "--data", str(EXAMPLES.parent / "README.md")]


@pytest.fixture
def train_lm(monkeypatch, request):
    """The example as a module, found as Python finds it when it runs the script."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_lm

    if request.function is not test_what_a_run_leaves_behind:
        # To draw a curve takes as long as twenty steps.
        monkeypatch.setattr(train_lm, "draw_curve", lambda path, curves: path.write_text("a curve"))
    return train_lm


def run(script: str, *args: object, **more) -> subprocess.Popen:
    command = [sys.executable, str(EXAMPLES / script), *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **more)


def saved(module, out: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint of a run."""
    o = module.options(["--resume", "--out", str(out)])
    route = module.PureRoute(module.fresh_model(o), module.pipeline(o))
    route.load(out / "checkpoint")
    from lm_report import named_tensors

    return named_tensors(route.state)


def assert_same_state(module, a: Path, b: Path) -> None:
    one, other = saved(module, a), saved(module, b)
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


def watch_steps(monkeypatch, module, interrupt_at: int | None = None) -> list[int]:
    """The steps that are run from now on; a real SIGINT arrives in the middle of one of them."""
    plain, seen = module.micro_batches, []

    def watched(text, step, o):
        seen.append(step)
        if step == interrupt_at:
            signal.raise_signal(signal.SIGINT)
        return plain(text, step, o)

    monkeypatch.setattr(module, "micro_batches", watched)
    return seen


@pytest.mark.parametrize("compute", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_both_routes_give_the_same_bits(train_lm, tmp_path, compute):
    options = [*TINY, "--steps", "8", "--compute", compute, "--accumulate", "2"]
    pure = train_lm.main([*options, "--route", "pure", "--out", str(tmp_path / "pure")])
    eager = train_lm.main([*options, "--route", "eager", "--out", str(tmp_path / "eager")])
    losses = pure["history"]["loss"]
    assert losses == eager["history"]["loss"] and len(set(losses)) == 8
    assert pure["history"]["validation"] == eager["history"]["validation"]
    assert pure["sample"] == eager["sample"]
    assert losses[-1] < losses[0]
    assert_same_state(train_lm, tmp_path / "pure", tmp_path / "eager")


@pytest.mark.parametrize(("options", "expected"), [((), 6), (("--rounding", "kahan"), 8)])
def test_what_a_run_leaves_behind(train_lm, tmp_path, options, expected):
    train_lm.main([*TINY, "--steps", "20", "--out", str(tmp_path), *options])
    record = json.loads((tmp_path / "run.json").read_text())
    assert len(record["history"]["loss"]) == 20 and record["settings"]["d_model"] == 16
    assert record["final_loss"] == pytest.approx(sum(record["history"]["loss"]) / 20)
    assert [step for step, _ in record["history"]["validation"]] == list(range(2, 21, 2))
    # Parameters, two moments and Kahan's compensation, of two bytes each, and an int64 counter for each leaf.
    leaves = sum(1 for k in saved(train_lm, tmp_path) if k.startswith("/params/"))
    assert record["bytes_per_parameter"] == pytest.approx(
        expected + 8 * leaves / record["settings"]["parameters"], rel=0.01
    )
    assert len(record["sample"].encode()) >= 12
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("first", "second"), [pytest.param("eager", "eager", marks=pytest.mark.slow), ("pure", "eager")]
)
def test_interrupted_and_resumed_is_straight_through(train_lm, tmp_path, monkeypatch, first, second):
    """Ctrl-C inside a step, then --resume: the same losses and the same state to the last bit."""
    options = [*TINY, "--steps", "10"]
    straight = train_lm.main([*options, "--out", str(tmp_path / "straight"), "--route", second])
    with monkeypatch.context() as patch:
        watch_steps(patch, train_lm, interrupt_at=6)
        stopped = train_lm.main([*options, "--out", str(tmp_path / "cut"), "--route", first])
    assert len(stopped["history"]["loss"]) == 7
    assert {"run.json", "checkpoint", "loss.png"} <= {p.name for p in (tmp_path / "cut").iterdir()}
    steps = watch_steps(monkeypatch, train_lm)
    resumed = train_lm.main(["--resume", "--out", str(tmp_path / "cut"), "--route", second])
    assert steps == list(range(7, 10))
    assert resumed["history"]["loss"] == straight["history"]["loss"]
    assert resumed["sample"] == straight["sample"]
    assert_same_state(train_lm, tmp_path / "straight", tmp_path / "cut")


def test_a_checkpoint_older_than_the_record_is_resumed_from(train_lm, tmp_path, monkeypatch):
    """A process killed between the two files leaves a record of steps that the checkpoint does not have."""
    options = [*TINY, "--steps", "10", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        watch_steps(patch, train_lm, interrupt_at=3)
        train_lm.main(options)
    older = shutil.copytree(tmp_path / "checkpoint", tmp_path / "older")
    finished = train_lm.main(["--resume", "--out", str(tmp_path)])
    shutil.rmtree(tmp_path / "checkpoint")
    older.rename(tmp_path / "checkpoint")
    assert train_lm.main(["--resume", "--out", str(tmp_path)])["history"]["loss"] == finished["history"]["loss"]


def test_compare_runs_the_same_data_through_adamw(train_lm, tmp_path, capsys):
    record = train_lm.main([*TINY, "--steps", "30", "--out", str(tmp_path), "--compare"])
    shown = capsys.readouterr().out
    adamw = record["adamw"]
    # The first loss is that of one initial model, rounded to bf16 in one of the two.
    assert adamw["bytes_per_parameter"] == pytest.approx(12, rel=0.01)
    assert record["bytes_per_parameter"] < 0.55 * adamw["bytes_per_parameter"]
    # Thirty steps take the loss down by about one; rounding may move it by a small part of that.
    assert abs(record["mean_loss"] - adamw["mean_loss"]) < 0.05
    for label in ("final loss", "mean loss", "validation loss", "state bytes per parameter", "step time"):
        assert re.search(rf"{label}.* \d+\.\d+ +\d+\.\d+", shown), label


def test_a_loss_that_is_no_number_is_named_and_what_was_saved_stays(train_lm, tmp_path, monkeypatch):
    options = [*TINY, "--steps", "20", "--out", str(tmp_path)]
    plain = train_lm.next_byte_loss
    calls = iter(range(10**6))
    monkeypatch.setattr(train_lm, "validate", lambda *args: 1.0)
    factor = lambda: float("nan") if next(calls) == 12 else 1  # noqa: E731
    monkeypatch.setattr(train_lm.Parts, "loss", lambda self, x, y: plain(x, y) * factor())
    with pytest.raises(SystemExit, match=r"the loss of step 13 is nan. What was saved at step 12 is in .*checkpoint"):
        train_lm.main(options)
    assert int(saved(train_lm, tmp_path)["/counters/step"]) == 12


@pytest.mark.slow
def test_ctrl_c_from_a_terminal(train_lm, tmp_path):
    """The command itself: SIGINT ends it with status 0 and everything saved."""
    process = run("train_lm.py", *TINY, "--steps", "4000", "--out", tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if "step 200/" in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=limit())
    assert process.returncode == 0, err
    assert "--resume" in out
    done = json.loads((tmp_path / "run.json").read_text())
    assert 200 <= len(done["history"]["loss"]) < 4000
    assert int(saved(train_lm, tmp_path)["/counters/step"]) == len(done["history"]["loss"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--d-model", "10", "--heads", "4"], "--d-model 10 must be a multiple of --heads 4"),
        (
            ["--batch", "5", "--accumulate", "2"],
            "--batch 5 must be a multiple of 1 ranks times --accumulate 2",
        ),
        (["--data", "/no/such/file"], "--data /no/such/file: no such file"),
        (["--sequence-parallel", "2"], "--sequence-parallel 2 must divide the number of ranks, 1"),
        (["--steps", "0"], "argument --steps: invalid positive int value: '0'"),
        (["--resume"], "--resume: there is no run in"),
    ],
)
def test_refusals(train_lm, tmp_path, capsys, args, message):
    with pytest.raises(SystemExit):
        train_lm.main([*args, "--out", str(tmp_path / "none")])
    assert message in capsys.readouterr().err


def test_resume_refuses_other_settings(train_lm, tmp_path, capsys):
    train_lm.main([*TINY, "--steps", "2", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        train_lm.main(["--resume", "--out", str(tmp_path), "--lr", "0.5"])
    assert "--lr 0.5 (was 0.01)" in capsys.readouterr().err


def test_a_text_that_is_too_short(train_lm, tmp_path):
    (tmp_path / "short.txt").write_bytes(b"abc" * 20)
    with pytest.raises(ValueError, match="171 bytes or more"):
        train_lm.main([*TINY, "--data", str(tmp_path / "short.txt"), "--out", str(tmp_path)])


def test_data_order_is_a_function_of_seed_and_step(train_lm):
    text = train_lm.Text.split(bytes(range(256)) * 4, 8)
    x, y = text.batch(0, 5, 3, 8)
    again, _ = text.batch(0, 5, 3, 8)
    assert torch.equal(x, again) and torch.equal(x[:, 1:], y[:, :-1])
    assert not torch.equal(x, text.batch(0, 6, 3, 8)[0])
    assert not torch.equal(x, text.batch(1, 5, 3, 8)[0])
    assert len({tuple(text.batch(0, step, 3, 8)[0].flatten().tolist()) for step in range(50)}) == 50
    # The held-out tail is never trained on.
    assert len(text.train) + len(text.held_out) == 1024
    assert sum(len(x) for x, _ in text.validation(4, 8)) == (len(text.held_out) - 9) // 8 + 1


def run_in_a_rank(script, args):
    """Exit code and output of a script, in a process that has imported torch."""
    sys.argv[1:], out, code = args, io.StringIO(), 0
    sys.path.insert(0, str((EXAMPLES / script).parent))
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except SystemExit as end:
            code = end.code
    return code, out.getvalue()


def on_a_rank(options):
    sys.path.insert(0, str(EXAMPLES))
    import train_lm

    train_lm.main(options)


@pytest.mark.parametrize(
    ("stage", "more", "torchrun"),
    [
        # Ranks that have torch already; torchrun takes ten seconds.
        pytest.param(2, [], False, id="2"),
        pytest.param(1, [], True, id="1", marks=pytest.mark.slow),
        pytest.param(2, [], True, id="2, torchrun", marks=pytest.mark.slow),
        pytest.param(3, [], True, id="3", marks=pytest.mark.slow),
        pytest.param(3, ["--sequence-parallel", "2"], True, id="parts", marks=pytest.mark.slow),
    ],
)
def test_zero_stages_over_ranks(train_lm, tmp_path, stage, more, torchrun):
    """The same command on two ranks: the run of one process, up to the order in which gradients are summed."""
    options = [*TINY, "--steps", "8", "--accumulate", "2"]
    alone = train_lm.main([*options, "--out", str(tmp_path / "alone")])
    route = "pure" if stage == 1 else "eager"
    options += ["--zero", str(stage), "--route", route, *more, "--out", str(tmp_path / "ranks")]
    if torchrun:
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command, env = [*ranks, str(EXAMPLES / "train_lm.py"), *options], {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit(120), env=env)
        assert done.returncode == 0, done.stderr
    else:
        zf.launch(on_a_rank, 2, options, timeout=limit())
    ranks = json.loads((tmp_path / "ranks" / "run.json").read_text())
    # Gradients are in bf16: another order of summation differs by its 2^-9, and losses by far less. At stage 1 a rank's
    # whole window is summed first, where one process has the mean of both ranks in each micro-step.
    assert ranks["history"]["loss"] == pytest.approx(alone["history"]["loss"], abs=5e-3 if stage == 1 else 2e-3)
    assert alone["history"]["loss"][-1] < alone["history"]["loss"][0] - 0.5
    assert ranks["bytes_per_parameter"] < 0.8 * alone["bytes_per_parameter"]


@pytest.mark.slow
def test_functional_benchmark_runs():
    """Without what is compiled, which takes a minute. The numbers are those of torch and of torchopt."""
    sizes = {"width": 8, "batch": 4, "inner": 2, "rounds": 3, "steps": 20}
    small = [part for name, size in sizes.items() for part in (f"--{name}", size)]
    process = run("benchmarks/functional.py", *small, "--only", "step", "meta", "memory")
    out, err = process.communicate(timeout=limit())
    assert process.returncode == 0, err
    rows = [line for line in out.splitlines() if "]  " in line and "quartiles" not in line]
    numbers = {line.split("  ")[0]: float(line.split()[-1]) for line in rows}
    assert numbers["torch, clip_grad_norm_, AdamW(fused)"] == pytest.approx(numbers["zerofn"], rel=1e-4)
    assert numbers["torchopt, autograd"] == pytest.approx(numbers["zerofn, autograd"], rel=1e-4)
    assert numbers["torchopt, autograd"] == pytest.approx(numbers["zerofn, torch.func.grad"], rel=1e-4)
    assert "resident MiB along 20 steps" in out


@pytest.mark.slow
def test_attached_update_benchmark_runs():
    process = run("benchmarks/attached_update.py", "--numel", 1 << 21, "--rounds", 2)
    out, err = process.communicate(timeout=limit())
    assert process.returncode == 0, err
    assert out.count("[") == 6 and "fp32 parameters equal; bf16 parameters equal" in out, out


@pytest.mark.slow
def test_curvature_benchmark_runs():
    """By hand and by zerofn the same eigenvalue and the same product."""
    process = run("benchmarks/curvature.py", "--width", 8, "--layers", 1, "--batch", 2, "--products", 2, "--rounds", 2)
    out, err = process.communicate(timeout=limit())
    assert process.returncode == 0, err
    pairs = re.findall(r"; (\S+), (\S+)\n  ratio", out)
    assert len(pairs) == 2, out
    for ours, by_hand in pairs:
        assert float(ours) == pytest.approx(float(by_hand), rel=1e-4)


@pytest.mark.slow
def test_a_rank_keeps_its_part_of_activations_and_sends_what_the_formula_says():
    process = run("benchmarks/sequence.py", "--lengths", 256, "--ranks", 1, 4, "--width", 32, "--layers", 1)
    out, err = process.communicate(timeout=limit())
    assert process.returncode == 0, err
    (_, one, *_), (_, four, _, part, _, _, sent, formula) = (line.split() for line in out.splitlines()[-2:])
    assert (one, four) == ("1", "4") and sent == formula != "0", out
    # A fourth, and bytes of the whole sequence, from which the rank's are cut.
    assert 0.25 <= float(part) < 0.27, out


@pytest.mark.slow
def test_wires_of_8_bits_send_a_quarter_and_a_little(tmp_path):
    sizes = ("--steps", 3, "--seeds", 0, "--d-model", 32, "--layers", 1, "--out", tmp_path)
    only = ("--only", "fp32 wires", "fp8 parameters, int8 gradients")
    process = run("benchmarks/narrow_wires.py", *sizes, *only)
    out, err = process.communicate(timeout=limit())
    assert process.returncode == 0, err
    wide, narrow = (int(row.replace(",", "")) for row in re.findall(r"\| ([\d,]+) \| \d+ \|$", out, re.MULTILINE))
    # Whole blocks of small leaves, and a few numbers of the agreement between ranks.
    assert wide * 132 / 512 < narrow < wide * 0.35, out


@pytest.mark.slow
def test_overhead_benchmark_runs():
    sizes = {"d-model": 16, "layers": 1, "seq": 16, "batch": 2, "leaves": 10, "buckets": 3, "rounds": 3, "processes": 1}
    small = [part for name, size in sizes.items() for part in (f"--{name}", size)]
    process = run("benchmarks/overhead.py", *small)
    out, err = process.communicate(timeout=limit())
    assert process.returncode == 0, err
    assert out.count("losses equal") == 5, out
    # Bytes do not depend on the machine: what a step holds beyond its states is one bucket.
    held = re.findall(r"(\d\.\d{3})   <= 1 met", out)
    assert len(held) == 4 and "MISSED" not in out.split("peak extra memory")[1].split("import zerofn")[0], out


def test_every_optimizer_is_timed_and_changes_what_torchs_does(tmp_path):
    """The figures of a tiny model say nothing; bytes and changes do not depend on the machine."""
    args = ["--numel", "6000", "--leaves", "5", "--makes", "1", "--rounds", "2", "--threads", "1", "--peers"]
    args += ["--json", str(tmp_path / "found.json")]
    ((code, out),) = zf.launch(run_in_a_rank, 1, "benchmarks/optimizers.py", args, init=False, timeout=limit())
    assert code == 0, out
    found = {(row["name"], row["dtype"]): row for row in json.loads((tmp_path / "found.json").read_text())}
    lines = [line for line in out.splitlines() if line.startswith("| ")]
    assert len(found) == len(lines) - 2 == 52 and "not run" not in out, out
    moved = {name: row["bytes"] for (name, dtype), row in found.items() if dtype == "fp32"}
    assert (moved["sgd"], moved["momentum"], moved["adamw"], moved["lion"], moved["adan"]) == (12, 20, 28, 20, 44)
    # A norm reads gradients once more; an average of parameters is read and written.
    assert (moved["clip, lion"], moved["clip, adamw, ema"]) == (24, 28 + 8 + 4)
    assert found["low_precision_adam, kahan", "bf16"]["bytes"] == 18
    with_torch = [row for row in found.values() if row["best"] and row["dtype"] == "fp32"]
    assert len(with_torch) == 13 and all(row["differs"] <= 5e-2 for row in with_torch)
    assert all(row["change"] > 0 and len(row["over adamw"]) == 2 for row in found.values())


@pytest.mark.parametrize(
    ("sections", "checks"),
    [(["bits", "memory", "offload", "nccl", "capture"], 7), pytest.param([], 50, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_what_a_gpu_is_asked_runs_without_one(sections, checks):
    """`bits`, `routes` and `offload` are compared with the CPU, here with itself."""
    args = ["--device", "cpu", "--tiny", *(["--only", *sections] if sections else [])]
    if sections:
        ((code, out),) = zf.launch(run_in_a_rank, 1, "benchmarks/gpu.py", args, init=False, timeout=limit())
    else:  # a section starts ranks of its own
        process = run("benchmarks/gpu.py", *args)
        out, _ = process.communicate(timeout=limit(120))
        code = process.returncode
    assert code == 0, out
    assert len(re.findall(r"^ok +\S", out, re.M)) > checks, out
    assert set(re.findall(r"^skip +(.*?)  ", out, re.M)) >= {"nccl", "capture"}, out
