"""Numbers of a chain that require grad: differentiated where a step is recorded, refused where it is not.

A table of numbers by what they are arguments of, over the ways in which a step is made. The reference of a derivative
is torch.func.grad in float64, and the slope of a secant beside it.
"""

import re

import pytest
import torch
from refusals import Refusals

import zerofn as zf
from zerofn.extend import Facts, Prepared, Transform

F64 = torch.float64
X = torch.linspace(-1.0, 1.0, 8, dtype=F64)
START = {"w": torch.tensor([[0.5, -0.25], [0.125, 0.75]], dtype=F64), "b": torch.tensor([0.3, -0.1], dtype=F64)}


def loss(p, x):
    return (((torch.stack([x, x * x], 1) @ p["w"] + p["b"]).sin() - x[:, None]) ** 2).mean()


@zf.leafwise(needs="element")
def times(grad, param, *, by):
    return grad * by


@zf.leafwise(optimizer=True, needs="element")
def plain(grad, param, *, lr):
    return param - lr * grad


@zf.leafwise(init=torch.zeros_like, needs="element")
def heavy(grad, param, state, *, beta=0.9):
    state = beta * state + grad
    return state, state


def closing_over(x):
    @zf.leafwise(needs="element")
    def inner(grad, param):
        return grad * x

    return inner()


def prepared_from(x):
    """A transform of one's own, which reads a number in its `prepare`."""
    prepare = lambda state, grads, params, ctx: Prepared(carry=ctx.replicated(x) * 2)  # noqa: E731
    update = lambda grads, state, params, by, ctx: ({p: g * by for p, g in grads.items()}, state)  # noqa: E731
    return Transform("prepared_from", needs="element", facts=Facts(keeps=False), prepare_fn=prepare, update_fn=update)


class Learned(torch.nn.Module):
    """A schedule with a parameter of its own."""

    def __init__(self, x):
        super().__init__()
        self.x = x

    def forward(self, step):
        return self.x / (1 + step)


AS_ARGUMENTS = {
    "rate of sgd": lambda x: zf.sgd(x),
    "rate in the middle of a graph": lambda x: zf.sgd(x.log().exp()),
    "momentum of sgd": lambda x: zf.sgd(0.2, momentum=x),
    "decay of sgd": lambda x: zf.sgd(0.2, weight_decay=x),
    "rate of adam": lambda x: zf.adam(x),
    "beta of adamw": lambda x: zf.adamw(0.1, betas=(x, 0.95)),
    "second beta of adamw": lambda x: zf.adamw(0.1, betas=(0.8, x)),
    "eps of adamw": lambda x: zf.adamw(0.1, eps=x),
    "decay of adamw": lambda x: zf.adamw(0.1, weight_decay=x),
    "rate of rmsprop": lambda x: zf.rmsprop(x),
    "rate of lion": lambda x: zf.lion(x),
    "rate of muon": lambda x: zf.partition({"a": zf.muon(x), "b": zf.sgd(0.1)}, {"w": "a", "b": "b"}),
    "both rates, given to two groups": lambda x: zf.partition({"a": zf.sgd(x), "b": zf.adamw(x)}, {"w": "a", "b": "b"}),
    "norm of a clip": lambda x: zf.chain(zf.clip_by_global_norm(x * 0.1), zf.sgd(0.5)),
    "limit of a clip": lambda x: zf.chain(zf.clip_by_value(x * 0.01), zf.sgd(0.5)),
    "decay of a trace": lambda x: zf.chain(zf.trace(x), zf.scale_by_lr(0.2)),
    "a decay that is added": lambda x: zf.chain(zf.add_decayed_weights(x), zf.sgd(0.2)),
    "rate that ends directions": lambda x: zf.chain(zf.scale_by_adam(), zf.scale_by_lr(x)),
    "argument of a function on leaves": lambda x: zf.chain(times(by=x), zf.sgd(0.2)),
    "argument of one with a state": lambda x: zf.chain(heavy(beta=x), zf.sgd(0.2)),
    "rate of a function on leaves": lambda x: plain(lr=x),
    "rate within a partition": lambda x: zf.partition({"a": zf.sgd(x), "b": zf.adamw(0.1)}, {"w": "a", "b": "b"}),
    "rate within an offload": lambda x: zf.offload(zf.adamw(x)),
    "decay within a mask": lambda x: zf.chain(zf.masked(zf.add_decayed_weights(x), lambda p: "w" in p), zf.sgd(0.2)),
}
FROM_ELSEWHERE = {
    "rate of a schedule": lambda x: zf.sgd(lambda step: x / (1 + step)),
    "rate of a schedule of adamw": lambda x: zf.adamw(lambda step: x * 0.5**step),
    "rate of a module": lambda x: zf.sgd(Learned(x)),
    "schedule of a function on leaves": lambda x: plain(lr=lambda step: x / (1 + step)),
    "what a function on leaves closes over": lambda x: zf.chain(closing_over(x), zf.sgd(0.2)),
    "what a transform of one's own closes over": lambda x: zf.chain(prepared_from(x), zf.sgd(0.2)),
}
NUMBERS = AS_ARGUMENTS | FROM_ELSEWHERE
AT = torch.tensor(0.4, dtype=F64)


