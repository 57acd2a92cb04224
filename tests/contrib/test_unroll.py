"""`zf.unroll`: derivatives are those of the steps one after the other, and little is kept between them."""

import weakref

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jvp, vmap
from torch.utils._pytree import tree_leaves

import zerofn as zf

F64 = torch.float64
RATE, W = torch.tensor(0.1, dtype=F64), torch.tensor([0.3, -0.2, 1.0], dtype=F64)
X = torch.randn(7, 5, 3, dtype=F64, generator=torch.Generator().manual_seed(0))


def loss(p, x):
    return (torch.tanh(x @ p["w"]) - 0.3).square().mean() + 0.1 * (p["w"] ** 2).sum()


def tx(rate):
    return zf.chain(zf.accumulate(2), zf.clip_by_global_norm(0.3), zf.adamw(rate, eps=1e-3), zf.ema(0.9))


def step(state, x, rate):
    return zf.make_step(loss, tx(rate))(state, x)


def unrolled(rate, w, xs, every=3, create_graph=False):
    state, losses = zf.unroll(step, zf.init(tx(rate), {"w": w}, create_graph=create_graph), list(xs), rate, every=every)
    assert losses.shape == (len(xs),) and state.step == len(xs) // 2
    return state.leaves["w"].square().sum() + losses.mean()


def one_by_one(rate, w, xs):
    state, losses = zf.init(tx(rate), {"w": w}), []
    for x in xs:
        state, metrics = step(state, x, rate)
        losses.append(metrics["loss"])
    return state.leaves["w"].square().sum() + torch.stack(losses).mean()


def agree(got, want):
    """To double precision: backward adds what comes from the segments in another order."""
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert b.abs().max() > 1e-6


@pytest.mark.parametrize("every", [3, 9, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 7))])
def test_derivatives_are_those_of_the_steps(every):
    ours = lambda *a: unrolled(*a, every=every)  # noqa: E731
    assert unrolled(RATE, W, X, every) == one_by_one(RATE, W, X)
    agree(grad(ours, (0, 1, 2))(RATE, W, X), grad(one_by_one, (0, 1, 2))(RATE, W, X))
    leaves = [x.clone().requires_grad_() for x in (RATE, W, X)]
    got = torch.autograd.grad(unrolled(*leaves, every, create_graph=True), leaves)
    agree(got, grad(one_by_one, (0, 1, 2))(RATE, W, X))


def test_batches_may_be_the_rows_of_a_tensor_or_come_one_by_one():
    start = zf.init(tx(RATE), {"w": W})
    expected = zf.unroll(step, start, list(X), RATE, every=3)[1]
    assert torch.equal(zf.unroll(step, start, X, RATE, every=3)[1], expected)
    assert torch.equal(zf.unroll(step, start, iter(X), RATE, every=3)[1], expected)


def test_other_transforms_and_second_derivatives():
    at, ones = (RATE, W, X), tuple(map(torch.ones_like, (RATE, W, X)))
    agree(jvp(unrolled, at, ones), jvp(one_by_one, at, ones))
    agree(hessian(unrolled, (0, 1))(*at), hessian(one_by_one, (0, 1))(*at))
    rates = torch.tensor([0.1, 0.2], dtype=F64)
    agree(vmap(lambda r: grad(unrolled)(r, W, X))(rates), vmap(lambda r: grad(one_by_one)(r, W, X))(rates))
    leaves = [x.clone().requires_grad_() for x in at]
    (first,) = torch.autograd.grad(unrolled(*leaves, create_graph=True), leaves[1], create_graph=True)
    want = grad(lambda *a: grad(one_by_one, 1)(*a).square().sum(), (0, 1, 2))(*at)
    agree(torch.autograd.grad(first.square().sum(), leaves), want)


def test_between_states_nothing_is_kept():
    """Of 12 steps at every 4th: what autograd saves are the inputs of three segments, and none of their activations."""
    saved = []

    class Kept:
        def __init__(self, x):
            self.x = x
            saved.append(weakref.ref(self))

    leaf = torch.tensor(0.1, requires_grad=True)
    start = zf.init(zf.sgd(0.1), {"w": torch.ones(3)})
    plain = lambda s, x, rate: zf.make_step(lambda p, x: (p["w"] * x).exp().sum(), zf.sgd(rate))(s, x)  # noqa: E731
    xs = [torch.full((3,), 0.1 * i) for i in range(12)]
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.x):
        state, _ = zf.unroll(plain, start, xs, leaf, every=4)
    assert state.leaves["w"].requires_grad
    state_and_batches = len(tree_leaves(start)) + 4 + 1
    assert sum(ref() is not None for ref in saved) == 3 * state_and_batches


