"""What an update half returns: leaves left out, strangers, other shapes, dtypes and devices are refused by path."""

import re

import pytest
import torch
from refusals import Refusals
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn._compat.functorch import COMPILES_STATES  # inside: whether this torch makes one graph of a step
from zerofn.extend import Facts, Prepared, Transform

ROUTES = ("make_step", "attach", "in backward", "compiled")


class Foreign:
    """A transformation of another library, which returns what it is told to."""

    def __init__(self, fn):
        self.fn = fn

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        return self.fn(updates), state


def mine(fn, **facts):
    def update(grads, state, params, carry, ctx):
        return fn(grads), state

    return Transform("mine", needs="element", facts=Facts(**facts), update_fn=update)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))

    def forward(self):
        return self.w.sum() + self.b.sum()


def trained(tx, route):
    """Parameters after a step whose gradients are 1."""
    if route in ("attach", "in backward"):
        model = Two()
        opt = zf.attach(model, tx, in_backward=route == "in backward")
        model().backward()
        opt.step()
        return dict(model.named_parameters())
    step = zf.make_step(lambda p: p["w"].sum() + p["b"].sum(), tx)
    if route == "compiled":
        # Before torch 2.13 a step runs uncompiled inside of torch.compile.
        step = torch.compile(step, backend="eager", fullgraph=COMPILES_STATES, dynamic=False)
    return step(zf.init(tx, {"w": torch.ones(2, 3), "b": torch.ones(3)}))[0].params


# What is returned for gradients, and what the message says of `w`; of `b` it says nothing.
WRONG = {
    "left out": (lambda gs: {p: g for p, g in gs.items() if p != "w"}, "  w: left out, so that"),
    "of no leaf": (lambda gs: {**gs, "v": gs.get("w")}, "  v: there is no parameter of that path"),
    "of one row": (lambda gs: {p: g[:1] if p == "w" else g for p, g in gs.items()}, "  w: a tensor of shape (1, 3)"),
    "none": (lambda gs: {p: None if p == "w" else g for p, g in gs.items()}, "  w: a NoneType instead of a tensor"),
    "of int": (lambda gs: {p: g.int() if p == "w" else g for p, g in gs.items()}, "  w: a tensor of torch.int32"),
    "complex": (lambda gs: {p: g * 1j if p == "w" else g for p, g in gs.items()}, "  w: a tensor of torch.complex64"),
    "elsewhere": (
        lambda gs: {p: g.to("meta") if p == "w" else g for p, g in gs.items()},
        "  w: a tensor on meta for a leaf on cpu",
    ),
}


def cells(routes):
    """Every fault in every route; one of them in a compiled step, which looks at them as the others do."""
    return [(x, r) for x in WRONG for r in routes if r != "compiled" or x == next(iter(WRONG))]


@pytest.mark.parametrize(("what", "route"), cells(ROUTES))
@pytest.mark.parametrize("optimizes", [False, True])
def test_a_transform_that_returns_what_does_not_fit(what, route, optimizes):
    fn, told = WRONG[what]
    tx = zf.chain(mine(fn, optimizes=True) if optimizes else zf.chain(mine(fn), zf.sgd(1.0)))
    with pytest.raises(Exception, match="mine: an update that does not fit its leaves") as raised:
        trained(tx, route)
    said = str(raised.value)
    assert route == "compiled" or isinstance(raised.value, ValueError)
    assert told in said and "\n  b: " not in said and "write: return {path: new" in said


@pytest.mark.parametrize(("what", "route"), cells([r for r in ROUTES if r != "in backward"]))
@pytest.mark.parametrize("ends", [False, True])
def test_a_transformation_of_another_library_that_returns_what_does_not_fit(what, route, ends):
    fn, told = WRONG[what]
    tx = zf.chain(Foreign(fn)) if ends else zf.chain(Foreign(fn), zf.sgd(1.0))
    with pytest.raises(Exception, match="Foreign: an update that does not fit its leaves") as raised:
        trained(tx, route)
    assert told in str(raised.value) and "  b: " not in str(raised.value)


@pytest.mark.parametrize("made", [mine, lambda fn: zf.guest(Foreign(fn))])
@pytest.mark.parametrize("what", list(WRONG))
def test_a_transform_alone_says_so_too(made, what):
    fn, told = WRONG[what]
    params = {"w": torch.ones(2, 3), "b": torch.ones(3)}
    t = made(fn)
    with pytest.raises(ValueError, match="does not fit its leaves") as raised:
        t.update(params, t.init(params), params)
    assert told in str(raised.value)


