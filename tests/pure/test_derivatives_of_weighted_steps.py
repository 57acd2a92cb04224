"""A derivative through steps with `weight=` is that of one process, where ranks have weights of their own too."""

import pytest
import torch
import torch.distributed as dist
from time_limits import limit

import zerofn as zf

P0 = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.5, -1.0]], dtype=torch.float64)
AT = torch.tensor([0.02, 0.7], dtype=torch.float64)
ALONG = torch.tensor([1.0, 0.5], dtype=torch.float64)
STAGES = {
    "shard": lambda window: (zf.shard(), window),
    "reduce_scatter": lambda window: (zf.reduce_scatter(), window),
    "all_reduce": lambda window: (zf.all_reduce(), window),
    "late reduce_scatter": lambda window: (window, zf.reduce_scatter()),
    "late all_reduce": lambda window: (window, zf.all_reduce()),
}
WEIGHTS = {
    "equal": lambda i, rank, h: 1.0 + 0.5 * i,
    "of each rank": lambda i, rank, h: 1.0 + 0.5 * i + rank,
    "differentiated": lambda i, rank, h: (1.0 + 0.5 * i + rank) * torch.exp(h[1] * i * (rank + 1)),
}


def loss(p, x):
    return ((p["w"] @ x).sin() * 3 + (p["w"] ** 2).sum(1)).sum()


def batches(size):
    return [torch.randn(size, 2, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(4)]


def expected(h, weight, size):
    """Two windows of two batches of every rank, each the mean by weights, written out."""
    w = P0.clone().requires_grad_()
    for window in ((0, 1), (2, 3)):
        total = by = 0
        for i in window:
            for rank, x in enumerate(batches(size)[i]):
                k = weight(i, rank, h)
                total, by = total + k * torch.autograd.grad(loss({"w": w}, x), w, create_graph=True)[0], by + k
        w = w - h[0] * total / by
    return (w**2).sum()


def mean(x, size):
    if size > 1:
        dist.all_reduce(x)
    return x / size


def derivatives(stage, weight, rank, size):
    """By torch.func in reverse and forward mode, and by `create_graph=True`."""

    def trained(h, create_graph=False):
        tx = zf.chain(*STAGES[stage](zf.accumulate(2, weighted=True)), zf.sgd(lr=h[0]))
        state = zf.init(tx, {"w": P0}, create_graph=create_graph)
        step = zf.make_step(loss, tx, create_graph=create_graph)
        for i, x in enumerate(batches(size)):
            state, _ = step(state, x[rank], weight=weight(i, rank, h))
        return (zf.full_params(tx, state)["w"] ** 2).sum()

    reverse = mean(torch.func.grad(trained)(AT), size)
    forward = torch.func.jvp(trained, (AT,), (ALONG,))[1]
    h = AT.clone().requires_grad_()
    (plain,) = torch.autograd.grad(trained(h, create_graph=True), h)
    return trained(AT), reverse, forward, mean(plain, size)


def over_ranks(cells):
    rank, size = dist.get_rank(), dist.get_world_size()
    return {(s, w): derivatives(s, WEIGHTS[w], rank, size) for s, w in cells}


def check(found, size):
    for (stage, name), (value, reverse, forward, plain) in found.items():
        h = AT.clone().requires_grad_()
        want = expected(h, WEIGHTS[name], size)
        (by_h,) = torch.autograd.grad(want, h)
        # Sums in another order, in float64.
        for got, of in ((value, want.detach()), (reverse, by_h), (forward, by_h @ ALONG), (plain, by_h)):
            torch.testing.assert_close(got, of, rtol=1e-9, atol=1e-11, msg=lambda m: f"{stage}, {name}: {m}")  # noqa: B023


def test_on_one_process():
    check({("shard", w): derivatives("shard", WEIGHTS[w], 0, 1) for w in WEIGHTS}, 1)


CELLS = [(s, w) for s in STAGES for w in WEIGHTS]
FEW = [(s, w) for s, w in CELLS if w == "differentiated" or s == "late reduce_scatter"]


@pytest.mark.parametrize(
    ("size", "cells"), [(2, FEW), *[pytest.param(n, CELLS, marks=pytest.mark.slow) for n in (2, 3)]]
)
def test_on_ranks(size, cells):
    for found in zf.launch(over_ranks, size, cells, timeout=limit()):
        check(found, size)