def test_a_step_that_has_a_rate_from_elsewhere_is_refused():
    """Even where the first step is held, so that its rate is looked at in the second only."""
    leaf = RATE.clone().requires_grad_()

    def after(rate, create_graph=False):
        w = W.clone().requires_grad_() if create_graph else W
        state = zf.init(tx(rate), {"w": w}, create_graph=create_graph)
        return zf.unroll(lambda s, x: step(s, x, rate), state, list(X), every=3)[0].leaves["w"].sum()

    with pytest.raises(RuntimeError, match="whose closure has a tensor"):
        after(leaf, create_graph=True).backward()
    for call in (
        lambda: grad(after)(RATE),
        lambda: jvp(grad(after), (RATE,), (RATE,)),
        lambda: vmap(grad(after))(RATE[None]),
    ):
        with pytest.raises(RuntimeError, match="whose closure has a tensor"):
            call()
    assert after(RATE).isfinite()
    with pytest.raises(ValueError, match="there is no step to run"):
        zf.unroll(step, zf.init(tx(RATE), {"w": W}), [], RATE, every=2)
    with pytest.raises(ValueError, match="every"):
        zf.unroll(step, zf.init(tx(RATE), {"w": W}), list(X), RATE, every=0)


def noisy(p, x):
    """Dropout, and noise on the target."""
    y = torch.nn.functional.dropout(x, 0.5) @ p["w"]
    return (torch.tanh(y) - 0.3 * torch.randn(len(x), dtype=x.dtype)).square().mean()


def noisy_step(state, x, rate):
    return zf.make_step(noisy, tx(rate))(state, x)


def seeded(rate, every=None):
    """After seven steps from one seed: by `zf.unroll` if `every` is given."""
    torch.manual_seed(3)
    state, losses = zf.init(tx(rate), {"w": W}), []
    if every is not None:
        state, losses = zf.unroll(noisy_step, state, list(X), rate, every=every)
        return state.leaves["w"].square().sum() + losses.mean()
    for x in X:
        state, metrics = noisy_step(state, x, rate)
        losses.append(metrics["loss"])
    return state.leaves["w"].square().sum() + torch.stack(losses).mean()


HOW = {
    "grad": lambda fn: torch.func.grad_and_value(fn)(RATE)[::-1],
    "jvp": lambda fn: jvp(fn, (RATE,), (torch.ones_like(RATE),)),
    "second": lambda fn: (fn(RATE), grad(grad(fn))(RATE)),
    "forward over reverse": lambda fn: (fn(RATE), jvp(grad(fn), (RATE,), (torch.ones_like(RATE),))),
}


@pytest.mark.parametrize("how", HOW)
def test_steps_that_are_run_again_draw_the_same_random_numbers(how):
    agree(HOW[how](lambda rate: seeded(rate, 3)), HOW[how](seeded))


def test_random_numbers_go_on_behind_an_unrolled_run_as_behind_its_steps():
    """Plain autograd: neither what is tried first nor what backward runs again moves torch's generator."""
    h = 1e-6
    leaf = RATE.clone().requires_grad_()
    value = seeded(leaf, 3)
    ahead = torch.rand(4)
    (slope,) = torch.autograd.grad(value, leaf)
    state = torch.get_rng_state()
    # A difference of two fp64 values over 2e-6.
    torch.testing.assert_close(slope, (seeded(RATE + h) - seeded(RATE - h)) / (2 * h), rtol=1e-6, atol=1e-8)
    torch.set_rng_state(state)
    behind = torch.rand(4)
    seeded(RATE)
    assert torch.equal(torch.rand(8), torch.cat([ahead, behind]))
    grad(lambda rate: seeded(rate, 3))(RATE)
    assert torch.equal(torch.rand(4), ahead)


