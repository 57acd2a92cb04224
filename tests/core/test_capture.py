"""Steps that can be captured: the numbers of ordinary ones, in memory that stays, and refusals by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from time_limits import limit
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transforms_table import LAYERS, ROWS, in_turn

import zerofn as zf

STEPS = torch.randn(6, 8, 3, generator=torch.Generator().manual_seed(0))


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.GELU(), torch.nn.Linear(5, 2))


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> Tensor:
    return model(x.to(dtype)).float().square().mean()


def attached(tx: zf.Transform, capturable: bool) -> tuple[list[list[Tensor]], list[dict[str, float]]]:
    """All tensors of the state before and after the steps, and the metrics of each."""
    model = build()
    opt = zf.attach(model, tx, capturable=capturable)
    before, told = tree_leaves((opt.state.transforms, opt.state.step, opt.state.micro_step, opt.state.leaves)), []
    for x in STEPS:
        opt.backward(loss_of(model, x, next(model.parameters()).dtype))
        opt.step()
        opt.zero_grad()
        told.append({name: value.item() for name, value in opt.metrics.items()})
    after = tree_leaves((opt.state.transforms, opt.state.step, opt.state.micro_step, opt.state.leaves))
    return [before, after], told


def pure(tx: zf.Transform, capturable: bool) -> tuple[list[list[Tensor]], list[dict[str, float]]]:
    model = build()
    state = zf.init(tx, {name: x.detach().clone() for name, x in model.named_parameters()})

    def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        dtype = next(iter(params.values())).dtype
        return loss_of(lambda x: torch.func.functional_call(model, params, (x,)), x, dtype)

    step = zf.make_step(loss_fn, tx, donate=True, capturable=capturable)
    before, told = tree_leaves((state.transforms, state.step, state.micro_step, state.leaves)), []
    for x in STEPS:
        state, metrics = step(state, x)
        told.append({name: value.item() for name, value in metrics.items()})
    return [before, tree_leaves((state.transforms, state.step, state.micro_step, state.leaves))], told


@pytest.mark.parametrize(
    ("name", "route"), in_turn("capture", [x for x, row in ROWS.items() if not row.host], (attached, pure))
)
def test_a_capturable_step_has_the_numbers_of_a_step_in_memory_that_stays(name, route):
    (_, ordinary), metrics = route(ROWS[name].trained(LAYERS), False)
    (before, found), captured = route(ROWS[name].trained(LAYERS), True)
    assert [x.data_ptr() for x in before] == [x.data_ptr() for x in found]
    for x, y in zip(ordinary, found, strict=True):
        # What is derived from the count is a tensor in float32: a sum and a product instead of one operation.
        torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-7 if ROWS[name].verdict == "near" else 0.0)
    for a, b in zip(metrics, captured, strict=True):
        assert a == pytest.approx(b, rel=1e-6, nan_ok=True)


def asks(step: Any) -> float:
    return 0.1 if step < 3 else 0.01


def ignores(step: Any) -> float:
    return 0.1


@zf.leafwise(needs="element", optimizer=True)
def mine(grad: Tensor, param: Tensor, *, lr: Any = 0.1) -> Tensor:
    return param - lr * grad


# Beside the rows of the table that say so.
REFUSED = {
    "asks": (zf.adamw(asks), "its schedule asks asks for the number of its step"),
    "ignores": (zf.chain(zf.clip_by_value(1.0), zf.sgd(ignores)), "its schedule ignores returned 0.1"),
    "leafwise": (mine(lr=lambda step: 0.1 / (1 + step)), "mine"),
}
HOST = [x for x, row in ROWS.items() if row.host]


@pytest.mark.parametrize("name", [*REFUSED, *HOST])
def test_what_needs_the_host_is_refused_by_name(name):
    tx, words = REFUSED[name] if name in REFUSED else (ROWS[name].trained(LAYERS), ROWS[name].host)
    with pytest.raises(ValueError, match="need the host in every step") as told:
        zf.attach(build(), tx, capturable=True)
    assert words in str(told.value)
    state = zf.init(tx, dict(build().named_parameters()))
    step = zf.make_step(lambda p: sum(x.sum() for x in p.values()), tx, donate=True, capturable=True)
    with pytest.raises(ValueError, match="need the host in every step"):
        step(state, **({"weight": 1.0} if name in ROWS and ROWS[name].weighted else {}))


def test_a_refused_model_is_plain():
    model = build()
    with pytest.raises(ValueError, match="need the host"):
        zf.attach(model, zf.adamw(asks), capturable=True)
    zf.attach(model, zf.adamw(asks))


def test_a_state_that_was_donated_is_refused_and_the_next_one_is_not():
    tx = zf.adamw()
    step = zf.make_step(lambda p: p["w"].sum(), tx, donate=True, capturable=True)
    old = zf.init(tx, {"w": torch.ones(2)})
    new, _ = step(old)
    with pytest.raises(RuntimeError, match="donated"):
        step(old)
    assert int(step(new)[0].step) == 2


def on_a_rank() -> str:
    try:
        zf.attach(build(), zf.chain(zf.all_reduce(), zf.adamw()), capturable=True)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_ranks_are_refused():
    for told in zf.launch(on_a_rank, 2, timeout=limit()):
        assert "all_reduce: ranks exchange messages of the host" in told
