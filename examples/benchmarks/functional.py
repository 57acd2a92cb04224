"""A step as a function: its time plain, compiled, batched and differentiated, beside other ways to write it.

    python examples/benchmarks/functional.py                            # 4 layers of 256, batch 64: a minute
    python examples/benchmarks/functional.py --model transformer        # 148 leaves; compiling takes minutes
    python examples/benchmarks/functional.py --only step meta --steps 0

All contestants of a table run in one process and one thread, in turns: what disturbs one round disturbs all. A ratio is
the median over rounds of the ratio within a round, in brackets its quartiles. Losses after as many steps, or the norm
of the meta-gradient, stand beside: they must be the same. JAX and optax take part where they are installed.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from functional_models import MODELS, problem
from functional_peers import (
    BETAS,
    CLIP,
    DECAY,
    EPS,
    LR,
    Step,
    bare,
    by_hand,
    by_hand_meta,
    jax_steps,
    norm_of,
    torchopt_meta,
)
from overhead import peak_extra, quartiles
from torch import Tensor
from update_kernel import machine

import zerofn as zf

TABLES = ("step", "compiled", "vmap", "meta", "memory")


def transform() -> zf.Transform:
    return zf.chain(zf.clip_by_global_norm(CLIP), zf.adamw(LR, BETAS, EPS, DECAY))


def zerofn_step(loss: Callable, params: dict[str, Tensor], x: Tensor, y: Tensor, compiled: bool = False) -> Step:
    """What `zf.make_step` returns, on a state that is given up at every step."""
    tx = transform()
    step, kept = zf.make_step(loss, tx, donate=True), [zf.init(tx, params)]
    run = torch.compile(step, fullgraph=True) if compiled else step

    def once() -> float:
        kept[0], metrics = run(kept[0], x, y)
        return float(metrics["loss"])

    return once


def zerofn_vmap(loss: Callable, params: dict[str, Tensor], x: Tensor, y: Tensor, members: int, compiled: bool) -> Step:
    """`members` states at once, given up at every step."""
    tx = transform()
    step = zf.make_step(loss, tx, donate=True)
    stacked = {k: torch.stack([v] * members) for k, v in params.items()}
    kept = [torch.func.vmap(lambda p: zf.init(tx, p))(stacked)]
    batched = torch.func.vmap(step, in_dims=(0, None, None))
    run = torch.compile(batched, fullgraph=True) if compiled else batched

    def once() -> float:
        kept[0], metrics = run(kept[0], x, y)
        return float(metrics["loss"][0])

    return once


def loop(steps: list[Step]) -> Step:
    """One after another."""

    def once() -> float:
        first, *_ = [step() for step in steps]
        return first

    return once


def zerofn_meta(loss: Callable, params: dict[str, Tensor], x: Tensor, y: Tensor, steps: int, func: bool) -> Step:
    """The meta-gradient through some steps by the first parameters, by torch.func or by plain autograd."""
    tx = transform()
    step = zf.make_step(loss, tx, create_graph=None if func else True)

    def outer(first: dict[str, Tensor]) -> Tensor:
        state = zf.init(tx, first, create_graph=not func)
        for _ in range(steps):
            state, _ = step(state, x, y)
        return loss(zf.full_params(tx, state), x, y)

    def once() -> float:
        if func:
            return norm_of(list(torch.func.grad(outer)(params).values()))
        first = {k: v.clone().requires_grad_() for k, v in params.items()}
        return norm_of(list(torch.autograd.grad(outer(first), list(first.values()))))

    return once


def table(title: str, sides: dict[str, Step], rounds: int, memory: bool = False) -> None:
    """Run all in turns, each round beginning with another, and print a line for each, as a ratio to the first."""
    print(f"\n{title:44} {'ms':>9}   ratio [quartiles]      " + ("MiB      " if memory else "") + "number", flush=True)
    names, times, last = list(sides), {name: [] for name in sides}, {}
    for name in names:
        for _ in range(3):
            sides[name]()
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            begun = time.perf_counter()
            last[name] = sides[name]()
            times[name].append(time.perf_counter() - begun)
    for name in names:
        low, ratio, high = quartiles([b / a for a, b in zip(times[names[0]], times[name], strict=True)])
        peak = f"{peak_extra(sides[name]) / 2**20:8.2f} " if memory else ""
        milliseconds = 1e3 * statistics.median(times[name])
        print(
            f"{name:44} {milliseconds:9.3f}   {ratio:5.3f} [{low:.3f}, {high:.3f}]   {peak}{last[name]:.6g}", flush=True
        )


def flat(once: Step, steps: int) -> None:
    """Resident memory of the process along a run; the first hundred steps fill the allocator's pools."""
    found = []
    for i in range(steps + 1):
        if i and i % max(1, steps // 10) == 0:
            gc.collect()
            found.append(resident())
        once()
    print(f"\nresident MiB along {steps} steps: {' '.join(f'{m:.1f}' for m in found)}")


def resident() -> float:
    """MiB; where the system does not tell, the most so far."""
    told = Path("/proc/self/statm")
    if told.exists():
        return int(told.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def versions() -> str:
    found = []
    for name in ("torch", "torchopt", "jax", "optax"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--width", type=int, help="256 of mlp, 64 of transformer")
    parser.add_argument("--layers", type=int, default=12, help="of transformer")
    parser.add_argument("--batch", type=int, help="64 of mlp, 4 sequences of 16 of transformer")
    parser.add_argument("--members", type=int, default=8, help="of vmap")
    parser.add_argument("--inner", type=int, default=5, help="steps that the meta-gradient goes through")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1000, help="of the table of memory")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES)
    o = parser.parse_args()
    torch.set_num_threads(1)
    wide = o.model == "mlp"
    arrays, x, y = problem(o.model, o.width or (256 if wide else 64), o.layers, o.batch or (64 if wide else 4))
    params = {k: torch.from_numpy(v) for k, v in arrays.items()}
    loss, at = MODELS[o.model], (params, torch.from_numpy(x), torch.from_numpy(y))
    count = sum(v.size for v in arrays.values())
    print(f"{machine()}, 1 thread; {versions()}; Python {sys.version.split()[0]}")
    print(f"{o.model}: {len(params)} leaves, {count:,} parameters, input {tuple(x.shape)}; clip, AdamW", flush=True)
    jax = jax_steps(loss, arrays, x, y, o.members) if {"compiled", "vmap"} & set(o.only) else {}
    if "step" in o.only:
        table(
            "a step, eager",
            {"torch, clip_grad_norm_, AdamW(fused)": bare(loss, *at), "zerofn": zerofn_step(loss, *at)},
            o.rounds,
        )
    if "compiled" in o.only:
        sides = {
            "written by hand, torch.compile": by_hand(loss, *at),
            "by hand, a count for each leaf": by_hand(loss, *at, counts=True),
            "zerofn, torch.compile": zerofn_step(loss, *at, compiled=True),
        }
        table("a step, compiled", sides | {f"JAX and optax, {k}": v for k, v in jax.items() if k == "step"}, o.rounds)
    if "vmap" in o.only:
        sides = {
            f"zerofn, loop over {o.members}": loop([zerofn_step(loss, *at) for _ in range(o.members)]),
            f"zerofn, vmap over {o.members}": zerofn_vmap(loss, *at, o.members, False),
            "written by hand, vmap, torch.compile": by_hand(loss, *at, o.members),
            "zerofn, vmap, torch.compile": zerofn_vmap(loss, *at, o.members, True),
        }
        table(
            f"{o.members} members", sides | {f"JAX and optax, {k}": v for k, v in jax.items() if k == "vmap"}, o.rounds
        )
    if "meta" in o.only:
        sides = {
            "torchopt, autograd": torchopt_meta(loss, *at, o.inner, norm=True),
            "torchopt, its clip, the norm a constant": torchopt_meta(loss, *at, o.inner, norm=False),
            "zerofn, autograd": zerofn_meta(loss, *at, o.inner, False),
            "torchopt, torch.func.grad": torchopt_meta(loss, *at, o.inner, norm=True, func=True),
            "written by hand, torch.func.grad": by_hand_meta(loss, *at, o.inner),
            "zerofn, torch.func.grad": zerofn_meta(loss, *at, o.inner, True),
        }
        table(f"meta-gradient through {o.inner} steps", sides, max(5, o.rounds // 4), memory=True)
    if "memory" in o.only and o.steps:
        flat(zerofn_step(loss, *at), o.steps)


if __name__ == "__main__":
    main()
