"""The pure route called wrongly: told at the call, in the words of the caller, with the state as it was."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import zerofn as zf
from zerofn.testing import assert_trees_equal, clone

SGD = zf.sgd(0.5)


def params():
    return {"w": torch.tensor([1.0, 2.0, 3.0]), "b": [torch.ones(2, 2)]}


def refuses(error, *needles):
    """`pytest.raises` that looks for each needle in the message."""
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{re.escape(n)})" for n in needles))


def loss(p, x=None):
    return (p["w"] ** 2).sum() + p["b"][0].sum()


# -- functions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 3, "loss", torch.ones(1), params()])
def test_what_is_no_function(wrong):
    state = zf.init(SGD, params())
    kind = {"NoneType": "a NoneType", "int": "an int"}.get(type(wrong).__name__, f"a {type(wrong).__name__}")
    for name, call in (
        ("zf.bind", lambda: zf.bind(wrong, SGD, state)),
        ("zf.vjp", lambda: zf.vjp(wrong, SGD, state)),
        ("zf.make_step", lambda: zf.make_step(wrong, SGD)),
    ):
        with refuses(TypeError, f"{name}({wrong!r}, tx, ...)", f"is {kind}", f"write: {name}(lambda params"):
            call()


def test_inputs_by_keyword():
    state = zf.init(SGD, params())
    with refuses(TypeError, "step(state, x=..., y=...)", "by position", "write: step(state, x, y)"):
        zf.make_step(loss, SGD)(state, x=1, y=2)
    with refuses(TypeError, "fn(stored, x=...)", "write: fn(stored, x)"):
        zf.bind(loss, SGD, state)(state.params, x=1)


# -- parameters of a bound function -------------------------------------------------------------------------

ROAMS = {
    "plain": lambda fn: fn,
    "grad": torch.func.grad,
    "jacrev": torch.func.jacrev,
    "vjp": lambda fn: functools.partial(torch.func.vjp, fn),
}
PIPES = {
    "sgd": SGD,
    "scaled": zf.chain(zf.scale_loss(8.0), SGD),
    "cast": zf.chain(zf.precision(param_dtype=torch.bfloat16, output_dtype=torch.float32), SGD),
}


@pytest.mark.parametrize("pipe", PIPES)
@pytest.mark.parametrize("roam", ROAMS)
def test_parameters_of_other_shapes(roam, pipe):
    """Each leaf by its path; a stack of parameters is for vmap, and broadcasting is nobody's wish."""
    tx = PIPES[pipe]
    state = zf.init(tx, params())
    call = ROAMS[roam](zf.bind(loss, tx, state))
    for w, b, needles in (
        (torch.ones(5), torch.ones(2, 2), ["w: of shape (5,), stored in shape (3,)"]),
        (torch.ones(4, 3), torch.ones(4, 2, 2), ["w: of shape (4, 3)", "b.0: of shape (4, 2, 2)", "torch.func.vmap"]),
        (torch.ones(()), torch.ones(4), ["w: of shape ()", "b.0: of shape (4,), stored in shape (2, 2)"]),
    ):
        with refuses(ValueError, "other parameters than it is bound to", "write: fn(state.params", *needles):
            call({"w": w, "b": [b]})


@pytest.mark.parametrize("wrong", [None, 3.0, "w", np.ones(3)])
def test_parameters_that_are_no_tensors(wrong):
    state = zf.init(SGD, params())
    with refuses(ValueError, f"w: {type(wrong).__name__} is no tensor"):
        zf.bind(loss, SGD, state)({"w": wrong, "b": [torch.ones(2, 2)]})


def test_stacks_of_parameters_under_vmap():
    state = zf.init(SGD, params())
    stacked = torch.utils._pytree.tree_map(lambda x: torch.stack([x, 2 * x]), state.params)
    found = torch.func.vmap(torch.func.grad(zf.bind(loss, SGD, state)))(stacked)
    assert torch.equal(found["w"], 2 * stacked["w"])


# -- states without data ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tx",
    [
        SGD,
        zf.adamw(0.1),
        zf.chain(zf.scale_loss(), zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.adamw(0.1), zf.ema(0.9)),
        zf.chain(zf.precision(store_dtype=torch.bfloat16), zf.low_precision_adam(0.1)),
    ],
)
def test_a_step_of_a_meta_state(tx):
    """It would count steps, or end in an error of a kernel."""
    state = zf.init(tx, {"w": torch.ones(3, device="meta"), "b": torch.ones(2, device="meta")})
    steps = {"a step": zf.make_step(lambda p: p["w"].sum() + p["b"].sum(), tx)}
    steps["zf.update"] = lambda s: zf.update(tx, torch.utils._pytree.tree_map(torch.ones_like, s.params), s)
    real = {"w": torch.ones(3), "b": torch.ones(2)}
    for name, step in {**steps, "zf.update of": lambda s: zf.update(tx, real, s)}.items():
        with refuses(ValueError, name, "on the meta device", "w: (3,)", "b: (2,)", "zf.plan(tx, params)"):
            step(state)
    assert int(state.step) == 0 and int(state.micro_step) == 0


# -- weights ------------------------------------------------------------------------------------------------

WEIGHTS = ["3", "", None, True, 1j, [3], (3,), {}, object(), np.ones(2), np.bool_(True), torch.ones(2)]
WEIGHTS += [torch.tensor(True), torch.tensor(1j), -1, float("nan"), float("inf"), np.float32(-1)]


