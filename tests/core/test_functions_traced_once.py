"""A function of `leafwise` is one program, traced once, if nothing that it reads may change; else it is traced anew.

Whichever way it goes, its results are those of torch's operations leaf by leaf.
"""

import functools
import math
import random

import pytest
import torch

import zerofn as zf
from zerofn.core.outside import constants  # inside: what a function reads
from zerofn.kernels import lists  # inside: which leaves are computed together
from zerofn.kernels.plans import Plans  # inside: how often a function is traced
from zerofn.kernels.program import printer_for  # inside: as above

pytestmark = pytest.mark.skipif(printer_for(torch.device("cpu")) is None, reason="there is no C compiler")

SCALE = 3.0
SCALES = {"now": 3.0}
WEIGHT = torch.tensor(3.0)


def scaled(x, by=2.0):
    return by * SCALE * x


class Momentum:
    strength = 0.5

    def __call__(self, grad, param, state, *, beta=0.9):
        state = beta * state + self.strength * grad
        return state, state


def momentum(grad, param, state, *, beta=0.9):
    state = beta * state + grad
    return state, state


def adam(grad, param, state, *, lr, betas=(0.9, 0.99), step, decoupled=True):
    t = step + 1
    if decoupled:
        param = param * (1 - lr * 0.1)
    m = betas[0] * state["m"] + (1 - betas[0]) * grad
    v = betas[1] * state["v"] + (1 - betas[1]) * grad * grad
    size = lr * math.sqrt(0.25) / (1 - betas[0] ** t)
    return param - size * m / (zf.extend.moment_root(v / (1 - betas[1] ** t)) + 1e-8), {"m": m, "v": v}


def warm(grad, param, *, lr, step):
    # A question of a number is a guard; a later one has an answer only where the first is false.
    return param - (0.0 if step == 0 or 1 / step > 0.7 else lr) * scaled(grad)


def of_modulo(grad, param, *, step):
    return grad * (1.0 + step % 2)


def of_a_global(grad, param):
    return SCALES["now"] * grad


def of_a_tensor(grad, param):
    return WEIGHT * grad


def of_a_random_tensor(grad, param):
    return grad * torch.rand(())


def of_random(grad, param):
    return random.random() * grad


def of_an_import(grad, param):
    import random as draws

    return draws.random() * grad


def of_an_attribute(grad, param):
    return attributed.by[0] * grad


def attributed():
    pass


attributed.by = [1.0]


def of_an_unseen_operation(grad, param):
    return torch.tanh(grad)


def of_a_value(grad, param):
    return grad if grad.numel() and grad.flatten()[0] > 0 else -grad


def that_writes(grad, param, state):
    state.mul_(0.5).add_(grad)
    return state * 2.0, state


def of_a_counter():
    n = [0]

    def counted(grad, param):
        n[0] += 1
        return grad * float(n[0] > 0)

    return counted


def zeros_of_two(p):
    return {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}


# A function, how its state starts, whether it is an optimizer, its arguments, and how often it is traced in four steps:
# `None` where it may not be traced once.
TABLE = {
    "momentum": (lambda: momentum, torch.zeros_like, False, {}, 1),
    "adam": (lambda: adam, zeros_of_two, True, {"lr": zf.schedules.linear(0.1, 0.0, 9)}, 1),
    "guards": (lambda: warm, None, True, {"lr": 0.1}, 3),
    "partial": (lambda: functools.partial(momentum, beta=0.5), torch.zeros_like, False, {}, None),
    "object": (Momentum, torch.zeros_like, False, {}, None),
    "modulo": (lambda: of_modulo, None, False, {}, None),
    "global": (lambda: of_a_global, None, False, {}, None),
    "tensor": (lambda: of_a_tensor, None, False, {}, None),
    "random tensor": (lambda: of_a_random_tensor, None, False, {}, None),
    "random": (lambda: of_random, None, False, {}, None),
    "import": (lambda: of_an_import, None, False, {}, None),
    "attribute": (lambda: of_an_attribute, None, False, {}, None),
    "operation": (lambda: of_an_unseen_operation, None, False, {}, None),
    "value": (lambda: of_a_value, None, False, {}, None),
    "written": (lambda: that_writes, torch.zeros_like, False, {}, None),
    "counter": (of_a_counter, None, False, {}, None),
}


