"""The pure route under every torch.func transform, in every container, against plain functions of plain tensors."""

import copy
import gc
import pickle
from collections import OrderedDict
from typing import NamedTuple

import optree
import pytest
import torch
from models import Dot
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_map as torch_map

import zerofn as zf
from zerofn.testing import assert_trees_close, assert_trees_equal, random_like

F64 = torch.float64
# Powers of two: multiplied and divided without a rounding, so that everything below is bitwise or float64.
PIPES = {
    "plain": zf.sgd(0.1),
    "scaled": zf.chain(zf.scale_loss(1024.0), zf.sgd(0.1)),
    "dynamic": zf.chain(zf.scale_loss("dynamic"), zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.adamw(0.1)),
    "wide": zf.chain(zf.precision(store_dtype=F64), zf.scale_loss(64.0), zf.sgd(0.1)),
}
PARAMS = random_like(
    {"w": torch.zeros(3, 4, dtype=F64), "b": [torch.zeros(4, dtype=F64), torch.zeros((), dtype=F64)]}, 0
)
X = random_like(torch.zeros(6, 3, dtype=F64), 1)


def net(p, x):
    return torch.tanh(x @ p["w"] + p["b"][0]) * p["b"][1]


def loss(p, x):
    return (net(p, x) ** 2).sum() + (p["w"] ** 3).sum()


@pytest.fixture(params=PIPES)
def pipe(request):
    tx = PIPES[request.param]
    state = zf.init(tx, PARAMS)
    return tx, state


def close(a, b):
    """Float64 on both sides; the same sums in another order."""
    assert_trees_close(a, b, ulps=256, floor=1.0)


# ---- torch.func through bind ----


def test_grad_vjp_jvp_jacobians_and_hessians(pipe):
    tx, state = pipe
    f, n, p = zf.bind(loss, tx, state), zf.bind(net, tx, state), state.params
    close(grad(f)(p, X), grad(loss)(PARAMS, X))
    close(grad(f, argnums=1)(p, X), grad(loss, argnums=1)(PARAMS, X))
    close(jacrev(n)(p, X), jacrev(net)(PARAMS, X))
    close(jacfwd(n)(p, X), jacfwd(net)(PARAMS, X))
    close(hessian(f)(p, X), hessian(loss)(PARAMS, X))
    close(jacrev(jacrev(f))(p, X), hessian(loss)(PARAMS, X))
    close(jacrev(jacfwd(f))(p, X), hessian(loss)(PARAMS, X))
    tangents = random_like(PARAMS, 2), random_like(X, 3)
    close(jvp(n, (p, X), tangents), jvp(net, (PARAMS, X), tangents))
    cotangent = random_like(net(PARAMS, X), 4)
    close(vjp(n, p, X)[1](cotangent), vjp(net, PARAMS, X)[1](cotangent))


def test_hessian_vector_products_in_every_order(pipe):
    tx, state = pipe
    f, v = zf.bind(loss, tx, state), random_like(PARAMS, 5)
    expected = jvp(lambda p: grad(loss)(p, X), (PARAMS,), (v,))[1]
    dot = lambda a, b: sum((x * y).sum() for x, y in zip(*(optree.tree_leaves(t) for t in (a, b)), strict=True))  # noqa: E731
    close(jvp(lambda p: grad(f)(p, X), (state.params,), (v,))[1], expected)
    close(grad(lambda p: dot(grad(f)(p, X), v))(state.params), expected)
    close(grad(lambda p: jvp(lambda q: f(q, X), (p,), (v,))[1])(state.params), expected)
    close(vjp(lambda p: grad(f)(p, X), state.params)[1](v)[0], expected)


def test_third_order(pipe):
    tx, state = pipe
    scalar = lambda f: lambda s: f({"w": PARAMS["w"] * s, "b": PARAMS["b"]}, X)  # noqa: E731
    one = torch.ones((), dtype=F64)
    close(grad(grad(grad(scalar(zf.bind(loss, tx, state)))))(one), grad(grad(grad(scalar(loss))))(one))


