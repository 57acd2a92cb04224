"""Ctrl-C at any moment of a step of the pure route: the state that the caller has is whole, donated or not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import RAISED, RAISES, Moment, by_signal, modes
from torch import Tensor
from trees import flat

import zerofn as zf
from zerofn.extend import Transform

CHAINS: dict[str, Callable[[], Transform]] = {
    "adamw": lambda: zf.adamw(1e-2),
    "accumulate, clip": lambda: zf.chain(zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.adamw(1e-2)),
    "low precision": lambda: zf.chain(
        zf.precision(param_dtype=torch.bfloat16), zf.scale_loss("dynamic"), zf.low_precision_adam(1e-2), zf.ema(0.9)
    ),
    "offload": lambda: zf.offload(zf.adamw(1e-2)),
}
X = torch.linspace(-1, 1, 8).view(2, 4)


def loss_fn(params: Any, x: Tensor) -> Tensor:
    return (x.to(params["a"].dtype) @ params["a"].T + params["b"]).square().mean().float()


def values(state: zf.State) -> list[Tensor]:
    tensors = [x for x in flat(state.transforms).values() if isinstance(x, Tensor)]
    return [x.clone() for x in (*state.leaves.values(), *tensors, state.step, state.micro_step)]


def same(xs: list[Tensor], ys: list[Tensor]) -> bool:
    return all(map(torch.equal, xs, ys))


def batch(state: zf.State) -> Tensor:
    """Of numbers that differ from step to step."""
    return X * (1 + int(state.micro_step) % 7)


def run(name: str, donate: bool, how_many: int | None) -> None:
    step, made = zf.make_step(loss_fn, CHAINS[name](), donate=donate), zf.make_step(loss_fn, CHAINS[name]())
    params = {"a": torch.linspace(-1, 1, 12).view(3, 4), "b": torch.linspace(0, 1, 3)}
    state, other = zf.init(CHAINS[name](), params), zf.init(CHAINS[name](), params)
    state, _ = step(state, batch(state))
    with Moment(0) as count:
        state, _ = step(state, batch(state))
    for _ in range(2):
        other, _ = made(other, batch(other))
    every = range(1, count.seen + 1)
    kept, ends = modes(), set()
    for n in every if how_many is None else sorted(random.Random(0).sample(every, how_many)):
        x, moment, before = batch(state), Moment(n), values(other)
        try:
            with moment:
                state, _ = step(state, x)
        except RAISED:
            pass
        assert modes() == kept, moment.where
        after = not same(values(state), before)
        if after:
            other, _ = made(other, batch(other))
            assert same(values(state), values(other)), moment.where
        ends.add(after)
        state, _ = step(state, batch(state))
        other, _ = made(other, batch(other))
        assert same(values(state), values(other)), moment.where
    assert ends == {False, True} if donate else False in ends


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_the_state_is_that_of_the_step_before_or_after(name, donate):
    run(name, donate, 25)


@pytest.mark.parametrize("number", RAISES)
def test_after_the_signal_of_a_batch_system_too(number):
    with by_signal(number):
        run("accumulate, clip", True, 20)


@pytest.mark.slow
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_at_every_moment(name, donate):
    run(name, donate, None)


DOORS: dict[str, Callable[[zf.State, Any], object]] = {
    "init": lambda state, tx: zf.init(tx, {"a": torch.ones(3, 4), "b": torch.ones(3)}),
    "vjp": lambda state, tx: zf.vjp(loss_fn, tx, state, X)[1](torch.ones(())),
    "full_params": lambda state, tx: zf.full_params(tx, state),
    "averages": lambda state, tx: zf.full_params(tx, state, of="ema"),
    "gather": lambda state, tx: zf.gather(tx, state, state.params),
    "bind": lambda state, tx: torch.func.grad(zf.bind(loss_fn, tx, state))(state.params, X),
    "update": lambda state, tx: zf.update(tx, {"a": torch.ones(3, 4), "b": torch.ones(3)}, state),
}


@pytest.mark.parametrize("places", [15, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("door", DOORS)
def test_grad_mode_is_put_back(door, grad, places):
    """At some places of each function of the pure route, and in either mode."""
    tx = zf.chain(zf.shard(), zf.scale_loss(8.0), zf.adamw(1e-2), zf.ema(0.9))
    state = zf.init(tx, {"a": torch.linspace(-1, 1, 12).view(3, 4), "b": torch.linspace(0, 1, 3)})
    before, was = values(state), modes()
    with torch.set_grad_enabled(grad):
        inside = modes()
        with Moment(0) as count:
            DOORS[door](state, tx)
        every = range(1, count.seen + 1)
        for n in every if count.seen <= places else sorted(random.Random(door).sample(every, places)):
            moment = Moment(n)
            try:
                with moment:
                    DOORS[door](state, tx)
            except (KeyboardInterrupt, UnboundLocalError):
                # A context manager of torch's own raises the second, if Ctrl-C comes in its first line.
                pass
            assert modes() == inside, moment.where
    assert modes() == was and same(values(state), before)
