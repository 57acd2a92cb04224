"""Bytes per parameter, allocated and peak, and the time of a step: each configuration, ZeRO stages on 1 and 2 ranks.

Each line is a fresh process per rank. *allocated* is what lives between backward and step: parameters, gradients,
moments, and buffers of reductions under way. *peak* is the most that lives at any time of the third training
step, activations and temporaries with it. On a CPU both are of the whole process, less what it had before the
model was built (`OfTheProcess`); on a GPU they are torch's counters. Times are of another process, which
runs the configuration and the fp32 baseline in turns; the ratio is the median over rounds.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from update_kernel import machine

import zerofn as zf

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LR = 1e-4
# DeepSpeed's own figures for what it keeps (parameters, gradients, moments), per parameter.
PUBLISHED = {"fp32 masters, bf16 compute": 20, "all bf16 (loses updates)": 12}
ALLOCATED, PEAK, TIME = 0.45, 0.50, 1.0
# What the lines below each are compared with.
BASELINES = {"torch AdamW(fused), fp32", *(f"zerofn ZeRO-{stage}, fp32" for stage in range(4))}

Step = Callable[[], Any]


class Model(nn.Sequential):
    """States dominate: nothing but large square layers, on a batch of a few rows."""

    def __init__(self, width: int, layers: int):
        blocks = [nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(layers)]
        super().__init__(*blocks)
        # torch's own start halves the signal in every layer, both ways: after 32 of them squared gradients are
        # subnormal, which a CPU handles ten times slower, and the times would be of that.
        for p in self.parameters():
            nn.init.normal_(p, std=width**-0.5)


@dataclass(frozen=True)
class Entry:
    """One line of a table.

    Attributes:
        name: shown.
        build: from the model: what is called in its place, the update, and what clears gradients.
        bytes: by formula, per parameter of the model: parameters, gradients and optimizer state, on N ranks.
        ranks: on how many it runs.
        needs: a module that may be missing.
    """

    name: str
    build: Callable[[nn.Module], tuple[nn.Module, Step, Step]]
    bytes: Callable[[int], float]
    ranks: tuple[int, ...] = (1,)
    needs: str | None = None


def plain(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = F32) -> Callable:
    def build(model: nn.Module) -> tuple[nn.Module, Step, Step]:
        model = model.to(dtype)
        opt = make(model.parameters())
        return model, opt.step, opt.zero_grad

    return build


def torchao(params: Any) -> torch.optim.Optimizer:
    # Private there, and the only one that keeps all states in bf16 with stochastic rounding.
    from torchao.optim import _AdamW

    return _AdamW(params, lr=LR, bf16_stochastic_round=True)


def fsdp2(dtype: torch.dtype, compute: torch.dtype | None = None) -> Callable:
    def build(model: nn.Module) -> tuple[nn.Module, Step, Step]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(next(model.parameters()).device.type, (int(os.environ["WORLD_SIZE"]),))
        model = model.to(dtype)
        policy = MixedPrecisionPolicy(param_dtype=compute)
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        return model, opt.step, opt.zero_grad

    return build


def deepspeed(stage: int, states: bool) -> Callable:
    """bf16 with fp32 masters, its baseline; with `states` masters, gradients and moments in bf16 too."""

    def build(model: nn.Module) -> tuple[nn.Module, Step, Step]:
        import deepspeed as ds

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            # Its defaults are half a billion elements, which it allocates.
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": 1 << 22,
                "allgather_bucket_size": 1 << 22,
                "stage3_prefetch_bucket_size": 1 << 21,
                "stage3_max_live_parameters": 1 << 22,
                "stage3_max_reuse_distance": 1 << 22,
            },
        }
        if states:
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        # CPU tensors lack this method, which stage 3 calls; streams mean nothing there.
        torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
        engine, *_ = ds.initialize(model=model, optimizer=fused(model.parameters()), config=config)
        return engine, engine.step, engine.zero_grad

    return build


def ours(dtypes: Any, optimizer: Any, stage: int = 0, scale: bool = False, in_backward: bool = False) -> Callable:
    def build(model: nn.Module) -> tuple[nn.Module, Step, Step]:
        view = [dtypes] if dtypes else []
        scaled = [zf.scale_loss("dynamic", init_scale=256.0)] if scale else []
        many = os.environ.get("WORLD_SIZE", "1") != "1"
        road = {
            0: [*([zf.all_reduce()] if many else []), *view, *scaled],
            1: [*view, *scaled, zf.accumulate(1), zf.reduce_scatter()],
            2: [zf.reduce_scatter(), *view, *scaled],
            3: [zf.shard(), *view, *scaled],
        }[stage]
        opt = zf.attach(model, zf.chain(*road, optimizer), in_backward=in_backward)
        return model, opt.step, opt.zero_grad

    return build


def keeps(p: float, g: float, state: float, stage: int = 0) -> Callable[[int], float]:
    """By formula; the stage says what of it is cut into N parts. Stage 1 accumulates nothing here."""
    cut = {0: (1, 1, 1), 1: (1, 0, 0), 2: (1, 0, 0), 3: (0, 0, 0)}[stage]
    return lambda n: sum(x if whole else x / n for x, whole in zip((p, g, state), cut, strict=True))


def low(rounding: str = "stochastic", moments: torch.dtype = BF16) -> Any:
    return zf.low_precision_adam(LR, rounding=rounding, state_dtype=moments)


def coded(bits: int) -> Any:
    return zf.quantize(low(moments=F32), bits)


def moments(bits: int) -> float:
    """Bytes per parameter of two moments as codes, with an fp32 scale for each block of 128."""
    return 2 * (bits / 8 + 4 / 128)


def entries() -> list[Entry]:
    bf16 = zf.precision(store_dtype=BF16, param_dtype=BF16)
    fp16 = zf.precision(store_dtype=F16, param_dtype=F16, grad_dtype=F16)
    masters = zf.precision(store_dtype=F32, param_dtype=BF16)
    split = zf.precision(store_dtype="bf16+8", param_dtype=BF16)
    adamw = zf.adamw(LR)
    alone = [
        Entry("torch AdamW(fused), fp32", plain(fused), keeps(4, 4, 8)),
        Entry("torch AdamW(foreach), fp32", plain(lambda p: torch.optim.AdamW(p, lr=LR, foreach=True)), keeps(4, 4, 8)),
        Entry("zerofn adamw, fp32", ours(None, adamw), keeps(4, 4, 8)),
        Entry("zerofn adamw, fp32 masters, bf16 compute", ours(masters, adamw), keeps(4, 4, 8)),
        *(Entry(f"zerofn bf16, {r}", ours(bf16, low(r)), keeps(2, 2, 4 + 2 * (r == "kahan"))) for r in ROUNDINGS),
        Entry("zerofn fp16, dynamic scale", ours(fp16, low(), scale=True), keeps(2, 2, 4)),
        Entry("zerofn bf16, stochastic, in backward", ours(bf16, low(), in_backward=True), keeps(2, 0, 4)),
        Entry("zerofn bf16, kahan, in backward", ours(bf16, low("kahan"), in_backward=True), keeps(2, 0, 6)),
        *(
            Entry(
                f"zerofn bf16, {n}-bit moments{how}",
                ours(bf16, coded(n), in_backward=bool(how)),
                keeps(2, g, moments(n)),
            )
            for n in (8, 4)
            for how, g in (("", 2), (", in backward", 0))
        ),
        Entry("zerofn bf16+8, fp32 moments", ours(split, adamw), keeps(2, 2, 9)),
        *(
            Entry(
                f"zerofn bf16+8, {n}-bit moments{how}",
                ours(split, zf.quantize(adamw, n), in_backward=bool(how)),
                keeps(2, g, 1 + moments(n)),
            )
            for n in (8, 4)
            for how, g in (("", 2), (", in backward", 0))
        ),
        Entry("torchao _AdamW, bf16, stochastic", plain(torchao, BF16), keeps(2, 2, 4), needs="torchao"),
        Entry("torch AdamW(fused), bf16 (loses updates)", plain(fused, BF16), keeps(2, 2, 4)),
    ]
    sharded = []
    for stage in range(4):
        sharded += [
            Entry(f"zerofn ZeRO-{stage}, fp32", ours(None, adamw, stage), keeps(4, 4, 8, stage), (2,)),
            Entry(f"zerofn ZeRO-{stage}, bf16, stochastic", ours(bf16, low(), stage), keeps(2, 2, 4, stage), (2,)),
            Entry(
                f"zerofn ZeRO-{stage}, 8-bit moments", ours(bf16, coded(8), stage), keeps(2, 2, moments(8), stage), (2,)
            ),
        ]
        if stage in (0, 2, 3):
            build = ours(bf16, low(), stage, in_backward=True)
            name = f"zerofn ZeRO-{stage}, bf16, stochastic, in backward"
            sharded.append(Entry(name, build, keeps(2, 0, 4, stage), (2,)))
    sharded += [
        Entry("FSDP2, fp32", fsdp2(F32), keeps(4, 4, 8, 3), (2,)),
        Entry("FSDP2, fp32 masters, bf16 compute", fsdp2(F32, BF16), keeps(4, 4, 8, 3), (2,)),
        Entry("FSDP2, bf16 (loses updates)", fsdp2(BF16), keeps(2, 2, 4, 3), (2,)),
        *(
            Entry(
                f"DeepSpeed ZeRO-3, {name}", deepspeed(3, size == 12), lambda n, size=size: size / n, (2,), "deepspeed"
            )
            for name, size in PUBLISHED.items()
        ),
    ]
    return alone + sharded


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, fused=True)


ROUNDINGS = "nearest", "stochastic", "kahan"


# ---------------------------------------------------------------- measuring, in processes of their own


def measure(name: str, o: Namespace) -> dict[str, float]:
    """Bytes that one rank holds after backward, and the most it holds, in the third step."""
    torch.set_num_threads(o.threads)
    # What libraries keep from their first use on is nobody's parameter.
    training(name, Namespace(**{**vars(o), "width": 64, "layers": 2}))(lambda: None)
    counter: Any = OfTorch() if torch.device(o.device).type == "cuda" else OfTheProcess()
    step = training(name, o)
    for _ in range(2):
        step(lambda: None)
    counter.restart()
    step(counter.mark)
    return {"allocated": counter.allocated, "peak": counter.peak()}


class OfTorch:
    """The caching allocator's own counters."""

    allocated = 0

    def restart(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def mark(self) -> None:
        self.allocated = torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


class Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`; the fifth of its ten numbers is the bytes in blocks mapped by themselves."""

    _fields_: ClassVar = [(f"{n}" if n != 4 else "hblkhd", ctypes.c_size_t) for n in range(10)]


class OfTheProcess:
    """Everything that the process has, whichever thread or library took it.

    glibc is told to map each block of 64 kB or more by itself and to give it back when freed, so that the bytes it
    has mapped are the bytes in use. The highest resident set of a step, which the kernel keeps, tells the
    peak. torch.profiler's events were tried: it does not see what is freed by gloo's and autograd's threads.
    """

    MMAP_THRESHOLD, BLOCK = -3, 1 << 16

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None)
        self.libc.mallinfo2.restype = Mallinfo
        self.libc.mallopt(self.MMAP_THRESHOLD, self.BLOCK)
        self.before = self.libc.mallinfo2().hblkhd
        self.allocated = self.resident = 0

    def restart(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def mark(self) -> None:
        self.allocated = self.libc.mallinfo2().hblkhd - self.before
        self.resident = self.status("VmRSS")

    def peak(self) -> int:
        return self.allocated + self.status("VmHWM") - self.resident

    def status(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) << 10 for x in lines if x.startswith(name))


def timed(names: list[str], o: Namespace) -> list[list[float]]:
    """Seconds of each step of each configuration, in turns: what disturbs a round disturbs all of it."""
    torch.set_num_threads(o.threads)
    steps = [training(name, o) for name in names]
    found: list[list[float]] = [[] for _ in steps]
    for i in range(2 + o.rounds):
        for k, step in enumerate(steps):
            begin = time.perf_counter()
            step(lambda: None)
            if torch.device(o.device).type == "cuda":
                torch.cuda.synchronize()
            if i >= 2:
                found[k].append(time.perf_counter() - begin)
    return found


def training(name: str, o: Namespace) -> Callable[[Callable[[], None]], None]:
    """A training step that calls its argument between backward and update."""
    entry = next(e for e in entries() if e.name == name)
    torch.manual_seed(0)
    with torch.device(o.device):
        model, update, clear = entry.build(Model(o.width, o.layers))
        x = torch.randn(o.batch, o.width, dtype=next(model.parameters()).dtype)

    def step(between: Callable[[], None]) -> None:
        model(x).float().square().mean().backward()
        between()
        update()
        clear()

    return step


# ---------------------------------------------------------------- the command


def missing(entry: Entry) -> str | None:
    if entry.needs is None:
        return None
    try:
        __import__(entry.needs)
    except ImportError:
        return f"{entry.needs} is not installed: pip install {entry.needs}"
    return None


def arguments(p: ArgumentParser) -> None:
    p.add_argument("--width", type=int, default=1024, help="of each layer (1024)")
    p.add_argument("--layers", type=int, default=64, help="(64: 67 M parameters)")
    p.add_argument("--batch", type=int, default=4, help="rows (4)")
    p.add_argument("--rounds", type=int, default=5, help="timed steps (5)")
    p.add_argument("--threads", type=int, default=1, help="of torch (1)")
    p.add_argument("--device", default="cpu", help="cuda measures one rank with torch's own counters (cpu)")
    p.add_argument("--only", nargs="+", metavar="TEXT", help="lines whose name holds one of these")
    p.add_argument("--out", type=Path, default=Path("runs/low_precision"), help="folder of memory.json")


def main(o: Namespace) -> None:
    count = o.width**2 * o.layers
    print(f"{count:,} parameters in {o.layers} layers, batch of {o.batch}\n{machine()}", flush=True)
    record: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(o).items()}, "machine": machine(), "rows": []}
    for ranks in (1, 2) if o.device == "cpu" else (1,):
        rows = [e for e in entries() if ranks in e.ranks]
        rows = [e for e in rows if not o.only or any(t in e.name for t in o.only) or e.name in BASELINES]
        print(f"\n{ranks} rank{'s' * (ranks > 1)}, bytes per parameter of the model, on the fullest rank\n")
        print("| configuration | formula | allocated | peak | of fp32: allocated | peak | of 20: peak | ms | time |")
        print("|---|---|---|---|---|---|---|---|---|")
        base: dict[str, float] = {}
        for entry in rows:
            if why := missing(entry):
                print(f"| {entry.name} | skipped: {why} | | | | | | | |")
                continue
            try:
                found = zf.launch(measure, ranks, entry.name, o, timeout=600, threads=o.threads)
                got = {k: max(f[k] for f in found) for k in found[0]}
                if entry.name in BASELINES:
                    base = {**got, "name": entry.name}  # type: ignore[dict-item]
                both = zf.launch(timed, ranks, [base["name"], entry.name], o, timeout=600, threads=o.threads)[0]
            except zf.RankError as error:
                why = str(error).strip().splitlines()[-1]
                print(f"| {entry.name} | does not run here: {why} | | | | | | | |", flush=True)
                continue
            ratio = statistics.median(b / a for a, b in zip(*both, strict=True))
            seconds = statistics.median(both[1])
            cells = [f"{entry.bytes(ranks):.2f}", *(f"{got[k] / count:.3f}" for k in ("allocated", "peak"))]
            cells += [*(f"{got[k] / base[k]:.3f}" for k in ("allocated", "peak")), f"{got['peak'] / count / 20:.3f}"]
            cells += [f"{seconds * 1e3:.0f}", f"{ratio:.2f}"]
            print(f"| {entry.name} | {' | '.join(cells)} |", flush=True)
            row = {"name": entry.name, "ranks": ranks, "formula": entry.bytes(ranks), "seconds": seconds, "time": ratio}
            record["rows"].append({**row, **got})
    print()
    for name, size in PUBLISHED.items():
        print(f"DeepSpeed, published, {name}: {size} bytes per parameter")
    print(
        f"Targets, of the fp32 baseline: allocated {ALLOCATED}, peak {PEAK}, time {TIME}. fp32 is the line above with "
        f"that name and stage; 20 is what DeepSpeed calls its baseline.\n{machine()}"
    )
    o.out.mkdir(parents=True, exist_ok=True)
    (o.out / "memory.json").write_text(json.dumps(record, indent=1))
