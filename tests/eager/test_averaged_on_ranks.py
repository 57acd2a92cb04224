"""Under `shard` all ranks compute with averages, or all with parameters: `opt.averaged()` is a call of every rank."""

import pytest
import torch
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
    return [x.tolist() for x in zf.full_params(opt.tx, opt.state).values()]


@pytest.mark.parametrize("place", ["everywhere", "an error"])
def test_averages_of_all_ranks_change_no_step(place):
    assert zf.launch(trained, 2, place, timeout=limit()) == zf.launch(trained, 2, "nowhere", timeout=limit())


@pytest.mark.parametrize(
    "place, call", [("alone", r"opt\.averaged\(\)"), ("inside alone", r"the end of opt\.averaged")]
)
def test_a_rank_that_computes_with_averages_alone_is_told(place, call, monkeypatch):
    monkeypatch.setenv("ZEROFN_TOGETHER_TIMEOUT", "3")
    with pytest.raises(zf.RankError, match=call + r".* on rank \d and not on every rank"):
        zf.launch(trained, 2, place, timeout=limit())
