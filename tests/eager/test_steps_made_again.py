"""A step that raises before its first write has its gradients still, at every stage: `opt.step()` makes it again."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from interrupts import Interrupt
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf

STAGES = {
    "all_reduce": lambda: (zf.all_reduce(),),
    "reduce_scatter": lambda: (zf.reduce_scatter(),),
    "shard": lambda: (zf.shard(),),
    "masters": lambda: (zf.all_reduce(), zf.precision(param_dtype=torch.bfloat16)),
    "scaled": lambda: (zf.reduce_scatter(), zf.precision(param_dtype=torch.float16), zf.scale_loss(1024.0)),
    "held": lambda: (zf.reduce_scatter(),),
}


class Raises:
    def __init__(self) -> None:
        self.left = 0

    def __call__(self) -> Any:
        @zf.leafwise(needs="element")
        def watched(grad, param):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return grad

        return watched()


def run(stage: str, errors: int = 0, weight: bool = False, after: str = "") -> list[Tensor]:
    """Four steps. The third one raises before it is made.

    Args:
        stage: of `STAGES`.
        errors: how often it raises, at its second leaf.
        weight: whether it raises for its arguments.
        after: what is called behind the errors.
    """
    raises = Raises()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    held = (zf.accumulate(2),) if stage == "held" else ()
    tx = zf.chain(*STAGES[stage](), zf.clip_by_value(1.0), raises(), *held, zf.clip_by_global_norm(0.1), zf.adamw(1e-2))
    opt = zf.attach(model, tx)
    rank = torch.distributed.get_rank()

    def backward(seed: int) -> None:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * seed + rank))
        model(x).float().square().mean().backward()

    for step in range(4):
        backward(step)
        for _ in range(errors if step == 2 else 0):
            raises.left = 2
            with pytest.raises(KeyboardInterrupt):
                opt.step()
        if step == 2 and weight:
            with pytest.raises(ValueError, match="weights nothing"):
                opt.step(weight=1.0)
        assert opt.micro_steps == step
        if step == 2 and after == "zero_grad":
            opt.zero_grad()
            backward(step)
        elif step == 2 and after == "backward":
            backward(7)
        opt.step()
        opt.zero_grad()
    full = [x.clone() for x in zf.full_params(opt.tx, opt.state).values()]
    opt.detach()
    return full


# What comes in between, and what then is the step without an error.
BETWEEN = {
    "again": ({"errors": 1}, ""),
    "twice": ({"errors": 2}, ""),
    "for its arguments": ({"errors": 1, "weight": True}, ""),
    "cleared": ({"errors": 1, "after": "zero_grad"}, ""),
    "added to": ({"errors": 1, "after": "backward"}, "backward"),
}
EVERY = list(itertools.product(STAGES, BETWEEN))
# Each stage with two of them.
OFTEN = [cell for i, cell in enumerate(EVERY) if (i // len(BETWEEN) + i) % len(BETWEEN) in (0, 2)]


def compared(cells: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The cells in which it is another step."""
    plain = functools.cache(lambda stage, after: run(stage, after=after))
    wrong = []
    for stage, name in cells:
        more, after = BETWEEN[name]
        if not all(map(torch.equal, run(stage, **more), plain(stage, after))):
            wrong.append((stage, name))
    assert not any(map(torch.equal, plain("shard", ""), plain("shard", "backward")))
    return wrong


@pytest.mark.parametrize("cells", [OFTEN, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["often", "every"])
def test_it_is_the_step_without_an_error(cells):
    """Whatever comes in between: what is cleared is gone, and what another backward brings is added."""
    assert {name for _, name in cells} == BETWEEN.keys()
    assert zf.launch(compared, 2, cells, timeout=limit()) == [[], []]


def interrupted_exchange(n: int) -> list[Any]:
    """Every rank is interrupted as it sends what is left: gradients that were taken are lost."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    unused = nn.Parameter(torch.ones(3))
    model.register_parameter("unused", unused)
    opt = zf.attach(model, zf.chain(zf.all_reduce(), zf.sgd(0.1)))
    before, told = model.weight.detach().clone(), ""
    model(torch.ones(1, 6)).sum().backward()
    mode = Interrupt(n)
    try:
        with mode:
            opt.step()
    except KeyboardInterrupt:
        with pytest.raises(RuntimeError) as error:
            opt.step()
        told = str(error.value)
        assert torch.equal(model.weight, before)
        opt.zero_grad()
        model(torch.ones(1, 6)).sum().backward()
        opt.step()
    return [told, (before - model.weight).mean().item()]


def test_an_exchange_that_is_interrupted():
    """`unused` has no gradient, so that the bucket of all leaves is sent at the step."""
    for told, moved in zf.launch(interrupted_exchange, 2, 3, timeout=limit()):
        assert "opt.step() after one that was interrupted while gradients were being reduced" in told
        assert abs(moved - 0.1) < 1e-6