@pytest.mark.parametrize("route", [r for r in ROUTES if r != "compiled"])  # torch refuses nn.Parameter in a graph
@pytest.mark.parametrize("made", [mine, lambda fn, **_: zf.guest(Foreign(fn))])
def test_a_leaf_of_autograds_own_is_refused(made, route):
    def fn(gs):
        return {p: nn.Parameter(g) if p == "w" else g for p, g in gs.items()}

    for tx in (zf.chain(made(fn, optimizes=True)), zf.chain(made(fn), zf.sgd(1.0))):
        if route == "in backward" and made is not mine:
            continue
        with pytest.raises(ValueError, match=r"\n  w: a leaf of autograd's own, such as nn.Parameter") as raised:
            trained(tx, route)
        assert "\n  b: " not in str(raised.value)


def test_a_step_that_is_differentiated_goes_on():
    def after(rate):
        return trained(mine(lambda gs: {p: -rate * g for p, g in gs.items()}, optimizes=True), "make_step")["w"].sum()

    # What is returned is -rate for each of six elements.
    assert torch.func.grad(after)(torch.tensor(0.5)).item() == -6.0


def test_gradients_of_another_dtype_go_on():
    tx = zf.chain(mine(lambda gs: {p: g.bfloat16() for p, g in gs.items()}), zf.sgd(0.5))
    for route in ROUTES:
        assert torch.equal(trained(tx, route)["w"], torch.full((2, 3), 0.5))


@pytest.mark.parametrize("given", [None, [], 1.0, ({},)])
def test_a_state_that_is_no_dict_is_refused(given):
    t = Transform("mine", needs="element", update_fn=lambda grads, *more: (grads, given))
    for route in ROUTES[:3]:
        with pytest.raises(
            TypeError, match=r"mine: an update that returned an? \w+ as its state\n.*\n.*grads}, {}, if"
        ):
            trained(zf.chain(t, zf.sgd(1.0)), route)
    assert torch.equal(trained(zf.chain(Stateless()), "make_step")["w"], torch.zeros(2, 3))


class Stateless:
    """A transformation of another library, whose state may be anything."""

    def init(self, params):
        return None

    def update(self, updates, state, params=None):
        return {path: -g for path, g in updates.items()}, None


@pytest.mark.parametrize("facts", [{"optimizes": True}, {"watches": True}])
def test_new_parameters_keep_dtype_and_layout(facts):
    def last(fn):
        return zf.chain(*([] if "optimizes" in facts else [zf.sgd(1.0)]), mine(fn, **facts))

    for route in ("make_step", "attach", "compiled"):
        with pytest.raises(Exception, match=r"stored in torch\.float32") as raised:
            trained(last(lambda gs: {p: g.double() for p, g in gs.items()}), route)
        assert "new.to(params[path].dtype)" in str(raised.value)
    with pytest.raises(
        ValueError, match=r"w: a new parameter of layout torch\.sparse_coo, .* stored as torch\.strided"
    ):
        trained(last(lambda gs: {p: g.to_sparse() for p, g in gs.items()}), "make_step")


def test_none_is_for_those_that_hold():
    def prepare(state, grads, params, ctx):
        return Prepared(emit=False)

    functions = {"prepare_fn": prepare, "update_fn": lambda *args: (None, {})}
    tx = zf.chain(Transform("waits", needs="element", facts=Facts(window=9), **functions), zf.sgd(1.0))
    assert torch.equal(trained(tx, "make_step")["w"], torch.ones(2, 3))


def test_leaves_that_a_group_does_not_train_and_leaves_without_a_gradient():
    frozen = zf.partition({"x": zf.sgd(1.0), "frozen": None}, lambda path: "frozen" if path == "w" else "x")
    for route in ROUTES:
        after = trained(frozen, route)
        assert torch.equal(after["w"], torch.ones(2, 3)) and torch.equal(after["b"], torch.zeros(3))
    tx = zf.chain(zf.accumulate(2), zf.clip_by_value(1.0), zf.sgd(1.0), zf.ema(0.5))
    step, state = zf.make_step(lambda p, on: p["b"].sum(), tx), zf.init(tx, {"w": torch.ones(2), "b": torch.ones(2)})
    for on in (True, False):
        state, _ = step(state, on)
    assert torch.equal(state.params["w"], torch.ones(2)) and torch.equal(state.params["b"], torch.zeros(2))


