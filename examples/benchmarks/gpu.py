"""One GPU in ten minutes: bits, waits, bandwidth, step time, memory, offload, and what a capture does.

    python examples/benchmarks/gpu.py                        # one CUDA device
    python examples/benchmarks/gpu.py --only bits waits      # some sections
    python examples/benchmarks/gpu.py --device cpu --tiny    # the same code without a GPU, a minute

It prints one line for each figure and goes on after a failure. A line is a figure, a check that is "ok" or "WRONG",
a skipped part, or a failed one. It ends with exit status 1 if a check was wrong or a part failed. Sections stand in
the order of their worth, and what is left when the time is up is skipped.

Shares of bandwidth are of a copy on the same device. Bytes of an update are what must be read and written once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Matrix products give the same bits in every run only with this, which is read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import zerofn as zf
from zerofn.kernels.program import printed_by
from zerofn.kernels.rounding import random_bits

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lm_model import GPT
from update_kernel import alone

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
GIB = 2**30


class Report:
    """Prints what was found, and counts it.

    Args:
        device: where everything runs.
        tiny: models of a few thousand parameters, for a run on a CPU.
        seconds: after which further parts are skipped.
    """

    def __init__(self, device: torch.device, tiny: bool, seconds: float):
        self.device, self.tiny = device, tiny
        self.end = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        # Bytes a second of a copy on the device, read and written.
        self.copy = float("nan")

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def _line(self, kind: str, name: str, text: str) -> None:
        self.counts[kind] += 1
        print(f"{kind:6}  {name:60}  {text}", flush=True)

    def figure(self, name: str, text: str) -> None:
        self._line("", name, text)

    def check(self, name: str, right: bool, text: str = "") -> None:
        self._line("ok" if right else "WRONG", name, text)

    def skip(self, name: str, why: str) -> None:
        self._line("skip", name, why)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """One part, whose failure is printed with the lines that led to it. Its memory is freed at the end."""
        try:
            yield
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-4:]
            where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))
            self._line("FAILED", name, f"{type(error).__name__}: {str(error)[:300]!r} at {where}")
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def parts(self, names: list[str]) -> Iterator[str]:
        """The names for which there is time left."""
        for name in names:
            if time.monotonic() > self.end:
                self.skip(name, "out of time")
            else:
                yield name

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object], warmup: int = 3, rounds: int = 10) -> tuple[float, float]:
        """Medians of a call: on the device, and on the host until the call returns."""
        for _ in range(warmup):
            call()
        self.synchronize()
        device, host = [], []
        for _ in range(rounds):
            if self.cuda:
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
            begin = time.perf_counter()
            call()
            host.append(1e3 * (time.perf_counter() - begin))
            if self.cuda:
                last.record()
                torch.cuda.synchronize()
                device.append(first.elapsed_time(last))
        return statistics.median(device or host), statistics.median(host)

    def peak(self, call: Callable[[], object]) -> float:
        """GiB that were allocated at most during a call."""
        if not self.cuda:
            call()
            return float("nan")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / GIB

    def bandwidth(self, size: int, milliseconds: float) -> str:
        rate = size / milliseconds * 1e3
        return f"{rate / 1e12:.2f} TB/s, {rate / self.copy:.0%} of a copy"


# ----------------------------------------------------------------------------------------------------------------------
# Models and pipelines.

# Width, layers, heads, length of a sequence, sequences in a batch.
SIZES = {
    "163M": (768, 23, 12, 1024, 8),
    "1.4B": (2048, 28, 16, 1024, 4),
    "6.9B": (4096, 34, 32, 512, 1),
}
TINY = (16, 2, 2, 16, 2)


def gpt(report: Report, size: str, dtype: torch.dtype = BF16) -> tuple[nn.Module, Tensor, Tensor]:
    """A GPT on bytes, made on the device, with a batch of inputs and targets."""
    width, layers, heads, length, batch = TINY if report.tiny else SIZES[size]
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with report.device:
            model = GPT(width, layers, heads, length)
    finally:
        torch.set_default_dtype(before)
    tokens = torch.randint(0, 256, (batch, length + 1), device=report.device)
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


def numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def low_precision(*before: zf.Transform, rounding: str = "stochastic") -> zf.Transform:
    return zf.chain(zf.precision(store_dtype=BF16), *before, zf.low_precision_adam(1e-4, rounding=rounding))


def muon_and_adamw() -> zf.Transform:
    return zf.partition(
        {"matrices": zf.muon(1e-2), "rest": zf.adamw(1e-2)},
        lambda path: "matrices" if "blocks" in path and "weight" in path and "norm" not in path else "rest",
    )


def moved(old: Tensor, new: Tensor) -> dict[str, Tensor]:
    return {"moved": (new - old).square().sum()}


# What the large models are trained with: bf16 parameters, gradients and moments.
STEPS: dict[str, Callable[[], zf.Transform]] = {
    "adamw": lambda: zf.adamw(1e-4),
    "low precision": low_precision,
    "clip, low precision": lambda: low_precision(zf.clip_by_global_norm(1.0)),
    "low precision, kahan": lambda: low_precision(rounding="kahan"),
    "scale, clip, low precision": lambda: low_precision(zf.scale_loss("dynamic"), zf.clip_by_global_norm(1.0)),
    "accumulate(2), low precision": lambda: low_precision(zf.accumulate(2)),
    "shard, low precision": lambda: zf.chain(zf.shard(), low_precision()),
    "lion": lambda: zf.lion(1e-4),
    "rmsprop": lambda: zf.rmsprop(1e-4),
    "sgd, momentum": lambda: zf.sgd(1e-4, momentum=0.9),
    "clip, adamw, ema": lambda: zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(1e-4), zf.ema(0.9)),
    "skip_nonfinite, adamw": lambda: zf.chain(zf.skip_nonfinite(), zf.adamw(1e-4)),
    "muon, adamw": muon_and_adamw,
    "watch, adamw": lambda: zf.chain(zf.adamw(1e-4), zf.watch(moved)),
    "offload(low precision)": lambda: zf.chain(zf.precision(store_dtype=BF16), zf.offload(zf.low_precision_adam(1e-4))),
}


class Small(nn.Module):
    """Three linear layers and a norm: every route runs it in milliseconds."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.norm(x)