@pytest.mark.parametrize("weight", [w for w in WEIGHTS if w is not None])
@pytest.mark.parametrize("offloaded", [False, True])
def test_weights_that_are_none(weight, offloaded):
    held = zf.accumulate(2, weighted=True)
    tx = zf.chain(zf.offload(held) if offloaded else held, SGD)
    state = zf.init(tx, params())
    before = clone(state)
    model = torch.nn.Linear(2, 1)
    opt = zf.attach(model, tx)
    model(torch.ones(1, 2)).sum().backward()
    for call in (
        lambda: zf.update(tx, params(), state, weight=weight),
        lambda: zf.make_step(loss, tx)(state, weight=weight),
        lambda: opt.step(weight=weight),
    ):
        with refuses(
            ValueError, f"weight={weight!r}", "one number, finite and not negative", "weight=number_of_tokens"
        ):
            call()
    assert_trees_equal(state, before)
    assert int(opt.state.micro_step) == 0


@pytest.mark.parametrize("weight", [3, 3.0, np.float32(3), np.int64(3), torch.tensor(3), torch.tensor(3.0)])
def test_weights_that_are(weight):
    tx = zf.chain(zf.accumulate(2, weighted=True), SGD)
    state = zf.init(tx, {"w": torch.zeros(1)})
    for g, w in ((1.0, weight), (5.0, 1)):
        state, _ = zf.update(tx, {"w": torch.tensor([g])}, state, weight=w)
    assert state.params["w"].tolist() == [-1.0]


# -- trees that hold themselves -----------------------------------------------------------------------------


def knots():
    knot = {"w": torch.ones(1)}
    knot["self"] = knot
    yield knot, "self"
    ring: list = [torch.ones(1)]
    ring.append({"deep": (ring,)})
    yield ring, "1.deep.0"
    inner: dict = {}
    inner["again"] = [inner]
    yield {"ok": torch.ones(1), "bad": inner}, "bad.again.0"


@pytest.mark.parametrize(("tree", "where"), list(knots()))
def test_trees_that_hold_themselves(tree, where):
    state = zf.init(SGD, params())
    told = ["a tree that contains itself, at ", where, "none of which contains itself"]
    for call in (
        lambda: zf.init(SGD, tree),
        lambda: zf.plan(SGD, tree),
        lambda: zf.update(SGD, tree, state),
        lambda: zf.bind(loss, SGD, state)(tree),
        lambda: zf.bind(loss, SGD, state)(state.params, tree),
        lambda: zf.vjp(loss, SGD, state, tree),
        lambda: zf.make_step(loss, SGD)(state, tree),
        lambda: zf.init(zf.masked(SGD, tree), params()),
        lambda: SGD.init(tree),
    ):
        with refuses(ValueError, *told):
            call()


def test_a_loss_that_recurses_without_end_says_so_itself():
    def endless(p):
        return endless(p)

    with pytest.raises(RecursionError):
        zf.make_step(endless, SGD)(zf.init(SGD, params()))


# -- autograd through an update -----------------------------------------------------------------------------


def test_a_graph_is_kept_where_it_is_asked_for_and_nowhere_else():
    """By what an update is given, or by name. By a rate alone that requires grad it is refused until it is said."""
    w, rate = torch.ones(3, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    tx = zf.sgd(rate)
    start = zf.init(tx, params())
    grads = lambda g: {"w": g, "b": [torch.ones(2, 2)]}  # noqa: E731
    for create_graph, g, kept in (
        (None, w * 2, True),
        (True, w.detach(), True),
        (False, w * 2, False),
        (False, w.detach(), False),
    ):
        state, _ = zf.update(tx, grads(g), start, create_graph=create_graph)
        assert state.leaves["w"].requires_grad is kept
        if kept:
            (by_rate,) = torch.autograd.grad(state.leaves["w"].sum(), rate)
            assert torch.equal(by_rate, -g.detach().sum())
    with torch.no_grad():
        state, _ = zf.update(tx, grads(w * 2), start)
        assert not state.leaves["w"].requires_grad
        for call in (
            lambda: zf.update(tx, grads(w), start, create_graph=True),
            lambda: zf.make_step(lambda p: p["w"].sum(), tx, create_graph=True)(start),
            lambda: zf.init(tx, params(), create_graph=True),
            lambda: zf.vjp(lambda p: p["w"], tx, start, create_graph=True),
        ):
            with pytest.raises(RuntimeError, match=r"create_graph=True\) inside torch.no_grad"):
                call()
    with pytest.raises(ValueError, match="create_graph is True or False"):
        zf.make_step(lambda p: p["w"].sum(), tx, create_graph="yes")


def test_a_rate_that_is_taken_for_a_constant_keeps_nothing_from_step_to_step():
    rate = torch.tensor(0.1, requires_grad=True)
    tx = zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(lr=lambda step: rate * 0.5), zf.ema(0.9))
    state, step = zf.init(tx, params()), zf.make_step(lambda p: p["w"].square().sum(), tx, create_graph=False)
    for _ in range(3):
        state, metrics = step(state)
        assert not any(x.requires_grad for x in tree_leaves(state))
    assert metrics["lr"].item() == pytest.approx(0.05)


def pull_back_after_a_write():
    tx = zf.chain(zf.shard(), zf.sgd(0.1))
    state = zf.init(tx, {"a": torch.ones(4), "b": torch.ones(4)})
    _, pullback = zf.vjp(lambda p: (p["a"] * p["b"]).sum(), tx, state)
    state.leaves["b"].mul_(2)
    with pytest.raises(RuntimeError, match=r"pullback after a parameter of the state was written \(b\)"):
        pullback(torch.tensor(1.0))


def test_a_pullback_under_shard_after_the_state_was_written_to_is_refused():
    zf.launch(pull_back_after_a_write, 2)
