"""`opt.step()` of every optimizer: beside torch's best, beside torch's fused AdamW, beside the bytes that it moves.

    python examples/benchmarks/optimizers.py                         # 6 M parameters, fp32 and bf16, ten minutes
    python examples/benchmarks/optimizers.py --only lion adan --dtype fp32 --threads 1
    python examples/benchmarks/optimizers.py --numel 20000 --makes 1 --peers      # seconds, without other packages

A model is attached, gradients are given, and a step is timed by the processor time of the process, which the load of
the machine moves little; threads that wait for each other sleep, so that waiting is no work. For each optimizer the
contenders take turns, round after round: zerofn's; torch's for-loop, foreach and fused ones where torch has the
optimizer (the one with the least median stands in the table); torch's fused AdamW in fp32; and `mul_` in place, the
ceiling of memory. A ratio is the median over rounds of the ratio within a round, in brackets its quartiles. Where
memory lies moves the time of a contender by 5 %, as long as it lives: all are made anew some times (`--makes`).

"bytes" is what a number must move: its parameter read and written, its gradient read, each state read and written, by
their dtypes, and once more what must be read again after a sum over the gradient or the leaf. "over bytes" is the time
over fused AdamW's, by the bytes over AdamW's 28. "of ceiling" is bytes in a second over those of `mul_`.

"change" is the norm of what five gradients do to a small model, which a faster step must not move; "differs" is the
relative difference of that change from torch's for-loop, and of bf16 from the same optimizer in fp32. The exit status
is 1 where it is above its tolerance.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any

# Read when OpenMP starts. A thread that spins while the other one has no processor would be counted.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.optim as T
from torch import Tensor, nn
from update_kernel import machine

import zerofn as zf

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM = 6  # rounds that touch pages, build kernels and join neighbours, each time that contenders are made
CHECKED = 1 << 17  # numbers of the model whose change is compared
Make = Callable[[Any], Any]


@zf.leafwise(init=torch.zeros_like, needs="element")
def momentum(grad: Tensor, param: Tensor, state: Tensor, *, beta: float = 0.9) -> tuple[Tensor, Tensor]:
    """The one of README."""
    state = beta * state + grad
    return state, state


@dataclass(frozen=True)
class Row:
    """An optimizer.

    Attributes:
        make: zerofn's.
        torch: torch's, of the same numbers, where it has it.
        again: what must be read a second time: "params", "grads", or the states of a transform.
        leaves: "mixed", of which a fifth are vectors; "square" or "wide" matrices.
        tolerance: of the change in fp32 beside torch's.
        own: a goal of its own for the time over fused AdamW.
        only: the dtype of storage, where there is one.
    """

    make: Callable[[], zf.Transform]
    torch: Callable[..., T.Optimizer] | None = None
    again: tuple[str, ...] = ()
    leaves: str = "mixed"
    tolerance: float = 1e-4
    own: float | None = None
    only: str | None = None

    def stored(self, dtype: str) -> zf.Transform:
        """The optimizer with parameters in `dtype`, rounded stochastically if it has 16 bits."""
        made = self.make()
        # `low_precision_adam` and `schedule_free` round by themselves.
        rounding = "stochastic" if made.facts.rounds else "nearest"
        return made if dtype == "fp32" else zf.chain(zf.precision(store_dtype=DTYPES[dtype], rounding=rounding), made)


# Rates with which a step changes parameters of size 0.01 by some 0.001, which bf16 sees.
SGD: Any = {"lr": 0.1, "momentum": 0.9}
MUON: Any = {"lr": 0.02, "weight_decay": 0.1}


def _muon(leaves: str) -> Row:
    return Row(lambda: zf.muon(**MUON, dtype=torch.bfloat16), partial(T.Muon, **MUON), leaves=leaves, tolerance=0.05)


def _low(rounding: str) -> zf.Transform:
    return zf.low_precision_adam(1e-3, weight_decay=0.01, rounding=rounding)


ROWS = {
    "sgd": Row(lambda: zf.sgd(0.1), partial(T.SGD, lr=0.1)),
    "momentum": Row(lambda: zf.sgd(**SGD), partial(T.SGD, **SGD)),
    "nesterov": Row(lambda: zf.sgd(**SGD, nesterov=True), partial(T.SGD, **SGD, nesterov=True)),
    "rmsprop": Row(lambda: zf.rmsprop(1e-3), partial(T.RMSprop, lr=1e-3)),
    "nadam": Row(lambda: zf.nadam(1e-3), partial(T.NAdam, lr=1e-3)),
    "radam": Row(lambda: zf.radam(0.1), partial(T.RAdam, lr=0.1)),
    # Sums of rows and columns of the gradient, then the root mean square of what they make of it.
    "adafactor": Row(lambda: zf.adafactor(0.1), partial(T.Adafactor, lr=0.1), ("params", "grads", "grads")),
    "adam": Row(lambda: zf.adam(1e-3), partial(T.Adam, lr=1e-3)),
    "adamw": Row(lambda: zf.adamw(1e-3), partial(T.AdamW, lr=1e-3)),
    "muon": _muon("square"),
    # Matrices of 8 rows, in whose step products of matrices are the lesser part.
    "muon, 8 rows": _muon("wide"),
    "lion": Row(lambda: zf.lion(1e-3)),
    "adan": Row(lambda: zf.adan(1e-3)),
    "adabelief": Row(lambda: zf.adabelief(1e-3)),
    "adopt": Row(lambda: zf.adopt(3e-3)),
    "mars, adamw": Row(lambda: zf.chain(zf.mars(), zf.adamw(1e-3)), again=("grads", "mars")),
    "lamb": Row(lambda: zf.lamb(0.1), again=("params", "lamb")),
    "lars": Row(lambda: zf.lars(1.0, trust_coefficient=0.1), again=("params", "grads")),
    "schedule_free_adamw": Row(lambda: zf.schedule_free_adamw(1e-2)),
    "scale_by_adam, scale_by_lr": Row(
        lambda: zf.chain(zf.scale_by_adam(), zf.scale_by_lr(1e-3)), partial(T.Adam, lr=1e-3)
    ),
    "clip, adamw, ema": Row(
        lambda: zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(1e-3), zf.ema(0.99)), again=("grads",)
    ),
    "clip, lion": Row(lambda: zf.chain(zf.clip_by_global_norm(1.0), zf.lion(1e-3)), again=("grads",)),
    "leafwise momentum, sgd": Row(lambda: zf.chain(momentum(), zf.sgd(0.1)), partial(T.SGD, **SGD)),
    "quantize(adamw), 8 bits": Row(lambda: zf.quantize(zf.adamw(1e-3), bits=8), own=1.0),
    "low_precision_adam, nearest": Row(lambda: _low("nearest"), only="bf16"),
    "low_precision_adam, stochastic": Row(lambda: _low("stochastic"), only="bf16"),
    "low_precision_adam, kahan": Row(lambda: _low("kahan"), only="bf16"),
    "quantize(low_precision_adam), 8 bits": Row(lambda: zf.quantize(_low("stochastic")), only="bf16", own=1.0),
}

# Other packages: their optimizers by row. Where one is missing, or does not run here, its figures are.
PEERS: dict[str, dict[str, Callable[[Any, list[nn.Parameter]], T.Optimizer]]] = {
    "pytorch_optimizer": {
        "lion": lambda m, p: m.Lion(p, lr=1e-3, weight_decay=0.0),
        "adan": lambda m, p: m.Adan(p, lr=1e-3),
        "adabelief": lambda m, p: m.AdaBelief(p, lr=1e-3),
        "lamb": lambda m, p: m.Lamb(p, lr=0.1),
        "schedule_free_adamw": lambda m, p: m.ScheduleFreeAdamW(p, lr=1e-2),
    },
    "flashoptim": {
        "adamw": lambda m, p: m.FlashAdamW(p, lr=1e-3),
        "lion": lambda m, p: m.FlashLion(p, lr=1e-3),
        "quantize(adamw), 8 bits": lambda m, p: m.FlashAdamW(p, lr=1e-3),
    },
    "torchao.optim": {
        "quantize(adamw), 8 bits": lambda m, p: m.AdamW8bit(p, lr=1e-3),
        "low_precision_adam, stochastic": lambda m, p: m._AdamW(p, lr=1e-3, bf16_stochastic_round=True),
    },
    "heavyball": {
        "adamw": lambda m, p: m.AdamW(p, lr=1e-3),
        "adopt": lambda m, p: m.ADOPT(p, lr=1e-3),
        "low_precision_adam, stochastic": lambda m, p: m.AdamW(p, lr=1e-3),
    },
}


# ---- contenders ----


@cache
def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(0.01)


def shapes(numel: int, leaves: int, kind: str) -> list[tuple[int, ...]]:
    vectors = leaves // 5 if kind == "mixed" else 0
    size = numel // (leaves - vectors)
    side = math.isqrt(size)
    matrix = (8, max(size // 8, 1)) if kind == "wide" else (side, side)
    return [(side,) if vectors and i % 5 == 4 else matrix for i in range(leaves)]


class Contender:
    """An optimizer, its parameters and gradients.

    Args:
        of: shapes of the parameters.
        dtype: of parameters and gradients.
        make: the optimizer for a model.
    """

    def __init__(self, of: list[tuple[int, ...]], dtype: torch.dtype, make: Make):
        model = nn.ParameterList(nn.Parameter(drawn(x, i).to(dtype, copy=True)) for i, x in enumerate(of))
        self.model, self.opt, self.dtype = model, make(model), dtype
        self.params = list(model.parameters())
        self.numel = sum(p.numel() for p in self.params)
        # Gradients come from two places in turn, as those of a training run do not stay where they are.
        self.turn = itertools.cycle([self.grads(seed) for seed in (1000, 2000)])

    def grads(self, seed: int) -> list[Tensor]:
        return [drawn(tuple(p.shape), seed + i).to(self.dtype, copy=True) for i, p in enumerate(self.params)]

    def step(self, grads: list[Tensor]) -> None:
        for p, g in zip(self.params, grads, strict=True):
            p.grad = g
        self.opt.step()

    def __call__(self) -> float:
        """Seconds of the processor for a number, of a step."""
        for p, g in zip(self.params, next(self.turn), strict=True):
            p.grad = g
        begun = time.process_time()
        self.opt.step()
        return (time.process_time() - begun) / self.numel

    def change(self) -> Tensor:
        """What five steps change, in float64."""
        before = [p.detach().double() for p in self.params]
        for seed in range(5):
            self.step(self.grads(1000 * (seed + 1)))
        return torch.cat([(p.detach().double() - x).flatten() for p, x in zip(self.params, before, strict=True)])


class Ceiling:
    """`mul_` in place, on as many bytes as AdamW has of states, parameters and gradients."""

    def __init__(self, numel: int):
        self.tensor = torch.ones(4 * numel)

    def __call__(self) -> float:
        begun = time.process_time()
        self.tensor.mul_(1.0)
        return (time.process_time() - begun) / self.tensor.numel()


def fused_adamw(model: nn.ParameterList) -> T.Optimizer:
    return T.AdamW(model.parameters(), lr=1e-3, fused=True)


def attached(row: Row, dtype: str) -> Make:
    return lambda model: zf.attach(model, row.stored(dtype))


def torchs(make: Callable[..., T.Optimizer]) -> Iterator[tuple[str, Make]]:
    """Torch's ways to run an optimizer."""
    known = signature(getattr(make, "func", make)).parameters
    ways = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    for name, how in ways.items():
        if set(how) <= set(known):
            yield name, lambda model, how=how: make(model.parameters(), **how)
        elif name == "for-loop":
            yield name, lambda model: make(model.parameters())