def in_fp32(*members: zf.Transform) -> zf.Transform:
    return zf.chain(zf.precision(store_dtype=BF16, param_dtype=FP32), *members)


# Of the small model. The second entry: each leaf can be updated within backward.
ROUTES: dict[str, tuple[Callable[[], zf.Transform], bool]] = {
    "sgd": (lambda: zf.sgd(1e-2), True),
    "sgd, momentum": (lambda: zf.sgd(1e-2, momentum=0.9), True),
    "adamw": (lambda: zf.adamw(1e-2), True),
    "clip, adamw": (lambda: zf.chain(zf.clip_by_global_norm(0.1), zf.adamw(1e-2)), False),
    "lion": (lambda: zf.lion(1e-3), True),
    "rmsprop": (lambda: zf.rmsprop(1e-3), True),
    "adamw, ema": (lambda: zf.chain(zf.adamw(1e-2), zf.ema(0.9)), True),
    "low precision, stochastic": (lambda: in_fp32(zf.low_precision_adam(1e-2)), True),
    "low precision, kahan": (lambda: in_fp32(zf.low_precision_adam(1e-2, rounding="kahan")), True),
    "low precision, nearest": (lambda: in_fp32(zf.low_precision_adam(1e-2, rounding="nearest")), True),
    "accumulate, adamw": (lambda: zf.chain(zf.accumulate(2), zf.adamw(1e-2)), False),
    "offload(adamw)": (lambda: zf.offload(zf.adamw(1e-2)), True),
    "muon, adamw": (muon_and_adamw, True),
    "scale, clip, low precision, fp16": (
        lambda: zf.chain(
            zf.precision(store_dtype=FP16),
            zf.scale_loss("dynamic", init_scale=2.0**8),
            zf.clip_by_global_norm(1.0),
            zf.low_precision_adam(1e-2),
        ),
        False,
    ),
}


# ----------------------------------------------------------------------------------------------------------------------
# Sections.