def trained(make, x, create_graph=None, route="make_step"):
    """A loss after two steps, with a second term, as a function of a number of the chain."""
    tx = make(x)
    state = zf.init(tx, START, create_graph=bool(create_graph))
    if route == "update":
        for _ in range(2):
            _, pull = zf.vjp(loss, tx, state, X, create_graph=bool(create_graph))
            grads, _ = pull(torch.ones((), dtype=F64))
            state, _ = zf.update(tx, grads, state, create_graph=create_graph)
    else:
        step = zf.make_step(loss, tx, donate=route == "donated", create_graph=create_graph)
        step = torch.compile(step, backend="eager") if route == "compiled" else step
        for _ in range(2):
            state, _ = step(state, X)
    return loss(zf.full_params(tx, state), X) + 0.01 * x**2


@pytest.mark.parametrize("route", ["make_step", "update"])
@pytest.mark.parametrize("name", NUMBERS)
def test_the_derivative_by_a_number_is_all_there_where_a_step_is_recorded(name, route):
    x = AT.clone().requires_grad_()
    trained(NUMBERS[name], x, True, route).backward()
    want = torch.func.grad(lambda x: trained(NUMBERS[name], x, route=route))(AT)
    torch.testing.assert_close(x.grad, want, rtol=1e-9, atol=1e-12)
    h = 1e-6
    ends = [float(trained(NUMBERS[name], AT + d, route=route)) for d in (-h, h)]
    assert abs((ends[1] - ends[0]) / (2 * h) - float(want)) < 1e-6 * max(1.0, abs(float(want)))


