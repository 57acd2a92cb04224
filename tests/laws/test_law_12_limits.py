"""Law 12 where a formula has a corner (zeros, a norm of zero, held and skipped steps, roundings): derivatives exist."""

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vmap

import zerofn as zf

F64, BF16 = torch.float64, torch.bfloat16


def run(tx, gradients, w, **keywords):
    state = zf.init(tx, {"w": w})
    for g in gradients:
        state, _ = zf.update(tx, {"w": g}, state, **keywords)
    return zf.full_params(tx, state)["w"]


OPTIMIZERS = {
    "adam": (lambda lr: zf.adam(lr, eps=1e-3), F64),
    "adamw": (lambda lr: zf.adamw(lr, eps=1e-3, weight_decay=0.1), F64),
    "low precision": (lambda lr: zf.low_precision_adam(lr, eps=1e-3), torch.float32),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_element_whose_gradient_has_always_been_zero(name):
    """By the gradient at 0 the derivative is what it tends to: `m / (sqrt(v) + eps)` is `g / (|g| + eps)` at first."""
    make, dtype = OPTIMIZERS[name]
    g = torch.tensor([0.0, 0.5], dtype=dtype)
    w = torch.ones(2, dtype=dtype)
    after = lambda g, lr=0.1: run(make(lr), [g], w)[0]  # noqa: E731
    by_gradient = grad(after)(g)
    torch.testing.assert_close(by_gradient, torch.tensor([-0.1 / 1e-3, 0.0], dtype=dtype), rtol=1e-5, atol=0)
    # Near zero it is eps / (|g| + eps)^2, so 2e-6 of eps next to it 4e-6 less.
    near = grad(after)(torch.tensor([2e-9, 0.5], dtype=dtype))
    torch.testing.assert_close(near, by_gradient, rtol=1e-5, atol=0)
    rate = torch.tensor(0.1, dtype=dtype)
    assert grad(lambda lr: run(make(lr), [torch.zeros_like(g)] * 3, w).sum())(rate).isfinite()
    assert hessian(after)(g).isfinite().all()
    assert jvp(after, (g,), (torch.ones_like(g),))[1].isfinite()


@pytest.mark.parametrize("transform", [lambda n: zf.clip_by_global_norm(n), lambda n: zf.muon(n)])
def test_a_norm_of_zero(transform):
    made = transform(0.5)
    tx = zf.chain(made, zf.sgd(0.1)) if not made.facts.optimizes else made
    zero, w = torch.zeros(2, 2, dtype=F64), torch.ones(2, 2, dtype=F64)
    jacobian = jacrev(lambda g: run(tx, [g], w))(zero)
    assert jacobian.isfinite().all()
    assert hessian(lambda g: run(tx, [g], w).sum())(zero).isfinite().all()
    if not made.facts.optimizes:
        # Short gradients are not clipped, and at zero the norm has no say.
        torch.testing.assert_close(jacobian.reshape(4, 4), -0.1 * torch.eye(4, dtype=F64))


def test_one_leaf_of_zeros_beside_others_has_its_part_in_the_curvature_of_the_norm():
    tx = zf.chain(zf.clip_by_global_norm(1.0), zf.sgd(1.0))

    def after(a, b):
        state = zf.init(tx, {"a": torch.zeros(2, dtype=F64), "b": torch.zeros(2, dtype=F64)})
        state, _ = zf.update(tx, {"a": a, "b": b}, state)
        return state.leaves["b"].sum()

    a, b = torch.zeros(2, dtype=F64), torch.tensor([3.0, 4.0], dtype=F64)
    by_hand = lambda a, b: -(b / (torch.cat([a, b]).square().sum().sqrt() + 1e-6)).sum()  # noqa: E731
    torch.testing.assert_close(hessian(after, (0, 1))(a, b), hessian(by_hand, (0, 1))(a, b))


@pytest.mark.parametrize("batched", [False, True])
def test_held_and_skipped_steps(batched):
    """A step that a NaN has skipped depends on the old state alone; those beside it are as if it had not been."""
    tx = lambda lr: zf.chain(zf.scale_loss(), zf.accumulate(2), zf.clip_by_global_norm(9.0), zf.adamw(lr, eps=1e-3))  # noqa: E731
    good = torch.tensor([[0.3, -0.2], [0.1, 0.4]], dtype=F64)
    bad = torch.tensor([[torch.nan, 1.0]], dtype=F64)
    w = torch.tensor([1.0, 2.0], dtype=F64)
    rows = {"skipped": torch.cat([good[:1], bad, good[1:]]), "held": good[:1], "only bad": bad}
    if batched:
        alone = lambda w, g: vmap(lambda w: run(tx(0.1), g, w))(w[None])[0]  # noqa: E731
    else:
        alone = lambda w, g: run(tx(0.1), g, w)  # noqa: E731
    eye = torch.eye(2, dtype=F64)
    assert torch.equal(jacrev(alone)(w, rows["held"]), eye) and torch.equal(jacrev(alone)(w, rows["only bad"]), eye)
    torch.testing.assert_close(jacrev(alone)(w, rows["skipped"]), jacrev(alone)(w, good))
    by_rate = lambda g: grad(lambda lr: run(tx(lr), g, w).sum())(torch.tensor(0.1, dtype=F64))  # noqa: E731
    assert by_rate(rows["held"]) == 0 and by_rate(rows["only bad"]) == 0
    torch.testing.assert_close(by_rate(rows["skipped"]), by_rate(good))


def test_members_that_skip_have_finite_derivatives_beside_members_that_do_not():
    tx = zf.chain(zf.scale_loss("dynamic"), zf.clip_by_global_norm(1.0), zf.adamw(0.1), zf.ema(0.5))
    g = torch.tensor([[torch.inf, 1.0], [0.3, -2.0], [torch.nan, torch.nan]], dtype=F64)
    w = torch.tensor([1.0, 2.0], dtype=F64)
    got = jacrev(lambda w: vmap(lambda g: run(tx, [g], w))(g))(w)
    want = torch.stack([torch.eye(2, dtype=F64), jacrev(lambda w: run(tx, [g[1]], w))(w), torch.eye(2, dtype=F64)])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest", "kahan"])
def test_derivatives_pass_straight_through_roundings(rounding):
    """The formula's in fp32, near which a bf16 one must lie: cotangents of 16-bit states have 16 bits, 2^-8 each."""
    low = lambda lr: zf.chain(  # noqa: E731
        zf.precision(store_dtype=BF16, grad_dtype=torch.float32),
        zf.low_precision_adam(lr, eps=1e-3, weight_decay=0.1, rounding=rounding),
    )
    wide = lambda lr: zf.adamw(lr, eps=1e-3, weight_decay=0.1)  # noqa: E731
    gradients = torch.tensor([[0.5, -0.25], [0.25, 1.0], [-1.0, 0.5]])
    w = torch.tensor([1.0, -2.0])
    after = lambda tx, lr, g: run(tx(lr), g, w).float().sum()  # noqa: E731
    rate = torch.tensor(0.125)
    got = grad(lambda lr, g: after(low, lr, g), (0, 1))(rate, gradients)
    want = grad(lambda lr, g: after(wide, lr, g), (0, 1))(rate, gradients)
    torch.testing.assert_close(got, want, rtol=3 * 2**-7, atol=3 * 2**-7 * 0.125)
    leaf = rate.clone().requires_grad_()
    by_autograd = torch.autograd.grad(run(low(leaf), gradients, w, create_graph=True).float().sum(), leaf)[0]
    assert torch.equal(by_autograd, got[0])
    assert grad(grad(lambda lr: after(low, lr, gradients)))(rate).isfinite()


def test_weights_and_scales():
    """By the weight of a micro-batch, and through a loss scale by a tensor in the closure of the loss."""
    tx = zf.chain(zf.scale_loss(1024.0), zf.accumulate(2, weighted=True), zf.sgd(0.5))
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=F64)

    def after(weights, factor):
        state = zf.init(tx, {"w": torch.ones(2, dtype=F64)})
        step = zf.make_step(lambda p, x: factor * (p["w"] * x).square().sum(), tx)
        for row, weight in zip(x, weights, strict=True):
            state, _ = step(state, row, weight=weight)
        return state.leaves["w"].prod()

    def by_hand(weights, factor):
        g = (weights[:, None] * 2 * factor * x.square()).sum(0) / weights.sum()
        return (1 - 0.5 * g).prod()

    at = torch.tensor([1.0, 3.0], dtype=F64), torch.tensor(0.7, dtype=F64)
    torch.testing.assert_close(grad(after, (0, 1))(*at), grad(by_hand, (0, 1))(*at))
    torch.testing.assert_close(hessian(after, (0, 1))(*at), hessian(by_hand, (0, 1))(*at))
    leaves = [y.clone().requires_grad_() for y in at]
    state = zf.init(tx, {"w": torch.ones(2, dtype=F64)})
    step = zf.make_step(lambda p, x: leaves[1] * (p["w"] * x).square().sum(), tx, create_graph=True)
    for row, weight in zip(x, leaves[0], strict=True):
        state, _ = step(state, row, weight=weight)
    got = torch.autograd.grad(state.leaves["w"].prod(), leaves)
    torch.testing.assert_close(got, grad(by_hand, (0, 1))(*at))


