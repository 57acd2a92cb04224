"""Modules that a backward calls again: in a checkpoint around several calls, and in an adjoint method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from time_limits import limit
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import zerofn as zf

# float64 in the model, so that the change of fp32 parameters is that of plain torch to their rounding.
WIDE = zf.precision(param_dtype=torch.float64)
CHAINS: dict[str, tuple[Any, ...]] = {
    "cast": (WIDE,),
    "scale": (zf.scale_loss(64.0),),
    "cast and scale": (WIDE, zf.scale_loss(64.0)),
    "shard": (zf.shard(),),
    "shard, cast and scale": (zf.shard(), WIDE, zf.scale_loss(64.0)),
}


class Adjoint(Function):
    """Euler's method, whose backward integrates back and asks for gradients of its arguments, as torchdiffeq's does."""

    @staticmethod
    def forward(ctx: Any, fn: nn.Module, y: Tensor, *params: Tensor) -> Tensor:
        ctx.fn = fn
        for _ in range(4):
            y = y + 0.25 * fn(y)
        ctx.save_for_backward(y, *params)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        y, *params = ctx.saved_tensors
        found = [torch.zeros_like(p) for p in params]
        for _ in range(4):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                slope = ctx.fn(y)
            more = torch.autograd.grad(slope, (y, *params), g, allow_unused=True)
            found = [a if b is None else a + 0.25 * b for a, b in zip(found, more[1:], strict=True)]
            y, g = y - 0.25 * slope.detach(), g + 0.25 * more[0]
        return None, g, *found


class Flow(nn.Module):
    """A layer that is integrated, and a head."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Adjoint.apply(self.slope, x, *self.slope.parameters()))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def two_calls(model: Any, x: Tensor) -> Tensor:
    h = checkpoint(lambda x: model[2](model[1](model[0](x))), x, use_reentrant=False)
    return model[4](model[3](h))


def part_and_whole(model: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: model(model[0](x)), x, use_reentrant=False)


def by_segments(model: Any, x: Tensor) -> Tensor:
    return checkpoint_sequential(model, 2, x, use_reentrant=False)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "adjoint": (Flow, lambda model, x: model(x)),
    "two calls in a checkpoint": (layers, two_calls),
    "a part and the whole in a checkpoint": (layers, part_and_whole),
    "checkpoint_sequential": (layers, by_segments),
}


def changes(program: str, tx: Any = None) -> list[Tensor]:
    """What three steps change of each parameter."""
    make, call = PROGRAMS[program]
    torch.manual_seed(0)
    model = make()
    start = [p.detach().clone() for p in model.parameters()]
    opt: Any = torch.optim.SGD(model.parameters(), 0.1) if tx is None else zf.attach(model, tx)
    for seed in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        call(model, x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    if tx is not None:
        opt.detach()
    return [p.detach() - s for p, s in zip(model.parameters(), start, strict=True)]


def on_ranks() -> dict[tuple[str, str], list[Tensor]]:
    return {(p, name): changes(p, zf.chain(*tx, zf.sgd(0.1))) for p in PROGRAMS for name, tx in CHAINS.items()}


def check(found: list[Tensor], program: str) -> None:
    for change, expected in zip(found, changes(program), strict=True):
        torch.testing.assert_close(change, expected, rtol=1e-4, atol=1e-6)
        assert expected.norm() > 1e-3


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_changes_are_those_of_plain_torch(program: str, chain: str):
    check(changes(program, zf.chain(*CHAINS[chain], zf.sgd(0.1))), program)


def test_changes_on_ranks_are_those_of_one_process():
    # All have the same rows, so that the mean over ranks is the gradient of one.
    for found in zf.launch(on_ranks, 2, timeout=limit(60)):
        for (program, _), change in found.items():
            check(change, program)
