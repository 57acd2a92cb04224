"""Derivatives by what was made of sharded parameters: fast weights, and torch.autograd.functional."""

import torch
from one_launch import one_launch
from torch import nn
from torch.autograd.functional import hvp, jacobian, vjp
from torch.func import functional_call

import zerofn as zf

X = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def norm(x):
    return (x * torch.arange(1.0, 1.0 + x.numel(), dtype=x.dtype).view(x.shape)).norm()


def loss_of(model, params):
    return functional_call(model, params, (X,)).square().mean()


def inner_step(model):
    """One step of gradient descent on copies, and the loss behind it."""
    fast = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    grads = torch.autograd.grad(loss_of(model, fast), list(fast.values()))
    after = {n: p.detach() - 0.1 * g for (n, p), g in zip(fast.items(), grads, strict=True)}
    return [*grads, loss_of(model, after)]


def of_one(model):
    p = model[0].weight.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(norm(p) ** 2, p)
    return [found, torch.autograd.grad(norm(p), inputs=[p])[0], *torch.autograd.grad(norm(p), (p,), allow_unused=True)]


PROGRAMS = {
    "fast weights": inner_step,
    "of one": of_one,
    "vjp": lambda model: [*vjp(norm, model[0].weight.detach())],
    "hvp": lambda model: [*hvp(norm, w := model[0].weight.detach(), torch.ones_like(w))],
    "jacobian": lambda model: [jacobian(norm, model[0].weight.detach())],
}


def on_a_rank(name):
    model = net()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    found = [getattr(x, "full_tensor", lambda x=x: x)().detach().clone() for x in PROGRAMS[name](model)]
    opt.detach()
    return found


def test_they_are_those_of_the_whole():
    for (name,), ranks in one_launch(2, on_a_rank, [(name,) for name in PROGRAMS]).items():
        want = [x.detach() for x in PROGRAMS[name](net())]
        assert all(x.abs().max() > 1e-3 for x in want)
        for found in ranks:
            for got, whole in zip(found, want, strict=True):
                # float64, of sums of a dozen products.
                torch.testing.assert_close(got, whole, rtol=1e-12, atol=1e-14, msg=lambda m, of=name: f"{of}: {m}")
