"""Gradients of several backwards before one step, some of leaves that have one waiting: none is lost or doubled."""

import copy
import itertools

import torch
import torch.distributed as dist
from one_launch import one_launch
from torch import nn

import zerofn as zf

REDUCTIONS = {"all_reduce": zf.all_reduce, "reduce_scatter": zf.reduce_scatter}
# For each backward before a step, the layers that it uses on each rank. A layer that is left out keeps its bucket
# waiting, so that the next gradient of the others is queued.
BACKWARDS = {
    "all, twice": [[(0, 1, 2)] * 2] * 2,
    "one left out at first": [[(1, 2)] * 2, [(0, 1, 2)] * 2, [(0, 1, 2)] * 2],
    "one left out always": [[(1, 2)] * 2] * 3,
    "another one on each rank": [[(0, 1), (1, 2)], [(0, 2), (0, 1)], [(1,), (1,)]],
    "more on one rank": [[(0, 1, 2), (0, 1, 2)], [(0, 1, 2), ()], [(0, 1), ()]],
}


def loss_of(model, used, seed):
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for i in used:
        x = torch.tanh(model[i](x))
    return x.square().mean()


def trained(reduction, backwards):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))).double()
    alone = copy.deepcopy(model)
    opt = zf.attach(model, zf.chain(REDUCTIONS[reduction](), zf.sgd(0.1)))
    reference = torch.optim.SGD(alone.parameters(), 0.1)
    world = dist.get_world_size()
    for step in range(2):
        for i, by_rank in enumerate(BACKWARDS[backwards]):
            for rank, used in enumerate(by_rank):
                seed = 100 * step + 10 * i + rank
                if used and rank == dist.get_rank():
                    loss_of(model, used, seed).backward()
                if used:
                    (loss_of(alone, used, seed) / world).backward()
        opt.step()
        opt.zero_grad()
        reference.step()
        reference.zero_grad()
    for p, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), right.detach(), rtol=1e-10, atol=1e-12)
    opt.detach()


def test_every_gradient_of_several_backwards_is_in_the_step():
    one_launch(2, trained, list(itertools.product(REDUCTIONS, BACKWARDS)))
