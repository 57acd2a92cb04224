"""`ctx.total`: a number of the whole tree, whatever the function gives that makes it of a rank's pieces."""

import pytest
import torch
from time_limits import limit
from torch.func import grad

import zerofn as zf
from zerofn.extend import Prepared, Scope, Transform, transform
from zerofn.testing import check_transform

F64 = torch.float64
NUMBERS = {
    "of no leaf 0": lambda leaves: sum(g.square().sum() for g in leaves.values()),
    "of no element 0": lambda leaves: sum(g.square().sum() for g in leaves.values() if g.numel()),
    "of Python": lambda leaves: sum(float(g.detach().sum()) for g in leaves.values()),
    "a count": lambda leaves: sum(g.numel() for g in leaves.values()),
}


@transform
def shrink(number):
    def prepare(state, grads, params, ctx):
        total = ctx.total(NUMBERS[number], grads)
        ctx.report("total", total)
        return Prepared(carry=total)

    def update(grads, state, params, total, ctx):
        return {path: g / (1 + total) for path, g in grads.items()}, state

    return Transform("shrink", Scope.TREE, needs="number", prepare_fn=prepare, update_fn=update)


def attached(number, dtype, masked):
    """The metric and the parameters of a step in which no leaf of a masked transform has a gradient, or one has."""
    start = {"used": torch.tensor([1.5], dtype=dtype), "rest": torch.arange(5.0, dtype=dtype), "not": torch.ones(2)}
    model = torch.nn.ParameterDict({path: torch.nn.Parameter(x) for path, x in start.items()})
    part = zf.masked(shrink(number), lambda path: path == "not") if masked else shrink(number)
    opt = zf.attach(model, zf.chain(zf.shard(), part, zf.sgd(lr=0.1)))
    (model["used"] ** 2).sum().backward()
    opt.step()
    with opt.gathered():
        shown = next(x for name, x in opt.metrics.items() if name.endswith("total"))
        return float(shown), {path: x.detach().clone() for path, x in model.items()}


def everywhere(cases):
    return [attached(*case) for case in cases]


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_number_of_python_is_a_number_on_ranks_too(size):
    # Each number in either dtype, and masked in one of them.
    dtypes = (torch.float32, F64)
    cases = [(n, dtype, (i + j) % 2 == 0) for i, n in enumerate(NUMBERS) for j, dtype in enumerate(dtypes)]
    want = everywhere(cases)
    for found in zf.launch(everywhere, size, cases, timeout=limit()):
        for case, got, alone in zip(cases, found, want, strict=True):
            torch.testing.assert_close(got, alone, msg=lambda m, case=case: f"{case}: {m}")


def derivatives(number):
    """By a leaf of one element, of which other ranks have none, and whose number of Python is no function of it."""

    def after(w):
        tx = zf.chain(zf.shard(), shrink(number), zf.sgd(lr=0.1))
        state, metrics = zf.make_step(lambda p: (p["w"] ** 3).sum(), tx)(zf.init(tx, {"w": w}))
        return (zf.full_params(tx, state)["w"] ** 2).sum() + metrics["total"] ** 2

    w = torch.tensor([1.3], dtype=F64)
    return grad(after)(w), grad(lambda w: grad(after)(w).sum())(w)


def test_ranks_without_elements_take_part_in_backward():
    want = derivatives("of no element 0")
    for got in zf.launch(derivatives, 2, "of no element 0", timeout=limit()):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("number", ["of no element 0", "a count"])
def test_the_laws_are_for_them_too(number):
    check_transform(shrink(number))
