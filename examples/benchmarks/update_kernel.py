"""Time of one AdamW update per rounding, beside torch's fused AdamW and the speed of memory.

    python examples/benchmarks/update_kernel.py        # 100 M parameters, 1 and 2 threads, 30 s
    python examples/benchmarks/update_kernel.py --numel 100000 --rounds 2
    python examples/benchmarks/update_kernel.py --coded    # moments in 8 and 4 bits

All contestants run in turn, round after round, since the load of machine and memory drifts by more than what
is to be seen; the ratio is the median over rounds of (this one / fused float32 in the same round). "GB/s"
counts what is read and what is written. The ceiling is ``mul_`` on one float32 tensor: in place as the
updates are, where ``copy_`` also pays for reading what it overwrites.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import zerofn as zf
from zerofn.core.layout import make_layout
from zerofn.extend import Context
from zerofn.kernels import native
from zerofn.kernels.program import printed_by

# Ratio to fused float32 that is aimed at, by number of threads.
TARGETS = {
    "nearest": {1: 0.60, 2: 0.55},
    "kahan": {1: 0.80, 2: 0.70},
    "stochastic": {1: 0.65, 2: 0.55},
}
ROW = 4096
BASELINE, CEILING = "torch fused AdamW, float32", "mul_ in place (ceiling)"


def machine() -> str:
    """Processor, cores, load and torch version in a line."""
    name = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        lines = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        name = lines[0].split(":")[1].strip() if lines else name
    load = f", load {os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else ""
    return f"{name}, {os.cpu_count()} cores{load}, torch {torch.__version__}"


def tensors(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameter, gradient, first moment, second moment: one block of values, repeated."""
    block = torch.randn(min(numel, 1 << 20), generator=torch.Generator().manual_seed(0)).mul_(0.01)
    made = []
    for k in range(4):
        x = torch.empty(numel, dtype=dtype)
        for start in range(0, numel, len(block)):
            piece = x[start : start + len(block)]
            piece.copy_(block[: len(piece)].roll(k))
        made.append(x.abs_() if k == 3 else x)
    return made


def fused(state: list[torch.Tensor]) -> Callable[[], object]:
    p, g, m, v = state
    step = torch.tensor(3.0)
    hyper = dict(lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False)
    return lambda: torch._fused_adamw_([p], [g], [m], [v], [], [step], **hyper)


def alone(
    tx: zf.Transform,
    params: dict[str, torch.Tensor],
    grads: dict[str, torch.Tensor],
    given: dict[str, dict[str, torch.Tensor]] | None = None,
    offsets: dict[str, int] | None = None,
) -> Callable[[], object]:
    """The update half of an optimizer, in place on all leaves.

    Args:
        tx: the optimizer.
        params, grads: by path.
        given: slots of its state, by name and path; by default as it starts.
        offsets: where each leaf's first element lies in a whole leaf, by path.
    """
    layout = make_layout(params)
    state = {**tx.init_fn(params, layout), **(given or {})}

    def update() -> None:
        ctx = Context(layout, donate=True, offsets=offsets or {})
        found = tx.prepare_fn(state, grads, params, ctx)
        state.update(tx.update_fn(grads, state, params, found.carry, ctx)[1])

    return update


def ours(state: list[torch.Tensor], compensation: torch.Tensor, rounding: str):
    p, g, m, v = state
    slots = {"exp_avg": {"w": m}, "exp_avg_sq": {"w": v}}
    slots |= {"compensation": {"w": compensation}} if rounding == "kahan" else {}
    return alone(zf.low_precision_adam(1e-4, weight_decay=0.01, rounding=rounding), {"w": p}, {"w": g}, slots)


def by_torch(update: Callable[[], object]) -> Callable[[], object]:
    """The same update by torch's operations, in chunks."""

    def run() -> None:
        with printed_by("torch", torch.device("cpu")):
            update()

    return run


