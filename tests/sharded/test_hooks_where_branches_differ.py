"""Hooks on a parameter that only some ranks, or none, have used do what they do in plain torch."""

import itertools

import pytest
import torch
import torch.distributed as dist
from pairs import cover
from time_limits import limit
from torch import nn

import zerofn as zf

HOOKS = ("none", "on a gradient", "on a gradient, before attach", "after a gradient", "after a gradient, before attach")
CHAINS = {
    "shard": lambda: (zf.shard(), zf.sgd(1.0)),
    "shard, cast": lambda: (zf.shard(), zf.precision(param_dtype=torch.float64), zf.sgd(1.0)),
}


class Branches(nn.Module):
    """A block of two layers, of which one is used by some."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.block = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x, both):
        x = self.first(x)
        if both:
            x = x + self.block[0](x)
        return self.last(self.block[1](x))


def hooked(model, kind):
    def triple(p):
        p.grad.mul_(3)

    weight = model.block[0].weight
    if kind.startswith("on"):
        weight.register_hook(lambda g: 3 * g)
    if kind.startswith("after"):
        weight.register_post_accumulate_grad_hook(triple)


def rows(rank):
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def changes(chain, kind, both, **more):
    torch.manual_seed(0)
    model = Branches().double()
    start = [p.detach().clone() for p in model.parameters()]
    if kind.endswith("before attach"):
        hooked(model, kind)
    opt = zf.attach(model, zf.chain(*CHAINS[chain]()), **more)
    if not kind.endswith("before attach"):
        hooked(model, kind)
    model(rows(dist.get_rank()), both[dist.get_rank()]).sum().backward()
    opt.step()
    opt.detach()
    return [p.detach() - s for p, s in zip(model.parameters(), start, strict=True)]


def expected(kind, both):
    """The mean over ranks of what plain torch gives each, hooks run."""
    total = None
    for rank, on in enumerate(both):
        torch.manual_seed(0)
        model = Branches().double()
        hooked(model, kind)
        model(rows(rank), on).sum().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        total = grads if total is None else [a + g for a, g in zip(total, grads, strict=True)]
    return [-g / len(both) for g in total]


def programs(size, every):
    cases = list(itertools.product(CHAINS, HOOKS, itertools.product((False, True), repeat=size), (False, True)))
    cases = [c for c in cases if not (c[3] and c[1].startswith("after"))]
    cases = cases if every else cover(cases)
    return {
        (chain, kind, both, early): changes(chain, kind, both, in_backward=early) for chain, kind, both, early in cases
    }


@pytest.mark.parametrize(
    ("size", "every"), [(2, False), *[pytest.param(n, True, marks=pytest.mark.slow) for n in (2, 3)]]
)
def test_changes_are_those_of_plain_torch(size, every):
    for found in zf.launch(programs, size, size, every, timeout=limit(60)):
        for (chain, kind, both, early), got in found.items():
            for change, want in zip(got, expected(kind, both), strict=True):
                # Sums over ranks are made in another order.
                text = f"{chain}, {kind}, {both}, in_backward={early}"
                torch.testing.assert_close(change, want, rtol=1e-12, atol=1e-12, msg=lambda m, t=text: f"{t}: {m}")
