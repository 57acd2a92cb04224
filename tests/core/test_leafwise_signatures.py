"""`leafwise` looks at the arguments of a function when it is built; states that are as wide as gradients."""

from __future__ import annotations

import functools

import pytest
import torch

import zerofn as zf
from zerofn.testing import check_transform

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ZEROS = torch.zeros_like


def of_two(grad, param):
    return grad


def of_three(grad, param, state):
    return grad, state


def called_otherwise(g, p, buffer):
    return g, buffer


def default_state(grad, param, state=None):
    return grad, state


def own_by_place(grad, param, lr=0.1):
    return lr * grad


def own_behind_state(grad, param, state, lr=0.1, *, b=1.0):
    return lr * grad, state


def by_keyword(grad, param, *, state):
    return grad


def of_one(grad):
    return grad


def generates(grad, param):
    yield grad


async def awaited(grad, param):
    return grad


class Scales:
    def __call__(self, grad, param, *, k=2.0):
        return k * grad


REFUSED = {
    "a state without init": (of_three, {}, "no init that", "@zf.leafwise(init=torch.zeros_like)\n"),
    "a state of another name": (
        called_otherwise,
        {},
        "no init that",
        "def called_otherwise(grad, param, state): ...",
    ),
    "a state with a default": (default_state, {}, "no init that", "init=torch.zeros_like"),
    "init without a state": (of_two, {"init": ZEROS}, "which it does not take", "def of_two(grad, param): ...; or"),
    "its own by place": (own_by_place, {}, "keyword-only", "def own_by_place(grad, param, *, lr=0.1): ..."),
    "its own behind the state": (
        own_behind_state,
        {"init": ZEROS},
        "keyword-only",
        "def own_behind_state(grad, param, state, *, lr=0.1, b=1.0): ...",
    ),
    "a state by keyword": (by_keyword, {}, "no init that", "def by_keyword(grad, param, state): ..."),
    "a state by keyword, with init": (by_keyword, {"init": ZEROS}, "its third argument", "(grad, param, state): ..."),
    "one argument": (of_one, {}, "called with (grad, param)", "def of_one(grad, param): ..."),
    "a class": (Scales, {}, "makes an object", "leafwise(Scales(...))"),
    "of C": (torch.sign, {}, "Python cannot list the arguments of a C function", "def mine(grad, param): return ..."),
    "a generator": (generates, {}, "a generator", "def generates(grad, param): ..."),
    "a coroutine": (awaited, {}, "something to await", "def awaited(grad, param): ..."),
    "init without arguments": (of_three, {"init": lambda: 0}, "init is called with one", "init=torch.zeros_like"),
    "init of two": (of_three, {"init": lambda p, q: p}, "init is called with one", "a function of one tensor"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_function_with_other_arguments_is_refused_when_it_is_built(kind):
    function, given, why, right = REFUSED[kind]
    for make in (lambda: zf.leafwise(function, **given), lambda: zf.leafwise(**given)(function)):
        with pytest.raises(TypeError) as raised:
            make()
        assert why in str(raised.value)
        assert right in str(raised.value).partition("write:")[2].replace("\n         ", "\n")


TAKEN = {
    "any number": (lambda grad, *rest: 2 * grad, {}, {}, -2.0),
    "any number, with init": (lambda *a: (a[0], a[2] + 1), {"init": ZEROS}, {}, -1.0),
    "an object that is called": (Scales(), {}, {"k": 3.0}, -3.0),
    "a partial": (functools.partial(own_by_place, lr=0.5), {}, {}, -0.5),
    "a partial of an object": (functools.partial(Scales(), k=4.0), {}, {}, -4.0),
    "a state with a default, and init": (default_state, {"init": ZEROS}, {}, -1.0),
    "a method": (Scales().__call__, {}, {"k": 1.5}, -1.5),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_whatever_can_be_called_so_is_taken(kind):
    function, given, arguments, expected = TAKEN[kind]
    made = zf.leafwise(function, **given)(**arguments)
    tx = zf.chain(made, zf.sgd(1.0))
    assert "build(" not in repr(tx)
    state, _ = zf.update(tx, {"w": torch.ones(2)}, zf.init(tx, {"w": torch.zeros(2)}))
    assert state.params["w"].tolist() == [expected] * 2
    with pytest.raises(TypeError, match="has no keyword 'nothing'"):
        zf.leafwise(function, **given)(nothing=1)


@zf.leafwise(init=torch.zeros_like, needs="element")
def momentum(grad, param, state, *, beta=0.9):
    state = beta * state + grad
    return state, state


@zf.leafwise(init=torch.zeros_like, optimizer=True, needs="element")
def descent(grad, param, state, *, lr=0.1):
    state = 0.9 * state + grad
    return param - lr * state, state


@zf.leafwise(init=lambda p: {"p": p.clone(), "below": {"m": torch.zeros_like(p)}}, needs="element")
def keeps_parameters(grad, param, state):
    # The parameter as it was is narrower than the state, which holds every number of it.
    return grad + 0 * state["p"].to(grad.dtype), {"p": param.clone(), "below": {"m": state["below"]["m"] + grad}}


DTYPES = {
    "fp32 gradients of bf16": (zf.precision(store_dtype=BF16, grad_dtype=F32), BF16, F32),
    "fp32 gradients of fp16": (zf.precision(store_dtype=F16), F16, F32),
    "bf16 throughout": (zf.precision(store_dtype=BF16), BF16, BF16),
    "fp32 masters": (zf.precision(store_dtype=F32, param_dtype=BF16), F32, F32),
    "fp64": (zf.precision(store_dtype=F64), F64, F64),
}
AROUND = {
    "alone": lambda t: t,
    "offloaded": zf.offload,
    "masked": lambda t: zf.masked(t, lambda path: True),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", DTYPES)
def test_a_first_state_is_as_wide_as_gradients(kind, around):
    precision, stored, wide = DTYPES[kind]
    start, grads = torch.tensor([1.0, -2.0]), [torch.tensor([0.25, 1.5]), torch.tensor([-1.0, 0.75])]
    for made, rest in ((momentum(), [zf.sgd(0.5)]), (keeps_parameters(), [zf.sgd(0.5)])):
        tx = zf.chain(precision, AROUND[around](made), *rest)
        state = zf.init(tx, {"w": start})
        kept = [x.dtype for x in zf.extend.flatten(state.transforms)[0] if x.is_floating_point() and x.numel() == 2]
        assert set(kept) == {wide}
        p, m = start.to(stored), torch.zeros(2, dtype=wide)
        for g in grads:
            g = g.to(wide)
            state, _ = zf.update(tx, {"w": g}, state)
            m = 0.9 * m + g
            p = (p.to(F64) - 0.5 * (m if made.name == "momentum" else g).to(F64)).to(stored)
        assert state.params["w"].dtype == stored
        torch.testing.assert_close(state.params["w"], p, rtol=2e-2 if wide == BF16 else 1e-6, atol=0)
    if (kind, around) == ("fp32 gradients of bf16", "alone"):
        check_transform(zf.chain(precision, momentum(), zf.sgd(0.1)))
        check_transform(zf.chain(precision, descent()))


@pytest.mark.parametrize("route", ["attached", "in backward"])
def test_readmes_momentum_of_fp32_gradients_of_bf16_parameters(route):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, bias=False)
    tx = zf.chain(zf.precision(store_dtype=BF16, grad_dtype=F32), momentum(beta=0.5), zf.sgd(0.25))
    x, w = torch.randn(8, 4), model.weight.detach().to(BF16)
    opt, m = zf.attach(model, tx, in_backward=route == "in backward"), torch.zeros(3, 4)
    for _ in range(3):
        model(x).square().sum().backward()
        opt.step()
        opt.zero_grad()
        seen = w.clone().requires_grad_()
        torch.nn.functional.linear(x.to(BF16), seen).square().sum().backward()
        m = 0.5 * m + seen.grad.float()
        w = (w.float() - 0.25 * m).to(BF16)
    assert opt.state.transforms["momentum"]["value"]["weight"].dtype == F32
    torch.testing.assert_close(opt.state.leaves["weight"], w, rtol=1e-2, atol=1e-2)


def test_a_state_that_would_lose_bits_is_refused_with_what_to_write():
    tx = zf.chain(momentum(), zf.sgd(0.1))
    state = zf.init(tx, {"w": torch.ones(2, dtype=BF16)})
    with pytest.raises(ValueError, match=r"w: .*float32 for its state, .*bfloat16: it would lose bits") as raised:
        zf.update(tx, {"w": torch.ones(2)}, state)
    assert "zf.precision(grad_dtype=torch.float32)" in str(raised.value)
    narrow = zf.leafwise(lambda g, p, s: (g, s + g), init=lambda p: torch.zeros_like(p, dtype=BF16))()
    tx = zf.chain(narrow, zf.sgd(0.1))
    with pytest.raises(ValueError, match="it would lose bits"):
        zf.update(tx, {"w": torch.ones(2)}, zf.init(tx, {"w": torch.ones(2)}))