def test_vmap_inside_and_outside_of_derivatives(pipe):
    tx, state = pipe
    f, p = zf.bind(loss, tx, state), state.params
    close(vmap(grad(f), (None, 0))(p, X), vmap(grad(loss), (None, 0))(PARAMS, X))
    close(grad(lambda p: vmap(f, (None, 0))(p, X).sum())(p), grad(lambda p: vmap(loss, (None, 0))(p, X).sum())(PARAMS))
    close(grad(lambda x: vmap(f, (None, 0))(p, x).sum())(X), grad(lambda x: vmap(loss, (None, 0))(PARAMS, x).sum())(X))
    v = random_like(PARAMS, 6)
    hvp = lambda f: lambda p, x: jvp(lambda q: grad(f)(q, x), (p,), (v,))[1]  # noqa: E731
    close(vmap(hvp(f), (None, 0))(p, X), vmap(hvp(loss), (None, 0))(PARAMS, X))
    nested = lambda f, p: grad(lambda q: vmap(vmap(f, (None, 0)), (None, 0))(q, X.view(2, 3, 3)).sum())(p)  # noqa: E731
    close(nested(f, p), nested(loss, PARAMS))


def test_plain_autograd_through_bind(pipe):
    tx, state = pipe
    leaves = [x.clone().requires_grad_() for x in (state.params["w"], *state.params["b"])]
    x = X.clone().requires_grad_()
    out = zf.bind(loss, tx, state)({"w": leaves[0], "b": leaves[1:]}, x)
    got = torch.autograd.grad(out, [*leaves, x], create_graph=True)
    expected = grad(loss, argnums=(0, 1))(PARAMS, X)
    close(list(got), [expected[0]["w"], *expected[0]["b"], expected[1]])
    second = torch.autograd.grad(sum((g**2).sum() for g in got), x)[0]
    norm = lambda x: sum((g**2).sum() for g in optree.tree_leaves(grad(loss, argnums=(0, 1))(PARAMS, x)))  # noqa: E731
    close(second, grad(norm)(X))
    rows = vmap(lambda row: zf.bind(loss, tx, state)(state.params, row))(x)
    close(torch.autograd.grad(rows.sum(), x)[0], vmap(grad(loss, argnums=1), (None, 0))(PARAMS, X))


def test_functional_call_through_bind():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    tx = PIPES["scaled"]
    params = dict(model.named_parameters())
    state = zf.init(tx, params)
    f = lambda p, x: functional_call(model, p, (x,)).square().mean()  # noqa: E731
    close(grad(zf.bind(f, tx, state))(state.params, X), grad(f)({k: x.detach() for k, x in params.items()}, X))


def test_compute_dtype_has_the_bits_of_a_cast_by_hand():
    """bf16 with a power-of-two scale: the exponent moves, no bit is lost."""
    tx = zf.chain(
        zf.precision(param_dtype=torch.bfloat16, output_dtype=torch.float32), zf.scale_loss(2.0**12), zf.sgd(0.1)
    )
    params = random_like({"w": torch.zeros(3, 4), "v": torch.zeros(4)}, 0)
    x = random_like(torch.zeros(6, 3), 1).bfloat16()
    f = lambda p, x: torch.tanh(x @ p["w"]) @ p["v"]  # noqa: E731
    state = zf.init(tx, params)
    by_hand = lambda p, x: f({k: v.bfloat16() for k, v in p.items()}, x).float()  # noqa: E731
    (out, pull), (expected, pull_expected) = vjp(zf.bind(f, tx, state), state.params, x), vjp(by_hand, params, x)
    c = random_like(out, 2)
    assert_trees_equal(out, expected)
    assert_trees_equal(pull(c), pull_expected(c))
    out, pullback = zf.vjp(f, tx, state, x)
    assert_trees_equal((out, pullback(c)), (expected, pull_expected(c)))


# ---- vjp ----


def test_vjp_of_any_tree_and_several_pullbacks(pipe):
    tx, state = pipe

    def fn(p, x, y):
        return {
            "a": net(p, x["in"]),
            "list": [x["in"] * 2, (p["b"][1] * y).sum()],
            "none": None,
            "int": torch.arange(3),
        }

    inputs = {"in": X, "n": torch.arange(4)}, random_like(torch.zeros(2, dtype=F64), 3)
    out, pullback = zf.vjp(fn, tx, state, *inputs)
    plain = fn(PARAMS, *inputs)
    assert_trees_close(out, plain, ulps=4, floor=1.0)
    for seed in (10, 11, 12):
        cotangents = {**random_like({k: plain[k] for k in ("a", "list")}, seed), "none": None, "int": torch.zeros(3)}
        grads, of_x, of_y = pullback(cotangents)

        def dot(p, x, y, c=cotangents):
            o = fn(p, {"in": x, "n": None}, y)
            return (o["a"] * c["a"]).sum() + (o["list"][0] * c["list"][0]).sum() + o["list"][1] * c["list"][1]

        expected = grad(dot, argnums=(0, 1, 2))(PARAMS, X, inputs[1])
        close([grads, of_x["in"], of_y], list(expected))
        assert of_x["n"] is None
        assert not any(g.requires_grad for g in optree.tree_leaves(grads))


