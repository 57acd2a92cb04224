"""Weight decay, betas and momentum set through `opt.param_groups` in training: torch's numbers, at every stage."""

import copy
from typing import Any

import pytest
import torch
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.testing import assert_trees_equal


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def train(model: nn.Module, opt: Any, first: int, last: int) -> None:
    for i in range(first, last):
        # The decay falls and betas rise, from step to step.
        opt.param_groups[0]["weight_decay"] = 0.5 / (i + 1)
        if "betas" in opt.param_groups[0]:
            opt.param_groups[0]["betas"] = (0.5 + 0.05 * i, 0.9 + 0.01 * i)
        if opt.param_groups[0].get("momentum"):
            opt.param_groups[0]["momentum"] = 0.5 + 0.05 * i
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        opt.step()
        opt.zero_grad()


OPTIMIZERS: dict[str, Any] = {
    "adamw": (lambda p: torch.optim.AdamW(p, 1e-2, fused=True), zf.adamw(1e-2)),
    "adam": (lambda p: torch.optim.Adam(p, 1e-2, fused=True), zf.adam(1e-2)),
    "sgd": (lambda p: torch.optim.SGD(p, 1e-1, momentum=0.9), zf.sgd(1e-1, momentum=0.9)),
    "NAdam": (lambda p: torch.optim.NAdam(p, 1e-2, foreach=False), zf.from_torch(torch.optim.NAdam, lr=1e-2)),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, 1e-2, foreach=False), zf.rmsprop(1e-2)),
    "rmsprop with momentum": (
        lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, foreach=False),
        zf.rmsprop(1e-2, momentum=0.5),
    ),
    "SGD": (
        lambda p: torch.optim.SGD(p, 1e-1, momentum=0.9, nesterov=True),
        zf.from_torch(torch.optim.SGD, lr=1e-1, momentum=0.9, nesterov=True),
    ),
}


def expected(name: str, live: bool = True) -> list[torch.Tensor]:
    model = net()
    opt = OPTIMIZERS[name][0](model.parameters())
    if live:
        train(model, opt, 0, 6)
    else:
        for i in range(6):
            model(torch.randn(4, 3, generator=torch.Generator().manual_seed(i))).square().mean().backward()
            opt.step()
            opt.zero_grad()
    return [p.detach() for p in model.parameters()]


def _close(found: list[torch.Tensor], name: str) -> None:
    start = list(net().parameters())
    for a, b, fixed, s in zip(found, expected(name), expected(name, live=False), start, strict=True):
        # Fused kernels round the last elements of a piece otherwise.
        assert (a - b).norm() <= 1e-6 * (b - s).norm()
        assert (a - fixed).norm() > 1e-3 * (b - s).norm()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("in_backward", [False, True])
def test_numbers_are_those_of_torch(name: str, in_backward: bool):
    model = net()
    train(model, zf.attach(model, OPTIMIZERS[name][1], in_backward=in_backward), 0, 6)
    _close([p.detach() for p in model.parameters()], name)


def _resumed(stage: str, folder: str) -> list[torch.Tensor]:
    tx = zf.chain(getattr(zf, stage)(), zf.partition({"all": zf.offload(OPTIMIZERS["adamw"][1])}, lambda p: "all"))
    model = net()
    opt = zf.attach(model, tx)
    train(model, opt, 0, 3)
    zf.save(folder, opt)
    other = net()
    again = zf.attach(other, tx)
    zf.load(folder, again)
    assert again.param_groups[0]["betas"] == (0.6, 0.92) and again.param_groups[0]["weight_decay"] == 0.5 / 3
    again.load_state_dict(opt.state_dict())
    assert again.param_groups[0]["betas"] == (0.6, 0.92)
    train(other, again, 3, 6)
    opt.detach()
    again.detach()
    return [p.detach() for p in other.parameters()]


@pytest.mark.parametrize("stage", ["all_reduce", "reduce_scatter", "shard"])
def test_so_at_every_stage_and_after_a_resume(stage: str, tmp_path: Any):
    for found in zf.launch(_resumed, 2, stage, str(tmp_path), timeout=limit()):
        _close(found, "adamw")