def machine(report: Report) -> None:
    """Versions, and what a copy and a launch cost."""

    def release(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "none"

    name = torch.cuda.get_device_name(report.device) if report.cuda else "CPU"
    report.figure("versions", f"{name}, torch {torch.__version__}, triton {release('triton')}, zerofn {zf.__version__}")
    n = 1 << (20 if report.tiny else 30)
    a = torch.zeros(n, dtype=torch.int8, device=report.device)
    b = torch.ones_like(a)
    ms, _ = report.milliseconds(lambda: b.copy_(a))
    report.copy = 2 * n / ms * 1e3
    report.figure("copy on the device, bytes read and written", f"{report.copy / 1e12:.2f} TB/s")
    host = torch.empty(n // 4, dtype=torch.int8, pin_memory=report.cuda)
    there = a[: n // 4]
    for name, call in {
        "pinned host memory to the device": lambda: there.copy_(host, non_blocking=True),
        "device to pinned host memory": lambda: host.copy_(there, non_blocking=True),
    }.items():
        ms, _ = report.milliseconds(call, 1, 5)
        report.figure(name, f"{n / 4 / ms / 1e6:.1f} GB/s")
    x = torch.zeros(8, device=report.device)
    _, ms = report.milliseconds(lambda: [x.add_(1) for _ in range(100)])
    report.figure("the host's time for one small launch", f"{ms * 10:.1f} us")


def columns(numels: list[int]) -> list[list[Tensor]]:
    """Parameters, gradients, first and second moments in bf16, with infinities, NaN and subnormals among them."""
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.3895e38, -3.3895e38, 1e-40, -1e-40, 1.1754944e-38]
    odd = torch.tensor(special)
    leaves = []
    for seed, n in enumerate(numels):
        draw = torch.Generator().manual_seed(seed)
        p, m = torch.randn(n, generator=draw), torch.randn(n, generator=draw) * 1e-2
        g = torch.randn(n, generator=draw) * torch.logspace(-30, 6, n)
        v = torch.rand(n, generator=draw) * torch.logspace(-38, 8, n)
        for x, shift in ((p, 0), (g, 3), (m, 5)):
            x[:30] = odd.roll(shift).repeat(3)
        v[:30] = odd.abs().roll(7).repeat_interleave(3)
        leaves.append([x.to(BF16) for x in (p, g, m, v)])
    return [list(column) for column in zip(*leaves, strict=True)]


def different(a: Tensor, b: Tensor) -> int:
    """How many elements differ in bits; two NaN are equal."""
    b = b.to(a.device)
    return int((~((a == b) | (a.isnan() & b.isnan()))).sum())


def bits(report: Report) -> None:
    """The device's bits are the CPU's."""
    far = dict(seed=7, step=3, key=11, offset=2**32 - 50_000)
    here, there = random_bits(100_003, **far), random_bits(100_003, **far, device=report.device)
    report.check("random bits are those of the CPU", torch.equal(here, there.cpu()))
    offsets = {"0": 0, "1": 2**32 - 17}
    names = [f"{kind}, {rounding}" for rounding in ("stochastic", "kahan", "nearest") for kind in ("auto", "eager")]
    for name in report.parts(names):
        with report.part(f"low_precision_adam {name}"):
            implementation, rounding = name.split(", ")
            tx = zf.low_precision_adam(1e-3, weight_decay=0.1, rounding=rounding, seed=5)
            numels = [5000, 40_001]
            made = [*columns(numels), [torch.zeros(n, dtype=BF16) for n in numels]]
            here = [[x.clone() for x in column] for column in made]
            there = [[x.clone().to(report.device) for x in column] for column in made]
            update, other = lists_updated(tx, here, offsets), lists_updated(tx, there, offsets)
            for _ in range(3):
                update()
                with contextlib.nullcontext() if implementation == "auto" else printed_by("eager", report.device):
                    other()
            wrong = [sum(map(different, a, b)) for a, b in zip(here, there, strict=True)]
            same = not sum(wrong)
            report.check(f"low_precision_adam {name}: bits of the CPU", same, f"elements that differ: {wrong}")


def lists_updated(tx: zf.Transform, lists: list[list[Tensor]], offsets: dict[str, int]) -> Callable[[], object]:
    """The update of parameters, gradients, moments and compensations, in place."""
    params, grads, m, v, c = ({str(i): x for i, x in enumerate(column)} for column in lists)
    slots = {"exp_avg": m, "exp_avg_sq": v} | ({"compensation": c} if "kahan" in repr(tx) else {})
    return alone(tx, params, grads, slots, offsets)


def waits_of(call: Callable[[], object]) -> Counter[str]:
    """Lines that made the host wait for the device, and how often, by torch's own debug mode."""
    found: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        # Torch also says once that this mode is a prototype.
        if "synchroniz" in str(warning.message) and "prototype" not in str(warning.message):
            found[f"{Path(warning.filename).name}:{warning.lineno}"] += 1
    return found


def launches_of(device: torch.device, call: Callable[[], object]) -> int:
    """Kernels that ran on the device, without copies and fills."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as run:
        call()
        torch.cuda.synchronize(device)
    # Ranges that this library and torch name are shown beside kernels.
    others = ("memcpy", "memset", "zerofn::", "optimizer.")
    events = run.events() or ()
    return sum("CUDA" in str(e.device_type) and not e.name.lower().startswith(others) for e in events)


def trainer(report: Report, size: str, tx: zf.Transform, in_backward: bool = False):
    """An attached model, a whole training step, and one without `opt.step()`."""
    model, x, y = gpt(report, size)
    opt = zf.attach(model, tx, in_backward=in_backward)

    def backward() -> None:
        opt.zero_grad()
        loss_of(model, x, y).backward()

    def step() -> None:
        backward()
        opt.step()

    return model, opt, step, backward


def waits(report: Report) -> None:
    """Waits of the host in a step, and launches of `opt.step()`."""
    for name in report.parts(list(STEPS)):
        with report.part(name):
            _, opt, step, backward = trainer(report, "163M", STEPS[name]())
            for _ in range(3):
                step()
            if not report.cuda:
                report.skip(name, "needs a GPU")
                continue
            found = waits_of(step)
            report.figure(f"{name}: waits in a step", f"{sum(found.values())} {dict(found)}")
            backward()
            report.figure(f"{name}: launches in opt.step()", str(launches_of(report.device, opt.step)))
    with report.part("torch"):
        if report.cuda:
            model, x, y = gpt(report, "163M")
            opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            loss_of(model, x, y).backward()
            opt.step()
            report.figure("torch's fused AdamW: launches in opt.step()", str(launches_of(report.device, opt.step)))


def flash_adamw(parameters) -> torch.optim.Optimizer:
    """FlashOptim's AdamW, where it is installed."""
    from flashoptim import FlashAdamW  # type: ignore[import-not-found]

    return FlashAdamW(parameters, lr=1e-4)


def update(report: Report) -> None:
    """`opt.step()` alone on given gradients: its share of the device's bandwidth."""
    torchs: dict[str, tuple[int, Callable]] = {
        "torch AdamW(fused=True), bf16": (14, lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=True)),
        "torch AdamW(foreach=True), bf16": (14, lambda ps: torch.optim.AdamW(ps, lr=1e-4, foreach=True)),
        "FlashOptim's AdamW": (14, flash_adamw),
    }
    # Bytes that must be read and written for each parameter. The norm reads gradients once more.
    ours: dict[str, int] = {"low precision": 14, "low precision, kahan": 18, "adamw": 14, "clip, low precision": 16}
    for size in report.parts(["163M"] if report.tiny else ["163M", "1.4B"]):
        for name in report.parts([*torchs, *ours]):
            with report.part(f"{size} {name}"):
                model, _, _ = gpt(report, size)
                if name in torchs:
                    size_of_one, make = torchs[name]
                    try:
                        opt = make(list(model.parameters()))
                    except ImportError as error:
                        report.skip(f"{size} {name}", str(error))
                        continue
                else:
                    size_of_one = ours[name]
                    opt = zf.attach(model, STEPS[name]())
                for p in model.parameters():
                    p.grad = torch.randn_like(p) * 1e-3
                begin = time.monotonic()
                opt.step()
                report.synchronize()
                first = time.monotonic() - begin
                ms, host = report.milliseconds(opt.step, 2, 10)
                rate = report.bandwidth(size_of_one * numel(model), ms)
                report.figure(f"{size} {name}", f"{ms:.3f} ms, host {host:.2f} ms; {rate}; first step {first:.1f} s")


def kernel(report: Report) -> None:
    """The kernel of low-precision Adam alone, on leaves of the large model."""
    model, _, _ = gpt(report, "1.4B")
    p = [x.detach() for x in model.parameters()]
    g, m, c = ([torch.randn_like(x) * size for x in p] for size in (1e-3, 1e-3, 0.0))
    v = [torch.rand_like(x) * 1e-6 for x in p]
    for rounding in report.parts(["stochastic", "nearest", "kahan"]):
        with report.part(rounding):
            call = lists_updated(zf.low_precision_adam(1e-4, rounding=rounding), [p, g, m, v, c], {})
            ms, host = report.milliseconds(call, 2, 10)
            rate = report.bandwidth((18 if rounding == "kahan" else 14) * numel(model), ms)
            report.figure(f"1.4B kernel, {rounding}", f"{ms:.3f} ms, host {host:.2f} ms; {rate}")


def small_run(route: str, tx: zf.Transform, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters after four steps of the small model by one route."""
    torch.manual_seed(0)
    model, xs = Small().to(device), torch.randn(4, 8, 6).to(device, dtype)

    def loss(y: Tensor) -> Tensor:
        return F.smooth_l1_loss(y.float(), torch.ones_like(y, dtype=FP32))

    if route in ("attached", "in backward"):
        opt = zf.attach(model, tx, in_backward=route == "in backward")
        for x in xs:
            loss(model(x)).backward()
            opt.step()
            opt.zero_grad()
        state = opt.state
    else:
        state = zf.init(tx, dict(model.named_parameters()))
        step = zf.make_step(lambda p, x: loss(functional_call(model, p, (x,))), tx, donate=route == "donated")
        for x in xs:
            state, _ = step(state, x)
    return {path: x.detach().float().cpu() for path, x in state.leaves.items()}


def routes(report: Report) -> None:
    """Every route has the bits of the attached model, and numbers near the CPU's."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for name in report.parts(list(ROUTES)):
            make, within = ROUTES[name]
            dtype = FP16 if "fp16" in name else FP32
            with report.part(name):
                attached = small_run("attached", make(), report.device, dtype)
                cpu = small_run("attached", make(), torch.device("cpu"), dtype)
                for route in ("attached", "pure", "donated", *["in backward"] * within):
                    found = small_run(route, make(), report.device, dtype)
                    equal = all(torch.equal(found[p], attached[p]) for p in found)
                    far = max(float((found[p] - cpu[p]).norm() / cpu[p].norm().clamp(min=1e-6)) for p in found)
                    # 16-bit states round by 2^-9 in each of four steps; so does Muon, which iterates in bf16.
                    near = far < (2e-2 if "low precision" in name or "muon" in name else 2e-4)
                    text = f"bits of attached: {equal}; distance from the CPU {far:.1e}"
                    # Muon multiplies matrices of one shape together, and within backward one by one.
                    alone = "muon" in name and route == "in backward"
                    report.check(f"{name}, {route}", (equal or alone) and near, text)
    finally:
        torch.use_deterministic_algorithms(False)


def step(report: Report) -> None:
    """A whole training step beside torch's fused AdamW in bf16 and over fp32 masters."""
    ours = ["low precision", "clip, low precision", "low precision, in backward", "shard, low precision", "adamw"]
    for size in report.parts(["163M"] if report.tiny else ["163M", "1.4B"]):
        first: float | None = None

        def row(name: str, call: Callable[[], object], size: str = size) -> None:
            nonlocal first
            for _ in range(3):
                call()
            gib = report.peak(call)
            ms, host = report.milliseconds(call, 0, 6)
            first = first or ms
            text = f"{ms:.1f} ms, {ms / first:.3f} of torch's fused bf16; host {host:.1f} ms; peak {gib:.2f} GiB"
            report.figure(f"{size} {name}", text)

        for name, dtype in {"torch fused AdamW, bf16": BF16, "torch fused AdamW, fp32 under autocast": FP32}.items():
            with report.part(f"{size} {name}"):
                model, x, y = gpt(report, size, dtype)
                opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

                def torchs(model=model, opt=opt, x=x, y=y, autocast=dtype == FP32) -> None:
                    with torch.autocast(report.device.type, BF16, enabled=autocast):
                        loss = loss_of(model, x, y)
                    loss.backward()
                    opt.step()
                    opt.zero_grad()

                row(name, torchs)
                del model, opt, torchs
        for name in report.parts(ours):
            with report.part(f"{size} {name}"):
                tx = STEPS[name.removesuffix(", in backward")]()
                run = trainer(report, size, tx, name.endswith("in backward"))
                row(name, run[2])
                # A model that is still alive would be in the next one's peak.
                del run
        if report.cuda and size == "163M":
            with report.part(f"{size} torch.compile"):
                model, x, y = gpt(report, size)
                opt, compiled = zf.attach(model, STEPS["low precision"]()), torch.compile(model)

                def call(compiled=compiled, opt=opt, x=x, y=y) -> None:
                    loss_of(compiled, x, y).backward()
                    opt.step()
                    opt.zero_grad()

                row("low precision, torch.compile(model)", call)
                del model, opt, compiled, call
                torch.compiler.reset()


def memory(report: Report) -> None:
    """Peak of a large model, by bytes a parameter. DeepSpeed published 0.63 and 0.60 of before at 6.86 B."""
    for name in report.parts(["low precision", "low precision, in backward"]):
        with report.part(name):
            tx = STEPS["low precision"]()
            model, opt, call, backward = trainer(report, "6.9B", tx, name.endswith("in backward"))
            n = numel(model)
            call()
            gib = report.peak(call)
            held = torch.cuda.memory_allocated() if report.cuda else 0
            # A model that is still alive would be in the next one's peak.
            del model, opt, call, backward
            text = f"peak {gib:.2f} GiB, {gib * GIB / n:.2f} bytes a parameter; between steps {held / n:.2f}"
            report.figure(f"{n / 1e9:.2f} B {name}", text)


def offload(report: Report) -> None:
    """States on the host: what it costs, and as far from states on the device as two runs of these are."""
    found: dict[str, list[Tensor]] = {}
    runs = {"low precision": "low precision", "the same once more": "low precision"}
    runs["offload(low precision)"] = "offload(low precision)"
    for name in report.parts(list(runs)):
        with report.part(name):
            model, opt, call, backward = trainer(report, "163M", STEPS[runs[name]]())
            for _ in range(3):
                call()
            found[name] = [p.detach().cpu().clone() for p in model.parameters()]
            ms, host = report.milliseconds(call, 0, 5)
            report.figure(name, f"{ms:.1f} ms, host {host:.1f} ms; peak {report.peak(call):.2f} GiB")
            del model, opt, call, backward
    if len(found) == 3:
        # Attention's backward adds in another order in another run, and the gradient of the bias of its keys is
        # nothing but rounding: there Adam's first steps have the sign of noise.
        plain, again, away = found.values()
        apart = [
            sum(different(a, b) for a, b in zip(plain, other, strict=True)) / sum(a.numel() for a in plain)
            for other in (again, away)
        ]
        text = f"{apart[1]:.1e} of the elements differ; of two runs on the device {apart[0]:.1e}"
        report.check("with and without offload", apart[1] <= 2 * apart[0], text)


class Leaves(nn.Module):
    """Parameters of sizes that fit no block of a kernel."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        shapes = [(1,), (7,), (3, 5), (1000,), (64, 130), (40_001,)]
        self.leaves = nn.ParameterList(torch.randn(*shape, generator=draw) for shape in shapes)


# Updates on given gradients, which need no model.
FORMULAS: dict[str, Callable[[], zf.Transform]] = {
    "sgd": lambda: zf.sgd(1e-2, weight_decay=0.1),
    "sgd, momentum": lambda: zf.sgd(1e-2, momentum=0.9),
    "sgd, nesterov": lambda: zf.sgd(1e-2, momentum=0.9, nesterov=True),
    "adam": lambda: zf.adam(1e-2),
    "adamw": lambda: zf.adamw(1e-2),
    "lion": lambda: zf.lion(1e-3),
    "rmsprop": lambda: zf.rmsprop(1e-3, centered=True),
    "adabelief": lambda: zf.adabelief(1e-3),
    "nadam": lambda: zf.nadam(1e-3),
    "lamb": lambda: zf.lamb(1e-3),
    "clip, sgd": lambda: zf.chain(zf.clip_by_global_norm(0.1), zf.sgd(1e-2)),
    "adamw, ema": lambda: zf.chain(zf.adamw(1e-2), zf.ema(0.9)),
    "accumulate, sgd": lambda: zf.chain(zf.accumulate(2), zf.sgd(1e-2)),
    "low precision, stochastic": lambda: in_fp32(zf.low_precision_adam(1e-2)),
    "low precision, kahan": lambda: in_fp32(zf.low_precision_adam(1e-2, rounding="kahan")),
}


# Whose kernels these run: they are compared with torch's on the same device.
TORCHS: dict[str, Callable] = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "adamw, ema": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
}


def updated(optimizer: Callable[[nn.Module], object], device: torch.device) -> tuple[Tensor, int]:
    """Parameters after four steps on given gradients, and the launches of the last step."""
    model, launches = Leaves().to(device), 0
    opt: Any = optimizer(model)
    draw = torch.Generator().manual_seed(1)
    for step in range(4):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draw).to(device, p.dtype)
        if step == 3 and device.type == "cuda":
            launches = launches_of(device, opt.step)
        else:
            opt.step()
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()]), launches


def formulas(report: Report) -> None:
    """The update halves of six leaves: bits of the CPU or of torch's fused kernels, or how far from the CPU."""
    for name in report.parts(list(FORMULAS)):
        with report.part(name):
            a, launches = updated(lambda model, name=name: zf.attach(model, FORMULAS[name]()), report.device)
            if name in TORCHS:
                b, _ = updated(lambda model, name=name: TORCHS[name](list(model.parameters())), report.device)
                report.check(f"{name}: bits of torch's fused kernel", not different(a, b), f"{launches} launches")
                continue
            b, _ = updated(lambda model, name=name: zf.attach(model, FORMULAS[name]()), torch.device("cpu"))
            far = float((a - b).abs().div(b.abs().clamp(min=1e-3)).max())
            text = f"{different(a, b)} of {a.numel()} elements differ, by {far:.1e} at most; {launches} launches"
            # Bits of sums depend on their order, and so do those of what a norm scales.
            report.check(f"{name}: near the CPU", far < 1e-5, text)


CAPTURED: dict[str, Callable[[], zf.Transform]] = {
    "adamw": lambda: zf.adamw(1e-2),
    "adamw, schedule": lambda: zf.adamw(zf.schedules.warmup_cosine(1e-1, 2, 10), weight_decay=0.1),
    "clip, adamw, ema": lambda: zf.chain(zf.clip_by_global_norm(0.1), zf.adamw(1e-2), zf.ema(0.9)),
    "sgd, schedule": lambda: zf.sgd(zf.schedules.linear(0.1, 0.0, 9), momentum=0.9, nesterov=True),
    "lion": lambda: zf.lion(1e-2),
    "rmsprop": lambda: zf.rmsprop(1e-2, centered=True),
    "muon, adamw": muon_and_adamw,
    "scale, overflow": lambda: zf.chain(zf.scale_loss("dynamic", init_scale=2.0**127), zf.sgd(1e-2)),
    "skip_nonfinite": lambda: zf.chain(zf.skip_nonfinite(), zf.adamw(1e-2)),
    "accumulate(3)": lambda: zf.chain(zf.accumulate(3), zf.adamw(1e-2)),
    "low precision": lambda: in_fp32(zf.clip_by_global_norm(1.0), zf.low_precision_adam(1e-2)),
    "low precision, kahan": lambda: in_fp32(zf.low_precision_adam(1e-2, rounding="kahan")),
}
WARM, REPLAYS = 3, 6


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    """Where the steps before a capture run, as torch asks."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def batches(device: torch.device) -> Tensor:
    return torch.randn(WARM + REPLAYS, 8, 6, generator=torch.Generator().manual_seed(2)).to(device)


def attached_steps(report: Report, tx: zf.Transform, captured: bool) -> list[Tensor]:
    """Parameters of an attached model after steps, the last of them replayed from a graph or not."""
    torch.manual_seed(0)
    model, xs = Small().to(report.device), batches(report.device)
    opt, x = zf.attach(model, tx, capturable=captured), xs[0].clone()

    def step() -> None:
        opt.zero_grad()
        F.smooth_l1_loss(model(x), torch.ones_like(x)).backward()
        opt.step()

    _run(step, lambda batch: x.copy_(batch), xs, captured)
    return [p.detach().clone() for p in model.parameters()]


def pure_steps(report: Report, tx: zf.Transform, captured: bool) -> list[Tensor]:
    """The same by `make_step`."""
    torch.manual_seed(0)
    model, xs = Small().to(report.device), batches(report.device)
    state, x = zf.init(tx, dict(model.named_parameters())), xs[0].clone()

    def loss(p, x: Tensor) -> Tensor:
        return F.smooth_l1_loss(functional_call(model, p, (x,)), torch.ones_like(x))

    take = zf.make_step(loss, tx, donate=True, capturable=captured)

    def step() -> None:
        nonlocal state
        state, _ = take(state, x)

    _run(step, lambda batch: x.copy_(batch), xs, captured)
    return [p.detach().clone() for p in state.leaves.values()]


def _run(step: Callable[[], object], fill: Callable[[Tensor], object], xs: Tensor, captured: bool) -> None:
    if not captured:
        for batch in xs:
            fill(batch)
            step()
        return
    with side_stream():
        for batch in xs[:WARM]:
            fill(batch)
            step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for batch in xs[WARM:]:
        fill(batch)
        graph.replay()


def capture(report: Report) -> None:
    """Steps in a CUDA graph: replays are ordinary steps, and without `capturable` a capture is refused."""
    if not report.cuda:
        report.skip("capture", "needs a GPU")
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for name in report.parts(list(CAPTURED)):
            for route, run in {"attached": attached_steps, "make_step": pure_steps}.items():
                with report.part(f"{name}, {route}"):
                    plain, replayed = (
                        torch.cat([*map(torch.flatten, run(report, CAPTURED[name](), c))]) for c in (False, True)
                    )
                    far = float((plain - replayed).norm() / plain.norm())
                    text = f"{different(plain, replayed)} of {plain.numel()} elements differ, distance {far:.1e}"
                    report.check(f"{name}, {route}: replays are steps", far < 1e-5, text)
    finally:
        torch.use_deterministic_algorithms(False)
    with report.part("time of a replay"):
        model, x, y = gpt(report, "163M")
        opt = zf.attach(model, STEPS["clip, low precision"](), capturable=True)

        def step() -> None:
            opt.zero_grad()
            loss_of(model, x, y).backward()
            opt.step()

        with side_stream():
            for _ in range(3):
                step()
        ms, host = report.milliseconds(step, 1, 6)
        report.figure("163M clip, low precision, ordinary step", f"{ms:.1f} ms, host {host:.1f} ms")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        ms, host = report.milliseconds(graph.replay, 1, 6)
        report.figure("163M clip, low precision, replayed", f"{ms:.1f} ms, host {host:.2f} ms")
        del graph
    with report.part("refusal"):
        model = Small().to(report.device)
        opt = zf.attach(model, zf.adamw(1e-2))
        F.smooth_l1_loss(model(batches(report.device)[0]), torch.ones(8, 6, device=report.device)).backward()
        opt.step()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                opt.step()
        except RuntimeError as error:
            report.check("without capturable", "captur" in str(error), f"refused: {str(error).splitlines()[0]}")
        else:
            report.check("without capturable", False, "captured: replays repeat the numbers of one step")


STAGES = ("all_reduce", "ZeRO-1", "ZeRO-2", "ZeRO-3", "fully_shard")


def of_stage(stage: str) -> zf.Transform:
    """Clip and AdamW at a stage."""
    first = {"all_reduce": [zf.all_reduce()], "ZeRO-2": [zf.reduce_scatter()], "ZeRO-3": [zf.shard()]}
    first["ZeRO-1"] = [zf.accumulate(1), zf.reduce_scatter()]
    return zf.chain(*first.get(stage, []), zf.clip_by_global_norm(0.1), zf.adamw(1e-2))


def stage_steps(stage: str, device: str) -> list[Tensor]:
    """Whole parameters after four steps of the small model, each on this rank's part of a batch."""
    import torch.distributed as dist

    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model, xs = Small().to(device), batches(torch.device(device))
    if stage == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(torch.device(device).type, (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    opt = zf.attach(model, of_stage(stage))
    for batch in xs[:4]:
        x = batch.chunk(ranks)[rank]
        F.smooth_l1_loss(model(x), torch.ones_like(x)).backward()
        opt.step()
        opt.zero_grad()
    if stage == "fully_shard":
        return [p.full_tensor().detach().cpu() for p in model.parameters()]  # type: ignore[operator]
    with opt.gathered():
        return [p.detach().cpu().clone() for p in model.parameters()]


def ranks(report: Report) -> None:
    """Two ranks on one device, over gloo: each stage has the parameters of one process. FSDP2's models need NCCL."""
    device = "cuda:0" if report.cuda else "cpu"
    one = torch.cat([x.flatten() for x in stage_steps("one process", device)])
    for stage in report.parts(["ZeRO-3"] if report.tiny else list(STAGES[:-1])):
        with report.part(stage):
            found = zf.launch(stage_steps, 2, stage, device, backend="gloo", timeout=60.0)
            every = [torch.cat([x.flatten() for x in leaves]) for leaves in found]
            far = float((every[0] - one).norm() / one.norm())
            text = f"ranks agree: {torch.equal(*every)}; distance from one process {far:.1e}"
            report.check(stage, torch.equal(*every) and far < 1e-5, text)


def nccl(report: Report) -> None:
    """What one GPU can tell of NCCL: each stage in a group of one, and a control message by NCCL and by gloo."""
    import torch.distributed as dist

    if not report.cuda:
        report.skip("nccl", "needs a GPU")
        return
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method="tcp://127.0.0.1:29577", rank=0, world_size=1)
    try:

        def exchange(device: torch.device | str) -> list[int]:
            numbers = torch.ones(8, dtype=torch.int64, device=device)
            every = torch.empty_like(numbers)
            dist.all_gather_into_tensor(every, numbers)
            return every.tolist()

        for name, device in {"gloo on the host": "cpu", "NCCL": report.device}.items():
            _, ms = report.milliseconds(lambda device=device: exchange(device), 3, 20)
            report.figure(f"a control message by {name}", f"{ms * 1e3:.0f} us")
            torch.cuda._sleep(20_000_000)
            begin = time.perf_counter()
            exchange(device)
            report.figure(f"  behind 10 ms of computation, {name}", f"{1e3 * (time.perf_counter() - begin):.2f} ms")
            torch.cuda.synchronize()
        one = torch.cat([x.flatten() for x in stage_steps("one process", "cuda:0")])
        for stage in report.parts(list(STAGES)):
            with report.part(f"{stage}, a group of one"):
                found = torch.cat([x.flatten() for x in stage_steps(stage, "cuda:0")])
                far = float((found - one).norm() / one.norm())
                report.check(f"{stage}, a group of one", far < 1e-5, f"distance from one process {far:.1e}")
    finally:
        dist.destroy_process_group()


# By worth.
SECTIONS = {
    f.__name__: f
    for f in (machine, bits, waits, kernel, update, formulas, step, capture, routes, memory, ranks, offload, nccl)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of a few thousand parameters")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--seconds", type=float, default=540.0, help="after which the rest is skipped")
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    report = Report(device, args.tiny, args.seconds)
    # That plain Adam in bf16 loses small updates is known here.
    warnings.filterwarnings("ignore", message=r"\w+. .* stored in bf16")
    for name in args.only:
        print(f"\n# {name}: {SECTIONS[name].__doc__}", flush=True)
        begin = time.monotonic()
        with report.part(name):
            SECTIONS[name](report)
        print(f"# {name} took {time.monotonic() - begin:.0f} s", flush=True)
    print("\n" + ", ".join(f"{kind or 'figures'}: {n}" for kind, n in report.counts.items()))
    return 1 if report.counts["WRONG"] or report.counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
