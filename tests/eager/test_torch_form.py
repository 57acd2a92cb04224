"""State dicts in the form of `torch.optim`: to and from torch's own optimizers, and `get/set_optimizer_state_dict`."""

from __future__ import annotations

from typing import Any

import pytest
import rank_programs as P
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import zerofn as zf

RATE, DECAY = 1e-2, 0.1


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY, fused=True)


def attached(model: nn.Module) -> zf.Optimizer:
    return zf.attach(model, zf.adamw(RATE, weight_decay=DECAY))


def train(model: nn.Module, opt: Any, first: int, last: int) -> list[Tensor]:
    rank = P.rank_and_size()[0]
    for i in range(first, last):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * i + rank))
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def torch_run(named=True, steps=2, **options):
    model = net()
    params = model.named_parameters() if named else model.parameters()
    optimizer = torch.optim.AdamW(params, RATE, **options)
    train(model, optimizer, 0, steps)
    return model, optimizer


def test_names_tell_parameters_and_the_report_says_so():
    model = net()
    named = dict(model.named_parameters())
    halves = [{"params": [(k, named[k]) for k in names]} for names in (["2.bias", "0.weight"], ["2.weight", "0.bias"])]
    theirs = torch.optim.AdamW(halves, RATE)
    train(model, theirs, 0, 2)
    other = net()
    opt = attached(other)
    assert opt.load_state_dict(theirs.state_dict()).by == "name"
    for path, p in other.named_parameters():
        assert torch.equal(opt.state[p]["exp_avg"], theirs.state[named[path]]["exp_avg"]), path
    assert opt.load_state_dict(torch_run(named=False)[1].state_dict()).by == "order"


def test_names_and_not_their_order_tell_parameters():
    """In a dict by names, as torch's functions give it, too."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    opt = attached(model)
    names = [name for name, _ in model.named_parameters()]
    state = {
        name: {"step": torch.tensor(2.0), "exp_avg": torch.full_like(p, i), "exp_avg_sq": torch.full_like(p, -i)}
        for i, (name, p) in enumerate(model.named_parameters())
    }
    opt.load_state_dict({"state": state, "param_groups": [{"lr": RATE, "params": names[::-1]}]})
    for i, p in enumerate(model.parameters()):
        assert (opt.state[p]["exp_avg"] == i).all() and (opt.state[p]["exp_avg_sq"] == -i).all()
    assert int(opt.state.step) == 2


@pytest.mark.parametrize("live", [False, True])
def test_a_parameter_without_a_state_begins_anew(live):
    """As in torch, where one that never had a gradient has none; moments of before are not kept."""
    torch.use_deterministic_algorithms(True)
    try:
        given = torch_run()[1].state_dict()
        del given["state"][2]
        model = net()
        opt = attached(model)
        if live:
            train(model, opt, 0, 2)
        told = opt.load_state_dict(given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert told.made_anew == ("2.weight",)
    new = opt.state[model[2].weight]
    assert not new["exp_avg"].any() and not new["exp_avg_sq"].any() and int(new["step"]) == 0
    assert opt.state[model[0].weight]["exp_avg"].any()


def test_counters_follow_what_torch_has_trained_since():
    """The step of a schedule and the counts of leaves would differ."""
    tx = zf.chain(zf.scale_loss("dynamic"), zf.adamw(RATE))
    model = net()
    opt = zf.attach(model, tx)
    train(model, opt, 0, 2)
    other = net()
    theirs = torch.optim.AdamW(other.parameters(), RATE)
    theirs.load_state_dict(opt.state_dict())
    train(other, theirs, 0, 3)
    opt.load_state_dict(theirs.state_dict())
    assert int(opt.state.step) == int(opt.state.transforms["adamw"]["step"]) == 5


def test_a_window_that_was_open_is_given_up():
    model = net()
    opt = zf.attach(model, zf.chain(zf.accumulate(2), zf.adamw(RATE)))
    train(model, opt, 0, 1)
    opt.load_state_dict(torch_run()[1].state_dict())
    held = opt.state.transforms["accumulate"]
    assert int(held["count"]) == 0 and not any(x.any() for x in held["sum"].values())
    assert int(opt.state.step) == 2


@pytest.mark.filterwarnings("ignore:.*torch.distributed")
def test_one_of_sgd_from_torchs_checkpoint(tmp_path):
    """It keeps no count: a checkpoint that lacks the key is read in part, and a count of 0 would drop the momentum."""
    model = net()
    theirs = torch.optim.SGD(model.parameters(), 0.125, momentum=0.5)
    train(model, theirs, 0, 2)
    other = net()
    other.load_state_dict(model.state_dict())
    opt = zf.attach(other, zf.sgd(0.125, momentum=0.5))
    dcp.save({"o": get_optimizer_state_dict(model, theirs)}, checkpoint_id=tmp_path, no_dist=True)
    given = {"o": get_optimizer_state_dict(other, opt)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(given, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    for own in given["o"]["state"].values():
        assert own["momentum_buffer"].any()
    with pytest.raises(ValueError, match="step: 0 beside a momentum_buffer"):
        set_optimizer_state_dict(other, opt, given["o"])
    for own in given["o"]["state"].values():
        own["step"].fill_(1)
    set_optimizer_state_dict(other, opt, given["o"])
    train(model, theirs, 2, 4)
    train(other, opt, 2, 4)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
