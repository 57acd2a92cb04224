"""Small modules in which every leaf gets a gradient, and which torture an adapter each in its own way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Two layers and a bare parameter."""

    def __init__(self, width: int = 6, out: int = 4):
        super().__init__()
        self.first = nn.Linear(width, 8)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.last = nn.Linear(8, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.gain)


class Regression(nn.Module):
    """Two layers in float64, the same in each process."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def regression_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `Regression`, of their own for each step and rank."""
    made = torch.Generator().manual_seed(10 * step + rank)
    x, y = (torch.randn(4, n, generator=made, dtype=torch.float64) for n in (3, 1))
    return x, y


class Pair(Net):
    """Two outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x)) * self.gain
        return self.last(h), h.mean(1)


class Reused(nn.Module):
    """One layer twice in a call, its weight a third time."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(torch.tanh(self.layer(x))), self.layer.weight)


class Tied(nn.Module):
    """Embedding and head share their weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


class TiedBlocks(nn.Module):
    """Residual blocks, of which a call may leave one out, between an embedding and a head of the same weight."""

    def __init__(self, words: int, width: int, norm: bool = False):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.head = nn.Linear(width, words)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, without: int = -1) -> Tensor:
        h = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            if i != without:
                h = h + torch.tanh(block(h))
        return self.head(self.norm(h))


class Lora(nn.Module):
    """A frozen layer with a trained low-rank addition."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.base = nn.Linear(6, 6, bias=False)
        self.a = nn.Parameter(torch.randn(2, 6) * 0.3)
        self.b = nn.Parameter(torch.randn(6, 2) * 0.3)
        self.head = nn.Linear(6, 4)
        for p in (*self.norm.parameters(), *self.base.parameters()):
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.head(torch.tanh(self.base(x) + x @ self.a.T @ self.b.T))


class Checkpointed(nn.Module):
    """Blocks of every kind under activation checkpointing, one inside another."""

    def __init__(self, reentrant: bool, frozen: bool = False):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(6, 6) * 0.4)
        if frozen:
            self.norm.requires_grad_(False)

    def again(self, fn, x: Tensor) -> Tensor:
        return checkpoint(fn, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.layers[0], self.first(x))
        x = self.again(lambda y: F.linear(self.norm(y), self.weight).tanh(), x)
        x = self.again(lambda y: self.layers[1](self.again(self.layers[2], y)), x)
        return F.linear(x, self.weight)


class Branch(nn.Module):
    """One of two branches."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 4)
        self.b = nn.Linear(6, 4)

    def forward(self, x: Tensor, use: str) -> Tensor:
        return (self.a if use == "a" else self.b)(x).tanh()


class Viewed(nn.Module):
    """Returns views of one tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.layer(x)
        return h[:, :4], h[:, 4:], h.T


class Lists(nn.Module):
    """Parameters in lists and dicts, walked over by `parameters()` too."""

    def __init__(self):
        super().__init__()
        self.items = nn.ParameterList([nn.Parameter(torch.randn(6, 6) * 0.4) for _ in range(2)])
        self.named = nn.ParameterDict(
            {"x": nn.Parameter(torch.randn(6) * 0.4), "y": nn.Parameter(torch.randn(6) * 0.4)}
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for w in self.items:
            x = torch.tanh(x @ w)
        for v in self.named.values():
            x = x * v
        return x + self.items[0].sum(), sum(p.square().sum() for p in self.parameters())


class Inner(nn.Module):
    """`torch.func.functional_call` on an inner module, with its own parameters and with fast ones."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        own = dict(self.net.named_parameters())
        y = torch.func.functional_call(self.net, own, (x,))
        grads = torch.autograd.grad(y.square().mean(), list(own.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(own.items(), grads, strict=True)}
        return torch.func.functional_call(self.net, fast, (x,)) + self.net(x)


class Stateful(nn.Module):
    """Leaves tensors in attributes, and carries one over to its next call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.memory: Tensor | None = None
        self.losses: list[Tensor] = []
        self.extra: dict = {}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x) + (0.0 if self.memory is None else self.memory))
        self.memory = h
        self.losses.append(h.square().mean())
        self.extra = {"features": (h, 3)}
        return h.sum(1)


class Force(nn.Module):
    """Energies and their gradient with respect to the input, as force fields have them."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_(True) if x.is_leaf else x
        energy = self.b(torch.tanh(self.a(x)))
        return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


class Convs(nn.Module):
    """BatchNorm, and weights in channels-last order."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=False)  # a bias before BatchNorm has no gradient
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(self.conv(x))).mean((2, 3)))


class Recurrent(nn.Module):
    """LSTM and GRU, whose kernels take a list of weights."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.gru = nn.GRU(5, 4, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0]


class Dot(torch.autograd.Function):
    """Its gradients, where the cotangent is one, are what it has saved: each argument is the other's."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return (a * b).sum()

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return b, a


class Parts(nn.Module):
    """Two halves that may be called by themselves; the second one reads a tensor from a closure if it is given one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.read: Any = lambda: 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) + self.read())