def test_vjp_gradient_feeds_update_as_a_step_does(pipe):
    tx, state = pipe
    out, pullback = zf.vjp(loss, tx, state, X)
    by_hand = zf.update(tx, pullback(torch.ones_like(out))[0], state)[0]
    by_step, metrics = zf.make_step(loss, tx)(state, X)
    assert_trees_equal(by_hand, by_step)
    assert_trees_equal(metrics["loss"], out)
    by_bind = zf.update(tx, grad(zf.bind(loss, tx, state))(state.params, X), state)[0]
    # The same operations, recorded by another machine that may add two cotangents in another order.
    close(by_bind.leaves, by_step.leaves)


def test_vjp_inside_torch_func(pipe):
    tx, state = pipe

    def norm(p_fn, x):
        g, *_ = p_fn(x)
        return sum((t**2).sum() for t in optree.tree_leaves(g))

    def ours(x):
        out, pullback = zf.vjp(loss, tx, state, x)
        return norm(lambda x: pullback(torch.ones_like(out)), x)

    expected = grad(lambda x: norm(lambda x: (grad(loss)(PARAMS, x),), x))(X)
    close(grad(ours)(X), expected)
    rows = vmap(lambda x: zf.vjp(loss, tx, state, x)[1](torch.ones((), dtype=F64))[1])(X)
    close(rows, vmap(grad(loss, argnums=1), (None, 0))(PARAMS, X))


def test_unused_parameters_have_no_gradient():
    tx = zf.adamw(0.1)
    state = zf.init(tx, {"a": torch.ones(2), "b": torch.ones(2)})
    _, pullback = zf.vjp(lambda p: p["a"].sum(), tx, state)
    assert pullback(torch.ones(()))[0]["b"] is None
    state, _ = zf.make_step(lambda p: p["a"].sum(), tx)(state)
    assert torch.equal(state.params["b"], torch.ones(2)) and not torch.equal(state.params["a"], torch.ones(2))


# ---- containers ----


class Pair(NamedTuple):
    left: torch.Tensor
    right: list


@optree.dataclasses.dataclass(namespace="zerofn")
class Block:
    w: torch.Tensor
    inner: Pair
    scale: float = optree.dataclasses.field(default=2.0, pytree_node=False)


def nested():
    t = [torch.zeros(2, 2), torch.zeros(3), torch.zeros(()), torch.zeros(1), torch.zeros(2)]
    t = random_like(t, 3)
    return [
        OrderedDict([("z", t[0]), ("a", {"k": t[1]})]),
        (Block(t[2], Pair(t[3], [None, t[4]])), None),
        (),
        {},
    ]


def nested_loss(p, x):
    block = p[1][0]
    parts = p[0]["z"].sum() ** 2, (p[0]["a"]["k"] * 3).sum(), block.w**2 * block.scale
    return (sum(parts) + (block.inner.left * block.inner.right[1]).sum()) * x


def test_every_container_keeps_its_kind_and_its_numbers(pipe):
    tx, _ = pipe
    state = zf.init(tx, nested())
    step = zf.make_step(nested_loss, tx)
    flat = {
        p: x.double()
        for p, x in zip(("z", "k", "w", "left", "right"), optree.tree_leaves(nested(), namespace="zerofn"), strict=True)
    }

    def plain(p, x):
        return (p["z"].sum() ** 2 + (p["k"] * 3).sum() + p["w"] ** 2 * 2 + (p["left"] * p["right"]).sum()) * x

    flat = {k: x.to(next(iter(state.leaves.values())).dtype) for k, x in flat.items()}
    other, flat_step = zf.init(tx, flat), zf.make_step(plain, tx)
    for i in range(4):
        state, _ = step(state, torch.tensor(1.0 + i))
        other, _ = flat_step(other, torch.tensor(1.0 + i))
    assert_trees_close(
        list(state.leaves.values()), [other.leaves[k] for k in ("z", "k", "w", "left", "right")], ulps=8, floor=1.0
    )
    params = zf.full_params(tx, state)
    assert type(params[0]) is OrderedDict and list(params[0]) == ["z", "a"]
    assert type(params[1][0]) is Block and type(params[1][0].inner) is Pair and params[1][0].scale == 2.0
    assert params[1][1] is None and params[1][0].inner.right[0] is None and params[2:] == [(), {}]
    grads = zf.vjp(nested_loss, tx, state, torch.ones(()))[1](torch.ones(()))[0]
    state, _ = zf.update(tx, grads, state)
    assert set(state.leaves) == {"0.z", "0.a.k", "1.0.w", "1.0.inner.left", "1.0.inner.right.1"}


