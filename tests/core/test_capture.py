"""Steps that can be captured: the numbers of ordinary ones, in memory that stays, and refusals by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchopt
from time_limits import limit
from torch import Tensor
from torch.utils._pytree import tree_leaves

import zerofn as zf

STEPS = torch.randn(6, 8, 3, generator=torch.Generator().manual_seed(0))


def low(*transforms: zf.Transform) -> zf.Transform:
    return zf.chain(zf.precision(store_dtype=torch.bfloat16), *transforms)


def scaled(*transforms: zf.Transform) -> zf.Transform:
    """Its first steps overflow."""
    return zf.chain(zf.scale_loss("dynamic", init_scale=2.0**127, growth_interval=2), *transforms)


def first_is_a(path: str) -> str:
    return "a" if path.startswith("0") else "b"


PIPELINES: dict[str, Callable[[], zf.Transform]] = {
    "adamw": lambda: zf.adamw(1e-2),
    "clip, schedule": lambda: zf.chain(zf.clip_by_global_norm(0.1), zf.adamw(zf.schedules.warmup_cosine(1e-2, 2, 9))),
    "sgd": lambda: zf.sgd(1e-2, momentum=0.9, nesterov=True),
    "sgd, dampening": lambda: zf.sgd(zf.schedules.linear(0.1, 0.0, 9), momentum=0.9, dampening=0.5),
    "low precision": lambda: low(zf.clip_by_global_norm(1.0), zf.low_precision_adam(1e-2)),
    "kahan": lambda: low(zf.low_precision_adam(zf.schedules.linear(0.1, 0.0, 9), rounding="kahan")),
    "scale, ema": lambda: scaled(zf.adamw(1e-2), zf.ema(0.9)),
    "accumulate": lambda: zf.chain(zf.accumulate(3), zf.clip_by_global_norm(0.1), zf.adamw(1e-2)),
    "scale, accumulate": lambda: scaled(zf.accumulate(2), zf.low_precision_adam(1e-2)),
    "skip": lambda: zf.chain(zf.skip_nonfinite(), zf.lion(1e-2)),
    "rmsprop": lambda: zf.rmsprop(1e-2, centered=True),
    "norms of leaves": lambda: zf.chain(zf.adaptive_clip(0.1), zf.mars(), zf.lamb(1e-2)),
    "numbers of leaves": lambda: zf.schedule_free_adamw(zf.schedules.warmup(1e-2, 3)),
    "count of leaves": lambda: zf.lookahead(zf.adopt(1e-2), 2),
    "loss": lambda: zf.chain(zf.accumulate(2), zf.scale_by_polyak(), zf.reduce_on_plateau(zf.adamw(1e-2), 0.5, 1)),
    "model of the loss": lambda: zf.chain(zf.scale_by_momo(), zf.sgd(1.0)),
    "schedule free": lambda: zf.schedule_free(zf.sgd(zf.schedules.warmup(1e-2, 3)), weight_decay_at_y=0.1),
    "partition": lambda: zf.partition({"a": zf.adamw(1e-2), "b": zf.sgd(1e-2, momentum=0.9)}, first_is_a),
}


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


@pytest.mark.parametrize("route", [attached, pure])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_capturable_step_has_the_numbers_of_a_step_in_memory_that_stays(pipeline, route):
    (_, ordinary), metrics = route(PIPELINES[pipeline](), False)
    (before, found), captured = route(PIPELINES[pipeline](), True)
    assert [x.data_ptr() for x in before] == [x.data_ptr() for x in found]
    for x, y in zip(ordinary, found, strict=True):
        # Dampening is computed with a factor that is a tensor: a sum and a product instead of one operation.
        torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-7 if pipeline == "sgd, dampening" else 0.0)
    for a, b in zip(metrics, captured, strict=True):
        assert a == pytest.approx(b, rel=1e-6, nan_ok=True)


def asks(step: Any) -> float:
    return 0.1 if step < 3 else 0.01


def ignores(step: Any) -> float:
    return 0.1


@zf.leafwise(needs="element", optimizer=True)
def mine(grad: Tensor, param: Tensor, *, lr: float = 0.1) -> Tensor:
    return param - lr * grad


OFFLOADED = {"a": zf.adamw(), "b": zf.offload(zf.adamw())}
REFUSED = {
    "asks": (lambda: zf.adamw(asks), "its schedule asks asks for the number of its step"),
    "ignores": (lambda: zf.chain(zf.clip_by_value(1.0), zf.sgd(ignores)), "its schedule ignores returned 0.1"),
    "over": (lambda: zf.chain(zf.clip_by_global_norm(1.0, over=lambda x: x), zf.adamw()), "clip_by_global_norm"),
    "offload": (lambda: zf.offload(zf.adamw()), "offload"),
    "partition": (lambda: zf.partition(OFFLOADED, first_is_a), "partition: offload"),
    "eigenvectors": (lambda: zf.soap(), "soap"),
    "by a function": (lambda: zf.apply_if(zf.adamw(), lambda step: step < 3), "adamw"),
    "guest": (lambda: zf.guest(torchopt.adam()), "Gradient"),
    "weights": (lambda: zf.chain(zf.accumulate(2, weighted=True), zf.adamw()), "accumulate"),
    "leafwise": (lambda: mine(lr=lambda step: 0.1 / (1 + step)), "mine"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_needs_the_host_is_refused_by_name(row):
    make, words = REFUSED[row]
    with pytest.raises(ValueError, match="need the host in every step") as told:
        zf.attach(build(), make(), capturable=True)
    assert words in str(told.value)
    state = zf.init(tx := make(), dict(build().named_parameters()))
    step = zf.make_step(lambda p: sum(x.sum() for x in p.values()), tx, donate=True, capturable=True)
    with pytest.raises(ValueError, match="need the host in every step"):
        step(state, **({"weight": 1.0} if row == "weights" else {}))


def test_a_refused_model_is_plain():
    model = build()
    with pytest.raises(ValueError, match="need the host"):
        zf.attach(model, zf.adamw(asks), capturable=True)
    zf.attach(model, zf.adamw(asks))


def test_ways_that_need_the_host_are_refused():
    with pytest.raises(ValueError, match="hooks of the host update leaves within backward"):
        zf.attach(build(), zf.adamw(), in_backward=True, capturable=True)
    with pytest.raises(ValueError, match="each replay would begin from the same state"):
        zf.make_step(lambda p: p["w"].sum(), zf.adamw(), capturable=True)
    with pytest.raises(ValueError, match="a derivative needs the old one"):
        zf.make_step(lambda p: p["w"].sum(), zf.adamw(), donate=True, create_graph=True, capturable=True)


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
