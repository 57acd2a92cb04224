"""Gradients of several backwards before one step, some of leaves that have one waiting: none is lost or doubled."""

import copy
import functools
import itertools
import random

import pytest
import torch
import torch.distributed as dist
from one_launch import one_launch
from torch import nn

import zerofn as zf
from zerofn.core.bucketed_views import into_buckets  # inside: small buckets
from zerofn.core.wires import Averaging, Sharding  # inside: what they send is logged
from zerofn.ranks.collectives import Work  # inside: what a poll says
from zerofn.sharded import reducer  # inside: the rule on GPUs

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

# Those that are the same on both ranks.
ALIKE = {"all, once": [[(0, 1, 2)] * 2], "all, twice": BACKWARDS["all, twice"], "four": [[(0, 1, 2)] * 2] * 4}
ALIKE |= {name: BACKWARDS[name] for name in ("one left out at first", "one left out always")}
ALL = ALIKE | BACKWARDS


def loss_of(model, used, seed):
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for i in used:
        x = torch.tanh(model[i](x))
    return x.square().mean()


def trained(reduction, backwards, talk=lambda: None):
    """Two steps, against torch on the mean of the ranks' losses; `talk` is called after each backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))).double()
    alone = copy.deepcopy(model)
    opt = zf.attach(model, zf.chain(REDUCTIONS[reduction](), zf.sgd(0.1)))
    reference = torch.optim.SGD(alone.parameters(), 0.1)
    world = dist.get_world_size()
    for step in range(2):
        for i, by_rank in enumerate(ALL[backwards]):
            for rank, used in enumerate(by_rank):
                seed = 100 * step + 10 * i + rank
                if used and rank == dist.get_rank():
                    loss_of(model, used, seed).backward()
                if used:
                    (loss_of(alone, used, seed) / world).backward()
            talk()
        opt.step()
        opt.zero_grad()
        reference.step()
        reference.zero_grad()
    for p, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), right.detach(), rtol=1e-10, atol=1e-12)
    opt.detach()


def test_every_gradient_of_several_backwards_is_in_the_step():
    one_launch(2, trained, list(itertools.product(REDUCTIONS, BACKWARDS)))


def in_program_order(reduction, backwards):
    """As on GPUs, whatever polls say: the numbers are right, and both ranks begin all collectives in one order."""
    rank, order = dist.get_rank(), []
    polls = random.Random(f"{reduction} {backwards} {rank}")
    wire = {"all_reduce": Averaging, "reduce_scatter": Sharding}[reduction]
    send, ended = wire.send, Work.is_completed

    def logged(self, buffer, async_op=False):
        order.append(tuple(buffer.shape))
        return send(self, buffer, async_op)

    def talk():
        order.append("the user's")
        dist.all_reduce(torch.ones(1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "sends_kernels", lambda group: True)
        patch.setattr(reducer, "LEAD", 100)
        patch.setattr(reducer, "PATIENCE", 0.01)
        patch.setattr(reducer, "into_buckets", functools.partial(into_buckets, limit=200))
        patch.setattr(Work, "is_completed", lambda self: polls.random() < 0.5 and ended(self))
        patch.setattr(wire, "send", logged)
        trained(reduction, backwards, talk)
    orders = [None, None]
    dist.all_gather_object(orders, order)
    assert order.count("the user's") == 2 * len(ALL[backwards])
    assert backwards not in ALIKE or orders[0] == orders[1]
    # A further round for all gradients that came late, and not one for each backward.
    ours = len(order) - order.count("the user's")
    # One more was sent when the model was attached, and a round when it was detached.
    assert ours <= 1 + 6 * (2 * 2 + 1), order


def test_on_gpus_the_order_of_collectives_follows_from_the_program():
    one_launch(2, in_program_order, list(itertools.product(REDUCTIONS, ALL)), seconds=120)
