"""A small model with the habits that people give to a forward: writes into parameters, hooks, torch.func inside."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

WIDTH = 4


def _lerp(student: Tensor, teacher: Tensor) -> None:
    teacher.lerp_(student, 0.25)


def _mul_add(student: Tensor, teacher: Tensor) -> None:
    teacher.mul_(0.75).add_(student, alpha=0.25)


def _copy(student: Tensor, teacher: Tensor) -> None:
    teacher.copy_(0.75 * teacher + 0.25 * student)


def _assign(student: Tensor, teacher: Tensor) -> None:
    teacher.data = 0.75 * teacher.data + 0.25 * student.data


def _foreach(student: Tensor, teacher: Tensor) -> None:
    torch._foreach_lerp_([teacher], [student.detach()], 0.25)


def _item(student: Tensor, teacher: Tensor) -> None:
    teacher[:, 0] = 0.75 * teacher[:, 0] + 0.25 * student[:, 0]


# A momentum encoder in the spellings that people use, and that count a version or exchange the memory.
MOMENTUM = (_lerp, _mul_add, _copy, _assign, _foreach, _item)
CLAMPS: tuple[Callable[[Tensor], Any], ...] = (
    lambda w: w.clamp_(-0.3, 0.3),
    lambda w: w.copy_(w.clamp(-0.3, 0.3)),
    lambda w: w.mul_(0.9),
)


def _by_vmap(net: UnusualStack, h: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: torch.tanh(net.head.weight @ row))(h)


def _by_grad(net: UnusualStack, h: Tensor) -> Tensor:
    return torch.func.grad(lambda z: net.blocks[0](z).square().sum())(h)


def _by_grad_of_weight(net: UnusualStack, h: Tensor) -> Tensor:
    w = torch.func.grad(lambda w: F.linear(h, w).square().mean())(net.head.weight)
    return h @ w.T


def _by_jvp(net: UnusualStack, h: Tensor) -> Tensor:
    return torch.func.jvp(net.blocks[0], (h,), (torch.ones_like(h),))[1]


def _by_jacrev(net: UnusualStack, h: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(net.head.weight @ row)))(h).sum(2)


INSIDE = (_by_vmap, _by_grad, _by_grad_of_weight, _by_jvp, _by_jacrev)


class Clamped(torch.autograd.Function):
    """Nonlinear in its cotangent, as a clipped backward is. Cotangents here stay below the bound."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g.clamp(-8.0, 8.0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.inner(x))


class UnusualStack(nn.Module):
    """A small stack with a teacher. `habits` says what its forward does besides computing."""

    def __init__(self, seed: int, habits: tuple[str, ...]):
        super().__init__()
        rng = random.Random(f"{seed} model")
        torch.manual_seed(seed)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(rng.randint(1, 3)))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.teacher = nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(False)
        self.habits = habits
        self.momentum = rng.choice(MOMENTUM)
        self.clamp = rng.choice(CLAMPS)
        self.inside = rng.choice(INSIDE)
        self.assigns = "momentum" in habits and self.momentum is _assign
        # Whether what is computed with are copies, of this call alone, of what is written into.
        self.apart = False
        self.feature: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if "momentum" in self.habits and self.training:
            with torch.no_grad():
                self.momentum(self.stem.weight, self.teacher.weight)
        if "clamp" in self.habits and self.training:
            with torch.no_grad():
                self.clamp(self.blocks[0].inner.weight)
        copies = {n: p.clone() for n, p in self.named_parameters()} if self.apart else {}
        with _reparametrize_module(self, copies):
            return self.compute(x)

    def compute(self, x: Tensor) -> Any:
        h = self.stem(x)
        if "hook in forward" in self.habits and h.requires_grad:
            h.register_hook(lambda g: g * 0.5)
        if "own backward" in self.habits:
            h = Clamped.apply(h)
        for block in self.blocks:
            h = block(h)
        if "torch.func" in self.habits:
            h = h + 0.1 * self.inside(self, h)
        if "attribute" in self.habits:
            self.feature = h
        y = self.head(h) + 0.2 * torch.tanh(self.teacher(h))
        return (y, h) if "returns features" in self.habits else y


HABITS = ("momentum", "clamp", "hook in forward", "own backward", "torch.func", "attribute", "returns features")
