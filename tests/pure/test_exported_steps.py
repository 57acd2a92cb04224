"""torch.export and make_fx over a step are refused by name, and a plain model is exported."""

import pytest
import torch
from torch import nn

import zerofn as zf

X = torch.tensor([1.0, 2.0, 3.0])
TX = zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(0.1))


def product(params, x):
    return (params["w"] * x).sum()


class Trained(nn.Module):
    """A step with a state of its own."""

    def __init__(self):
        super().__init__()
        self.step, self.state = zf.make_step(product, TX), zf.init(TX, {"w": torch.ones(3)})

    def forward(self, x):
        return self.step(self.state, x)[0].params["w"]


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_linearize_records_a_step_as_before():
    trained = Trained()
    out, along = torch.func.linearize(trained, X)
    _, expected = torch.func.jvp(trained, (X,), (torch.ones(3),))
    assert torch.equal(out, trained(X))
    torch.testing.assert_close(along(torch.ones(3)), expected)


def test_a_model_is_exported_plain():
    model = nn.Linear(3, 2)
    opt = zf.attach(model, zf.chain(zf.shard(), zf.precision(param_dtype=torch.bfloat16), TX))
    model(X).float().sum().backward()
    opt.step()
    opt.detach()
    served = torch.export.export(model, (X,)).module()
    assert torch.equal(served(X), model(X))
