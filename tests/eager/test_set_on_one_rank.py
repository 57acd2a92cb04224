"""What is set in `param_groups` on one rank alone: an error on all ranks at the next step, at every stage."""

import functools

import pytest
import rank_programs as P
import torch
from one_launch import one_launch
from stages import around
from torch import nn

import zerofn as zf

STAGES = ("data parallel", "data parallel, late", "ZeRO-2", "ZeRO-3")


def rate(opt, model):
    opt.param_groups[0]["lr"] *= 2


def decay(opt, model):
    opt.param_groups[0]["weight_decay"] = 0.3


def trained(stage, act, where, early=False):
    """What is told at the second step, before which `act` is done on the ranks `where`; and the parameters."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    opt = zf.attach(model, zf.chain(*around(stage, window=zf.accumulate(1)), zf.adamw(0.1)), in_backward=early)
    rank, said = P.rank_and_size()[0], None
    for step in range(3):
        if step == 1 and rank in where:
            act(opt, model)
        model(torch.full((2, 3), 1.0 + rank + step, dtype=torch.float64)).square().mean().backward()
        try:
            opt.step()
        except RuntimeError as error:
            return str(error), int(opt.state.step)
        opt.zero_grad()
    with opt.gathered():
        return said, [p.detach().clone() for p in model.parameters()]


@functools.cache
def on_two_ranks(act, where):
    return one_launch(2, trained, [(stage, act, where) for stage in STAGES])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("act", [rate, decay])
def test_what_one_rank_sets_in_its_groups_is_refused_on_all(stage, act):
    here = "as in the pipeline", {rate: "lr=0.2", decay: "weight_decay=0.3"}[act]
    for own, (said, steps) in zip(here, on_two_ranks(act, (1,))[stage, act, (1,)], strict=True):
        what = f"ranks disagree on what opt.param_groups sets and which leaves are frozen, here {own}, of which"
        assert said.startswith(what), said
        assert said.endswith("a scheduler that reads a loss is to read its mean over ranks.") and steps == 1


@pytest.mark.parametrize("act", [rate, pytest.param(decay, marks=pytest.mark.slow)])
def test_on_every_rank_it_is_what_one_process_does(act):
    reference = plain(act)
    for found in on_two_ranks(act, (0, 1)).values():
        for said, params in found:
            # The mean over ranks is summed in another order than the mean of the whole batch.
            assert said is None
            assert all(torch.allclose(p, q, rtol=1e-12) for p, q in zip(params, reference, strict=True))


def plain(act):
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    decay = zf.adamw(0.1).config["weight_decay"]
    opt = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=decay)
    for step in range(3):
        if step == 1:
            act(opt, model)
        for rank in range(2):
            loss = model(torch.full((2, 3), 1.0 + rank + step, dtype=torch.float64)).square().mean() / 2
            loss.backward()
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()]
