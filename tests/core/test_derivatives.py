"""Derivatives of kernels that are written by hand: those of the formula, to third order, in every nesting."""

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

import zerofn as zf

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
X, Y = (torch.randn(s, dtype=F64, generator=GENERATOR) for s in ((5, 3), (5,)))
W, V = (torch.randn(3, dtype=F64, generator=GENERATOR) for _ in range(2))
MAKERS = {
    "adamw": lambda lr: zf.chain(zf.clip_by_global_norm(0.5), zf.adamw(lr, (0.8, 0.9), 1e-3, 0.1)),
    "adam": lambda lr: zf.adam(lr, (0.8, 0.9), 1e-3, 0.1),
}


def run(make, lr, w, x, steps=3, create_graph=None):
    """The loss after a few steps. Where the rate is a tensor, autograd goes through the formula."""
    loss = lambda p, x: ((torch.tanh(x @ p["w"]) + p["b"] - Y) ** 2).mean() + (p["w"] ** 3).sum()  # noqa: E731
    tx = make(lr)
    state = zf.init(tx, {"w": w, "b": torch.zeros((), dtype=F64)}, create_graph=bool(create_graph))
    step = zf.make_step(loss, tx, create_graph=create_graph)
    for _ in range(steps):
        state, _ = step(state, x)
    kept = sum((m**2).sum() for m in state.transforms[list(state.transforms)[-1]]["exp_avg_sq"].values())
    return loss(state.params, x) + kept, state


def pair(name):
    """By hand, and through the formula."""
    rates = 0.1, torch.tensor(0.1, dtype=F64)
    return [lambda w, x, steps=3, lr=lr: run(MAKERS[name], lr, w, x, steps)[0] for lr in rates]


def both(name, derivative):
    ours, theirs = (torch.cat([t.flatten() for t in derivative(f)]) for f in pair(name))
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", MAKERS)
def test_it_is_that_of_the_formula(name):
    both(name, lambda f: grad(f, (0, 1))(W, X))
    both(name, lambda f: jvp(grad(f, (0, 1)), (W, X), (V, X * X))[1])
    both(name, lambda f: vmap(grad(f), (0, None))(torch.stack([W, V]), X))
    both(name, lambda f: [grad(lambda w: (grad(f)(w, X) * V).sum())(W)])
    both(name, lambda f: [jacrev(grad(f))(W, X), hessian(f)(W, X), jacrev(jacrev(f))(W, X)])
    both(name, lambda f: [grad(lambda w: (grad(lambda w: (grad(f)(w, X, 2) * V).sum())(w) * V).sum())(W)])
    both(name, lambda f: vmap(vjp(lambda w: f(w, X), W)[1])(torch.tensor([1.0, 2.0], dtype=F64)))


@pytest.mark.parametrize("name", MAKERS)
def test_by_plain_autograd(name):
    found = []
    for lr in (0.1, torch.tensor(0.1, dtype=F64)):
        w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
        out, state = run(MAKERS[name], lr, w, x, create_graph=True)
        taken = state.leaves["w"].grad_fn.name() == "_RecordedBackward"
        assert taken == isinstance(lr, float)
        first = torch.autograd.grad(out, (w, x), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (w, x))
        found.append((*first, *second))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", MAKERS)
def test_numbers_are_the_kernels(name):
    tx = MAKERS[name](0.1)
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(67, generator=generator), "b": torch.randn(3, 5, generator=generator)}
    grads = {p: torch.randn(x.shape, generator=generator) for p, x in params.items()}
    plain = recorded = zf.init(tx, params)
    for _ in range(3):
        plain, _ = zf.update(tx, grads, plain)
        recorded, _ = zf.update(tx, grads, recorded, create_graph=True)
        own = grads | {"w": grads["w"].clone().requires_grad_()}
        followed, _ = zf.update(tx, own, plain)
        assert followed.leaves["w"].requires_grad and not followed.leaves["b"].isnan().any()
    for path, x in plain.leaves.items():
        # The clip's norm is summed in another order where it is recorded.
        torch.testing.assert_close(recorded.leaves[path], x, rtol=0, atol=0 if name == "adam" else 3e-7)