def test_through_groups_guests_and_functions_of_ones_own():
    @zf.leafwise
    def halved(grad, param):
        return grad / (1 + grad.norm())

    class Descent:
        def init(self, params):
            return ()

        def update(self, updates, state, params=None):
            return {path: -rate_of[0] * g for path, g in updates.items()}, state

    x = torch.tensor([2.0, -1.0], dtype=F64)
    rate_of = [0.0]
    on = lambda path: path == "a"  # noqa: E731
    which = lambda path: "x" if path == "a" else "y"  # noqa: E731

    def pipelines(lr):
        rate_of[0] = lr
        both = {"x": zf.sgd(lr), "y": zf.chain(zf.clip_by_value(1.0), zf.sgd(2 * lr))}
        return [
            (zf.partition(both, which), lambda g: (lr * g["a"], 2 * lr * g["b"].clamp(-1, 1))),
            (zf.chain(zf.masked(halved(), on), zf.sgd(lr)), lambda g: (lr * g["a"] / (1 + g["a"].norm()), lr * g["b"])),
            (zf.chain(Descent()), lambda g: (lr * g["a"], lr * g["b"])),
        ]

    for i in range(3):

        def ours(lr, x, i=i):
            tx = pipelines(lr)[i][0]
            step = zf.make_step(lambda p: (p["a"] * x).square().sum() + (p["b"] * x).sum().exp(), tx)
            state, _ = step(zf.init(tx, {"a": x.detach() + 1, "b": torch.zeros(2, dtype=F64)}))
            return sum(y.square().sum() for y in state.leaves.values())

        def by_hand(lr, x, i=i):
            a = x.detach() + 1
            da, db = pipelines(lr)[i][1]({"a": 2 * a * x**2, "b": x})
            return (a - da).square().sum() + db.square().sum()

        at = torch.tensor(0.1, dtype=F64), x
        torch.testing.assert_close(grad(ours, (0, 1))(*at), grad(by_hand, (0, 1))(*at))
        torch.testing.assert_close(hessian(ours)(*at), hessian(by_hand)(*at))