def coded(state: list[torch.Tensor], bits: int, optimizer: zf.Transform) -> Callable[[], object]:
    """The update of an optimizer whose moments are codes."""
    p, g = (x.view(-1, ROW) for x in state[:2])
    model = torch.nn.ParameterList([torch.nn.Parameter(p)])
    opt = zf.attach(model, zf.quantize(optimizer, bits=bits))
    model[0].grad = g
    return opt.step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--coded", action="store_true", help="time moments in 8 and 4 bits in place of 16-bit ones")
    parser.add_argument("--eager", action="store_true", help="also time the eager fallback (10 to 20 times slower)")
    args = parser.parse_args()

    args.numel -= args.numel % ROW
    wide, low = tensors(args.numel, torch.float32), tensors(args.numel, torch.bfloat16)
    compensation = torch.zeros_like(low[0])

    print(machine())
    # An empty cache, so that the compiler is seen to run; kernels are otherwise kept on disk.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        build = []
        begin = time.perf_counter()
        implementation = "native" if native.compiler() else "eager"
        for rounding in TARGETS:
            ours([x[: 1 << 16] for x in low], compensation[: 1 << 16], rounding)()
            build.append(f"{rounding} {time.perf_counter() - begin:.2f} s")
            begin = time.perf_counter()
    print(f"{args.numel:,} bfloat16 parameters, gradients and moments; implementation: {implementation}")
    print("first use, with compiler and self-check: " + ", ".join(build))

    # name -> (bytes read and written per parameter, call)
    contestants: dict[str, tuple[float, Callable[[], object]]] = {
        BASELINE: (28, fused(wide)),
        CEILING: (8, lambda: wide[1].mul_(1.0)),
        "torch fused AdamW, bfloat16": (14, fused(low)),
    }
    for bits in (8, 4) if args.coded else ():
        # Codes and scales of two moments, read and written.
        size = 4 * (bits / 8 + 4 / 128)
        for name, state, arithmetic, bytes_ in (
            ("fp32", wide, zf.adamw(1e-4), 12),
            ("bf16, stochastic", low, zf.low_precision_adam(1e-4, state_dtype=torch.float32), 6),
        ):
            contestants[f"{name}, moments in {bits} bits"] = bytes_ + size, coded(state, bits, arithmetic)
    for rounding in () if args.coded else TARGETS:
        size = 18 if rounding == "kahan" else 14
        contestants[rounding] = size, ours(low, compensation, rounding)
        if args.eager:
            contestants[f"{rounding}, eager"] = size, by_torch(ours(low, compensation, rounding))

    for threads in args.threads:
        torch.set_num_threads(threads)
        times: dict[str, list[float]] = {name: [] for name in contestants}
        # Of one thread the time of the processor, which other programs do not add to.
        clock = time.process_time if threads == 1 else time.perf_counter
        for _ in range(args.rounds + 1):
            for name, (_, call) in contestants.items():
                begin = clock()
                call()
                times[name].append(clock() - begin)
        times = {name: values[1:] for name, values in times.items()}  # the first round touches pages
        rates = {name: args.numel * contestants[name][0] / statistics.median(t) / 1e9 for name, t in times.items()}
        print(f"\n{threads} thread{'s' * (threads > 1)}")
        print("| update | ms | ratio to fused fp32 [min..max] | target | GB/s | of ceiling |")
        print("|---|---|---|---|---|---|")
        for name, values in times.items():
            ratios = [a / b for a, b in zip(values, times[BASELINE], strict=True)]
            spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}]"
            target = f"{TARGETS[name][threads]:.2f}" if threads in TARGETS.get(name, {}) else ""
            ms, share = statistics.median(values) * 1e3, rates[name] / rates[CEILING]
            print(f"| {name} | {ms:.1f} | {spread} | {target} | {rates[name]:.1f} | {share:.0%} |")
    print("\n" + machine())


if __name__ == "__main__":
    main()
