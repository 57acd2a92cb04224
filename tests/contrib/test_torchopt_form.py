"""Transforms in the hands of torchopt and posteriors, against the same by hand; skipped where they are missing."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofn as zf

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchopt = pytest.importorskip("torchopt")

ADAMW = zf.chain(zf.clip_by_global_norm(0.5), zf.adamw(0.1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(model: nn.Module, i: int) -> Tensor:
    return model(torch.randn(5, 3, generator=torch.Generator().manual_seed(i))).square().mean()


def attached(tx: Any, steps: int = 4) -> list[Tensor]:
    model = net()
    opt = zf.attach(model, tx)
    for i in range(steps):
        loss_of(model, i).backward()
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()]


def same(found: Any, expected: list[Tensor]) -> None:
    for a, b, s in zip(found, expected, net().parameters(), strict=True):
        # An update is the difference of two parameters, and added to one: a rounding for each step.
        assert (a - b).norm() < 1e-5 * (b - s).norm()


@pytest.mark.parametrize("tx", [ADAMW, zf.chain(zf.accumulate(2), ADAMW), zf.sgd(0.1, momentum=0.9)], ids=repr)
def test_optimizer(tx: Any):
    model = net()
    opt = torchopt.Optimizer(tuple(model.parameters()), zf.as_torchopt(tx))
    for i in range(4):
        opt.zero_grad()
        loss_of(model, i).backward()
        opt.step()
    same(model.parameters(), attached(tx))


def test_functional_optimizer_and_chain():
    model = net()
    opt = torchopt.FuncOptimizer(
        torchopt.chain(zf.as_torchopt(zf.clip_by_global_norm(0.5)), zf.as_torchopt(zf.adamw(0.1)))
    )
    names, values = zip(*model.named_parameters(), strict=True)
    for i in range(4):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(i))
        out = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))
        # Not as a dict, which it would hand to torch.autograd.grad: in torch 2.11 that takes sequences alone.
        values = opt.step(out.square().mean(), values)
    same([p.detach() for p in values], attached(ADAMW))


def test_a_derivative_through_a_meta_optimizer():
    """By the learning rate's stand-in, a factor of the loss, against the same two steps by hand in `torch.func`."""
    model, factor = net(), torch.tensor(1.3, requires_grad=True)
    opt = torchopt.MetaOptimizer(model, zf.as_torchopt(zf.sgd(0.1, momentum=0.9)))
    for i in range(2):
        opt.step(factor * loss_of(model, i))
    (found,) = torch.autograd.grad(loss_of(model, 9), factor)

    def by_hand(factor: Tensor) -> Tensor:
        inner = net()
        params, momentum = {k: p.detach() for k, p in inner.named_parameters()}, None

        def loss(params: Any, i: int) -> Tensor:
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(i))
            return torch.func.functional_call(inner, params, (x,)).square().mean()

        for i in range(2):
            grads = torch.func.grad(lambda p, i=i: factor * loss(p, i))(params)
            momentum = grads if momentum is None else {k: 0.9 * momentum[k] + g for k, g in grads.items()}
            params = {k: p - 0.1 * momentum[k] for k, p in params.items()}
        return loss(params, 9)

    expected = torch.func.grad(by_hand)(factor.detach())
    assert expected.abs() > 1e-4 and torch.allclose(found, expected, rtol=1e-4)


def test_posteriors():
    posteriors = pytest.importorskip("posteriors")
    data = torch.randn(64, generator=torch.Generator().manual_seed(0)) + 2.0

    def log_posterior(params: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
        return -0.5 * (batch - params["mean"]).square().sum() - params["other"].square().sum(), torch.zeros(())

    found = []
    for optimizer in (zf.as_torchopt(zf.adam(0.05)), torchopt.adam(lr=0.05)):
        torch.manual_seed(0)
        transform = posteriors.vi.diag.build(log_posterior, optimizer)
        state = transform.init({"mean": torch.zeros(1), "other": torch.zeros(2)})
        for _ in range(5):
            state, _ = transform.update(state, data)
        found.append(state.params["mean"].detach())
    # torchopt's Adam adds eps elsewhere and rounds otherwise.
    assert found[0].abs() > 0.1 and torch.allclose(*found, rtol=1e-4)
