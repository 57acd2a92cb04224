"""The loss gap of low precision: the byte-level GPT of `train_lm.py`, trained by each configuration on the same data.

Configurations of one seed start from the same weights and see the same bytes in the same order, so losses are
compared in pairs. Two things that are not the states' doing are told apart from them. To compute in bf16 moves
the loss by itself, so bf16 states are also trained with fp32 compute, and compared with fp32 masters that
compute in bf16. And training is chaotic: fp32 runs that only start from other last bits end apart; what
they differ by, printed as configurations of their own, is what so many seeds can resolve at best.

One configuration is of another library: torchao's AdamW with 8-bit moments, by the dynamic map, to nearest, in blocks
of 256. It runs if `--only` names it, and needs `pip install torchao`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lm_data import Text, read_text
from lm_model import GPT, next_byte_loss
from lm_report import write_atomically
from update_kernel import machine

import zerofn as zf

BETA1 = 0.9
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0
FIRST, LAST = 100, 50  # steps told apart at the beginning and averaged at the end
BASELINE, MASTERS = "fp32 AdamW (torch.optim)", "fp32 masters, bf16 compute"
TORCHAO = "torchao AdamW8bit"
NUDGED, ROUNDED = "the same, weights off by 1e-6", "the same, from weights rounded to bf16"
TARGET = 0.002  # of stochastic rounding and Kahan, in final and mean loss

Step = Callable[[torch.Tensor, torch.Tensor], float]


def schedule(o: Namespace) -> Any:
    return zf.schedules.warmup_cosine(o.lr, max(1, o.steps // 10), max(2, o.steps))


def betas(o: Namespace) -> tuple[float, float]:
    return BETA1, o.beta2


def fp32_masters(o: Namespace, seed: int) -> zf.Transform:
    dtypes = zf.precision(store_dtype=torch.float32, param_dtype=torch.bfloat16)
    return zf.chain(
        dtypes, zf.clip_by_global_norm(MAX_NORM), zf.adamw(schedule(o), betas(o), weight_decay=WEIGHT_DECAY)
    )


def low_states(dtype: torch.dtype, rounding: str, compute: Any = None) -> Callable[[Namespace, int], zf.Transform]:
    """Parameters in `dtype`, by default seen as they are stored; bf16 moments. fp16 adds a dynamic loss scale."""

    def pipeline(o: Namespace, seed: int) -> zf.Transform:
        scale = [zf.scale_loss("dynamic")] if dtype is torch.float16 else []
        adam = zf.low_precision_adam(schedule(o), betas(o), weight_decay=WEIGHT_DECAY, rounding=rounding, seed=seed)
        dtypes = zf.precision(store_dtype=dtype, param_dtype=compute or dtype)
        return zf.chain(dtypes, *scale, zf.clip_by_global_norm(MAX_NORM), adam)

    return pipeline


def coded_moments(
    bits: int, dtype: torch.dtype, rounding: str = "stochastic", code: str = "companded"
) -> Callable[..., zf.Transform]:
    """Moments as codes of 8 or 4 bits; parameters in `dtype`, rounded stochastically if that is bf16; fp32 compute."""

    def pipeline(o: Namespace, seed: int) -> zf.Transform:
        given = (schedule(o), betas(o))
        adam = (
            zf.adamw(*given, weight_decay=WEIGHT_DECAY)
            if dtype is torch.float32
            else zf.low_precision_adam(*given, weight_decay=WEIGHT_DECAY, state_dtype=torch.float32, seed=seed)
        )
        dtypes = zf.precision(store_dtype=dtype, param_dtype=torch.float32)
        coded = zf.quantize(adam, bits, code=code, rounding=rounding, seed=seed + 1)
        return zf.chain(dtypes, zf.clip_by_global_norm(MAX_NORM), coded)

    return pipeline


def masters_of_24_bits(bits: int | None) -> Callable[[Namespace, int], zf.Transform]:
    """bf16 parameters and residuals of 8 bits; moments in fp32, or as codes; fp32 compute."""

    def pipeline(o: Namespace, seed: int) -> zf.Transform:
        adam = zf.adamw(schedule(o), betas(o), weight_decay=WEIGHT_DECAY)
        dtypes = zf.precision(store_dtype="bf16+8", param_dtype=torch.float32, grad_dtype=torch.float32)
        return zf.chain(
            dtypes, zf.clip_by_global_norm(MAX_NORM), adam if bits is None else zf.quantize(adam, bits, seed=seed + 1)
        )

    return pipeline


ROUNDINGS = "nearest", "stochastic", "kahan"
PIPELINES: dict[str, Callable[[Namespace, int], zf.Transform]] = {
    MASTERS: fp32_masters,
    **{f"bf16 states, {r}": low_states(torch.bfloat16, r) for r in ROUNDINGS},
    **{f"bf16 states, {r}, fp32 compute": low_states(torch.bfloat16, r, torch.float32) for r in ROUNDINGS},
    "fp32 parameters, bf16 moments": low_states(torch.float32, "stochastic"),
    "fp32 parameters, 8-bit moments": coded_moments(8, torch.float32),
    "fp32 parameters, 8-bit moments to nearest": coded_moments(8, torch.float32, "nearest"),
    "fp32 parameters, 8-bit moments, dynamic": coded_moments(8, torch.float32, code="dynamic"),
    "fp32 parameters, 8-bit moments, dynamic to nearest": coded_moments(8, torch.float32, "nearest", "dynamic"),
    "fp32 parameters, 4-bit moments": coded_moments(4, torch.float32),
    "bf16 parameters, 8-bit moments, fp32 compute": coded_moments(8, torch.bfloat16),
    "bf16+8 parameters, fp32 compute": masters_of_24_bits(None),
    "bf16+8 parameters, 8-bit moments, fp32 compute": masters_of_24_bits(8),
    "fp16 states, dynamic scale": low_states(torch.float16, "stochastic"),
}
CONFIGURATIONS = [BASELINE, *PIPELINES, NUDGED, ROUNDED]
# If it is installed, and asked for.
OF_OTHERS = [TORCHAO]


def plain_step(model: GPT, o: Namespace) -> Step:
    """AdamW as torch has it, without zerofn."""
    opt = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=betas(o), weight_decay=WEIGHT_DECAY, fused=True)
    at = schedule(o)
    rates = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: at(step) / o.lr)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = next_byte_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        opt.step()
        opt.zero_grad()
        rates.step()
        return float(loss.detach())

    return step


def torchao_step(model: GPT, o: Namespace) -> Step:
    """AdamW as torchao has it."""
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found]

    opt = AdamW8bit(model.parameters(), lr=o.lr, betas=betas(o), weight_decay=WEIGHT_DECAY)
    at, steps = schedule(o), 0

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        nonlocal steps
        # A rate is a tensor there, and a scheduler of torch's would put a number in its place.
        opt.param_groups[0]["lr"].fill_(at(steps))
        steps += 1
        loss = next_byte_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        opt.step()
        opt.zero_grad()
        return float(loss.detach())

    return step


def attached_step(model: GPT, opt: Any) -> Step:
    """The same through a pipeline. The rates are those of `plain_step`: both read the schedule before a step."""

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = next_byte_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return float(loss.detach())

    return step


def train(name: str, seed: int, text: Text, o: Namespace) -> dict[str, Any]:
    """One configuration of one seed: loss and time of each step."""
    torch.manual_seed(seed)
    model = GPT(o.d_model, o.layers, o.heads, o.seq).to(o.device)
    skipped = 0
    with torch.no_grad():
        for p in model.parameters() if name in (NUDGED, ROUNDED) else ():
            p.copy_(p * (1 + 1e-6 * torch.randn(p.shape).to(p)) if name == NUDGED else p.bfloat16())
    if name in PIPELINES:
        opt = zf.attach(model, PIPELINES[name](o, seed))
        step = attached_step(model, opt)
    else:
        opt, step = None, (torchao_step if name == TORCHAO else plain_step)(model, o)
    losses, seconds = [], []
    for i in range(o.steps):
        x, y = (part.to(o.device) for part in text.batch(seed, i, o.batch, o.seq))
        begin = time.perf_counter()
        losses.append(step(x, y))
        seconds.append(time.perf_counter() - begin)
    if opt is not None and "skipped_steps" in opt.metrics:
        skipped = int(opt.metrics["skipped_steps"])
    return {"loss": losses, "step_ms": statistics.median(seconds) * 1e3, "skipped": skipped}


# ---------------------------------------------------------------- what is made of the losses

Runs = dict[str, dict[str, dict[str, Any]]]  # configuration -> seed -> what `train` returned


def windows(losses: list[float]) -> dict[str, float]:
    """The means that are compared. Early steps stand apart: a gap of the mean can lie in them alone."""
    later = losses[FIRST:] or losses
    return {
        "final": statistics.fmean(losses[-LAST:]),
        "mean": statistics.fmean(losses),
        "first": statistics.fmean(losses[:FIRST]),
        "later": statistics.fmean(later),
    }


def spread(values: list[float], form: str) -> str:
    """Mean and standard deviation over seeds."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return format(statistics.fmean(values), form) + deviation


