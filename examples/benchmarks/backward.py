"""What an attached model costs in forward and backward, against the bare module.

    python examples/benchmarks/backward.py
    python examples/benchmarks/backward.py --width 1024 --layers 24 --chain 500 --rounds 30

Both run in one process, in turns: what disturbs one round disturbs both. The ratio is the median over rounds of the
ratio within a round, in brackets its quartiles. Where the arithmetic is the same, gradients are compared first.

A pipeline without a cast and without a loss scale leaves forward and backward alone, so its rows measure noise and
the hooks that are not there. `scale_loss` keeps the arithmetic and adds the boundary: a hook at every module, a node of
autograd and a division for every parameter. That is the honest price of loss scaling without a call, and it shows
where layers are tiny.

The second table is the whole step with the update after backward and within it (`attach(in_backward=True)`), and the
most bytes of tensors that live at once in a step beyond states.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from overhead import peak_extra
from torch import Tensor, nn

import zerofn as zf


class Block(nn.Module):
    """Two layers with a residual."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def large(width: int, layers: int) -> nn.Module:
    """Few large layers: the arithmetic is the time."""
    return nn.Sequential(*(Block(width) for _ in range(layers)))


def chain(length: int) -> nn.Module:
    """Many tiny layers: Python is the time."""
    layers = [nn.Linear(8, 8) for _ in range(length)]
    for layer in layers:
        # torch's own start halves a gradient in every layer: after 200 of them nothing is left to compare.
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers)


def backward(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """One forward and backward."""

    def run() -> None:
        for p in model.parameters():
            p.grad = None
        model(x).square().mean().backward()
        if x.is_cuda:
            torch.cuda.synchronize()

    return run


def seconds(run: Callable[[], None], repeats: int, clock: Callable[[], float]) -> float:
    """Seconds for one run."""
    start = clock()
    for _ in range(repeats):
        run()
    return (clock() - start) / repeats


def in_turns(sides: Sequence[Callable[[], None]], rounds: int, repeats: int, clock: Callable[[], float]) -> str:
    """Milliseconds of the first and of the second, and the ratio with its quartiles."""
    pairs = []
    for i in range(rounds):
        # Whoever comes second finds other caches.
        order = (0, 1) if i % 2 == 0 else (1, 0)
        times = [0.0, 0.0]
        for k in order:
            times[k] = seconds(sides[k], repeats, clock)
        pairs.append(times)
    ratios = sorted(b / a for a, b in pairs)
    low, _, high = statistics.quantiles(ratios, n=4)
    first, second = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    return f"{first:>9.2f} {second:>9.2f}   {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def compare(name: str, model: nn.Module, x: Tensor, rounds: int, repeats: int, clock: Callable[[], float]) -> None:
    """Print one row for each pipeline: times and the ratio to the bare module."""
    pipelines = {
        "adamw": zf.adamw(1e-3),
        "accumulate, clip, adamw": zf.chain(zf.accumulate(4), zf.clip_by_global_norm(1.0), zf.adamw(1e-3)),
        "scale_loss, adamw": zf.chain(zf.scale_loss(1024.0), zf.adamw(1e-3)),
    }
    for title, tx in pipelines.items():
        bare, attached = copy.deepcopy(model), copy.deepcopy(model)
        opt = zf.attach(attached, tx)
        sides = (backward(bare, x), backward(attached, x))
        for _ in range(3):
            for side in sides:
                side()
        far = max(
            float((a.grad - b.grad).abs().max()) for a, b in zip(bare.parameters(), attached.parameters(), strict=True)
        )
        size = min(float(a.grad.abs().max()) for a in bare.parameters())
        print(f"{name:<24} {title:<26} {in_turns(sides, rounds, repeats, clock)}   {far / size:.0e}")
        opt.detach()


def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Callable[[], None]:
    """Forward, backward and update."""

    def run() -> None:
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if x.is_cuda:
            torch.cuda.synchronize()

    return run


def in_backward(model: nn.Module, x: Tensor, rounds: int, clock: Callable[[], float]) -> None:
    """Print the same step with the update after backward and during it: times, ratio, peak memory, parameters."""
    print(
        f"\n{'update, whole step':<24} {'pipeline':<26} {'after ms':>9} {'during ms':>9}   ratio [quartiles]   peak MB"
    )
    pipelines = {
        "adamw": lambda: zf.adamw(1e-3),
        "bf16 states, stochastic": lambda: zf.chain(
            zf.precision(store_dtype=torch.bfloat16), zf.low_precision_adam(1e-3)
        ),
    }
    count = sum(p.numel() for p in model.parameters()) / 1e6
    for title, tx in pipelines.items():
        models = copy.deepcopy(model), copy.deepcopy(model)
        sides = [
            step(m, zf.attach(m, tx(), in_backward=late), x) for m, late in zip(models, (False, True), strict=True)
        ]
        for side in sides * 2:
            side()
        times = in_turns(sides, rounds, 2, clock)
        peaks = [peak_extra(side) / 1e6 for side in sides]
        both = zip(*(m.parameters() for m in models), strict=True)
        far = max(float((a.detach().float() - b.detach().float()).abs().max()) for a, b in both)
        print(
            f"{f'{count:.1f} M parameters':<24} {title:<26} {times}   {peaks[0]:.1f} -> {peaks[1]:.1f}, "
            f"parameters differ by {far:.0e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="of the large model")
    parser.add_argument("--layers", type=int, default=12, help="of the large model: about 8 width^2 parameters each")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--chain", type=int, default=500, help="modules in the chain of tiny layers")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: on a machine that others use too"
    )
    args = parser.parse_args()
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"torch {torch.__version__}, {device}, {args.threads} threads, {args.rounds} rounds")
    print(
        f"{'model':<24} {'pipeline':<26} {'bare ms':>9} {'zerofn ms':>9}   ratio [quartiles]   difference of gradients"
    )
    model = large(args.width, args.layers).to(device)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    x = torch.randn(args.batch, args.width, device=device)
    compare(f"{count:.1f} M parameters", model, x, args.rounds, 2, clock)
    tiny = chain(args.chain).to(device)
    compare(f"chain of {args.chain}", tiny, torch.randn(16, 8, device=device), args.rounds, 3, clock)
    in_backward(model, x, args.rounds, clock)


if __name__ == "__main__":
    main()