def test_what_was_not_set_is_the_chains(tmp_path: Any):
    model, other = net(), net()
    opt = zf.attach(model, zf.adamw(1e-2, weight_decay=0.1))
    zf.save(tmp_path, opt)
    new = zf.attach(other, zf.adamw(1e-2, weight_decay=0.2))
    zf.load(tmp_path, new)
    assert new.param_groups[0]["weight_decay"] == 0.2
    new.load_state_dict(opt.state_dict())
    assert new.param_groups[0]["weight_decay"] == 0.2
    opt.param_groups[0]["weight_decay"] = 0.3
    new.load_state_dict(opt.state_dict())
    assert new.param_groups[0]["weight_decay"] == 0.3
    assert set(opt.state_dict()["param_groups"][0]) == set(torch.optim.AdamW(net().parameters()).param_groups[0])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_schedulers_that_cycle_betas_or_momentum_have_an_effect(name: str):
    found = []
    theirs, tx = OPTIMIZERS[name]
    for make in (lambda m: zf.attach(m, tx), lambda m: theirs(m.parameters())):
        model = net()
        opt = make(model)
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=8)
        for i in range(6):
            model(torch.randn(4, 3, generator=torch.Generator().manual_seed(i))).square().mean().backward()
            opt.step()
            opt.zero_grad()
            schedule.step()
        found.append([p.detach() for p in model.parameters()])
    # torch fuses the products of SGD on some processors: two roundings in each of six steps, of |p| < 1.
    bound = 12 * torch.finfo(torch.float32).eps if name == "sgd" else 0.0
    torch.testing.assert_close(*found, rtol=0.0, atol=bound)


@pytest.mark.parametrize(
    "tx, name, value, why",
    [
        (zf.adamw(1e-2), "weight_decay", -1.0, "weight_decay must lie in"),
        (zf.adamw(1e-2), "betas", (0.9, 1.0), "each of betas must lie in"),
        (zf.sgd(1e-2), "betas", (0.9, 0.9), "only lr and weight_decay can be set; betas is"),
        (zf.sgd(1e-2), "momentum", 0.9, r"momentum is part of the pipeline(.|\n)*sgd\(momentum=...\) before"),
        (zf.sgd(1e-2, momentum=0.9), "momentum", 1.0, "momentum must lie in"),
        (zf.sgd(1e-2, momentum=0.9), "nesterov", True, r"sgd\(nesterov=...\) before zf.attach"),
        (zf.adamw(1e-2), "maximize", True, "an optimizer that has it, before zf.attach"),
        (zf.adamw(1e-2), "amsgrad", True, "only lr and betas and weight_decay can be set; amsgrad is"),
        (zf.chain(zf.trace(0.9), zf.scale_by_lr(0.1)), "weight_decay", 0.1, "only lr can be set"),
    ],
)
def test_what_cannot_be_set_is_an_error(tx: Any, name: str, value: Any, why: str):
    model = net()
    opt = zf.attach(model, tx)
    model(torch.ones(1, 3)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    opt.param_groups[0][name] = value
    with pytest.raises(ValueError, match=why):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_rate_that_is_a_tensor_is_not_shared_with_the_optimizer_whose_state_was_loaded():
    opt, other = (zf.attach(net(), zf.sgd(torch.tensor(0.5))) for _ in range(2))
    other.load_state_dict(opt.state_dict())
    # As a scheduler of torch does.
    other.param_groups[0]["lr"].fill_(0.25)
    assert float(opt.param_groups[0]["lr"]) == 0.5


BAD = {
    "text": ("lr", "x", r"param_groups/1: lr is a number, and 'x' is a str"),
    "none": ("lr", None, r"param_groups/1: lr is a number, and None is"),
    "negative": ("lr", -1.0, r"param_groups/1: lr must lie in \[0, inf\)"),
    "a row": ("lr", torch.ones(2), r"param_groups/1: lr is a number"),
    "betas": ("betas", 5, r"param_groups/1: adamw\(betas=5\) is refused"),
    "weight_decay": ("weight_decay", "x", r"param_groups/1: adamw\(weight_decay='x'\) is refused"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_group_that_cannot_be_loaded_changes_nothing(name: str):
    key, value, why = BAD[name]
    model = net()
    opt = zf.attach(model, zf.partition({"a": zf.sgd(0.1), "b": zf.adamw(1e-2)}, lambda path: "ab"["2" in path]))
    train(model, opt, 0, 2)
    saved = copy.deepcopy(opt.state_dict())
    train(model, opt, 2, 4)
    before = copy.deepcopy(opt.state_dict())
    saved["param_groups"][1][key] = value
    with pytest.raises(ValueError, match=why):
        opt.load_state_dict(saved)
    assert_trees_equal(opt.state_dict(), before)
    train(model, opt, 4, 5)
    assert opt.global_steps == 5


@pytest.mark.parametrize("rate", ["x", None])
def test_nor_does_one_of_torch(rate: Any):
    model, other = net(), net()
    opt, theirs = zf.attach(model, zf.adamw(1e-2)), torch.optim.AdamW(other.parameters())
    train(model, opt, 0, 2)
    train(other, theirs, 0, 1)
    saved, before = theirs.state_dict(), copy.deepcopy(opt.state_dict())
    saved["param_groups"][0]["lr"] = rate
    with pytest.raises(ValueError, match="param_groups/0: lr is a number"):
        opt.load_state_dict(saved)
    assert_trees_equal(opt.state_dict(), before)