def trained(name, donate, rounding=None, dtype=torch.float32):
    """Tensors of a state after four steps on a leaf, while what the function may read changes."""
    make, init, optimizer, options, _ = TABLE[name]
    tx = zf.leafwise(make(), init=init, optimizer=optimizer, needs="element")(**options)
    tx = tx if optimizer else zf.chain(tx, zf.scale_by_lr(0.1))
    tx = zf.chain(zf.precision(store_dtype=dtype, rounding=rounding), tx) if rounding else tx
    generator = torch.Generator().manual_seed(0)
    random.seed(0), torch.manual_seed(0)
    state = zf.init(tx, {"w": torch.randn(1003, generator=generator)})
    step = zf.make_step(lambda p, g: (p["w"].float() * g).sum(), tx, donate=donate)
    for i in range(4):
        SCALES["now"], Momentum.strength = 3.0 + i, 0.5 + i
        WEIGHT.fill_(3.0 + i)
        attributed.by[0] = 3.0 + i
        state, _ = step(state, torch.randn(1003, generator=generator))
    return [x.clone() for x in torch.utils._pytree.tree_leaves((dict(state.leaves), dict(state.transforms)))]


@pytest.mark.parametrize("how", ["given away", "kept", "stochastic", "nearest"])
@pytest.mark.parametrize("name", TABLE)
def test_a_program_of_a_function_has_the_bits_of_torchs_operations(name, how, monkeypatch):
    given = (how == "given away", *((how, torch.bfloat16) if how in ("stochastic", "nearest") else ()))
    of_leaves = trained(name, *given)
    monkeypatch.setattr(lists, "LARGE", 1)
    traced, known = [], Plans._traced

    def counted(plans, *args):
        made = known(plans, *args)
        traced.append(plans.formula.__self__.name if hasattr(plans.formula, "__self__") else "")
        return made

    monkeypatch.setattr(Plans, "_traced", counted)
    together = trained(name, *given)
    assert len(of_leaves) == len(together)
    assert all(torch.equal(a, b) for a, b in zip(of_leaves, together, strict=True))
    # A function that is given copies in fp32 may write them.
    once = 1 if (name, how) == ("written", "stochastic") else TABLE[name][-1]
    assert len([x for x in traced if x]) == (once or 0)


def test_what_a_function_reads_is_compared():
    """Another value of a constant is another trace, also of a constant that another function reads."""
    by = 2.0

    def doubled(x):
        return by * scaled(x)

    first = constants(doubled)
    assert first is not None and first == constants(doubled)
    by = 3.0
    second = constants(doubled)
    assert second is not None and second != first
    assert constants(lambda x: x, 1) != constants(lambda x: x, 1.0) and constants(1) != constants(True)


@pytest.mark.parametrize(
    "value", [[1.0], {"a": 1.0}, torch.ones(()), Momentum(), functools.partial(scaled), random, print]
)
def test_what_may_change_is_no_constant(value):
    assert constants(value) is None and constants(lambda: value) is None and constants((1.0, value)) is None


def test_a_constant_that_changes_in_each_step_does_not_fill_memory(monkeypatch):
    monkeypatch.setattr(lists, "LARGE", 1)
    by = 1.0

    @zf.leafwise(needs="element")
    def times(grad, param):
        return by * grad

    part = times()
    tx = zf.chain(part, zf.sgd(0.5))
    state = zf.init(tx, {"w": torch.zeros(2)})
    for i in range(100):
        by = float(i)
        before = state.params["w"]
        state, _ = zf.update(tx, {"w": torch.ones(2)}, state)
        assert torch.equal(before - state.params["w"], torch.full((2,), 0.5 * i))
    assert 1 < len(part.update_fn.func.__self__.plans.known) < 100