def test_one_tensor_is_a_tree():
    tx = zf.sgd(1.0)
    state, _ = zf.make_step(lambda p: (p**2).sum(), tx)(zf.init(tx, torch.ones(2)))
    assert torch.equal(zf.full_params(tx, state), -torch.ones(2))


def test_none_entries_are_kept():
    tx = zf.adamw(0.1)
    state = zf.init(tx, {"w": torch.ones(2), "bias": None})
    state, _ = zf.make_step(lambda p: p["w"].sum() if p["bias"] is None else 1 / 0, tx)(state)
    assert state.params["bias"] is None and list(state.leaves) == ["w"]


def test_tied_leaves_are_one_parameter(pipe):
    tx, _ = pipe
    w = random_like(torch.zeros(3, 3, dtype=F64), 0)

    def tied(p, x):
        return ((x @ p["embed"]).tanh() @ p["head"].T).square().sum()

    def untied(p, x):
        return tied({"embed": p["w"], "head": p["w"]}, x)

    state, other = zf.init(tx, {"embed": w, "head": w}), zf.init(tx, {"w": w})
    assert list(state.leaves) == ["embed"]
    for i in range(4):
        x = random_like(X, i)
        expected, _ = zf.make_step(untied, tx)(other, x)
        out, pullback = zf.vjp(tied, tx, state, x)
        routes = [
            zf.make_step(tied, tx)(state, x)[0],
            zf.update(tx, pullback(torch.ones_like(out))[0], state)[0],
            zf.update(tx, grad(zf.bind(tied, tx, state))(state.params, x), state)[0],
        ]
        for route in routes:
            close(list(route.leaves.values()), list(expected.leaves.values()))
        state, other = routes[i % 3], expected
    params = zf.full_params(tx, state)
    assert params["embed"] is params["head"]
    assert not torch.equal(params["embed"], w)


def test_symmetric_tied_gradients_count_twice():
    """Autograd gives one tensor object for both terms of a sum; two uses are two gradients all the same."""
    tx, w = zf.sgd(1.0), torch.ones(2)
    state = zf.init(tx, {"a": w, "b": w})
    grads = grad(zf.bind(lambda p: (p["a"] + p["b"]).sum(), tx, state))(state.params)
    assert torch.equal(zf.update(tx, grads, state)[0].params["a"], torch.full((2,), -1.0))
    state, _ = zf.make_step(lambda p: (p["a"] + p["b"]).sum(), tx)(state)
    assert torch.equal(state.params["b"], torch.full((2,), -1.0))


# ---- ensembles ----


def stacked(states):
    return torch_map(lambda *xs: torch.stack(xs), *states)


def gentle(p, x):
    """Under which gradient descent does not diverge, which would magnify every rounding."""
    return 0.02 * loss(p, x)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", [*PIPES, "ema", "partition"])
def test_ensemble_is_a_loop_though_members_skip_at_different_steps(name, donate):
    groups = zf.partition({"w": zf.chain(zf.clip_by_global_norm(0.5), zf.adamw(0.1)), "b": zf.sgd(0.1)}, lambda p: p[0])
    more = {
        "ema": zf.chain(zf.scale_loss(), zf.adamw(0.1), zf.ema(0.5)),
        "partition": zf.chain(zf.scale_loss(), groups),
    }
    tx = {**PIPES, **more}[name]
    step = zf.make_step(gentle, tx, donate=donate)
    members = [zf.init(tx, random_like(PARAMS, s)) for s in range(3)]
    together = stacked(members)
    scaled = any(p.name == "scale_loss" for p in zf.chain(tx).parts)
    steps = [zf.make_step(gentle, tx) for _ in members]
    for i in range(7):
        x = random_like(torch.zeros(3, 6, 3, dtype=F64), 20 + i)
        if scaled:
            x[i % 3, 0, 0] = [torch.nan, torch.inf][i % 2] if i in (1, 2, 4, 6) else 1.0
        together, metrics = vmap(step)(together, x)
        results = [s(m, row) for s, m, row in zip(steps, members, x, strict=True)]
        members = [r[0] for r in results]
        skipped = [bool(r[1]["skipped"]) for r in results]
        assert metrics["skipped"].expand(3).tolist() == skipped
        assert metrics["updated"].expand(3).tolist() == [bool(r[1]["updated"]) for r in results]
        assert not scaled or any(skipped) == (i in (1, 2, 4, 6))
    # Fused kernels and the formula under vmap round differently, in each of 7 updates.
    for got, want in zip(together.leaves.values(), stacked(members).leaves.values(), strict=True):
        assert_trees_close(got, want, ulps=64, floor=1.0)
    for part in members[0].transforms:
        assert_trees_close(together.transforms[part], stacked(members).transforms[part], ulps=1e4, floor=1.0)
    assert_trees_equal(together.step, stacked(members).step)


