"""`p.grad.clone()` between backwards where gradients leave to be reduced: the mean over ranks, as with DDP."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stages import around
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf

BACKWARDS = 3
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda p: p.grad.clone(),
    "detached": lambda p: p.grad.detach().clone(),
    "in fp64": lambda p: p.grad.double(),
    "deepcopy": lambda p: copy.deepcopy(p.grad),
}
MIDDLES: dict[str, Callable[[], list]] = {
    "alone": lambda: [],
    "scaled": lambda: [zf.scale_loss(64.0)],
    "bf16": lambda: [zf.precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)],
    "clipped": lambda: [zf.clip_by_global_norm(0.1)],
}
STAGES = ("data parallel", "ZeRO-2")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(5, 7), nn.Linear(7, 3), nn.Parameter(torch.ones(4))
        self.z = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).tanh())
        return y + (y * self.z).abs().to(y.dtype)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batch(rank: int, i: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * i + rank))


def reference(size: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """After each backward, the mean of the gradients of all ranks; and the parameters after a step of them."""
    model, found = net(), []
    for i in range(BACKWARDS):
        for rank in range(size):
            (model(batch(rank, i)).square().mean() / size).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    torch.optim.SGD(model.parameters(), 0.1).step()
    return found, {n: p.detach() for n, p in model.named_parameters()}


def read(stage: str, middle: str, how: str) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    model, found = net(), []
    held = [zf.accumulate(1)] if stage == "ZeRO-2" else []
    front = MIDDLES[middle]()
    before, behind = ([], front) if middle == "clipped" else (front, [])
    opt = zf.attach(model, zf.chain(*around(stage, *before, window=zf.accumulate(1)), *held, *behind, zf.sgd(0.1)))
    for i in range(BACKWARDS):
        model(batch(dist.get_rank(), i)).square().mean().backward()
        found.append({n: COPIES[how](p) for n, p in model.named_parameters() if how != "in fp64" or n != "z"})
        # A second copy sends no gradient again.
        assert torch.equal(model.a.weight.grad.clone(), found[-1]["a.weight"].to(model.a.weight.grad.dtype))
    opt.step()
    opt.detach()
    return found, {n: p.detach().clone() for n, p in model.named_parameters()}


ROWS = [(stage, middle, how) for stage in STAGES for middle in MIDDLES for how in COPIES]
FEW = [row for i, row in enumerate(ROWS) if i % 4 == (i // 4) % 4]


def on_a_rank(rows: list[tuple[str, str, str]]) -> list[Any]:
    return [read(*row) for row in rows]


@pytest.mark.parametrize(("size", "rows"), [(2, FEW), *[pytest.param(n, ROWS, marks=pytest.mark.slow) for n in (2, 3)]])
def test_a_copy_has_the_mean_over_ranks(size, rows):
    grads, params = reference(size)
    for found in zf.launch(on_a_rank, size, rows, timeout=limit()):
        for row, (mine, after) in zip(rows, found, strict=True):
            near = {"rtol": 0.1, "atol": 0.02} if row[1] == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
            for expected, got in zip(grads, mine, strict=True):
                for n, x in got.items():
                    want = expected[n] if n in expected else torch.zeros_like(x)
                    torch.testing.assert_close(
                        x.to(want.dtype), want, **near, msg=lambda m, n=n, row=row: f"{row} {n}: {m}"
                    )
            for n, x in after.items():
                if row[1] != "clipped":
                    torch.testing.assert_close(x, params[n], **near, msg=lambda m, n=n, row=row: f"{row} {n}: {m}")


def project(stage: str) -> dict[str, Tensor]:
    """PCGrad: each task's gradient without what works against the other one, from copies, and given back."""
    model = net()
    held = [zf.accumulate(1)] if stage == "ZeRO-2" else []
    opt = zf.attach(model, zf.chain(*around(stage, window=zf.accumulate(1)), *held, zf.sgd(0.1)))
    tasks = []
    for i in range(2):
        model(batch(dist.get_rank(), i)).square().mean().backward()
        tasks.append({n: p.grad.clone() for n, p in model.named_parameters()})
        opt.zero_grad()
    for n, p in model.named_parameters():
        p.grad = projected(tasks[0][n], tasks[1][n])
    opt.step()
    opt.detach()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def projected(g: Tensor, h: Tensor) -> Tensor:
    inner = (g * h.conj()).sum().real
    return (
        g
        + h
        - inner.clamp(max=0)
        * (h / h.abs().square().sum().clamp(min=1e-12) + g / g.abs().square().sum().clamp(min=1e-12))
    )


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_tasks_are_projected_as_on_one_process(stage):
    model, tasks = net(), []
    for i in range(2):
        for rank in range(2):
            (model(batch(rank, i)).square().mean() / 2).backward()
        tasks.append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        )
        model.zero_grad()
    for found in zf.launch(project, 2, stage, timeout=limit()):
        for n, p in model.named_parameters():
            want = p.detach() - 0.1 * projected(tasks[0][n], tasks[1][n])
            torch.testing.assert_close(found[n], want, rtol=1e-5, atol=1e-6)


