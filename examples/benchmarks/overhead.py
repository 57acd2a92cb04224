"""What zerofn costs on top of plain PyTorch: time of a step, memory of a step, time of the import.

    python examples/benchmarks/overhead.py

Both sides of a comparison run in one process, in turns: what disturbs one round disturbs both. The ratio is the
median over rounds of the ratio within a round, in brackets its quartiles. Losses are printed because both sides must
do the same arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

import zerofn as zf
from zerofn.core.executor import BUCKET_BYTES

sys.path.insert(0, str(Path(__file__).parent.parent))
from lm_data import Text, read_text
from lm_model import GPT, next_byte_loss

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LR = 1e-3
Step = Callable[[], Tensor]


class Tiny(nn.Module):
    """Many leaves of 8 elements: nearly all the time of a step is Python's."""

    def __init__(self, leaves: int):
        super().__init__()
        self.weights = nn.ParameterList(torch.linspace(-1, 1, 8) + 0.01 * i for i in range(leaves))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.stack(list(self.weights)) * x).square().mean()


def training_step(model: nn.Module, loss_of: Callable[[], Tensor], opt: torch.optim.Optimizer) -> Step:
    """The loop that everybody writes; the same for a bare optimizer and for an attached one."""

    def step() -> Tensor:
        loss = loss_of()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def optimizer_step(model: nn.Module, loss_of: Callable[[], Tensor], opt: torch.optim.Optimizer) -> Step:
    """The optimizer alone, on gradients that stay."""
    loss = loss_of()
    loss.backward()

    def step() -> Tensor:
        opt.step()
        return loss.detach()

    return step


def seconds(step: Step) -> tuple[float, float]:
    """Time of a step, and its loss."""
    begun = time.perf_counter()
    loss = float(step())
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun, loss


def compare(name: str, bare: Step, ours: Step, rounds: int, target: float | None) -> None:
    """Run both in turns and print a line; which of them goes first alternates."""
    for side in (bare, ours):
        for _ in range(3):
            side()
    times: list[list[float]] = [[], []]
    losses: list[list[float]] = [[], []]
    for i in range(rounds):
        for side in (0, 1) if i % 2 else (1, 0):
            t, loss = seconds((bare, ours)[side])
            times[side].append(t)
            losses[side].append(loss)
    low, ratio, high = quartiles([b / a for a, b in zip(*times, strict=True)])
    a, b = (1e3 * statistics.median(t) for t in times)
    same = (
        "equal" if losses[0] == losses[1] else f"DIFFER by {max(abs(p - q) for p, q in zip(*losses, strict=True)):.1e}"
    )
    print(
        f"{name:52} {a:9.3f} {b:9.3f}   {ratio:5.3f} [{low:.3f}, {high:.3f}]   {verdict(ratio, target):16}"
        f"losses {same}, {losses[1][0]:.4f} to {losses[1][-1]:.4f}",
        flush=True,
    )


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def verdict(value: float, target: float | None) -> str:
    if target is None:
        return "no target"
    return f"<= {target:g} {'met' if value <= target else 'MISSED'}"


def pair(
    make: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor], kind: Callable, **options: bool
) -> list[Step]:
    """The same step with torch.optim.AdamW and with an attached zf.adamw, on two equal models."""
    steps = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = make().to(DEVICE)
        plain = None if attached else torch.optim.AdamW(model.parameters(), lr=LR, **options)
        opt = plain or zf.attach(model, zf.adamw(lr=LR))
        steps.append(kind(model, lambda model=model: loss(model), opt))
    return steps


def gpt_loss(seq: int, batch: int) -> Callable[[nn.Module], Tensor]:
    x, y = (part.to(DEVICE) for part in Text.split(read_text(None), seq).batch(0, 0, batch, seq))
    return lambda model: next_byte_loss(model(x), y)


