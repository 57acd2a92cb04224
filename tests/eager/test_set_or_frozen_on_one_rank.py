"""What is set in `param_groups` or frozen on one rank alone: an error on all ranks at the next step, at every stage."""

import functools
import itertools
import re

import pytest
import rank_programs as P
import torch
from one_launch import one_launch
from pairs import cover
from stages import STAGES, around
from torch import nn

import zerofn as zf


def rate(opt, model):
    opt.param_groups[0]["lr"] *= 2


def decay(opt, model):
    opt.param_groups[0]["weight_decay"] = 0.3


def freezes(opt, model):
    model.weight.requires_grad_(False)


def freezes_late(opt, model):
    """Behind backward."""
    model.weight.requires_grad_(False)


def unfreezes(opt, model):
    model.weight.requires_grad_(True)


def makes_a_state(opt, model):
    """As `unfreezes`, of a leaf that has no state yet."""
    model.weight.requires_grad_(True)


def trained(stage, act, where, early=False):
    """What is told, where `act` is done on the ranks `where` in the second of four steps; and the parameters.

    Behind an error the other ranks do it too, and all go on.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    if act in (unfreezes, makes_a_state):
        model.weight.requires_grad_(False)
    chain = zf.chain(*around(stage, window=zf.accumulate(1)), zf.adamw(0.1))
    opt = zf.attach(model, chain, in_backward=early, hold_frozen=act is not makes_a_state)
    rank, said = P.rank_and_size()[0], []
    for step in range(4):
        now = step == 1 and rank in where
        if now and act is not freezes_late:
            act(opt, model)
        try:
            model(torch.full((2, 3), 1.0 + rank + step, dtype=torch.float64)).square().mean().backward()
            if now and act is freezes_late:
                act(opt, model)
            opt.step()
        except RuntimeError as error:
            said.append(f"step {step}: {error}")
            if rank not in where:
                act(opt, model)
        opt.zero_grad()
    opt.detach()
    return said, [p.detach().clone() for p in model.parameters()]


SET = ("data parallel", "data parallel, late", "ZeRO-2", "ZeRO-3")


@functools.cache
def on_two_ranks(act, where):
    return one_launch(2, trained, [(stage, act, where) for stage in SET])


@pytest.mark.parametrize("stage", SET)
@pytest.mark.parametrize("act", [rate, decay])
def test_what_one_rank_sets_in_its_groups_is_refused_on_all(stage, act):
    here = "as in the pipeline", {rate: "lr=0.2", decay: "weight_decay=0.3"}[act]
    (first, params), (second, others) = on_two_ranks(act, (1,))[stage, act, (1,)]
    for own, said in zip(here, (first, second), strict=True):
        what = f"step 1: ranks disagree on what opt.param_groups sets and which leaves are frozen. On this rank: {own}."
        assert len(said) == 1 and said[0].startswith(what), said
        assert said[0].endswith("a scheduler that reads a loss is to read its mean over ranks.")
    assert all(map(torch.equal, params, others))


ROWS = [
    (stage, act, (0,), early)
    for stage, act, early in itertools.product(STAGES, (freezes, unfreezes, freezes_late, makes_a_state), (False, True))
]


@pytest.mark.parametrize("rows", [cover(ROWS), pytest.param(ROWS, marks=pytest.mark.slow)], ids=["pairs", "all"])
def test_a_leaf_that_one_rank_alone_freezes_is_named(rows):
    for row, ((first, params), (second, others)) in one_launch(2, trained, rows).items():
        for said in (first, second):
            assert len(said) == 1 and said[0].startswith("step 1: ranks disagree on"), (row, said)
            assert "which leaves are frozen" in said[0] and re.search(r"\(rank 0: \d+, rank 1: \d+\)", said[0]), row
        # The rank that has frozen leaves tells which they are.
        word = "unfrozen: weight" if row[1] is makes_a_state else " frozen: weight"
        assert [word in said[0] for said in (first, second)].count(True) == 1, row
        assert all(map(torch.equal, params, others)), row


@pytest.mark.parametrize("act", [rate, pytest.param(decay, marks=pytest.mark.slow)])
def test_on_every_rank_it_is_what_one_process_does(act):
    reference = plain(act)
    for found in on_two_ranks(act, (0, 1)).values():
        for said, params in found:
            # The mean over ranks is summed in another order than the mean of the whole batch.
            assert said == []
            assert all(torch.allclose(p, q, rtol=1e-12) for p, q in zip(params, reference, strict=True))


def plain(act):
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    decay = zf.adamw(0.1).config["weight_decay"]
    opt = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=decay)
    for step in range(4):
        if step == 1:
            act(opt, model)
        for rank in range(2):
            loss = model(torch.full((2, 3), 1.0 + rank + step, dtype=torch.float64)).square().mean() / 2
            loss.backward()
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()]
