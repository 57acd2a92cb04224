"""Learning-rate schedulers of torch.optim on optimizers of a user's own: the rates and parameters of torch.optim's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import zerofn as zf

BASE = 0.2


@zf.leafwise(optimizer=True)
def descent(grad, param, *, lr=BASE):
    return param - lr * grad


@zf.leafwise(init=torch.zeros_like, optimizer=True)
def heavy_ball(grad, param, state, *, lr, beta=0.5):
    state = beta * state + grad
    return param - lr * state, state


@zf.leafwise(optimizer=True)
def rateless(grad, param, *, size=BASE):
    return param - size * grad


class Adding:
    """A transformation as of another library."""

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        return {name: -BASE * g for name, g in updates.items()}, state


OWN: dict[str, tuple[zf.Transform, float]] = {
    "plain": (descent(), 0.0),
    "stateful": (heavy_ball(lr=BASE), 0.5),
    "masked": (zf.masked(descent(), lambda path: True), 0.0),
    "partition": (zf.partition({"a": zf.chain(zf.clip_by_value(1e9), heavy_ball(lr=BASE))}, lambda path: "a"), 0.5),
    "offload": (zf.offload(heavy_ball(lr=BASE)), 0.5),
    "chain": (zf.chain(zf.scale_loss(8.0), zf.clip_by_global_norm(1e9), descent(), zf.ema(0.9)), 0.0),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.5**e),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=8, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "to nothing": lambda o: lr_scheduler.LambdaLR(o, lambda e: float(e < 2)),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()


def train(model: nn.Module, opt: Any, schedule: Any, steps: range) -> list[float]:
    """The rate of each step."""
    seen = []
    for step in steps:
        opt.zero_grad()
        seen.append(float(opt.param_groups[0]["lr"]))
        backward(model, step)
        opt.step()
        schedule.step(1.0) if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else schedule.step()
    return seen


def change(model: nn.Module) -> list[Tensor]:
    return [p.detach() - q.detach() for p, q in zip(model.parameters(), net().parameters(), strict=True)]


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("own", OWN)
def test_a_schedule_on_an_optimizer_of_ones_own(own, schedule, in_backward):
    tx, momentum = OWN[own]
    if in_backward and own == "chain":
        tx = zf.chain(zf.clip_by_value(1e9), descent(), zf.ema(0.9))
    plain, model, again = net(), net(), net()
    theirs = torch.optim.SGD(plain.parameters(), BASE, momentum=momentum)
    expected = train(plain, theirs, SCHEDULES[schedule](theirs), range(6))
    opt = zf.attach(model, tx, in_backward)
    ours = SCHEDULES[schedule](opt)
    found = train(model, opt, ours, range(3))
    # The second half in another process, as it were.
    other = zf.attach(again, tx, in_backward)
    resumed = SCHEDULES[schedule](other)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    resumed.load_state_dict(ours.state_dict())
    found += train(again, other, resumed, range(3, 6))
    assert found == expected and len(set(expected)) > 1
    for a, b in zip(change(again), change(plain), strict=True):
        torch.testing.assert_close(a, b)
        assert b.abs().max() > 1e-2


def test_its_rate_is_a_metric_and_is_checked():
    opt = zf.attach(net(), descent())
    backward(opt._own.model, 0)
    opt.step()
    assert float(opt.metrics["lr"]) == pytest.approx(BASE)
    before = copy.deepcopy(opt.state_dict())
    for bad, error in ((float("nan"), ValueError), (-1.0, ValueError), ("x", TypeError)):
        opt.param_groups[0]["lr"] = bad
        with pytest.raises(error, match=r"descent\(lr="):
            opt.step()
    assert all(torch.equal(x, before["zerofn"]["params"][k]) for k, x in opt.state_dict()["zerofn"]["params"].items())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tx", [rateless(), zf.chain(Adding()), zf.masked(rateless(), lambda path: True)])
def test_a_schedule_where_there_is_no_rate(tx, schedule):
    """Whatever the scheduler, the first rate that it sets is an error, and nothing is changed by that step."""
    model = net()
    opt = zf.attach(model, tx)
    ours = SCHEDULES[schedule](opt)
    with pytest.raises(ValueError, match=r"no learning rate, so what is set here would have no effect") as caught:
        train(model, opt, ours, range(6))
    assert "def mine(grad, param, *, lr)" in str(caught.value)
    steps = opt.global_steps
    before = change(model)
    opt.zero_grad()
    backward(model, 0)
    with pytest.raises(ValueError, match="no learning rate"):
        opt.step()
    assert opt.global_steps == steps and all(torch.equal(a, b) for a, b in zip(before, change(model), strict=True))


def test_a_schedule_that_sets_nothing_is_none():
    """Trainers make one of constant rate for whoever asks for none."""
    model = net()
    opt = zf.attach(model, rateless())
    train(model, opt, lr_scheduler.LambdaLR(opt, lambda e: 1.0), range(2))
    assert opt.global_steps == 2
