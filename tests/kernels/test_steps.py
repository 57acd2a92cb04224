"""The number of an update that is none: refused by every kernel of Adam that is given one."""

import pytest
import torch

from zerofn.extend import FORMAT, adam_, adam_operator, adam_update, fused_operator, fused_update

NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


def lists():
    return [torch.ones(3)], [torch.ones(3)], [torch.zeros(3)], [torch.zeros(3)]


def in_place(step):
    given = lists()
    adam_(*given, step=step, keys=[0], offsets=[0], **NUMBERS)
    return given[0][0]


def alone(step):
    return adam_update(*[xs[0] for xs in lists()], step=step, key=0, offset=0, **NUMBERS)[0]


def fused(step):
    given = lists()
    fused_update(*given, step=step, decoupled=True, **NUMBERS)
    return given[0][0]


KERNELS = {"adam_": in_place, "adam_update": alone, "fused_update": fused}


@pytest.mark.parametrize("step", [1, 1.0, torch.tensor(1), torch.tensor(1.0)])
def test_numbers_and_tensors_are_the_same_step(step):
    for kernel, run in KERNELS.items():
        torch.testing.assert_close(run(step), torch.full((3,), 0.9), msg=kernel)


def test_the_operators_refuse_it_too():
    zero, params = torch.tensor([0]), lists()
    with pytest.raises(ValueError, match=r"fused_update\(step=0"):
        fused_operator(*params, step=zero, decoupled=True, **NUMBERS)
    with pytest.raises(ValueError, match=r"adam_\(step=0"):
        more = {"rounding": "nearest", "seed": 0, "keys": [0], "offsets": [0], "form": FORMAT}
        adam_operator(*params, [], step=zero, **NUMBERS, **more)
    assert torch.equal(params[0][0], torch.ones(3))


def test_under_vmap_and_a_derivative_it_is_as_it_was():
    """Python cannot read it there for every member."""
    rows = torch.vmap(lambda step: alone(step))(torch.tensor([1, 2]))
    torch.testing.assert_close(rows, torch.stack([alone(1), alone(2)]))
    slope = torch.func.grad(
        lambda lr: adam_update(*[x[0] for x in lists()], **{**NUMBERS, "lr": lr}, step=1, key=0, offset=0)[0].sum()
    )
    torch.testing.assert_close(slope(torch.tensor(0.1)), torch.tensor(-3.0))