@pytest.mark.parametrize("plain", [False, True], ids=["torch.func", "autograd"])
@pytest.mark.parametrize("inside", [False, True], ids=["ended", "on"])
def test_steps_that_are_run_again_have_the_autocast_of_forward(plain, inside):
    """Backward outside of the context, and a backward inside of one that forward did not have."""

    def final(rate, every=None):
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            return unrolled(rate, W.float(), X.float(), every) if every else one_by_one(rate, W.float(), X.float())

    def slope(fn):
        if plain and fn is not final:
            leaf = RATE.float().requires_grad_()
            value = fn(leaf)
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                return torch.autograd.grad(value, leaf)[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return grad(fn)(RATE.float())

    # The same products of bf16 numbers, added up in another order.
    torch.testing.assert_close(slope(lambda rate: final(rate, 3)), slope(final), rtol=1e-3, atol=1e-5)


def slope(fn):
    return lambda rate: jvp(fn, (rate,), (torch.ones_like(rate),))[1]


TAKEN = {
    "forward over forward": lambda fn: slope(slope(fn))(RATE),
    "jacfwd of jacfwd": lambda fn: jacfwd(jacfwd(fn))(RATE),
    "third in forward mode": lambda fn: slope(slope(slope(fn)))(RATE),
    "forward over forward over reverse": lambda fn: slope(slope(grad(fn)))(RATE),
    "reverse over forward": lambda fn: grad(slope(fn))(RATE),
    "vmap": lambda fn: vmap(fn)(RATES),
    "vmap of vmap": lambda fn: vmap(vmap(fn))(RATES[None]),
    "vmap of grad": lambda fn: vmap(grad(fn))(RATES),
    "grad over vmap": lambda fn: grad(lambda rates: vmap(fn)(rates).sum())(RATES),
    "forward over vmap": lambda fn: jvp(lambda rates: vmap(fn)(rates), (RATES,), (RATES,))[1],
    "vmap of forward": lambda fn: vmap(slope(fn))(RATES),
}
RATES = torch.stack([RATE, RATE / 3])


# The others are of two of these.
SLOW = ("jacfwd of jacfwd", "third in forward mode", "vmap of vmap", "forward over vmap", "vmap of forward")


@pytest.mark.parametrize("how", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in TAKEN])
def test_transforms_of_torch_func_in_any_order(how):
    agree(TAKEN[how](lambda rate: unrolled(rate, W, X)), TAKEN[how](lambda rate: one_by_one(rate, W, X)))


def test_plain_autograd_over_vmap():
    leaf = RATES.clone().requires_grad_()
    (got,) = torch.autograd.grad(vmap(lambda rate: unrolled(rate, W, X, create_graph=True))(leaf).sum(), leaf)
    agree(got, vmap(grad(lambda rate: one_by_one(rate, W, X)))(RATES))


def epochs(rate, xs):
    """Two steps for each batch, as a step of their own."""

    def epoch(state, x, rate):
        state, losses = zf.unroll(step, state, [x, x.flip(0)], rate, every=1)
        return state, {"loss": losses.sum()}

    state, losses = zf.unroll(epoch, zf.init(tx(rate), {"w": W}), list(xs), rate, every=2)
    return state.leaves["w"].square().sum() + losses.mean() / 2


@pytest.mark.parametrize(
    "how",
    ["vmap of grad", "forward over forward", *(pytest.param(x, marks=pytest.mark.slow) for x in ("grad", "second"))],
)
def test_a_step_may_itself_be_an_unrolled_run(how):
    how = {"grad": lambda fn: grad(fn)(RATE), "second": lambda fn: grad(grad(fn))(RATE), **TAKEN}[how]
    rows = torch.stack([y for x in X[:4] for y in (x, x.flip(0))])
    agree(how(lambda rate: epochs(rate, X[:4])), how(lambda rate: one_by_one(rate, W, rows)))


def test_a_rate_from_elsewhere_that_comes_in_late_is_refused_as_well():
    """A schedule that reads it from the third update on. Forward mode, which runs no step again, is right."""

    def last(late, run):
        chain = zf.sgd(lambda step: late if step >= 2 else 0.1)
        state, step = zf.init(chain, {"w": W}), zf.make_step(loss, chain)
        if run == "unroll":
            return zf.unroll(step, state, list(X), every=3)[1].sum()
        losses = []
        for x in X:
            state, metrics = step(state, x)
            losses.append(metrics["loss"])
        return torch.stack(losses).sum()

    with pytest.raises(RuntimeError, match="whose closure has a tensor"):
        grad(last)(RATE, "unroll")
    agree(slope(lambda rate: last(rate, "unroll"))(RATE), grad(last)(RATE, "loop"))