def test_ensemble_over_learning_rates_and_with_shared_counters():
    """`vmap(init)` gives a stacked state; a schedule sees a tensor of steps."""
    tx = zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(zf.schedules.warmup_cosine(0.1, 2, 9)))
    params = random_like({"w": torch.zeros(4, 3, dtype=F64)}, 0)
    f = lambda p, x: (p["w"] * x).square().sum()  # noqa: E731
    together, members = vmap(lambda p: zf.init(tx, p))(params), [zf.init(tx, {"w": w}) for w in params["w"]]
    step = zf.make_step(f, tx)
    for i in range(5):
        x = random_like(params["w"], i)
        together, _ = vmap(step)(together, x)
        members = [step(m, row)[0] for m, row in zip(members, x, strict=True)]
    assert_trees_close(together.leaves["w"], torch.stack([m.leaves["w"] for m in members]), ulps=1e3, floor=1.0)


def test_ensemble_with_weights():
    tx = zf.chain(zf.accumulate(2, weighted=True), zf.sgd(0.5))
    f = lambda p, x: (p["w"] * x).sum() + (p["g"] ** 2) * x.sum()  # noqa: E731
    members = [zf.init(tx, random_like({"w": torch.zeros(3), "g": torch.zeros(())}, s)) for s in range(3)]
    together, step = stacked(members), zf.make_step(f, tx)
    for i in range(4):
        x, weights = random_like(torch.zeros(3, 3), i), torch.tensor([1.0, 0.0, 3.0]) + i % 2
        together, _ = vmap(lambda s, x, w: step(s, x, weight=w))(together, x, weights)
        members = [step(m, r, weight=w)[0] for m, r, w in zip(members, x, weights, strict=True)]
    assert_trees_close(together.leaves, stacked(members).leaves, ulps=16, floor=1.0)


ONE_STATE = {
    "sgd": zf.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": zf.adam(0.1),
    "bf16": zf.chain(zf.precision(store_dtype=torch.bfloat16), zf.low_precision_adam(0.1)),
    "clip": zf.chain(zf.clip_by_global_norm(0.5), zf.adamw(zf.schedules.step(0.1, 2, 0.5))),
    "accumulate": zf.chain(zf.accumulate(2), zf.sgd(0.1, momentum=0.9), zf.ema(0.5)),
    "scaled": zf.chain(zf.scale_loss("dynamic"), zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.adamw(0.1)),
    "ema": zf.chain(zf.scale_loss("dynamic"), zf.adamw(0.1), zf.ema(0.5)),
}


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("name", ONE_STATE)
def test_one_state_and_many_batches_are_as_many_steps(name, before):
    tx = ONE_STATE[name]
    step = zf.make_step(lambda p, x: gentle(torch_map(lambda t: t.to(F64), p), x), tx)
    start = zf.init(tx, PARAMS)
    for _ in range(before):
        start, _ = step(start, X)
    kept = copy.deepcopy(start)
    x = random_like(torch.zeros(2, 3, 6, 3, dtype=F64), 3)
    if name in ("scaled", "ema"):
        x[0, 1, 0, 0] = torch.inf
    together, metrics = vmap(step, in_dims=(None, 0))(start, x[0])
    assert_trees_equal(start, kept)
    members = [step(start, row) for row in x[0]]
    assert metrics["updated"].expand(3).tolist() == [bool(m["updated"]) for _, m in members]
    members = [state for state, _ in members]
    for more in (None, x[1]):
        if more is not None:
            together, _ = vmap(step)(together, more)
            members = [step(m, row)[0] for m, row in zip(members, more, strict=True)]
        for got, want in zip(together.leaves.values(), stacked(members).leaves.values(), strict=True):
            assert got.dtype == want.dtype
            assert_trees_close(got, want, ulps=64, floor=1.0)
        for part in start.transforms:
            assert_trees_close(together.transforms[part], stacked(members).transforms[part], ulps=1e4, floor=1.0)
        assert_trees_equal((together.step, together.micro_step), (stacked(members).step, stacked(members).micro_step))


