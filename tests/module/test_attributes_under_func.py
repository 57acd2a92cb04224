"""A tensor that a scaled model leaves in an attribute, used in a function that torch.func differentiates."""

import torch
from torch import nn

import zerofn as zf


class KeepsAFeature(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.feature = nn.Linear(3, 3), nn.Linear(3, 2), None

    def forward(self, x):
        self.feature = torch.tanh(self.a(x))
        return self.b(self.feature)


def found(attached):
    model = KeepsAFeature().double()
    if attached:
        zf.attach(model, zf.chain(zf.scale_loss(64.0), zf.sgd(0.1)))
    x = torch.linspace(-1, 1, 6).double().reshape(2, 3)

    def f(z):
        return model(z).square().sum() + 0.3 * model.feature.square().sum()

    yield torch.func.grad(f)(x)
    yield torch.func.jvp(f, (x,), (x,))[1]
    yield torch.func.vmap(torch.func.grad(f))(x)
    yield torch.func.hessian(f)(x)
    # And a backward after it.
    f(x).backward()
    yield from (p.grad for p in model.parameters())


def test_as_of_a_plain_model():
    for plain, got in zip(found(False), found(True), strict=True):
        assert plain.abs().max() > 0 and torch.equal(got, plain)  # the scale is a power of two
