"""What a model writes into its parameters while torch.func.grad, vjp or jvp goes through the call."""

import pytest
import torch
from torch import nn

import zerofn as zf

WRITES = {
    "lerp_": lambda w: w.lerp_(torch.ones_like(w), 0.25),
    "foreach": lambda w: torch._foreach_mul_([w], 0.5),
    "data": lambda w: w.data.mul_(0.5),
}
WAYS = {
    "grad": lambda f, x: torch.func.grad(lambda z: f(z).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x)),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "of a batch": lambda f, x: torch.func.vmap(lambda row: torch.func.jvp(f, (row,), (row,))[1])(x),
}


class Teacher(nn.Linear):
    write = None

    def forward(self, x):
        if self.write is not None:
            with torch.no_grad():
                self.write(self.weight)
        return super().forward(x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("calls", [0, 3])
def test_refused_where_the_model_sees_a_copy(write, way, calls):
    """Torch refuses all but `foreach`, which it does not see; of a copy none of them would reach what is stored."""
    torch.manual_seed(0)
    model = Teacher(3, 3)
    opt = zf.attach(model, zf.chain(zf.precision(param_dtype=torch.float64), zf.sgd(0.1)))
    x = torch.randn(3, 3)
    for _ in range(calls):
        model(x)
    before = model.weight.detach().clone()
    model.write = WRITES[write]
    with pytest.raises(RuntimeError, match=r"weight|mutat|in-place"):
        WAYS[way](model, x)
    assert torch.equal(model.weight, before)
    # After a refusal the model goes on with what is stored.
    model.write = None
    torch.testing.assert_close(
        model(x.double()),
        torch.nn.functional.linear(x.double(), *(p.double() for p in model.parameters())),
        rtol=0,
        atol=0,
    )
    opt.detach()
