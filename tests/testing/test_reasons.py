"""Why a formula is no kernel, or is called in each step: what people are told, with the line that was the reason."""

from __future__ import annotations

import linecache
import math
import re

import numpy as np
import pytest
import torch
from compilers import needs_compiler

import zerofn as zf
from zerofn.extend import direction, optimizer
from zerofn.kernels import lists  # inside: kernels for small leaves
from zerofn.testing import kernel_source

pytestmark = needs_compiler

RATES = [2.0]


def branches(x, g, m):
    if g.sum() > 0:  # here
        x = x + 1
    return x - 0.1 * g, m


def asks_for_all(x, g, m):
    return (x if (g > 0).all() else x - 0.1 * g), m  # here


def writes_its_argument(x, g, m):
    x.sub_(0.1 * g)  # here
    return x, m


def writes_its_state(x, g, m):
    m.mul_(0.9).add_(g)  # here
    return x - 0.1 * m, m


def reads_a_value(x, g, m):
    return x - 0.1 / g.abs().max().item() * g, m  # here


def indexes(x, g, m):
    return x - 0.1 * g[0], m  # here


def uses_the_shape(x, g, m):
    return x - 0.1 / math.sqrt(g.numel()) * g, m  # here


def makes_a_tensor(x, g, m):
    return x - 0.1 * (g + torch.ones(())), m  # here


def goes_to_numpy(x, g, m):
    return x - 0.1 * torch.from_numpy(np.tanh(g.numpy())), m  # here


def helper(x):
    return x.tanh()  # here


def calls_a_helper(x, g, m):
    return x - 0.1 * helper(g), m


def has_no_such_operator(x, g, m):
    return x - 0.1 * (g % 3.0), m  # here


def reads_a_list(x, g, m):
    return x - RATES[0] * 0.05 * g, m


# What is said, and whether a kernel computes it all the same.
TORCH, KERNEL = "torch's operations", "one kernel"
KINDS = {
    branches: ("a function of a sum over a leaf", TORCH),
    asks_for_all: ("all", TORCH),
    writes_its_argument: ("an argument that the formula writes", KERNEL),
    writes_its_state: ("an argument that the formula writes", KERNEL),
    reads_a_value: ("max", TORCH),
    indexes: ("single elements of a tensor", TORCH),
    uses_the_shape: ("numel", TORCH),
    makes_a_tensor: ("ones of a tensor that is no argument", KERNEL),
    goes_to_numpy: ("numpy", TORCH),
    calls_a_helper: ("tanh", TORCH),
    has_no_such_operator: ("TypeError: unsupported operand", TORCH),
}


def as_leafwise(f):
    @zf.leafwise(init=torch.zeros_like, optimizer=True, needs="element")
    def mine(grad, param, state):
        return f(param, grad, state)

    return mine()


def as_optimizer(f):
    def formula(x, g, slots, at):
        new, m = f(x, g, slots["m"])
        return new, {"m": m}

    return optimizer("mine", 0.1, {"m": torch.zeros_like}, formula)


def as_direction(f):
    def formula(g, p, slots, at):
        new, m = f(p, g, slots["m"])
        return new - p, {"m": m}

    return zf.chain(direction("mine", {"m": torch.zeros_like}, formula), zf.scale_by_lr(1.0))


def marked(f):
    """The line of a function, or of what it calls, that is the reason."""
    code = (helper if f is calls_a_helper else f).__code__
    lines = (linecache.getline(code.co_filename, code.co_firstlineno + i) for i in range(9))
    return code.co_name, *next((code.co_firstlineno + i, x.strip()) for i, x in enumerate(lines) if "# here" in x)


@pytest.mark.parametrize("made", [as_leafwise, as_optimizer, as_direction])
@pytest.mark.parametrize("f", KINDS, ids=lambda f: f.__name__)
def test_the_line_that_was_the_reason_is_told(f, made):
    said, by = KINDS[f]
    name, line, text = marked(f)
    want = rf"{re.escape(said)}.*, in {name}, line {line} of test_reasons.py: {re.escape(text)}"
    table = zf.plan(made(f), {"w": torch.empty(512, 512)})
    (why,) = {x.why for x in table.passes.rows if x.why}
    assert re.fullmatch(want, why), why
    assert {x.by for x in table.passes.rows if x.why} == {by}
    assert f"mine {'is called in each step' if by == KERNEL else 'is no kernel'}: {why}" in repr(table)
    shown = kernel_source(made(f)) if by == KERNEL else None
    assert shown is None or shown.startswith(f"// Called in each step: {why}\n")


def trained(f):
    """Parameters after some steps; the functions write their arguments, so each gets copies."""
    opt = zf.attach(model := torch.nn.Linear(3, 5), f)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(1.0, 1 + p.numel()).view_as(p))
    for i in range(6):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5 + i)
        opt.step()
    return list(model.parameters())


@pytest.mark.parametrize("made", [as_leafwise, as_optimizer])
@pytest.mark.parametrize("f", KINDS, ids=lambda f: f.__name__)
def test_what_is_no_kernel_computes_the_same(f, made, monkeypatch):
    want = trained(made(f))
    monkeypatch.setattr(lists, "LARGE", 1)
    torch.testing.assert_close(trained(made(f)), want, rtol=0, atol=0)


class Scaled:
    def __call__(self, grad, param):
        return 2.0 * grad


def test_what_may_change_besides_the_arguments_is_named():
    factor = torch.tensor(2.0)
    made = {
        "RATES, which may change, in mine, line ": as_leafwise(reads_a_list),
        "factor, which may change, in <lambda>, line ": zf.leafwise(lambda g, p: g * factor, needs="element")(),
        "an object of Scaled, which may change, in __call__, line ": zf.leafwise(Scaled(), needs="element")(),
        "weights, which may change, in <lambda>, line ": zf.leafwise(
            lambda g, p, *, weights: weights[0] * g, needs="element"
        )(weights=[1.0]),
    }
    for want, tx in made.items():
        tx = tx if tx.facts.optimizes else zf.chain(tx, zf.sgd(0.1))
        rows = [x for x in zf.plan(tx, {"w": torch.empty(512, 512)}).passes.rows if x.why]
        assert [x.by for x in rows] == [KERNEL] and rows[0].why.startswith(want), (want, rows)


@zf.leafwise(needs="element")
def scaled_by_a_list(grad, param):
    return RATES[0] * grad


def test_check_transform_tells_that_a_function_is_called_in_each_step():
    (reason,) = zf.testing.check_transform(scaled_by_a_list())
    assert reason.startswith("RATES, which may change, in scaled_by_a_list, line ")
