"""Under `shard` a reduce-scatter is under way while backward goes on: its numbers come later, and none is lost."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf


class Blocks(nn.Module):
    """Blocks whose activations can be watched."""

    def __init__(self, count: int = 4):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(count))

    def forward(self, x: Tensor, watch=None) -> Tensor:
        for i, block in enumerate(self.blocks):
            if watch is not None:
                x.register_hook(lambda g, i=i: watch(i))
            x = torch.tanh(block(x))
        return x


def models() -> tuple[Blocks, Blocks]:
    torch.manual_seed(0)
    plain = Blocks().double()
    return plain, copy.deepcopy(plain)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(
        3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank)
    ).requires_grad_()


def mean_loss(model: nn.Module, world: int, step: int) -> Tensor:
    return sum(model(batch(rank, step)).square().mean() for rank in range(world)) / world  # type: ignore[return-value]


def when_gradients_come() -> tuple[dict[int, list[bool]], float]:
    plain, model = models()
    world, rank = dist.get_world_size(), dist.get_rank()
    zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    there: dict[int, list[bool]] = {}
    weights = [block.weight for block in model.blocks]

    def watch(i: int) -> None:
        # Called when the gradient of block i's input is there, behind that of its parameters.
        there[i] = [weight.grad is not None for weight in weights]

    mean_loss(plain, world, 0).backward()
    model(batch(rank, 0), watch).square().mean().backward()
    wanted = [p.grad for p in plain.parameters()]
    found = [p.grad.full_tensor() for p in model.parameters()]
    return there, max(float((a - b).abs().max()) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_the_gradients_of_one_block_come_while_the_next_one_computes(world: int):
    for there, far in zf.launch(when_gradients_come, world, timeout=limit()):
        # Block 1 has computed its own, and they are on their way: block 0 computes meanwhile.
        assert there[1] == [False, False, True, True], there
        # Sums over ranks are made in another order.
        assert far < 1e-14


def after_a_failed_backward(clears: str) -> float:
    plain, model = models()
    world, rank = dist.get_world_size(), dist.get_rank()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    torchs = torch.optim.SGD(plain.parameters(), 0.1)

    def fails(i: int) -> None:
        if i == 1:
            raise ValueError("on every rank")

    with pytest.raises(ValueError, match="on every rank"):
        model(batch(rank, 0), fails).square().mean().backward()
    if clears == "the optimizer":
        opt.zero_grad()
    elif clears == "the model":
        model.zero_grad()
    else:
        for p in model.parameters():
            p.grad = None
    before = [p.detach().clone() for p in plain.parameters()]
    for step in (1, 2):
        torchs.zero_grad()
        mean_loss(plain, world, step).backward()
        torchs.step()
        opt.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        opt.step()
    changes = [(a.detach() - b).norm() for a, b in zip(plain.parameters(), before, strict=True)]
    far = [(a - b.full_tensor()).norm() for a, b in zip(plain.parameters(), model.parameters(), strict=True)]
    return max(float(d / c) for d, c in zip(far, changes, strict=True))


@pytest.mark.parametrize("clears", ["the optimizer", "the model", "by hand"])
def test_nothing_of_a_backward_that_raised_comes_later(clears: str):
    """A reduce-scatter was under way when it raised. Sums over ranks are made in another order: 1e-12 of a change."""
    for far in zf.launch(after_a_failed_backward, 2, clears, timeout=limit()):
        assert far < 1e-12
