"""Law 12: a step is a function. Its derivatives are those of the same formula written by hand in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training_runs import Inputs, Recipe, agree, by_hand, by_torchopt, inputs, optimizers, recipes, trained
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

import zerofn as zf

F64 = torch.float64


@settings(max_examples=20)
@given(recipes, st.integers(0, 99))
def test_derivatives_are_those_of_the_formula(r, seed):
    at = inputs(r.steps, seed)
    ours, theirs = (lambda *a, f=f: f(r, Inputs(*a)) for f in (trained, by_hand))
    everything = tuple(range(5))
    agree(grad(ours, everything)(*at), grad(theirs, everything)(*at))
    tangents = tuple(torch.full_like(x, 0.5 + i) for i, x in enumerate(at))
    agree(jvp(ours, tuple(at), tangents), jvp(theirs, tuple(at), tangents))
    leaves = [x.clone().requires_grad_() for x in at]
    # A step that is held depends on nothing but the parameters.
    by_autograd = torch.autograd.grad(trained(r, Inputs(*leaves), True), leaves, materialize_grads=True)
    agree(by_autograd, grad(theirs, everything)(*at))


@settings(max_examples=4)
@given(recipes, st.integers(0, 99))
def test_second_derivatives_and_batches_of_derivatives(r, seed):
    r = r._replace(steps=min(r.steps, 3))
    at = inputs(r.steps, seed)
    some = lambda f: lambda rate, w: f(r, at._replace(rate=rate, w=w))  # noqa: E731
    agree(hessian(some(trained), (0, 1))(at.rate, at.w), hessian(some(by_hand), (0, 1))(at.rate, at.w))
    agree(jacrev(grad(some(trained)), 1)(at.rate, at.w), jacrev(grad(some(by_hand)), 1)(at.rate, at.w))
    rates = torch.tensor([0.01, 0.05, 0.1], dtype=F64)
    one = lambda f: lambda rate: some(f)(rate, at.w)  # noqa: E731
    agree(vmap(grad(one(trained)))(rates), torch.stack([grad(one(by_hand))(x) for x in rates]))
    agree(grad(lambda x: vmap(one(trained))(x).sum())(rates), torch.stack([grad(one(by_hand))(x) for x in rates]))
    w = at.w.clone().requires_grad_()
    (first,) = torch.autograd.grad(trained(r, at._replace(w=w), True), w, create_graph=True)
    squared = lambda w: grad(some(by_hand), 1)(at.rate, w).square().sum()  # noqa: E731
    agree(torch.autograd.grad(first.square().sum(), w), grad(squared)(at.w))


@settings(max_examples=8)
@given(optimizers, st.integers(1, 4), st.integers(0, 99))
def test_derivatives_are_those_of_torchopt(optimizer, steps, seed):
    """By rate, first parameters, batch and weight, and the derivative of the squares of those.

    torchopt has Adam's corrections in float32, and `1 - 0.99` makes a hundred of its roundings of 6e-8: 1e-4 there.
    """
    torchopt = pytest.importorskip("torchopt")
    r = Recipe(optimizer, 1, None, None, False, False, False, False, steps)

    def twice(run):
        at = inputs(steps, seed)
        at = Inputs(*(x if x is at.decay else x.clone().requires_grad_() for x in at))
        by = at.rate, at.w, at.x, at.weight
        first = torch.autograd.grad(run(at), by, create_graph=True)
        return first, torch.autograd.grad(sum(g.square().sum() for g in first), by)

    got, want = twice(lambda at: trained(r, at, True)), twice(lambda at: by_torchopt(torchopt, optimizer, at))
    agree(got, want, 1e-4 if optimizer.startswith("adam") else 1e-10)


PLAIN = {
    "sgd": zf.sgd(0.1, momentum=0.9, weight_decay=0.1),
    "bf16": zf.chain(zf.precision(store_dtype=torch.bfloat16), zf.low_precision_adam(0.1)),
    "kahan": zf.chain(zf.precision(store_dtype=torch.bfloat16), zf.low_precision_adam(0.1, rounding="kahan")),
    "fp16": zf.chain(zf.precision(store_dtype=torch.float16), zf.scale_loss(8.0), zf.low_precision_adam(0.1)),
    "muon": zf.chain(zf.accumulate(2), zf.muon(0.1, weight_decay=0.1), zf.ema(0.9)),
    "adamw": zf.chain(zf.accumulate(2), zf.clip_by_value(0.1), zf.adamw(0.1), zf.ema(0.9)),
    "clip": zf.chain(zf.clip_by_global_norm(0.1), zf.adam(0.1, weight_decay=0.1)),
}
# A kernel of torch's fuses products with sums, and norms are summed in another order: of numbers near 1, per update.
BOUNDS = {"adamw": 3e-7, "clip": 3e-7, "muon": 1e-6}


@pytest.mark.parametrize("name", PLAIN)
def test_values_under_transforms_are_the_values(name):
    tx = PLAIN[name]
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(5, 7, generator=generator), "v": torch.randn(3, 4, generator=generator)}
    fn = lambda p, x: sum((q.float() * x[: q.shape[1]]).square().mean() for q in p.values())  # noqa: E731
    step = zf.make_step(fn, tx)
    plain = zf.init(tx, params)
    recorded = [plain] * 3
    xs = torch.randn(4, 7, generator=generator)
    for i, x in enumerate(xs):
        plain, _ = step(plain, x)
        _, _, (recorded[0], _) = vjp_of_step(step, recorded[0], x)
        recorded[1] = tree_map(lambda y: y[0], vmap(step, (None, 0))(recorded[1], x[None])[0])
        recorded[2] = zf.make_step(fn, tx, create_graph=True)(recorded[2], x)[0]
        for other in recorded:
            for a, b in zip(tree_leaves(other), tree_leaves(plain), strict=True):
                torch.testing.assert_close(a.detach(), b, rtol=0, atol=(i + 1) * BOUNDS.get(name, 0.0))


def vjp_of_step(step, state, x):
    out, back, new = vjp(lambda x: (lambda s, m: (m["loss"], (s, m)))(*step(state, x)), x, has_aux=True)
    return out, back, new
