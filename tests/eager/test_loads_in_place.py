"""A load that writes into the state's own tensors, as `torch.distributed.checkpoint` does, keeps all that it writes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import optree
import pytest
import torch
from torch import Tensor, nn

import zerofn as zf

# Chains whose state has tensors that follow from a parameter, where somebody writes into it alone.
CHAINS: dict[str, Callable[[], zf.Transform]] = {
    "kahan": lambda: zf.low_precision_adam(1e-2, rounding="kahan"),
    "schedule_free": lambda: zf.schedule_free(zf.sgd(0.1)),
    "lookahead": lambda: zf.lookahead(zf.sgd(0.1), sync_period=3, slow_step_size=0.5),
}


def begun(make: Callable[[], zf.Transform]) -> tuple[nn.Module, zf.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).to(torch.bfloat16)
    return model, zf.attach(model, make())


def step(model: nn.Module, opt: zf.Optimizer, seed: int) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    opt.zero_grad()
    model(x).square().sum().backward()
    opt.step()


def tensors(model: nn.Module, opt: zf.Optimizer) -> tuple[dict, list[Tensor]]:
    found = {"model": model.state_dict(), "optimizer": opt.state_dict()}
    return found, [x for x in optree.tree_leaves(found) if isinstance(x, Tensor)]


@pytest.mark.parametrize("name", CHAINS)
def test_training_goes_on_to_the_bit(name):
    model, opt = begun(CHAINS[name])
    for seed in range(4):
        step(model, opt, seed)
    saved = [x.detach().clone() for x in tensors(model, opt)[1]]
    groups = copy.deepcopy(opt.state_dict()["param_groups"])
    for seed in (7, 8):
        step(model, opt, seed)
    want = [x.detach().clone() for x in tensors(model, opt)[1]]

    model, opt = begun(CHAINS[name])
    step(model, opt, 100)
    given, into = tensors(model, opt)
    with torch.no_grad():
        for x, y in zip(into, saved, strict=True):
            x.copy_(y)
    given["optimizer"]["param_groups"] = groups
    model.load_state_dict(given["model"])
    opt.load_state_dict(given["optimizer"])
    for seed in (7, 8):
        step(model, opt, seed)
    torch.testing.assert_close(tensors(model, opt)[1], want, rtol=0, atol=0)
