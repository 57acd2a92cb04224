"""A model whose parts are as long as rows of others, and what a call says: for tests of parts under `shard`."""

import torch
from torch import nn

WIDTH = 4


def said(fn):
    """The message of what `fn` raises, or what it returns."""
    try:
        return fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def rows(step, rank):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, WIDTH, generator=g, dtype=torch.float64)


class Two(nn.Module):
    """As many rows as ranks in one leaf; a leaf of two numbers; one of as many as a part of another."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(WIDTH, 2)
        self.same = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.w(x) * torch.tanh(self.same(x))


def two():
    torch.manual_seed(0)
    return Two().double()
