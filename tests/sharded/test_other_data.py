"""`p.data = x` of sharded parameters: other memory, as in torch, so that who kept the old one has what it was.

Numbers are those of the same program on a plain model in one process, in float64.
"""

import itertools

import pytest
import torch
from pairs import cover
from rank_programs import batch, rank_and_size
from time_limits import limit
from torch import nn

import zerofn as zf

CHAINS = {
    "shard": lambda: [zf.shard()],
    # Sums of gradients are in float32.
    "precision": lambda: [zf.shard(), zf.precision(param_dtype=torch.float32, grad_dtype=torch.float64)],
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).double()


def loss_of(model, step, ranks):
    losses = []
    for rank in ranks:
        x, y = batch(rank, step)
        losses.append((model(x) - y).square().mean().double())
    return sum(losses) / len(losses)


def train(model, opt, steps, ranks):
    for step in steps:
        loss_of(model, step, ranks).backward()
        opt.step()
        opt.zero_grad()


def evaluated(model):
    with torch.no_grad():
        return loss_of(model, 99, [0]).clone()


def swapped_averages(model, opt, ranks, whole):
    """Averages in the place of parameters for an evaluation, as it is found in many a script."""
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}
    seen = []
    for step in range(5):
        train(model, opt, [step], ranks)
        for name, p in model.named_parameters():
            shadow[name] = (0.5 * shadow[name] + 0.5 * p.data).clone()
        backup = {}
        for name, p in model.named_parameters():
            backup[name] = p.data
            p.data = shadow[name]
        seen.append(evaluated(model))
        for name, p in model.named_parameters():
            p.data = backup[name]
        seen.append(evaluated(model))
    return seen


def trained_elsewhere(model, opt, ranks, whole):
    """What is trained is what was set, and what was kept stays; then the other way round."""
    train(model, opt, range(2), ranks)
    first = [p.data for p in model.parameters()]
    seen = [evaluated(model)]
    for p in model.parameters():
        p.data = torch.full(p.shape, 0.1, dtype=p.dtype)
    train(model, opt, range(2, 5), ranks)
    second = [p.data for p in model.parameters()]
    seen += [evaluated(model), *map(whole, first)]
    for p, x in zip(model.parameters(), first, strict=True):
        p.data = x
    train(model, opt, range(5, 8), ranks)
    return [*seen, evaluated(model), *map(whole, second), *map(whole, first)]


PROGRAMS = [swapped_averages, trained_elsewhere]


def on_a_rank(cells):
    found = {}
    for program, name, in_backward in cells:
        model = net()
        opt = zf.attach(model, zf.chain(*CHAINS[name](), zf.adamw(lr=0.1)), in_backward=in_backward)
        seen = program(model, opt, [rank_and_size()[0]], lambda x: x.full_tensor().clone())
        stored = zf.full_params(opt.tx, opt.state)
        opt.detach()
        # What is stored is what the model has.
        assert all(torch.equal(p, stored[path]) for path, p in model.named_parameters())
        found[program.__name__, name, in_backward] = [*seen, *(p.detach() for p in model.parameters())]
    return found


EVERY = list(itertools.product(PROGRAMS, CHAINS, (False, True)))


@pytest.mark.parametrize(
    ("size", "cells"),
    [(2, cover(EVERY)), pytest.param(2, EVERY, marks=pytest.mark.slow), pytest.param(3, EVERY, marks=pytest.mark.slow)],
    ids=["2, pairs", "2", "3"],
)
def test_what_was_kept_is_what_it_was(size, cells):
    want = {}
    for program in PROGRAMS:
        model = net()
        opt = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01)
        seen = program(model, opt, range(size), lambda x: x.clone())
        want[program.__name__] = [*seen, *(p.detach() for p in model.parameters())]
        assert abs(seen[0] - seen[1]) > 0.01
    for found in zf.launch(on_a_rank, size, cells, timeout=limit()):
        for cell, got in found.items():
            # Of other order of sums, which Adam's division carries on; of float32 in the model.
            tol = 1e-9 if cell[1] == "shard" else 1e-4
            near = {"rtol": tol, "atol": tol, "msg": lambda m, at=cell: f"{at}: {m}"}
            torch.testing.assert_close(got, want[cell[0]], **near)
