"""What a loss scale refuses is refused at every stage, on every rank, and the next step is that of one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stages import FIRST
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf

LR = 0.25
# The compute dtype and how far its change of a parameter may be from that of float64.
DTYPES = {torch.float16: 0.01, torch.bfloat16: 0.1}


class ReadsFromOutside(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 5)
        self.read: Any = lambda: 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x + self.read()
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.last(h), h


def data(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(out: tuple[Tensor, Tensor]) -> Tensor:
    y, h = out
    return y.double().square().mean() + h.double().exp().mean()


def an_output_in_a_closure(model: Any, x: Tensor) -> None:
    kept = model.blocks[0](x)
    model.read = lambda: kept
    try:
        loss_of(model(x)).backward()
    finally:
        model.read = lambda: 0.0


def a_hook_on_a_feature(model: Any, x: Tensor) -> None:
    y, h = model(x)
    h.register_hook(lambda g: g * 2)
    loss_of((y, h)).backward()


def a_penalty_on_a_feature(model: Any, x: Tensor) -> None:
    y, h = model(x)
    torch.autograd.grad(y.sum() + h.sum(), h)


def a_backward_hook(model: Any, x: Tensor) -> None:
    handle = model.blocks[1].register_full_backward_hook(lambda m, into, out: None)
    try:
        loss_of(model(x)).backward()
    finally:
        handle.remove()


def what_a_pre_hook_kept(model: Any, x: Tensor) -> None:
    kept: list[Tensor] = []
    handle = model.blocks[2].register_forward_pre_hook(lambda m, a: kept.append(a[0]))
    out = model(x)
    handle.remove()
    more = kept[0].double().mean()
    for _ in range(50):
        more = more * 1.01
    (loss_of(out) + more).backward()


REFUSED: dict[Callable[[Any, Tensor], None], str] = {
    an_output_in_a_closure: "did not come in as an argument",
    a_hook_on_a_feature: "a hook on a tensor of shape",
    a_penalty_on_a_feature: r"torch.autograd.grad\(",
    a_backward_hook: "blocks.1: register_full_backward_hook",
    what_a_pre_hook_kept: "a tensor from inside the attached model",
}


def changes(stage: str, dtype: torch.dtype) -> tuple[list[dict[str, Tensor]], list[str]]:
    """The change of parameters in each step, after a program that was refused; and what the refusals said."""
    model = ReadsFromOutside()
    opt = zf.attach(model, zf.chain(FIRST[stage](), zf.precision(param_dtype=dtype), zf.scale_loss(256.0), zf.sgd(LR)))
    steps, told = [], []
    for i, program in enumerate(REFUSED):
        try:
            program(model, data(dist.get_rank(), i))
            told.append("nothing")
        except RuntimeError as error:
            told.append(str(error))
        opt.zero_grad()
        with opt.gathered():
            before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
        loss_of(model(data(dist.get_rank(), i))).backward()
        opt.step()
        opt.zero_grad()
        with opt.gathered():
            steps.append({n: p.detach().double() - before[n] for n, p in model.named_parameters()})
    opt.detach()
    return steps, told


def all_cells() -> dict[tuple[str, torch.dtype], tuple[list[dict[str, Tensor]], list[str]]]:
    return {(stage, dtype): changes(stage, dtype) for stage in FIRST for dtype in DTYPES}


def on_one_process(size: int) -> list[dict[str, Tensor]]:
    """Plain torch in float64, on the batches of all ranks."""
    model = ReadsFromOutside().double()
    other = torch.optim.SGD(model.parameters(), LR)
    steps = []
    for i in range(len(REFUSED)):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        loss_of(model(torch.cat([data(rank, i) for rank in range(size)]).double())).backward()
        other.step()
        other.zero_grad()
        steps.append({n: p.detach() - before[n] for n, p in model.named_parameters()})
    return steps


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_is_refused_on_ranks(size):
    ranks = zf.launch(all_cells, size, timeout=limit(60))
    want = on_one_process(size)
    for cell in ranks[0]:
        for rank in ranks:
            steps, told = rank[cell]
            for program, text, message in zip(REFUSED, REFUSED.values(), told, strict=True):
                assert re.search(text, message), f"{cell}, {program.__name__}: {message}"
            for i, (got, right) in enumerate(zip(steps, want, strict=True)):
                for n, change in right.items():
                    assert change.norm() > 1e-3
                    assert (got[n] - change).norm() < DTYPES[cell[1]] * change.norm(), f"{cell}, step {i}, {n}"
