"""Threads of a rank that call a model, or under `shard` run backwards, at once: sums are those of one thread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from one_launch import one_launch
from stages import around
from torch import Tensor, nn

import zerofn as zf

THREADS, STEPS = 3, 4


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(6, 6), nn.Tanh())]).double()


def batch(step: int, rank: int, thread: int) -> Tensor:
    seed = 100 * step + 10 * rank + thread
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def in_threads(what: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(what, range(THREADS)))


def train(stage: Any, calls: bool, backwards: bool) -> dict[str, Tensor]:
    """How parameters change in a few steps, with threads that are switched as often as Python can."""
    switched = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    model = net()
    begun = {path: p.detach().clone() for path, p in model.named_parameters()}
    opt = zf.attach(model, zf.chain(*around(stage, window=zf.accumulate(1)), zf.sgd(0.1)))
    for step in range(STEPS):
        rank = dist.get_rank()

        def loss(thread: int, step: int = step, rank: int = rank) -> Tensor:
            return model(batch(step, rank, thread)).square().mean()

        losses = in_threads(loss) if calls else [loss(thread) for thread in range(THREADS)]
        if backwards:
            in_threads(lambda thread, losses=losses: losses[thread].backward())
        else:
            sum(losses).backward()
        opt.step()
        opt.zero_grad()
    sys.setswitchinterval(switched)
    opt.detach()
    return {path: p.detach() - begun[path] for path, p in model.named_parameters()}


def by_torch(ranks: int) -> dict[str, Tensor]:
    model = net()
    begun = {path: p.detach().clone() for path, p in model.named_parameters()}
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        for rank in range(ranks):
            for thread in range(THREADS):
                (model(batch(step, rank, thread)).square().mean() / ranks).backward()
        opt.step()
        opt.zero_grad()
    return {path: p.detach() - begun[path] for path, p in model.named_parameters()}


# Where gradients leave in hooks, at stages 0 to 2, backwards are run one after the other.
ROWS = [(0, True, False), (2, True, False), (3, True, False), (3, False, True), (3, True, True)]


def test_threads_of_each_rank_add_up_as_one_does():
    want = by_torch(2)
    for row, ranks in one_launch(2, train, ROWS).items():
        for found in ranks:
            for path, x in want.items():
                # Gradients are added in another order.
                torch.testing.assert_close(found[path], x, rtol=1e-10, atol=1e-13, msg=lambda m, at=row: f"{at}: {m}")
                assert x.abs().max() > 1e-4