def peers_of(name: str, asked: list[str], told: dict[str, str]) -> Iterator[tuple[str, Make]]:
    """Optimizers of other packages; what is missing is told."""
    for package in asked:
        if name in PEERS[package]:
            try:
                module = importlib.import_module(package)
            except Exception as error:  # a package may fail as it likes
                told[package] = first_line(error)
                continue
            yield package, lambda model, make=PEERS[package][name], m=module: make(m, list(model.parameters()))


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:150]


def size(x: Any) -> int:
    """Bytes of tensors with dimensions: counters are no columns."""
    if isinstance(x, dict):
        return sum(map(size, x.values()))
    return x.numel() * x.element_size() if isinstance(x, Tensor) and x.ndim else 0


def bytes_moved(ours: Contender, again: tuple[str, ...]) -> float:
    """What a number must move in a step."""
    state = ours.opt.state
    columns = {"params": size(dict(state.leaves)), "grads": size(dict(enumerate(ours.grads(0))))}
    columns |= {name: size(dict(slots)) for name, slots in state.transforms.items()}
    once = sum(columns.values()) * 2 - columns["grads"]
    return (once + sum(columns[x] for x in again)) / ours.numel


# ---- measuring ----


def in_turns(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for i in range(WARM + rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(contenders[name]())
    return {name: values[WARM:] for name, values in times.items()}


def ratios(a: list[float], b: list[float]) -> list[float]:
    return [x / y for x, y in zip(a, b, strict=True)]


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def differs(row: Row, dtype: str, of: list[tuple[int, ...]]) -> tuple[float, float | None, float]:
    """The norm of the change; its difference from a reference, if there is one; the tolerance."""
    change = Contender(of, DTYPES[dtype], attached(row, dtype)).change()
    if dtype != "fp32":
        # Rounding to bf16 moves steps by some percent: the reference is the optimizer in fp32.
        wide = zf.adamw(1e-3) if row.only else None
        reference = Contender(of, torch.float32, lambda model: zf.attach(model, wide or row.make())).change()
        tolerance = 0.2
    elif row.torch:
        reference = Contender(of, torch.float32, next(torchs(row.torch))[1]).change()
        tolerance = row.tolerance
    else:
        return float(change.norm()), None, 0.0
    return float(change.norm()), float((change - reference).norm() / reference.norm()), tolerance


def makers(
    name: str, row: Row, dtype: str, o: argparse.Namespace, told: dict[str, str]
) -> dict[str, Callable[[], Callable[[], float]]]:
    """What makes each contender; those that do not run here are told."""
    of = shapes(o.numel, o.leaves, row.leaves)
    here, wide = partial(Contender, of, DTYPES[dtype]), partial(Contender, of, torch.float32)
    found: dict[str, Callable[[], Callable[[], float]]] = {"ours": partial(here, attached(row, dtype))}
    if dtype != "fp32" and not row.only:
        found["own fp32"] = partial(wide, attached(row, "fp32"))
    others = [(f"torch {way}", make) for way, make in torchs(row.torch)] if row.torch else []
    for label, make in others + list(peers_of(name, o.peers, told)):
        try:
            here(make)()
            found[label] = partial(here, make)
        except Exception as error:  # not for this dtype, not on a CPU
            told[f"{label}, {name} in {dtype}"] = first_line(error)
    found["fused AdamW"] = partial(Contender, shapes(o.numel, o.leaves, "mixed"), torch.float32, fused_adamw)
    return found | {"ceiling": partial(Ceiling, o.numel)}


def measured(name: str, row: Row, dtype: str, o: argparse.Namespace, told: dict[str, str]) -> dict[str, Any]:
    """Figures of a row."""
    made_by = makers(name, row, dtype, o, told)
    names, times = list(made_by), {x: [] for x in made_by}
    bytes_, numel = 0.0, 1
    for i in range(o.makes):
        first = 2 * i % len(names)
        contenders = {x: made_by[x]() for x in names[first:] + names[:first]}
        for x, values in in_turns(contenders, o.rounds).items():
            times[x] += values
        ours: Any = contenders["ours"]
        bytes_, numel = bytes_moved(ours, row.again), ours.numel
        del contenders, ours
    base, mine = times["fused AdamW"], times["ours"]
    best = min((x for x in times if x.startswith("torch ")), key=lambda x: statistics.median(times[x]), default=None)
    norm, off, tolerance = differs(row, dtype, shapes(min(o.numel, CHECKED), o.leaves, row.leaves))
    return {
        "name": name,
        "dtype": dtype,
        "ms": 1e3 * statistics.median(mine) * numel,
        "best": best and best.removeprefix("torch "),
        "over torch": ratios(mine, times[best]) if best else None,
        "torch over adamw": ratios(times[best], base) if best else None,
        "over adamw": ratios(mine, base),
        "over fp32": ratios(mine, times["own fp32"]) if "own fp32" in times else None,
        "bytes": bytes_,
        "over bytes": [x * 28 / bytes_ for x in ratios(mine, base)],
        "of ceiling": [x * bytes_ / 8 for x in ratios(times["ceiling"], mine)],
        "peers": {x: ratios(times[x], base) for x in times if x in PEERS},
        "change": norm,
        "differs": off,
        "right": off is None or off <= tolerance,
        "products": row.leaves != "mixed",
        "own": row.own,
    }


def goal(found: dict[str, Any]) -> str:
    """What is aimed at, and whether it is met."""
    if found["own"]:
        which, most = "over adamw", found["own"]
    elif found["over torch"] and (found["dtype"] == "fp32" or found["products"]):
        which, most = "over torch", 1.0
    elif found["over fp32"]:
        which, most = "over fp32", 0.6
    else:
        which, most = "over bytes", 1.15
    # Two decimals, as they are printed.
    met = round(statistics.median(found[which]), 2) <= most
    return f"{which.split()[1]} {most:.2f} {'met' if met else 'MISSED'}"


HEAD = ["optimizer", "ms", "over torch's best", "over fused AdamW", "over own fp32", "bytes", "over bytes"]
HEAD += ["of ceiling", "goal", "others over fused AdamW", "change", "differs"]


def line(found: dict[str, Any]) -> str:
    def of(key: str) -> str:
        return spread(found[key]) if found[key] else ""

    torch_s = f"{of('over torch')} {found['best']}" if found["best"] else ""
    others = [f"{x} {statistics.median(y):.2f}" for x, y in found["peers"].items()]
    if found["torch over adamw"]:
        others.insert(0, f"torch {statistics.median(found['torch over adamw']):.2f}")
    off = "" if found["differs"] is None else f"{found['differs']:.1e}{'' if found['right'] else ' WRONG'}"
    moved = ["", "", ""]
    if not found["products"]:
        share = f"{statistics.median(found['of ceiling']):.0%}"
        moved = [f"{found['bytes']:.1f}", f"{statistics.median(found['over bytes']):.2f}", share]
    cells = [found["name"], f"{found['ms']:.2f}", torch_s, of("over adamw"), of("over fp32"), *moved, goal(found)]
    return "| " + " | ".join([*cells, ", ".join(others), f"{found['change']:.6g}", off]) + " |"


def versions(peers: list[str]) -> str:
    found = [f"zerofn {zf.__version__}", f"Python {platform.python_version()}"]
    for package in peers:
        try:
            found.append(f"{package} {importlib.metadata.version(package.partition('.')[0])}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=6_000_000)
    parser.add_argument("--leaves", type=int, default=30)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--makes", type=int, default=3, help="how often contenders are made")
    parser.add_argument("--rounds", type=int, default=4, help="of steps, each time; two or more")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="of storage")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="other packages")
    parser.add_argument("--json", type=Path, help="a file for all ratios")
    o = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*stored in bf16, and so are the moments")

    # Until a large tensor has been freed, glibc gives the pages of each temporary of a megabyte back to the system, and
    # steps that make some take twice as long. In a training run one has been freed.
    torch.empty(31 << 20, dtype=torch.uint8)
    print(f"{machine()}\n{versions(o.peers)}")
    kept, told = [], {}
    for dtype, threads in itertools.product(o.dtype, o.threads):
        torch.set_num_threads(threads)
        print(f"\n{dtype}, {threads} thread{'s' * (threads > 1)}, {o.numel:,} parameters, {o.leaves} leaves")
        print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
        for name in o.only:
            if ROWS[name].only in (None, dtype):
                found = {"threads": threads, **measured(name, ROWS[name], dtype, o, told)}
                kept.append(found)
                print(line(found), flush=True)
    for what, why in told.items():
        print(f"\nnot run: {what}: {why}", end="")
    print(f"\n\n{machine()}")
    if o.json:
        o.json.write_text(json.dumps(kept, indent=1))
    if wrong := [f"{x['name']} in {x['dtype']}" for x in kept if not x["right"]]:
        raise SystemExit(f"changes that differ by more than their tolerance: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