def table(runs: Runs) -> str:
    """Losses with their spread over seeds; below, differences to the baseline of the same seed."""
    measured = {name: {s: windows(r["loss"]) for s, r in by_seed.items()} for name, by_seed in runs.items()}
    lines = [
        f"| configuration | seeds | final (last {LAST}) | mean | first {FIRST} | after | ms/step | skipped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, by_seed in measured.items():
        cells = [spread([w[key] for w in by_seed.values()], ".4f") for key in ("final", "mean", "first", "later")]
        ms = statistics.fmean(r["step_ms"] for r in runs[name].values())
        skipped = sum(r["skipped"] for r in runs[name].values())
        lines.append(f"| {name} | {len(by_seed)} | {' | '.join(cells)} | {ms:.1f} | {skipped} |")
    for base, names in ((BASELINE, list(measured)), (MASTERS, [f"bf16 states, {r}" for r in ROUNDINGS])):
        if base in measured:
            lines += ["", *differences(measured, base, [n for n in names if n != base and n in measured])]
    return "\n".join(lines)


def differences(measured: dict[str, dict[str, dict[str, float]]], base: str, names: list[str]) -> list[str]:
    """Means over seeds of what each configuration is above `base`, of the same seed."""
    lines = [
        f"Minus {base} of the same seed:",
        "",
        f"| configuration | final | by seed | mean | by seed | first {FIRST} | after | target |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        by_seed = measured[name]
        pairs = [s for s in by_seed if s in measured[base]]
        gaps = {k: [by_seed[s][k] - measured[base][s][k] for s in pairs] for k in ("final", "mean", "first", "later")}
        if pairs:
            cells = []
            for key in ("final", "mean"):
                cells += [spread(gaps[key], "+.4f"), each(gaps[key])]
            cells += [spread(gaps["first"], "+.4f"), spread(gaps["later"], "+.4f"), verdict(name, gaps)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def each(values: list[float]) -> str:
    """The values, or of many how well they know their mean."""
    if len(values) <= 10:
        return " ".join(f"{x:+.4f}" for x in values)
    return f"standard error {statistics.stdev(values) / len(values) ** 0.5:.4f}"


def verdict(name: str, gaps: dict[str, list[float]]) -> str:
    if not name.startswith(("bf16 states, stochastic", "bf16 states, kahan")):
        return ""
    met = all(abs(statistics.fmean(gaps[key])) <= TARGET for key in ("final", "mean"))
    return f"{'met' if met else 'missed'} (within {TARGET:g})"


def draw(path: Path, runs: Runs) -> None:
    """Losses, mean over seeds and over 20 steps, and below them the distance from the baseline."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('no curves: they need matplotlib. pip install "zerofn[examples]"')
        return
    figure = Figure(figsize=(9, 8), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    base = runs.get(BASELINE, {})
    for i, (name, by_seed) in enumerate(runs.items()):
        style: Any = {
            "color": f"C{i}",
            "label": name,
            "linewidth": 1.0,
            "linestyle": ":" if name in (NUDGED, ROUNDED) else "-",
        }
        upper.plot(smooth([r["loss"] for r in by_seed.values()], 20), **style)
        shared = [s for s in by_seed if s in base]
        if name != BASELINE and shared:
            gaps = [[a - b for a, b in zip(by_seed[s]["loss"], base[s]["loss"], strict=True)] for s in shared]
            lower.plot(smooth(gaps, 50), **style)
    upper.set(ylabel="loss (nats per byte)", title="Byte-level GPT, mean over seeds")
    lower.set(xlabel="step", ylabel=f"minus {BASELINE}\n(mean of 50 steps)")
    lower.axhline(0, color="black", linewidth=0.6)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    upper.legend()
    write_atomically(path, lambda f: figure.savefig(f, format="png", dpi=120))


def smooth(curves: list[list[float]], over: int) -> list[float]:
    mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
    return [statistics.fmean(mean[max(0, i + 1 - over) : i + 1]) for i in range(len(mean))]


# ---------------------------------------------------------------- the command


def arguments(p: ArgumentParser) -> None:
    p.add_argument("--steps", type=int, default=1000, help="optimizer steps (1000)")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights, data and rounding (0 1 2)")
    p.add_argument("--d-model", type=int, default=256, help="width (256; with 4 layers, 3.3 M parameters)")
    p.add_argument("--layers", type=int, default=4, help="depth (4)")
    p.add_argument("--heads", type=int, default=4, help="attention heads (4)")
    p.add_argument("--batch", type=int, default=8, help="sequences in a step (8)")
    p.add_argument("--seq", type=int, default=128, help="bytes in a sequence (128)")
    p.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (0.002)")
    # The usual value, and the hard case: a bf16 second moment rounded to nearest does not decay with it.
    p.add_argument("--beta2", type=float, default=0.999, help="decay of the second moment (0.999; train_lm has 0.99)")
    p.add_argument("--threads", type=int, default=1, help="of torch (1)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument(
        "--only", nargs="+", choices=[*CONFIGURATIONS, *OF_OTHERS], default=CONFIGURATIONS, metavar="CONFIGURATION"
    )
    p.add_argument("--out", type=Path, default=Path("runs/low_precision"), help="folder of loss.json and loss.png")


def main(o: Namespace) -> None:
    """Run what `--out` does not have yet, seed by seed, and print tables; each finished run is kept at once."""
    torch.set_num_threads(o.threads)
    text, file = Text.split(read_text(None), o.seq), o.out / "loss.json"
    free = {"seeds", "only", "out", "threads", "command"}
    settings = {k: v for k, v in vars(o).items() if k not in free}
    record: dict[str, Any] = {"settings": settings, "machine": machine(), "runs": {}}
    if file.exists():
        record = json.loads(file.read_text())
        if record["settings"] != settings:
            sys.exit(f"{file} holds runs with {record['settings']}. Give the same settings, or another --out.")
    runs: Runs = record["runs"]
    with torch.device("meta"):
        count = sum(p.numel() for p in GPT(o.d_model, o.layers, o.heads, o.seq).parameters())
    print(
        f"{count:,} parameters, {o.steps} steps of {o.batch} x {o.seq} bytes, AdamW{betas(o)}\n{machine()}", flush=True
    )
    for seed in o.seeds:
        for name in o.only:
            if str(seed) in runs.get(name, {}):
                continue
            begin = time.perf_counter()
            result = runs.setdefault(name, {})[str(seed)] = train(name, seed, text, o)
            write_atomically(file, lambda f: f.write(json.dumps(record).encode()))
            took = time.perf_counter() - begin
            print(f"seed {seed}, {name}: final {windows(result['loss'])['final']:.4f}, {took:.0f} s", flush=True)
    ordered = {name: runs[name] for name in [*CONFIGURATIONS, *OF_OTHERS] if name in runs}
    print("\n" + table(ordered) + "\n\n" + machine())
    draw(o.out / "loss.png", ordered)
