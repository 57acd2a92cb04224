"""An `autograd.Function` that gives parameters natural gradients, in a model that has a `__call__` of its own.

So has a sparse variational Gaussian process of gpytorch: parameters reach the Function outside of all calls that
`zf.attach` knows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import covering
from one_launch import one_launch
from stages import PLACES, around
from torch import Tensor, nn

import zerofn as zf


class Natural(torch.autograd.Function):
    """The mean and the root of the covariance; backward gives the gradient by natural parameters in their places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, root: Tensor) -> Tensor:
        ctx.save_for_backward(x, mean, root)
        return x @ mean + (x @ root).square().sum(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        x, mean, root = ctx.saved_tensors
        of_x = g[:, None] * (mean + 2 * (x @ root) @ root.T)
        return of_x, root @ root.T @ (x.T @ g), root @ (2 * x.T @ (g[:, None] * (x @ root)))


class Process(nn.Module):
    def __init__(self, inside: bool):
        super().__init__()
        torch.manual_seed(0)
        draw = lambda *shape: nn.Parameter(torch.randn(shape, dtype=torch.float64) * 0.3)  # noqa: E731
        self.points, self.scale, self.mean, self.root = draw(5, 2), draw(2), draw(5), draw(5, 5)
        self.inside = inside

    def values(self, x: Tensor) -> Tensor:
        kernel = torch.exp(-((x[:, None] - self.points) * self.scale.exp()).square().sum(-1))
        return Natural.apply(kernel, self.mean, self.root)

    def forward(self, x: Tensor) -> Tensor:
        return self.values(x)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) if self.inside else self.values(x)

    def divergence(self) -> Tensor:
        """Outside of every call, as an evidence lower bound has it."""
        return self.mean.square().sum() + self.root.square().sum()


class Around(nn.Module):
    """What to write for a library's model."""

    def __init__(self):
        super().__init__()
        self.process = Process(inside=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.process(x)


MODELS = {"inside": lambda: Process(True), "outside": lambda: Process(False), "around": Around}


def train(stage: str, how: str) -> None:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, theirs = MODELS[how](), MODELS[how]()
    of = lambda m: m.process if how == "around" else m  # noqa: E731
    opt = zf.attach(model, zf.chain(*around(stage, window=zf.accumulate(1)), zf.sgd(0.1, momentum=0.9)))
    o = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9)

    def loss(m: Any, x: Tensor) -> Tensor:
        return (m(x) - x.sum(1)).square().mean() + 0.1 * of(m).divergence()

    if (stage, how) == ("ZeRO-3", "outside") and ranks > 1:
        with pytest.raises(RuntimeError, match=r"autograd.Function that is given .* mean(?s:.)*a module whose forward"):
            loss(model, x)
        return
    for _ in range(3):
        loss(model, x.chunk(ranks)[rank]).backward()
        opt.step()
        opt.zero_grad()
        for part in x.chunk(ranks):
            (loss(theirs, part) / ranks).backward()
        o.step()
        o.zero_grad()
    first = dict(MODELS[how]().named_parameters())
    with opt.gathered():
        for name, p in theirs.named_parameters():
            q = model.get_parameter(name)
            found = (q.full_tensor() if hasattr(q, "full_tensor") else q).detach()
            torch.testing.assert_close(found - first[name], p.detach() - first[name], rtol=1e-8, atol=1e-11)
    opt.detach()


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_natural_gradients_are_those_of_one_process(ranks, few):
    rows = [(stage, how) for stage in PLACES for how in MODELS if ranks == 1 or stage != "one process"]
    # Under ZeRO-3 each of the models.
    kept = [row for row in rows if row in covering(rows) or row[0] == "ZeRO-3"]
    one_launch(ranks, train, kept if few else rows)
