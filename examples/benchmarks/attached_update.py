"""What `opt.step()` of an attached model costs where states dominate: beside torch's fused AdamW, beside its kernel.

    python examples/benchmarks/attached_update.py                           # 100 M parameters, a minute
    python examples/benchmarks/attached_update.py --numel 400000000         # 24 GB of memory
    python examples/benchmarks/attached_update.py --numel 4000000 --rounds 3

Gradients are given, so that a step is the update alone. `adamw` in fp32 is compared with
`torch.optim.AdamW(fused=True)`, and so is `adamw` on bf16 parameters with residuals of 8 bits; `low_precision_adam` on
bfloat16 with its update half alone, on tensors of its own, without a norm of the gradients, checks or metrics. All take
turns, and which goes first alternates; the ratio is the median over rounds, in brackets its quartiles. At the end both
sides of a pair must have the same parameters, but for the residuals' pair.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from update_kernel import alone, machine

import zerofn as zf

HOW = {"lr": 1e-4, "weight_decay": 0.01}
Update = Callable[[], object]


class Leaves(nn.Module):
    """Matrices of 4 M numbers, as those of a model that fills memory; nothing is computed with them."""

    def __init__(self, numel: int, dtype: torch.dtype):
        super().__init__()
        rows, count = min(numel, 1 << 22) // 1024, max(numel >> 22, 1)
        self.weights = nn.ParameterList(drawn(rows, i).to(dtype) for i in range(count))


def drawn(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 1024, generator=torch.Generator().manual_seed(seed)).mul_(0.01)


def stepped(model: Leaves, opt: torch.optim.Optimizer) -> Update:
    """The step of an optimizer, on gradients that stay."""
    for i, p in enumerate(model.weights):
        p.grad = drawn(len(p), -1 - i).to(p.dtype)
    return opt.step


def by_kernel(model: Leaves) -> Update:
    """The C kernel alone, on all leaves in one call."""
    params = {f"weights.{i}": p.detach() for i, p in enumerate(model.weights)}
    grads = {path: drawn(len(p), -1 - i).to(p.dtype) for i, (path, p) in enumerate(params.items())}
    return alone(zf.low_precision_adam(**HOW), params, grads)


def compare(name: str, plain: Update, attached: Update, rounds: int, clock: Callable[[], float]) -> str:
    """Run both in turns; a row of the table."""
    times: list[list[float]] = [[], []]
    for i in range(rounds + 1):
        for side in (0, 1) if i % 2 else (1, 0):
            begun = clock()
            (plain, attached)[side]()
            times[side].append(clock() - begun)
    times = [t[1:] for t in times]  # the first round touches pages
    a, b = (1e3 * statistics.median(t) for t in times)
    low, ratio, high = statistics.quantiles([y / x for x, y in zip(*times, strict=True)], n=4)
    return f"| {name} | {a:.2f} | {b:.2f} | {ratio:.3f} [{low:.3f}, {high:.3f}] |"


def equal(a: Leaves, b: Leaves) -> str:
    """Whether parameters have the same bits, and that they are not where they began."""
    same = all(torch.equal(x, y) for x, y in zip(a.weights, b.weights, strict=True))
    moved = not torch.equal(b.weights[0].float(), drawn(len(b.weights[0]), 0).to(b.weights[0].dtype).float())
    return f"parameters {'equal' if same and moved else 'DIFFER'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processor", action="store_true", help="processor time, for a machine that is busy")
    args = parser.parse_args()
    clock = time.process_time if args.processor else time.perf_counter

    wide, low = [[Leaves(args.numel, dtype) for _ in range(2)] for dtype in (torch.float32, torch.bfloat16)]
    fused = stepped(wide[0], torch.optim.AdamW(wide[0].parameters(), fused=True, **HOW))
    attached = stepped(wide[1], zf.attach(wide[1], zf.adamw(**HOW)))
    lowered = stepped(low[1], zf.attach(low[1], zf.low_precision_adam(**HOW)))
    whole, split = Leaves(args.numel, torch.float32), Leaves(args.numel, torch.float32)
    dtypes = zf.precision(store_dtype="bf16+8")
    masters = stepped(split, zf.attach(split, zf.chain(dtypes, zf.adamw(**HOW))))
    pairs = {
        "fp32: `AdamW(fused=True)`, attached `adamw`": (fused, attached),
        "bf16: the C kernel, attached `low_precision_adam`": (by_kernel(low[0]), lowered),
        "bf16+8: `AdamW(fused=True)` in fp32, attached `adamw`": (
            stepped(whole, torch.optim.AdamW(whole.parameters(), fused=True, **HOW)),
            masters,
        ),
    }
    print(machine())
    count = sum(p.numel() for p in wide[0].parameters())
    print(f"{count:,} parameters in {len(wide[0].weights)} leaves")
    for threads in args.threads:
        torch.set_num_threads(threads)
        print(f"\n{threads} thread{'s' * (threads > 1)}")
        print("| update | ms | ms attached | ratio |\n|---|---|---|---|")
        for name, pair in pairs.items():
            print(compare(name, *pair, args.rounds, clock), flush=True)
    print(f"\nfp32 {equal(*wide)}; bf16 {equal(*low)}")
    print(machine())


if __name__ == "__main__":
    main()
