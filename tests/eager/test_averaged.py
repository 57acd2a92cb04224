"""Under `shard` all ranks compute with averages, or all with parameters: `opt.averaged()` is a call of every rank.

Its end may be interrupted.
"""

import copy

import pytest
import torch
from interrupts import Interrupt
from one_launch import one_launch
from time_limits import limit
from torch import nn

import zerofn as zf

X = torch.linspace(-1, 1, 12).view(2, 6)


def trained(place):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.5), zf.ema(0.9)))
    first = torch.distributed.get_rank() == 0
    for step in range(2):
        if step == 1 and place == "everywhere":
            with opt.averaged():
                model(X)
        elif step == 1 and (place == "an error" or (place == "alone" and first)):
            try:
                with opt.averaged():
                    model(X)
                    raise KeyError
            except KeyError:
                pass
        elif step == 1 and place == "inside alone":
            with opt.averaged():
                if first:
                    model(X)
        model(X).square().mean().backward()
        opt.step()
        opt.zero_grad()
    found = [x.tolist() for x in zf.full_params(opt.tx, opt.state).values()]
    opt.detach()
    return found


def test_averages_of_all_ranks_change_no_step():
    found = one_launch(2, trained, [("everywhere",), ("an error",), ("nowhere",)])
    assert found["everywhere",] == found["an error",] == found["nowhere",]


@pytest.mark.parametrize(
    "place, call", [("alone", r"opt\.averaged\(\)"), ("inside alone", r"the end of opt\.averaged")]
)
def test_a_rank_that_computes_with_averages_alone_is_told(place, call, monkeypatch):
    monkeypatch.setenv("ZEROFN_TOGETHER_TIMEOUT", "3")
    with pytest.raises(zf.RankError, match=call + r".* on rank \d and not on every rank"):
        zf.launch(trained, 2, place, timeout=limit())


def interrupted_ends(masters):
    """At each of the operations that put parameters back: they are stored, and the step behind it is that without."""
    first = [zf.all_reduce(), zf.precision(param_dtype=torch.bfloat16)] if masters else []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    opt = zf.attach(model, zf.chain(*first, zf.adamw(1e-2), zf.ema(0.5)))

    def step():
        opt.zero_grad()
        model(X).float().square().mean().backward()
        opt.step()
        return [x.clone() for x in opt.state.leaves.values()]

    before, saved, after = step(), copy.deepcopy(opt.state_dict()), step()
    refused = 0
    for n in range(1, 100):
        opt.load_state_dict(saved)
        inside, mode = opt.averaged(), Interrupt(n)
        inside.__enter__()
        try:
            with mode:
                inside.__exit__(None, None, None)
        except KeyboardInterrupt:
            assert all(map(torch.equal, opt.state.leaves.values(), before))
            with pytest.raises(RuntimeError, match=r"opt\.load_state\(opt\.state\) to go on from what is there"):
                step()
            opt.load_state(opt.state)
            refused += 1
        assert all(map(torch.equal, step(), after)), n
        if mode.left > 0:
            return refused
    raise AssertionError("it has no end")


def test_an_end_that_is_interrupted():
    assert interrupted_ends(False) >= 4


def test_an_end_that_is_interrupted_on_ranks():
    assert min(zf.launch(interrupted_ends, 2, True, timeout=limit())) > 4