def at_an_owner():
    """A leaf has one owner: the error is on all ranks, and nobody waits."""
    part = Transform("mine", needs="leaf", update_fn=lambda grads, state, *more: ({}, state))
    tx = zf.chain(zf.shard(), part, zf.sgd(1.0))
    state = zf.init(tx, {"w": torch.ones(4, 4)})
    try:
        zf.make_step(lambda p: p["w"].sum(), tx)(state)
    except (ValueError, RuntimeError) as error:
        return str(error)


def test_left_out_at_an_owner_is_an_error_on_every_rank():
    for said in zf.launch(at_an_owner, 2, timeout=limit(60)):
        assert "mine: an update that does not fit its leaves" in said and "w: left out" in said


class Guest:
    def init(self, params):
        return ()


class WithoutParams(Guest):
    def update(self, updates, state):
        return updates, state


class WithMore(Guest):
    def update(self, updates, state, params, value):
        return updates, state


class ByKeyword(Guest):
    def update(self, updates, state, *, params=None):
        return {path: -0.5 * g for path, g in updates.items()}, state


class ByPlace(Guest):
    def update(self, *given):
        updates, state, _ = given
        return {path: -0.5 * g for path, g in updates.items()}, state


def test_a_guest_whose_update_takes_other_arguments_is_refused_where_it_is_made():
    for kind in (WithoutParams, WithMore):
        for make in (zf.guest, zf.chain):
            with pytest.raises(TypeError, match=rf"guest\({kind.__name__}\(\.\.\.\)\) whose update takes \(updates, "):
                make(kind())
    for kind in (ByKeyword, ByPlace):
        tx = zf.chain(kind())
        state, _ = zf.update(tx, {"w": torch.ones(2)}, zf.init(tx, {"w": torch.zeros(2)}))
        assert torch.equal(state.params["w"], torch.full((2,), -0.5))


# ---- refused ----

ROWS = Refusals()


INSIDE = {
    "masked": lambda x: zf.chain(zf.masked(x, lambda path: True), zf.sgd(1.0)),
    "partition": lambda x: zf.chain(zf.partition({"x": x}, lambda path: "x"), zf.sgd(1.0)),
    "chain in a partition": lambda x: zf.partition({"x": zf.chain(x, zf.sgd(1.0))}, lambda path: "x"),
    "behind a window": lambda x: zf.chain(zf.accumulate(1), x, zf.sgd(1.0)),
}
for _route in ("make_step", "attach"):

    @ROWS(ValueError, re.compile(r"mine: .*\n  w: a tensor of shape \(1, 3\) for a gradient of shape"), over=INSIDE)
    def inside_of_others(where, route=_route):
        tx = INSIDE[where](mine(WRONG["of one row"][0]))
        yield
        trained(tx, route)

    @ROWS(ValueError, re.compile(r"w: a new parameter in torch\.float64, .* stored in torch\.float32"))
    def a_new_parameter_of_another_dtype(route=_route):
        tx = mine(lambda gs: {p: g.double() for p, g in gs.items()}, optimizes=True)
        yield
        trained(tx, route)

    @ROWS(TypeError, "mine: an update that returned", over=[None, 1.0, (), ({},), ({}, {}, {}), ([], {}), (None, {})])
    def no_pair_of_updates_and_a_state(given, route=_route):
        t = Transform("mine", needs="element", update_fn=lambda *args: given)
        yield
        trained(zf.chain(t, zf.sgd(1.0)), route)


@ROWS(ValueError, re.compile(r"write: .*; return None, state, while it holds gradients"))
def nothing_of_a_transform_that_holds():
    holds = Transform("waits", needs="element", facts=Facts(window=9), update_fn=lambda *args: ({}, {}))
    yield
    trained(zf.chain(holds, zf.sgd(1.0)), "make_step")


for _nothing, _error in (({}, ValueError), (None, TypeError)):

    @ROWS(_error, "write: return grads, state: what a transform that watches")
    def nothing_of_a_transform_that_watches(nothing=_nothing):
        watch = mine(lambda gs: nothing, watches=True)
        yield
        trained(zf.chain(zf.sgd(1.0), watch), "make_step")


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