def test_members_made_from_one_state_have_memory_of_their_own():
    tx = zf.chain(zf.accumulate(2), zf.sgd(0.1))
    state = zf.init(tx, PARAMS)
    together, _ = vmap(zf.make_step(gentle, tx), in_dims=(None, 0))(state, X)
    first, second = (torch_map(lambda x, i=i: x[i], together) for i in range(2))
    kept = copy.deepcopy(second)
    zf.make_step(gentle, tx, donate=True)(first, X)
    assert_trees_equal(second, kept)


def test_ensemble_times_batches_and_one_state_with_many_weights():
    tx = ONE_STATE["clip"]
    step = zf.make_step(gentle, tx)
    members = [zf.init(tx, random_like(PARAMS, s)) for s in range(2)]
    got = vmap(vmap(step, in_dims=(None, 0)), in_dims=(0, None))(stacked(members), X)[0]
    want = stacked([stacked([step(m, row)[0] for row in X]) for m in members])
    assert_trees_close(got.leaves, want.leaves, ulps=64, floor=1.0)
    tx = zf.chain(zf.accumulate(2, weighted=True), zf.sgd(0.5))
    step, weights = zf.make_step(gentle, tx), torch.tensor([1.0, 0.0, 3.0])
    state, _ = step(zf.init(tx, PARAMS), X, weight=2)
    got = vmap(lambda w: step(state, 2 * X, weight=w)[0])(weights)
    want = stacked([step(state, 2 * X, weight=w)[0] for w in weights])
    assert_trees_close(got.leaves, want.leaves, ulps=64, floor=1.0)


def test_a_state_for_many_batches_cannot_be_donated():
    tx = zf.sgd(0.1)
    state = zf.init(tx, PARAMS)
    with pytest.raises(
        ValueError, match=r"(?s)donate=True under torch.func.vmap.*share the memory.*write: zf.make_step"
    ):
        vmap(zf.make_step(loss, tx, donate=True), in_dims=(None, 0))(state, X)
    assert_trees_equal(state.params, PARAMS)


# ---- steps and states ----


def test_aux_and_metrics():
    tx = PIPES["dynamic"]
    fn = lambda p, x: (loss(p, x), {"out": net(p, x), "n": 3, "none": None})  # noqa: E731
    state = zf.init(tx, PARAMS)
    for held in (True, False):
        state, metrics = zf.make_step(fn, tx)(state, X)
        assert metrics["aux"]["n"] == 3 and metrics["aux"]["none"] is None
        assert not metrics["aux"]["out"].requires_grad and not metrics["loss"].requires_grad
        assert bool(metrics["updated"]) != held and float(metrics["loss_scale"]) == 2.0**16
    close(metrics["loss"], loss(PARAMS, X))
    norm = torch.cat([g.flatten() for g in optree.tree_leaves(grad(loss)(PARAMS, X))]).norm()
    close(metrics["grad_norm"].double(), norm)
    assert float(metrics["lr"]) == pytest.approx(0.1)


def test_states_pickle_copy_and_go_on():
    tx = PIPES["dynamic"]
    step = zf.make_step(nested_loss, tx)
    state = zf.init(tx, nested())
    for i in range(3):
        state, _ = step(state, torch.tensor(1.0 + i))
    again = pickle.loads(pickle.dumps(state))
    for other in (again, copy.deepcopy(state)):
        assert other.layout == state.layout and repr(other) == repr(state)
        assert_trees_equal(step(other, torch.tensor(5.0))[0], step(state, torch.tensor(5.0))[0])


def test_donated_state_keeps_its_memory_and_pure_one_its_numbers():
    tx = zf.chain(zf.accumulate(2), zf.adamw(0.1))
    for donate in (True, False):
        state = first = zf.init(tx, {"w": torch.ones(3)})
        address = state.leaves["w"].data_ptr()
        for _ in range(2):
            state, _ = zf.make_step(lambda p: (p["w"] ** 2).sum(), tx, donate=donate)(state)
        assert (state.leaves["w"].data_ptr() == address) == donate
        assert torch.equal(first.leaves["w"], torch.ones(3)) != donate


