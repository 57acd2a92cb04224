"""The number of an update that is none: refused by torch's fused Adam, which is given one."""

import pytest
import torch

from zerofn.extend import fused_operator, fused_update

NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


def lists():
    return [torch.ones(3)], [torch.ones(3)], [torch.zeros(3)], [torch.zeros(3)]


def fused(step):
    given = lists()
    fused_update(*given, step=step, decoupled=True, **NUMBERS)
    return given[0][0]


@pytest.mark.parametrize("step", [1, 1.0, torch.tensor(1), torch.tensor(1.0)])
def test_numbers_and_tensors_are_the_same_step(step):
    torch.testing.assert_close(fused(step), torch.full((3,), 0.9))


def test_the_operator_refuses_it_too():
    zero, params = torch.tensor([0]), lists()
    with pytest.raises(ValueError, match=r"fused_update\(step=0"):
        fused_operator(*params, step=zero, decoupled=True, **NUMBERS)
    assert torch.equal(params[0][0], torch.ones(3))
