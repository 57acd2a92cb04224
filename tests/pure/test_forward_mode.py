"""Derivatives forwards through a step: plain `torch.autograd.forward_ad`, and `torch.func.linearize`, which uses it.

The reference is torch.func.jvp, whose derivatives the laws hold against formulas by hand.
"""

import pytest
import torch
from support.time_limits import limit
from torch.autograd import forward_ad
from torch.func import jvp, linearize

import zerofn as zf
from zerofn.testing import assert_trees_equal

X, Y = torch.linspace(-1.0, 2.0, 12, dtype=torch.float64).reshape(4, 3).sin(), torch.tensor([0.3, -1.0, 0.5, 2.0])
PARAMS = {"w": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64), "b": torch.tensor(0.2, dtype=torch.float64)}
CHAINS = {
    "adamw": zf.adamw(0.1),
    "clip": zf.chain(zf.clip_by_global_norm(0.1), zf.sgd(0.1, momentum=0.9)),
    "accumulate": zf.chain(zf.accumulate(2), zf.sgd(0.1), zf.ema(0.9)),
    "scale": zf.chain(zf.scale_loss(), zf.sgd(0.1)),
    "skip": zf.chain(zf.skip_nonfinite(), zf.rmsprop(0.1)),
    "precision": zf.chain(zf.precision(param_dtype=torch.float32), zf.sgd(0.1)),
}


# What is linearized in every run of the tests: ten seconds each.
SOON = ("adamw",)


def loss(params, x, y):
    x = x.to(params["w"].dtype)
    return ((torch.tanh(x @ params["w"] + params["b"]) - y) ** 2).mean()


def programs(tx):
    step, state = zf.make_step(loss, tx), zf.init(tx, PARAMS)
    state, _ = step(state, X, Y)

    def tree(w):
        return {"w": w, "b": w.sum()}

    return {
        "a step by its batch": (lambda x: step(state, x, Y)[0].params["w"], X),
        "an update by gradients": (lambda g: zf.update(tx, tree(g), state)[0].params["w"], PARAMS["w"]),
        "a step by first parameters": (lambda w: step(zf.init(tx, tree(w)), X, Y)[1]["loss"], PARAMS["w"]),
        "a bound function": (lambda w: zf.bind(loss, tx, state)(tree(w), X, Y), PARAMS["w"]),
        "an output": (lambda x: zf.vjp(loss, tx, state, x, Y)[0], X),
        "a gradient": (lambda x: zf.vjp(loss, tx, state, x, Y)[1](torch.ones(()))[0]["w"], X),
        "parameters": (lambda w: zf.full_params(tx, zf.init(tx, tree(w)))["w"], PARAMS["w"]),
        "steps": (lambda x: zf.unroll(step, state, [(x, Y)] * 3, every=2)[0].params["w"], X),
    }


@pytest.mark.parametrize("name", CHAINS)
def test_tangents_go_through_all_of_a_step(name):
    for what, (fn, x) in programs(CHAINS[name]).items():
        tangent = x.cos()
        value, wanted = jvp(fn, (x,), (tangent,))
        with forward_ad.dual_level():
            out, found = forward_ad.unpack_dual(fn(forward_ad.make_dual(x, tangent)))
        assert wanted.abs().max() > 1e-6 and found is not None, what
        # The same formulas, compiled to other orders of additions.
        torch.testing.assert_close(
            (out, found), (value, wanted), rtol=1e-6, atol=1e-9, msg=lambda m, what=what: what + m
        )


# torch's own, where it folds constants of the graph that it makes.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize(
    ("name", "of"),
    [
        # A step has a bound function in it, and first parameters go through what they are read by.
        *((x, ("a step by its batch", "an update by gradients", "a gradient", "steps")) for x in SOON),
        *(pytest.param(x, None, marks=pytest.mark.slow) for x in CHAINS),
    ],
)
def test_a_step_is_linearized(name, of):
    for what, (fn, x) in programs(CHAINS[name]).items():
        if of is not None and what not in of:
            continue
        value, push = linearize(fn, x)
        for tangent in (x.cos(), x.sin()):
            wanted = jvp(fn, (x,), (tangent,))
            torch.testing.assert_close(
                (value, push(tangent)), wanted, rtol=1e-6, atol=1e-9, msg=lambda m, what=what: what + m
            )


def test_a_second_derivative_has_its_tangent():
    tx = zf.adamw(0.1)
    step, state = zf.make_step(loss, tx), zf.init(tx, PARAMS)

    def slope(x):
        x = x if x.requires_grad else x.view_as(x).requires_grad_()
        after = zf.make_step(loss, tx, create_graph=True)(state, x, Y)[1]["grad_norm"]
        return torch.autograd.grad(after, x)[0]

    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(slope(forward_ad.make_dual(X, X.cos()))).tangent
    wanted = jvp(torch.func.grad(lambda x: step(state, x, Y)[1]["grad_norm"]), (X,), (X.cos(),))[1]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_a_step_that_nobody_follows_keeps_its_numbers_beside_one_that_is():
    tx = zf.chain(zf.clip_by_global_norm(0.1), zf.adamw(0.1))
    step, state = zf.make_step(loss, tx), zf.init(tx, PARAMS)
    wanted = step(state, X, Y)[0].params
    with forward_ad.dual_level():
        forward_ad.make_dual(X, X)
        torch.testing.assert_close(step(state, X, Y)[0].params, wanted, rtol=1e-12, atol=1e-12)
    assert_trees_equal(step(state, X, Y)[0].params, wanted)


def linearized_on_ranks(stage):
    tx = zf.chain(*stage, zf.clip_by_global_norm(0.1), zf.sgd(0.1))
    step, state = zf.make_step(loss, tx), zf.init(tx, PARAMS)
    x = X * (1 + torch.distributed.get_rank())

    def after(x):
        return step(state, x, Y)[0].params["w"]

    for fn, at in (
        (after, x),
        (lambda p: torch.func.grad(zf.bind(loss, tx, state))(p, x, Y), state.params),
        (lambda w: zf.full_params(tx, zf.init(tx, {**PARAMS, "w": w})), PARAMS["w"]),
    ):
        with pytest.raises(
            RuntimeError, match=r"(?s)linearize, or make_fx, over what goes over several.*write: torch.func.jvp"
        ):
            linearize(fn, at)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(after(forward_ad.make_dual(x, x.cos()))).tangent
    torch.testing.assert_close(found, jvp(after, (x,), (x.cos(),))[1], rtol=1e-12, atol=1e-12)
    return True


@pytest.mark.parametrize(
    "stage", [(zf.all_reduce(),), pytest.param((zf.reduce_scatter(),), marks=pytest.mark.slow), (zf.shard(),)], ids=repr
)
def test_over_ranks_plain_forward_mode_is_right_and_linearize_is_refused(stage):
    assert all(zf.launch(linearized_on_ranks, 2, stage, timeout=limit(60)))