def test_what_a_donated_step_shows_is_from_before_its_update():
    tx, made = zf.sgd(1.0), []

    def fn(p):
        made.append(p["w"] * 2)
        aux = {"w": p["w"], "views": [p["w"][1:], p["w"].T.detach()], "out": made[-1], "n": 3, "none": None}
        return p["b"] + p["w"].sum() * 0, aux

    state, ones = zf.init(tx, {"w": torch.ones(2, 2), "b": torch.tensor(5.0)}), torch.ones(2, 2)
    step = zf.make_step(lambda p: (fn(p)[0] + p["w"].sum(), fn(p)[1]), tx, donate=True)
    state, metrics = step(state)
    assert torch.equal(state.params["w"], ones - 1)
    aux = metrics["aux"]
    assert torch.equal(aux["w"], ones) and torch.equal(aux["views"][0], ones[1:]) and torch.equal(aux["views"][1], ones)
    # Nothing else is copied.
    assert aux["out"].data_ptr() == made[-1].data_ptr() and aux["n"] == 3 and aux["none"] is None
    step, state = zf.make_step(lambda p: p, tx, donate=True), zf.init(tx, torch.tensor(5.0))
    state, metrics = step(state)
    assert (float(metrics["loss"]), float(state.params)) == (5.0, 4.0)
    # The parameters of a held step go on to the next state, which is donated too.
    tx = zf.chain(zf.accumulate(2), zf.sgd(1.0))
    step, state = zf.make_step(lambda p: (p["w"].sum(), p["w"]), tx, donate=True), zf.init(tx, {"w": ones})
    state, held = step(state)
    state, _ = step(state)
    assert torch.equal(held["aux"], ones) and torch.equal(state.params["w"], ones - 1)


def test_a_donated_state_is_not_used_again(tmp_path):
    """It would be the next state's numbers with its own counters, without a word."""
    tx = zf.adamw(0.1)
    plain, step = (zf.make_step(lambda p: (p["w"] ** 2).sum(), tx, donate=d) for d in (False, True))
    old = zf.init(tx, {"w": torch.ones(3)})
    plain(old)
    new, _ = step(old)
    uses = {
        "a step": lambda s: plain(s),
        "a step ": lambda s: step(s),
        "zf.update": lambda s: zf.update(tx, {"w": torch.ones(3)}, s),
        "zf.full_params": lambda s: zf.full_params(tx, s),
        "zf.bind": lambda s: zf.bind(lambda p: p["w"], tx, s),
        "zf.vjp": lambda s: zf.vjp(lambda p: p["w"], tx, s),
        "zf.save": lambda s: zf.save(tmp_path / "saved", s),
    }
    for name, use in uses.items():
        with pytest.raises(RuntimeError, match=rf"(?s){name.strip()}.*that was donated.*write: state, metrics = step"):
            use(old)
    # One that a step has refused is still there.
    with pytest.raises(TypeError):
        step(new, torch.ones(1), torch.ones(1))
    for name, use in uses.items():
        use(copy.deepcopy(new) if name == "a step " else new)


