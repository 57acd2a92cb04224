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
