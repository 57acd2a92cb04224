"""State dicts in the form of `torch.optim`: to and from torch's own optimizers, and `get/set_optimizer_state_dict`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import rank_programs as P
import torch
import torch.distributed.checkpoint as dcp
from stages import FIRST
from time_limits import limit
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import zerofn as zf
from zerofn.extend import Transform, transform

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


def by_torch(a: tuple[nn.Module, Any], b: tuple[nn.Module, Any]) -> None:
    set_optimizer_state_dict(*b, get_optimizer_state_dict(*a))


def by_hand(a: tuple[nn.Module, Any], b: tuple[nn.Module, Any]) -> None:
    b[1].load_state_dict(copy.deepcopy(a[1].state_dict()))


@pytest.mark.parametrize(
    "before, after, how",
    [
        (adamw, attached, by_torch),
        (adamw, attached, by_hand),
        (attached, adamw, by_torch),
        (attached, attached, by_torch),
    ],
)
def test_training_goes_on_in_the_other(before: Callable, after: Callable, how: Callable):
    straight = net()
    expected = train(straight, adamw(straight), 0, 6)
    model = net()
    opt = before(model)
    start = train(model, opt, 0, 3)
    opt.param_groups[0]["lr"] = RATE / 2
    other = net(7)
    other.load_state_dict(model.state_dict())
    then = after(other)
    how((model, opt), (other, then))
    assert then.param_groups[0]["lr"] == RATE / 2
    then.param_groups[0]["lr"] = RATE
    for a, b, s in zip(train(other, then, 3, 6), expected, start, strict=True):
        # Two kernels of Adam, which round their tails otherwise.
        assert (a - b).norm() < 1e-6 * (b - s).norm()
    if isinstance(then, zf.Optimizer):
        assert int(then.state.step) == int(then.state.micro_step) == 6


def test_what_is_not_there_is_named_and_nothing_changes():
    model = net()
    opt = attached(model)
    train(model, opt, 0, 2)
    sgd = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9) if (other := net(1)) else None
    train(other, sgd, 0, 1)
    before = {name: x.clone() for name, x in opt.state.transforms["adamw"]["exp_avg"].items()}
    with pytest.raises(ValueError, match=r"0.weight \(0\): exp_avg: missing\n.*\n.*momentum_buffer: unexpected"):
        opt.load_state_dict(sgd.state_dict())
    wide = adamw(other := nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    train(other, wide, 0, 1)
    with pytest.raises(ValueError, match=r"exp_avg: \(5, 3\) torch.float32 instead of \(4, 3\) torch.float32"):
        opt.load_state_dict(wide.state_dict())
    two = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], RATE)
    with pytest.raises(ValueError, match=r"groups of \[1, 1, 1, 1\] parameters into groups of \[4\]"):
        opt.load_state_dict(two.state_dict())
    assert all(torch.equal(x, before[name]) for name, x in opt.state.transforms["adamw"]["exp_avg"].items())


def _through_dcp(stage: str, folder: str) -> bool:
    tx = zf.chain(FIRST[stage](), zf.adamw(RATE, weight_decay=DECAY))
    straight = net()
    one = zf.attach(straight, tx)
    train(straight, one, 0, 3)
    zf.save(f"{folder}/params", one)
    dcp.save({"optimizer": get_optimizer_state_dict(straight, one)}, checkpoint_id=f"{folder}/optimizer")
    model = net(7)
    two = zf.attach(model, tx)
    two.load_state(zf.load(f"{folder}/params", like=two.state))
    for kept in two.state.values():
        kept["exp_avg"] = torch.zeros_like(kept["exp_avg"])
    given = {"optimizer": get_optimizer_state_dict(model, two)}
    dcp.load(given, checkpoint_id=f"{folder}/optimizer")
    set_optimizer_state_dict(model, two, given["optimizer"])
    train(straight, one, 3, 6)
    train(model, two, 3, 6)
    one.detach()
    two.detach()
    return all(map(torch.equal, straight.parameters(), model.parameters()))


@pytest.mark.parametrize("stage", ["reduce_scatter", "shard"])
@pytest.mark.filterwarnings("ignore:.*torch.distributed")
def test_sharded_states_through_torchs_checkpoints(stage, tmp_path):
    assert zf.launch(_through_dcp, 2, stage, str(tmp_path), timeout=limit()) == [True, True]


@transform
def counting():
    def update(grads, state, params, carry, ctx):
        return grads, {"seen": state["seen"] + 1}

    return Transform("counting", needs="element", init_fn=lambda leaves, layout: {"seen": 0}, update_fn=update)


def test_a_number_of_python_comes_back():
    """A count in Python is an entry of the first parameter, as are counters that are tensors."""
    tx = zf.chain(counting(), zf.sgd(0.1, momentum=0.9))
    opt = zf.attach(model := nn.Linear(2, 2), tx)
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    given = get_optimizer_state_dict(model, opt)
    assert given["state"]["weight"]["zerofn/counting/seen"] == 1
    by_hand = opt.state_dict()
    for load in (lambda opt, m: set_optimizer_state_dict(m, opt, given), lambda opt, _: opt.load_state_dict(by_hand)):
        other = nn.Linear(2, 2)
        into = zf.attach(other, tx)
        load(into, other)
        assert into.state.transforms["counting"]["seen"] == 1


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


def test_all_that_is_wrong_is_named_at_once():
    given = copy.deepcopy(torch_run()[1].state_dict())
    del given["state"][0]["exp_avg"]
    given["state"][1]["foo"] = torch.ones(1)
    given["state"][2]["exp_avg"] = torch.ones(7)
    given["state"][9] = {}
    opt = attached(net())
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError) as error:
        opt.load_state_dict(given)
    for row in (
        "0.weight (0): exp_avg: missing",
        "0.bias (1): foo: unexpected",
        "2.weight (2): exp_avg: (7,)",
        "9: unexpected",
    ):
        assert row in str(error.value), row
    given["param_groups"][0]["params"][3] = 2
    with pytest.raises(ValueError, match="2: doubled"):
        opt.load_state_dict(given)
    with pytest.raises(ValueError, match=r"1.bias: unexpected\n(.|\n)*2.bias: missing"):
        m = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        o = torch.optim.AdamW(m.named_parameters(), RATE)
        opt.load_state_dict(o.state_dict())
    with pytest.raises(ValueError, match="maximize"):
        opt.load_state_dict(torch_run(maximize=True)[1].state_dict())
    assert all(map(torch.equal, _tensors(before), _tensors(opt.state_dict())))


def _tensors(d):
    return [x for own in d["state"].values() for x in own.values()] + list(d["zerofn"]["params"].values())


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
    theirs = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, theirs, 0, 2)
    other = net()
    other.load_state_dict(model.state_dict())
    opt = zf.attach(other, zf.sgd(0.1, momentum=0.9))
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