def times(o: argparse.Namespace) -> None:
    print(f"{'milliseconds':52} {'torch':>9} {'zerofn':>9}   ratio [quartiles]      target")
    gpt = lambda: GPT(o.d_model, o.layers, max(1, o.d_model // 64), o.seq)  # noqa: E731
    loss = gpt_loss(o.seq, o.batch)
    compare("GPT, step, AdamW(fused=True)", *pair(gpt, loss, training_step, fused=True), o.rounds, 1.02)
    x = torch.ones(8, device=DEVICE)
    for name, kind in {"step": training_step, "optimizer alone": optimizer_step}.items():
        for options in ({"foreach": True}, {"fused": True}):
            label = f"{o.leaves} leaves of 8, {name}, AdamW({next(iter(options))}=True)"
            sides = pair(lambda: Tiny(o.leaves), lambda model: model(x), kind, **options)
            # The target is foreach; fused is torch's fastest and shown for what remains.
            compare(label, *sides, 5 * o.rounds, 1.3 if "foreach" in options else None)


# ---------------------------------------------------------------- memory


@contextmanager
def no_stderr() -> Iterator[None]:
    """The profiler announces its start and its end there, from C++, in the middle of the table."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def peak_extra(step: Callable[[], object]) -> int:
    """The most bytes of tensors that live at once during `step`, beyond those that lived before it."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with no_stderr(), torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    live = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def memory(o: argparse.Namespace) -> None:
    bf16 = zf.precision(store_dtype=torch.bfloat16)
    pipelines = {
        "adamw": zf.adamw(lr=LR),
        "clip, adamw": zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(lr=LR)),
        "bf16, clip, low_precision_adam": zf.chain(bf16, zf.clip_by_global_norm(1.0), zf.low_precision_adam(lr=LR)),
        "scale_loss, clip, adamw": zf.chain(zf.scale_loss("dynamic"), zf.clip_by_global_norm(1.0), zf.adamw(lr=LR)),
    }
    print(
        f"\npeak extra memory of step(), in buckets of {BUCKET_BYTES >> 20} MiB; {o.buckets} buckets of fp32 parameters"
    )
    for name, tx in pipelines.items():
        model = nn.ParameterList(torch.randn(BUCKET_BYTES // 4) for _ in range(o.buckets)).to(DEVICE)
        opt = zf.attach(model, tx)
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            extra = peak_extra(opt.step) / BUCKET_BYTES
        # Besides the bucket there are counters and norms, a few bytes for each leaf.
        print(f"{name:52} {extra:9.3f}   {verdict(round(extra, 2), 1)}")


# ---------------------------------------------------------------- import

# Names are imported when they are first used. That is told apart, and with it a pass of the garbage collector over
# torch's modules, which is due after some thousand objects more, whoever makes them.
IMPORT = """
import time, torch
begin = time.perf_counter()
import zerofn as zf
between = time.perf_counter()
zf.chain, zf.shard, zf.adamw, zf.init, zf.make_step
print(between - begin, time.perf_counter() - between)
"""


def imports(processes: int) -> None:
    outs = [subprocess.check_output([sys.executable, "-c", IMPORT], text=True) for _ in range(processes)]
    found = [[float(x) for x in out.split()] for out in outs]
    print(f"\nseconds after import torch, in {processes} fresh processes")
    for what, column in zip(("import zerofn", "first use of its names"), zip(*found, strict=True), strict=True):
        middle = statistics.median(column)
        told = verdict(middle, 0.15) if what.startswith("import") else "no target"
        print(f"{what:52} {middle:9.3f} [{min(column):.3f}, {max(column):.3f}]   {told}")


def machine() -> str:
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    return (
        f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads, {device}; "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}"
    )


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--d-model", type=int, default=256)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--seq", type=int, default=128)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--leaves", type=int, default=500, help="of the model of tiny leaves")
    p.add_argument("--buckets", type=int, default=16, help="size of the model whose memory is measured")
    p.add_argument("--rounds", type=int, default=60)
    p.add_argument("--processes", type=int, default=7, help="fresh processes that time the import")
    o = p.parse_args(argv)
    print(machine())
    times(o)
    memory(o)
    imports(o.processes)


if __name__ == "__main__":
    main()
