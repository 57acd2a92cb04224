"""Law 12: a step is a function. Its derivatives are those of the same formula written by hand in float64."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

import zerofn as zf

F64 = torch.float64
BETAS, EPS = (0.9, 0.99), 1e-3
W = torch.tensor([0.3, -0.7, 1.1], dtype=F64)
B = torch.tensor([0.2, -0.4], dtype=F64)


class Inputs(NamedTuple):
    """What a training run is differentiated by."""

    rate: Tensor
    decay: Tensor  # weight decay
    w: Tensor  # first parameters
    x: Tensor  # (micro-steps, rows, 3)
    weight: Tensor  # of a term of the loss


class Recipe(NamedTuple):
    optimizer: str
    every: int
    clip: float | None
    limit: float | None
    average: bool
    scale: bool
    schedule: bool
    steps: int


def loss(p, x, weight):
    y = torch.tanh(x @ p["w"]) + p["b"].sum() * 0.1
    return (y - 0.5).square().mean() + weight * (p["w"] ** 2).sum() + (p["b"] ** 3).sum()


def pipeline(r: Recipe, given: Inputs):
    lr = (lambda step: given.rate * 0.8**step) if r.schedule else given.rate
    made = {
        "sgd": lambda: zf.sgd(lr, momentum=0.8, dampening=0.1, weight_decay=given.decay),
        "nesterov": lambda: zf.sgd(lr, momentum=0.8, weight_decay=given.decay, nesterov=True),
        "adam": lambda: zf.adam(lr, BETAS, EPS, given.decay),
        "adamw": lambda: zf.adamw(lr, BETAS, EPS, given.decay),
    }[r.optimizer]()
    parts = [zf.scale_loss(256.0)] if r.scale else []
    parts += [zf.accumulate(r.every)]
    parts += [zf.clip_by_value(r.limit)] if r.limit else []
    parts += [zf.clip_by_global_norm(r.clip)] if r.clip else []
    parts += [made] + ([zf.ema(0.7)] if r.average else [])
    return zf.chain(*parts)


def measured(p):
    return (p["w"] * torch.tensor([1.0, -2.0, 0.5], dtype=F64)).sum().sin() + p["b"].prod()


def trained(r: Recipe, given: Inputs, create_graph=None):
    """By zerofn."""
    tx = pipeline(r, given)
    state = zf.init(tx, {"w": given.w, "b": B}, create_graph=bool(create_graph))
    step = zf.make_step(loss, tx, create_graph=create_graph)
    for x in given.x:
        state, _ = step(state, x, given.weight)
    out = measured(zf.full_params(tx, state))
    return out + (measured(zf.full_params(tx, state, of="ema")) if r.average else 0)


def by_hand(r: Recipe, given: Inputs):
    """The same in plain float64."""
    p = {"w": given.w, "b": B}
    average, sums, t = dict(p), None, 0
    slots = {k: [torch.zeros_like(x), torch.zeros_like(x)] for k, x in p.items()}
    for i, x in enumerate(given.x):
        at, back = vjp(lambda p, x=x: loss(p, x, given.weight), p)
        (g,) = back(torch.ones_like(at))
        sums = g if i % r.every == 0 else {k: sums[k] + g[k] for k in p}
        if i % r.every < r.every - 1:
            continue
        g = {k: s / r.every for k, s in sums.items()}
        if r.limit:
            g = {k: s.clamp(-r.limit, r.limit) for k, s in g.items()}
        if r.clip:
            norm = torch.cat([s.flatten() for s in g.values()]).pow(2).sum() ** 0.5
            g = {k: s * torch.minimum(torch.ones((), dtype=F64), r.clip / (norm + 1e-6)) for k, s in g.items()}
        rate, t = given.rate * (0.8**t if r.schedule else 1), t + 1
        for k in p:
            p = {**p, k: update(r.optimizer, p[k], g[k], slots[k], rate, given.decay, t)}
        average = {k: 0.7 * average[k] + 0.3 * p[k] for k in p}
    return measured(p) + (measured(average) if r.average else 0)


def update(kind, p, g, slots, rate, decay, t):
    if kind in ("adam", "adamw"):
        if kind == "adam":
            g = g + decay * p
        else:
            p = p - rate * decay * p
        slots[0] = BETAS[0] * slots[0] + (1 - BETAS[0]) * g
        slots[1] = BETAS[1] * slots[1] + (1 - BETAS[1]) * g**2
        return p - rate * (slots[0] / (1 - BETAS[0] ** t)) / ((slots[1] / (1 - BETAS[1] ** t)) ** 0.5 + EPS)
    g = g + decay * p
    slots[0] = g if t == 1 else 0.8 * slots[0] + (1 if kind == "nesterov" else 0.9) * g
    return p - rate * (g + 0.8 * slots[0] if kind == "nesterov" else slots[0])


recipes = st.builds(
    Recipe,
    st.sampled_from(["sgd", "nesterov", "adam", "adamw"]),
    st.sampled_from([1, 2]),
    st.sampled_from([None, 0.3, 9.0]),
    st.sampled_from([None, 0.2]),
    *[st.booleans()] * 3,
    st.integers(1, 5),
)


def inputs(r: Recipe, seed: int) -> Inputs:
    x = torch.randn(r.steps, 4, 3, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return Inputs(*(torch.tensor(v, dtype=F64) for v in (0.05, 0.1)), W, x, torch.tensor(0.3, dtype=F64))


def agree(got, want, tolerance=1e-10):
    """Of both trees: double precision, of sums in other orders, over up to 5 steps and two derivatives."""
    got, want = (torch.cat([x.flatten() for x in tree_leaves(t)]) for t in (got, want))
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@settings(max_examples=20)
@given(recipes, st.integers(0, 99))
def test_derivatives_are_those_of_the_formula(r, seed):
    at = inputs(r, seed)
    ours, theirs = (lambda *a, f=f: f(r, Inputs(*a)) for f in (trained, by_hand))
    everything = tuple(range(5))
    agree(grad(ours, everything)(*at), grad(theirs, everything)(*at))
    tangents = tuple(torch.full_like(x, 0.5 + i) for i, x in enumerate(at))
    agree(jvp(ours, tuple(at), tangents), jvp(theirs, tuple(at), tangents))
    leaves = [x.clone().requires_grad_() for x in at]
    # A step that is held depends on nothing but the parameters.
    by_autograd = torch.autograd.grad(trained(r, Inputs(*leaves), True), leaves, materialize_grads=True)
    agree(by_autograd, grad(theirs, everything)(*at))


@settings(max_examples=8)
@given(recipes, st.integers(0, 99))
def test_second_derivatives_and_batches_of_derivatives(r, seed):
    r = r._replace(steps=min(r.steps, 3))
    at = inputs(r, seed)
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
