"""`offload(compute="host")`: where optimizers run changes no bit; masters are what `precision` would have stored."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import Refusals
from torch import Tensor, nn

import zerofn as zf
from zerofn.extend import Scope

BF16, FP32 = torch.bfloat16, torch.float32
MASTERS = {"compute": "host", "master_dtype": FP32}


def hosted(t: zf.Transform) -> zf.Transform:
    return zf.offload(t, compute="host")


OPTIMIZERS: dict[str, Callable[[], zf.Transform]] = {
    "sgd": lambda: zf.sgd(0.1, momentum=0.9),
    "adamw": lambda: zf.adamw(zf.schedules.warmup_cosine(0.1, 2, 9), weight_decay=0.1),
    "lion": lambda: zf.lion(0.01),
    "partition": lambda: zf.partition(
        {"a": zf.adamw(0.1), "b": zf.sgd(0.1)}, lambda path: "a" if "weight" in path else "b"
    ),
}


def net(dtype: torch.dtype = FP32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def steps(model: nn.Module, opt: zf.Optimizer, first: int, last: int) -> None:
    for i in range(first, last):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(i))
        model(x).float().square().sum().backward()
        opt.step()
        opt.zero_grad()


def trained(tx: zf.Transform, dtype: torch.dtype = FP32, last: int = 4, **how: bool) -> dict[str, Tensor]:
    model = net(dtype)
    steps(model, zf.attach(model, tx, **how), 0, last)
    return {path: p.detach().clone() for path, p in model.named_parameters()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(x, b[path]) for path, x in a.items())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("in_backward", [False, True])
def test_the_bits_are_those_without_it(name, in_backward):
    plain, there = OPTIMIZERS[name](), hosted(OPTIMIZERS[name]())
    assert equal(trained(zf.chain(there), in_backward=in_backward), trained(zf.chain(plain), in_backward=in_backward))


def behind(*parts: zf.Transform) -> zf.Transform:
    return zf.chain(zf.precision(store_dtype=BF16, output_dtype=FP32), *parts)


def test_masters_are_what_precision_would_store():
    """Of a chain, of which an average stays on the device. Masters begin as parameters are stored.

    Clipped gradients differ by a rounding, which are fp32 behind `precision` and here as the parameters are.
    """
    adamw = zf.adamw(0.01, weight_decay=0.1)
    model, there = net(BF16).float(), net(BF16)
    opt = zf.attach(model, zf.chain(zf.precision(param_dtype=BF16, output_dtype=FP32), adamw, zf.ema(0.9)))
    other = zf.attach(there, behind(zf.offload(zf.chain(adamw, zf.ema(0.9)), **MASTERS)))
    for i in range(6):
        steps(model, opt, i, i + 1)
        steps(there, other, i, i + 1)
    for path, x in opt.state.leaves.items():
        assert other.state.leaves[path].dtype is BF16
        own = other.state.transforms["adamw"]
        assert torch.equal(own["master"][path], x), path
        assert torch.equal(own["exp_avg_sq"][path], opt.state.transforms["adamw"]["exp_avg_sq"][path]), path
        assert torch.equal(other.state.leaves[path], x.to(BF16)), path
    lost = trained(behind(zf.low_precision_adam(0.01, weight_decay=0.1, rounding="nearest")), last=6)
    assert not equal(lost, {path: x.detach() for path, x in there.named_parameters()})


@pytest.mark.parametrize("route", ["attached", "pure"])
def test_what_is_written_into_a_parameter_counts(route):
    """Elements that were not written keep the low bits of their masters."""
    tx = behind(zf.offload(zf.sgd(0.0), **MASTERS))
    w = torch.tensor([1.0009765625, 2.0, 3.0])
    start = zf.init(tx, {"w": w.to(BF16)})
    low = {"w": torch.tensor([1.0009765625, 2.0001, 3.0])}
    start.transforms["sgd"]["master"]["w"].copy_(low["w"])
    if route == "pure":
        state = start.replace(params={"w": torch.tensor([1.0, 2.0, 7.0], dtype=BF16)})
        state, _ = zf.update(tx, {"w": torch.zeros(3, dtype=BF16)}, state)
        found = state.transforms["sgd"]["master"]["w"]
    else:
        model = nn.ParameterDict({"w": w})
        opt = zf.attach(model, tx)
        opt.load_state(start)
        with torch.no_grad():
            model["w"][2] = 7.0
        model["w"].grad = torch.zeros(3, dtype=BF16)
        opt.step()
        found = opt.state.transforms["sgd"]["master"]["w"]
    assert torch.equal(found, torch.tensor([1.0009765625, 2.0001, 7.0]))


@pytest.mark.parametrize("donate", [False, True])
def test_the_pure_route_leaves_its_arguments_alone(donate):
    tx = behind(zf.offload(zf.adamw(0.1), **MASTERS))
    params = {"w": torch.ones(3, dtype=BF16), "b": torch.zeros(2, dtype=BF16)}
    step = zf.make_step(lambda p, x: (p["w"].sum() * (p["b"].sum() + x)).float(), tx, donate=donate)
    state = zf.init(tx, params)
    first, _ = step(state if not donate else copy.deepcopy(state), torch.tensor(2.0))
    again, _ = step(state, torch.tensor(2.0))
    assert equal(first.leaves, again.leaves) and equal(*(s.transforms["adamw"]["master"] for s in (first, again)))
    assert torch.equal(params["w"], torch.ones(3, dtype=BF16))


def test_it_is_differentiated_as_without_it():
    def lost(tx: zf.Transform, w: Tensor) -> Tensor:
        step = zf.make_step(lambda p: p["w"].square().sum(), tx)
        return step(zf.init(tx, {"w": w}))[0].params["w"].square().sum()

    w = torch.tensor([1.0, -2.0])
    plain, there = (torch.func.grad(lambda w, tx=tx: lost(tx, w))(w) for tx in (zf.adamw(0.1), hosted(zf.adamw(0.1))))
    assert torch.equal(plain, there)


def test_a_run_goes_on_from_a_file(tmp_path: Path):
    tx = behind(zf.clip_by_global_norm(1.0), zf.offload(zf.adamw(0.01), **MASTERS))
    whole = trained(tx, last=6)
    model = net()
    opt = zf.attach(model, tx)
    steps(model, opt, 0, 3)
    zf.save(tmp_path, opt)
    for load in ("file", "state dict"):
        other = net()
        new = zf.attach(other, tx)
        if load == "file":
            zf.load(tmp_path, like=new)
        else:
            other.load_state_dict(model.state_dict())
            new.load_state_dict(opt.state_dict())
        steps(other, new, 3, 6)
        assert equal(whole, dict(other.named_parameters())), load


WRONG: dict[str, tuple[Callable[[], zf.Transform], str]] = {
    "no optimizer": (lambda: hosted(zf.accumulate(4)), "makes no new parameters"),
    "all leaves at once": (lambda: hosted(replace(zf.sgd(0.1), scope=Scope.TREE)), "must see all leaves at once"),
    "elsewhere": (lambda: zf.offload(zf.sgd(0.1), "cuda", compute="host"), "has its state there"),
    "unknown": (lambda: zf.offload(zf.sgd(0.1), compute="gpu"), "on the parameters' device or on the host"),
    "masters on the device": (lambda: zf.offload(zf.sgd(0.1), master_dtype=FP32), "stored there"),
    "narrow masters": (lambda: zf.offload(zf.sgd(0.1), compute="host", master_dtype=BF16), "master_dtype"),
}


REFUSED = Refusals()
for _make, _told in WRONG.values():
    REFUSED.rows((ValueError, TypeError), (_make, re.compile(_told)))


@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_run_there_is_refused(row):
    row.check()