@pytest.mark.parametrize("donate", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_thousand_steps_keep_what_ten_keep(donate):
    """By a rate that requires grad and is to be a constant: tensors and nodes of graphs that are alive."""
    tx = zf.chain(zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.adamw(torch.tensor(0.1, requires_grad=True)))
    step = zf.make_step(lambda p, x: ((p["w"] - x) ** 2).sum(), tx, donate=donate, create_graph=False)
    state, x, found = zf.init(tx, {"w": torch.ones(3)}), torch.zeros(3), []
    # What other tests have left is not counted: it may go in the meantime.
    gc.freeze()
    try:
        for i in range(1001):
            state, metrics = step(state, x)
            assert metrics["loss"].grad_fn is None and state.leaves["w"].grad_fn is None
            if i in (10, 1000):
                gc.collect()
                found.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    finally:
        gc.unfreeze()
    assert found[0] == found[1] > 0


def test_a_gradient_in_the_memory_of_a_donated_parameter_is_read_before_that_is_written():
    tx, params = zf.sgd(1.0), {"a": torch.full((2,), 3.0), "b": torch.full((2,), 5.0)}
    for donate in (False, True):
        state, _ = zf.make_step(lambda p: Dot.apply(p["a"], p["b"]), tx, donate)(zf.init(tx, params))
        assert_trees_equal(state.params, {"a": torch.full((2,), -2.0), "b": torch.full((2,), 2.0)})


def test_init_shares_no_memory_and_updates_write_no_caller_tensor():
    params = {"w": torch.ones(3), "t": torch.arange(6.0).view(2, 3).T}
    tx = zf.sgd(0.1)
    state = zf.init(tx, params)
    zf.make_step(lambda p: p["w"].sum() + p["t"].sum(), tx, donate=True)(state)
    assert torch.equal(params["w"], torch.ones(3)) and torch.equal(params["t"], torch.arange(6.0).view(2, 3).T)


def test_meta_parameters_make_a_meta_state():
    tx = PIPES["dynamic"]
    state = zf.init(tx, torch_map(lambda x: x.to("meta"), PARAMS))
    assert all(x.is_meta for x in state.leaves.values())
    assert all(x.is_meta for x in state.transforms["adamw"]["exp_avg"].values())


def test_steps_inside_no_grad_and_after_inference():
    tx = PIPES["scaled"]
    expected, _ = zf.make_step(loss, tx)(zf.init(tx, PARAMS), X)
    with torch.no_grad():
        assert_trees_equal(zf.make_step(loss, tx)(zf.init(tx, PARAMS), X)[0], expected)


def test_inference_mode_is_named_where_a_gradient_is_asked_for():
    tx = PIPES["scaled"]
    state = zf.init(tx, PARAMS)
    with torch.inference_mode():
        for ask in (lambda: zf.make_step(loss, tx)(state, X), lambda: zf.vjp(loss, tx, state, X)):
            with pytest.raises(RuntimeError, match=r"(?s)inside torch.inference_mode\(\).*records nothing.*no_grad"):
                ask()
        close(zf.bind(loss, tx, state)(state.params, X), loss(PARAMS, X))
        if torch.__version__ >= "2.13":
            # Older ones raise in torch.func itself: "Inference tensors cannot be saved for backward".
            close(vmap(zf.make_step(gentle, tx), (None, 0))(state, X)[1]["loss"], vmap(gentle, (None, 0))(PARAMS, X))


def test_full_params_gives_master_copies_and_averages():
    tx = zf.chain(zf.precision(param_dtype=torch.bfloat16), zf.sgd(0.1), zf.ema(0.5))
    params = random_like({"w": torch.zeros(3)}, 0)
    state = zf.init(tx, params)
    assert_trees_equal(zf.full_params(tx, state), params)
    assert_trees_equal(zf.full_params(tx, state, of="ema"), params)


def test_a_label_called_average_is_no_average():
    params = {"w": torch.ones(2), "b": torch.zeros(1)}
    labels = lambda path: "average" if path == "w" else "rest"  # noqa: E731
    tx = zf.partition({"average": zf.sgd(0.1, momentum=0.9), "rest": zf.adamw(0.1)}, labels)
    with pytest.raises(ValueError, match=r"no averages\n.*zf.ema"):
        zf.full_params(tx, zf.init(tx, params), of="partition")
    mean = zf.partition({"average": zf.ema(0.5), "rest": None}, labels)
    tx = zf.chain(zf.sgd(1.0), mean)
    state, _ = zf.make_step(lambda p: p["w"].sum() + p["b"].sum(), tx)(zf.init(tx, params))
    assert_trees_equal(zf.full_params(tx, state, of="partition"), {"w": torch.full((2,), 0.5), "b": -torch.ones(1)})


def test_a_write_into_shown_parameters_is_one_into_the_state_and_an_assignment_is_none():
    tx = zf.sgd(0.5)
    step, state = zf.make_step(lambda p: (p["w"] ** 2).sum() / 2, tx), zf.init(tx, {"w": torch.ones(2)})
    with torch.no_grad():
        state.params["w"].mul_(8)
    state.params["w"] = torch.zeros(2)
    assert step(state)[0].params["w"].tolist() == [4, 4]


def test_the_rate_in_metrics_is_that_of_its_step():
    """A rate that is a tensor is filled with another number after the step."""
    rate = torch.tensor(0.25)
    tx = zf.chain(zf.sgd(rate))
    _, metrics = zf.make_step(lambda p: p["w"].sum(), tx)(zf.init(tx, {"w": torch.ones(3)}))
    rate.fill_(0.5)
    assert float(metrics["lr"]) == 0.25