@pytest.mark.parametrize("route", ["make_step", "donated", "update"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_requires_grad_is_refused_where_a_step_is_not_recorded(name, route):
    """By name and with what to write. `create_graph=False` and torch.no_grad() say that it is a constant."""
    refused(name, route)


def test_a_compiled_step_refuses_it_too():
    refused("decay of adamw", "compiled")


def refused(name, route):
    x = AT.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"requires? grad(.|\n)*create_graph=True"):
        trained(NUMBERS[name], x, route=route)
    if route in ("make_step", "update"):
        want = float(trained(NUMBERS[name], AT, route=route))
        got = trained(NUMBERS[name], x, False, route)
        assert abs(float(got.detach()) - want) < 1e-12
        with torch.no_grad():
            assert abs(float(trained(NUMBERS[name], x, route=route)) - want) < 1e-12


def average(x, create_graph=None):
    tx = zf.chain(zf.sgd(0.2), zf.ema(x))
    state, step = zf.init(tx, START), zf.make_step(loss, tx, create_graph=create_graph)
    for _ in range(2):
        state, _ = step(state, X)
    return loss(zf.full_params(tx, state, of="ema"), X) + 0.01 * x**2


def weighted(x, create_graph=None):
    tx = zf.chain(zf.accumulate(2, weighted=True), zf.sgd(0.2))
    state, step = zf.init(tx, START), zf.make_step(loss, tx, create_graph=create_graph)
    for w, rows in ((x, X[:3]), (1.0, X[3:])):
        state, _ = step(state, rows, weight=w)
    return loss(zf.full_params(tx, state), X) + 0.01 * x**2


def two_chains(x, create_graph=None):
    """One rate, given to two chains that train two models."""
    found = 0.01 * x**2
    for tx in (zf.sgd(x), zf.adamw(x)):
        state, step = zf.init(tx, START), zf.make_step(loss, tx, create_graph=create_graph)
        for _ in range(2):
            state, _ = step(state, X)
        found = found + loss(zf.full_params(tx, state), X)
    return found


@pytest.mark.parametrize("fn", [average, weighted, two_chains])
def test_other_numbers(fn):
    x = AT.clone().requires_grad_()
    fn(x, True).backward()
    torch.testing.assert_close(x.grad, torch.func.grad(fn)(AT), rtol=1e-9, atol=1e-12)
    with pytest.raises(RuntimeError, match=r"requires? grad(.|\n)*create_graph=True"):
        fn(x)


def test_a_transform_alone_is_differentiated_by_its_numbers():
    x = AT.clone().requires_grad_()
    tx, params = zf.sgd(x), {"w": torch.ones(3, dtype=F64)}
    out, _ = tx.update({"w": torch.ones(3, dtype=F64)}, tx.init(params), params)
    (by_rate,) = torch.autograd.grad(out["w"].sum(), x)
    assert float(by_rate) == -3.0
    theirs = zf.as_torchopt(tx)
    out, _ = theirs.update(params, theirs.init(params), params=params, inplace=False)
    assert float(torch.autograd.grad(out["w"].sum(), x)[0]) == -3.0
    out, _ = closing_over(x).update(params, {}, params)
    assert float(torch.autograd.grad(out["w"].sum(), x)[0]) == 3.0
    late = zf.sgd(lambda step: x)
    with pytest.raises(RuntimeError, match=r"requires? grad(.|\n)*create_graph=True"):
        late.update(params, late.init(params), params)
    with torch.no_grad():
        assert not tx.update(params, tx.init(params), params)[0]["w"].requires_grad


# -- numbers that begin to require grad after the first step -------------------------------------------------------


# ---- refused ----

ROWS = Refusals()


CELLS = [(name, b) for name in NUMBERS for b in (False, True) if not (b and "norm" in name)]


@ROWS(RuntimeError, re.compile(r"requires? grad(.|\n)*detach\(\)"), over=CELLS)
def a_number_of_an_attached_model(cell):
    name, in_backward = cell
    model = torch.nn.Module()
    model.w, model.b = (torch.nn.Parameter(START[k].clone()) for k in ("w", "b"))
    yield
    opt = zf.attach(model, NUMBERS[name](AT.clone().requires_grad_()), in_backward=in_backward)
    loss({"w": model.w, "b": model.b}, X).backward()
    opt.step()


@ROWS(RuntimeError, "adamw(lr=...): requires grad")
def one_of_two_chains_with_one_rate():
    x = AT.clone().requires_grad_()
    first, second = zf.sgd(x), zf.adamw(x)
    state, _ = zf.make_step(loss, first, create_graph=True)(zf.init(first, START), X)
    assert state.leaves["w"].requires_grad
    yield
    zf.make_step(loss, second)(zf.init(second, START), X)


@ROWS(RuntimeError, "clip_by_global_norm(max_norm=...)", "adamw(betas=...).1")
def all_numbers_that_require_grad():
    x, y = (AT.clone().requires_grad_() for _ in range(2))
    tx = zf.chain(zf.clip_by_global_norm(x), zf.adamw(0.1, betas=(0.9, y)))
    yield
    zf.make_step(loss, tx)(zf.init(tx, START), X)


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