# -- what ranks do not do alike, and where there are no numbers ---------------------------------------------------


def alone(stage: str, other: str) -> tuple[str, bool]:
    model = net()
    held = [zf.accumulate(1)] if stage == "ZeRO-2" else []
    opt = zf.attach(model, zf.chain(*around(stage, window=zf.accumulate(1)), *held, zf.sgd(0.1)))
    said = ""
    for step in range(3):
        for _ in range(1 + (other == "two backwards")):
            model(batch(dist.get_rank(), step)).square().mean().backward()
        try:
            if step == 1 and (dist.get_rank() == 0 or other == "another"):
                (model.a.weight if dist.get_rank() == 0 else model.b.bias).grad.clone()
            opt.step()
        except RuntimeError as error:
            said += f"{step}: {error}"
        opt.zero_grad()
    opt.detach()
    values = [torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in model.parameters()]
    every = [torch.empty_like(x) for x in values]
    for x, y in zip(every, values, strict=True):
        x.copy_(y)
        dist.broadcast(x, 0)
    return said, all(map(torch.equal, every, values))


def all_alone() -> dict[tuple[str, str], tuple[str, bool]]:
    return {(stage, other): alone(stage, other) for stage in STAGES for other in ("step", "another", "two backwards")}


def test_a_copy_that_ranks_do_not_make_alike_is_refused_on_all():
    for found in zf.launch(all_alone, 2, timeout=limit()):
        for row, (said, equal) in found.items():
            wrong = r"1: ranks disagree on step\(\), zero_grad\(\) or p\.grad\.clone\(\) \(rank 0: \d+, rank 1: \d+\)"
            assert re.match(wrong, said) and said.count("disagree") == 1 and equal, (row, said)


def nowhere() -> list[str]:
    said = []
    for used in (False, True):
        model = nn.Linear(3, 2)
        opt = zf.attach(model, zf.chain(zf.all_reduce(), zf.sgd(0.1)), in_backward=not used)
        model(torch.ones(2, 3)).sum().backward()
        if used:
            opt.step()
        with pytest.raises(
            RuntimeError, match=r"clone with p\.grad of the parameter weight, which has no numbers"
        ) as error:
            model.weight.grad.clone()
        said.append(str(error.value))
        opt.detach()
    model = nn.Linear(3, 2)
    opt = zf.attach(model, zf.chain(zf.all_reduce(), zf.sgd(0.1)))
    model(torch.ones(2, 3)).sum().backward()
    y = model(torch.ones(2, 3))
    y.register_hook(lambda g: model.weight.grad.clone() and None)
    with pytest.raises(RuntimeError, match=r"in the middle of a backward(.|\n)*p\.grad\.clone\(\) behind loss"):
        y.sum().backward()
    opt.zero_grad()
    opt.detach()
    return said


def test_a_gradient_that_is_used_or_still_arrives_has_no_copy():
    zf.launch(nowhere, 2, timeout=limit())
