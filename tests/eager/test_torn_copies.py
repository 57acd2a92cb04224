"""A step or a load that raises half done, where the model's parameters are copies of what is stored."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from interrupts import Interrupt
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf
from zerofn.extend import Facts, Transform
from zerofn.testing import assert_trees_equal

X = torch.linspace(-1, 1, 12).view(2, 6)
STAGES = {
    "masters, all_reduce": lambda: (zf.all_reduce(), zf.precision(param_dtype=torch.bfloat16)),
    "masters, reduce_scatter": lambda: (zf.reduce_scatter(), zf.precision(param_dtype=torch.bfloat16)),
    "reduce_scatter": lambda: (zf.reduce_scatter(),),
}


class Late:
    """Raises behind the optimizer, once it has written all parameters."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self) -> Transform:
        def update(params: Any, state: Any, old: Any, carry: Any, ctx: Any) -> Any:
            if self.armed:
                self.armed = False
                raise KeyboardInterrupt
            return params, state

        return Transform("late", needs="element", facts=Facts(watches=True), update_fn=update)


def attached(stage: str, late: Late) -> tuple[nn.Module, zf.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, zf.attach(model, zf.chain(*STAGES[stage](), zf.adamw(1e-3), late()))


def step(model: nn.Module, opt: zf.Optimizer) -> None:
    opt.zero_grad()
    model(X * (1 + opt.micro_steps)).float().square().mean().backward()
    opt.step()


def seen(model: nn.Module, opt: zf.Optimizer) -> list[Tensor]:
    """What is stored, and what the model computes with."""
    leaves = [x.detach().clone() for x in opt.state.leaves.values()]
    return [*leaves, *(p.detach().clone() for p in model.parameters())]


def same(xs: list[Tensor], ys: list[Tensor]) -> bool:
    return all(map(torch.equal, xs, ys))


def repaired(stage: str, directory: str) -> list[Any]:
    """After 1 and 2 steps one is torn; each of the three repairs, and the step behind it."""
    found = []
    for n in (1, 2):
        for how in ("load_state", "load_state_dict", "zf.load"):
            late = Late()
            (model, opt), (other, reference) = attached(stage, late), attached(stage, Late())
            for _ in range(n):
                step(model, opt)
                step(other, reference)
            saved, place = copy.deepcopy(opt.state_dict()), f"{directory}/{n}"
            zf.save(place, opt)
            late.armed = True
            with pytest.raises(KeyboardInterrupt):
                step(model, opt)
            written = [x.clone() for x in opt.state.leaves.values()]
            if how == "load_state":
                opt.load_state(opt.state)
                kept = all(map(torch.equal, written, opt.state.leaves.values()))
                reference.load_state_dict(copy.deepcopy(opt.state_dict()))
            else:
                opt.load_state_dict(saved) if how == "load_state_dict" else zf.load(place, like=opt)
                kept = same(seen(model, opt), seen(other, reference))
            step(model, opt)
            step(other, reference)
            assert_trees_equal(opt.state_dict(), reference.state_dict())
            found.append((n, how, kept, same(seen(model, opt), seen(other, reference))))
            opt.detach()
            reference.detach()
    return found


@pytest.mark.parametrize(
    "stage", ["masters, all_reduce", *(pytest.param(s, marks=pytest.mark.slow) for s in list(STAGES)[1:])]
)
def test_what_a_torn_step_has_written_is_no_write_by_the_user(stage, tmp_path):
    """The number of steps before it decides whether copies are compared with what is stored."""
    for found in zf.launch(repaired, 2, stage, str(tmp_path), timeout=limit(60)):
        assert [x[2:] for x in found] == [(True, True)] * 6, found


def interrupted_loads(stage: str, every: int) -> list[str]:
    """At each of its operations, or one of so many; what is not refused has changed nothing."""
    model, opt = attached(stage, Late())
    for _ in range(2):
        step(model, opt)
    saved, found = copy.deepcopy(opt.state_dict()), []
    step(model, opt)
    expected = seen(model, opt)
    for n in range(1, 1000, every):
        opt.param_groups[0]["lr"] = 0.5
        step(model, opt)
        before, mode = seen(model, opt), Interrupt(n)
        try:
            with mode:
                opt.load_state_dict(saved)
        except KeyboardInterrupt:
            try:
                opt.state_dict()
                assert same(seen(model, opt), before)
                assert opt.param_groups[0]["lr"] == 0.5
                found.append("unchanged")
            except RuntimeError:
                with pytest.raises(RuntimeError, match="after a step or a load that raised while it was writing"):
                    step(model, opt)
                found.append("refused")
        opt.load_state_dict(saved)
        step(model, opt)
        assert same(seen(model, opt), expected), n
        if mode.left > 0:
            return found
    raise AssertionError("it has no end")


@pytest.mark.parametrize(
    ("stage", "every"),
    [
        ("masters, reduce_scatter", 23),
        pytest.param("masters, all_reduce", 1, marks=pytest.mark.slow),
        pytest.param("masters, reduce_scatter", 1, marks=pytest.mark.slow),
    ],
)
def test_a_load_is_whole_once_the_model_has_it(stage, every):
    for found in zf.launch(interrupted_loads, 2, stage, every, timeout=limit(60)):
        assert "refused" in found


def loaded_on_one_rank() -> list[Any]:
    """Rank 1 alone is interrupted, behind all that ranks say to each other in a load."""
    model, opt = attached("masters, all_reduce", Late())
    step(model, opt)
    saved = copy.deepcopy(opt.state_dict())

    class Rate(Tensor):
        def clone(self, **how: Any) -> Any:
            raise KeyboardInterrupt

    saved["param_groups"][0]["lr"] = torch.tensor(1e-3)
    if torch.distributed.get_rank() == 1:
        saved["param_groups"][0]["lr"] = torch.tensor(1e-3).as_subclass(Rate)
        with pytest.raises(KeyboardInterrupt):
            opt.load_state_dict(saved)
    else:
        opt.load_state_dict(saved)
    found = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            step(model, opt)
        found.append(str(error.value))
    return [*found, opt.micro_steps]


def test_a_load_that_raises_on_one_rank():
    """No rank makes a step of it."""
    for first, again, steps in zf.launch(loaded_on_one_rank, 2, timeout=limit()):
        for told in (first, again):
            assert "ranks disagree on whether a step or a load has raised while it was writing" in told
            assert "(rank 0: 0, rank 1: 1)" in told
        assert steps == 1
