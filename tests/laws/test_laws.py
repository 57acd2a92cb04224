"""The laws of the design as properties of random pipelines over random trees. Law 3 has a file of its own."""

import warnings

import optree
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import zerofn as zf
from zerofn.testing import assert_trees_close, assert_trees_equal, check_transform, clone, random_like

from .strategies import BF16, F16, F32, F64, OPTIMIZERS, kinds, module, pipelines, seeds, trees


def loss(params, data):
    """Alive in every leaf that has elements."""
    pairs = zip(optree.tree_leaves(params), optree.tree_leaves(data), strict=True)
    return sum(((p.float() * d).sum() + 0.3 * (p.float() ** 2 * d.abs()).sum() for p, d in pairs), torch.zeros(()))


def run(tx, params, steps, donate=False, seed=0):
    step, state = zf.make_step(loss, tx, donate=donate), zf.init(tx, params)
    for i in range(steps):
        state, _ = step(state, random_like(params, seed + i))
    return state


# ---- law 2: both routes agree ----


def eager_batch(seed, i):
    return random_like(torch.zeros(5, 3), seed + i), random_like(torch.zeros(5, 2), seed + i + 1)


def objective(outputs, y):
    return (outputs[0].float() - y).square().mean() + outputs[1]["hidden"].float().mean()


@settings(max_examples=60)
@given(pipelines(), kinds, seeds)
@example([zf.precision(param_dtype=F16), zf.scale_loss(init_scale=2.0**30), zf.accumulate(2), zf.adamw(0.1)], 5, 0)
def test_routes_agree_bitwise(parts, kind, seed):
    tx = zf.chain(*parts)
    dtype = next((p.config["param_dtype"] for p in parts if p.name == "precision"), None) or F32
    model, plain = module(kind, seed), module(kind, seed)
    for m in (model, plain):
        # The pure route knows no frozen leaf but by its absence.
        m.frozen.requires_grad_(True)
    opt = zf.attach(model, tx)

    def pure(params, x, y):
        out = torch.func.functional_call(plain, params, (x.to(dtype),), tie_weights=False)
        cast = next((p.config["output_dtype"] for p in parts if p.name == "precision"), None)
        return objective(optree.tree_map(lambda t: t.to(cast) if cast and isinstance(t, torch.Tensor) else t, out), y)

    params = dict(plain.named_parameters(remove_duplicate=False))
    state, step = zf.init(tx, params), zf.make_step(pure, tx)
    for i in range(5):
        x, y = eager_batch(seed, i)
        state, metrics = step(state, x, y)
        objective(model(x), y).backward()
        if i == 0:
            assert all(p.grad is not None and p.grad.ne(0).any() for p in model.parameters())
        opt.step()
        opt.zero_grad()
        assert_trees_equal(dict(opt.state.leaves), dict(state.leaves), f"parameters after step {i}")
        assert_trees_equal(opt.state.transforms, state.transforms, f"state after step {i}")
        assert_trees_equal(opt.metrics, {k: v for k, v in metrics.items() if k != "loss"}, "metrics")
    assert all(p.data_ptr() == opt.state.leaves[n].data_ptr() for n, p in model.named_parameters())


@given(kinds, seeds, st.sampled_from([BF16, F16]), st.sampled_from(["stochastic", "kahan", "nearest"]))
def test_routes_agree_in_low_precision_storage(kind, seed, dtype, rounding):
    test = test_routes_agree_bitwise.hypothesis.inner_test
    cast = zf.precision(store_dtype=dtype, param_dtype=dtype, grad_dtype=F32)
    test([cast, zf.scale_loss(256.0), zf.accumulate(2), zf.low_precision_adam(0.05, rounding=rounding)], kind, seed)


# ---- law 4: view after store is the identity ----


@given(trees((F32, F64, BF16)), st.sampled_from([F32, F64, None]), st.sampled_from([BF16, F16, F32, None]))
def test_what_is_seen_of_what_is_stored_is_what_was_seen(params, store, seen):
    tx = zf.chain(zf.precision(param_dtype=seen, store_dtype=store), zf.sgd(0.1))
    state = zf.init(tx, params)
    views = {}
    fn = zf.bind(lambda p: views.update(p=p) or torch.zeros(()), tx, state)
    fn(state.params)
    first = views["p"]
    # Whatever the model saw can be stored and seen again, if storage is at least as wide.
    pairs = list(zip(optree.tree_leaves(state.params), optree.tree_leaves(first), strict=True))
    assume(all(torch.promote_types(a.dtype, b.dtype) == a.dtype for a, b in pairs))
    again = zf.init(tx, optree.tree_map(lambda s, f: f.to(s.dtype), params, first))
    zf.bind(lambda p: views.update(p=p) or torch.zeros(()), tx, again)(again.params)
    assert_trees_equal(views["p"], first)


@given(trees((F32, F64)), seeds, st.sampled_from([BF16, F32, None]))
def test_gradients_are_the_vjp_of_the_view(params, seed, dtype):
    tx = zf.chain(zf.precision(param_dtype=dtype), zf.scale_loss(64.0), zf.sgd(1.0))
    state = zf.init(tx, params)
    data = random_like(params, seed)

    def fn(p):
        pairs = zip(optree.tree_leaves(p), optree.tree_leaves(data), strict=True)
        return sum((a.float() * b.float()).sum() for a, b in pairs)

    _, pullback = zf.vjp(fn, tx, state)
    grads = optree.tree_leaves(pullback(torch.ones(()))[0])
    for g, d, p in zip(grads, optree.tree_leaves(data), optree.tree_leaves(params), strict=True):
        # The cotangent as the model gave it, in the dtype the model saw, cast back to storage.
        assert_trees_equal(g, d.float().to(dtype or p.dtype).to(p.dtype))


# ---- law 5: accumulate ----


@given(trees(), pipelines(), seeds)
def test_accumulate_1_is_the_identity_and_holds_no_buffer(params, parts, seed):
    parts = [p for p in parts if p.name != "accumulate"]
    at = next(i for i, p in enumerate(parts) if p.name not in ("precision", "scale_loss"))
    with_one = zf.chain(*parts[:at], zf.accumulate(1), *parts[at:])
    got, expected = run(with_one, params, 3, seed=seed), run(zf.chain(*parts), params, 3, seed=seed)
    assert_trees_equal(got.leaves, expected.leaves)
    assert got.transforms["accumulate"] == {}


@given(trees((F64,)), st.integers(1, 4), st.sampled_from(OPTIMIZERS[:5]), seeds)
def test_accumulated_micro_batches_are_the_mean_gradient(params, k, optimizer, seed):
    tx = zf.chain(zf.accumulate(k), optimizer)
    state, grads = zf.init(tx, params), [random_like(params, seed + i) for i in range(k)]
    for g in grads:
        state, metrics = zf.update(tx, g, state)
    assert metrics["updated"]
    mean = optree.tree_map(lambda *gs: sum(gs) / k, *grads)
    assert_trees_close(
        state.params, zf.update(optimizer, mean, zf.init(optimizer, params))[0].params, ulps=1e4, floor=1.0
    )


@given(trees(), st.integers(2, 4), st.sampled_from([64.0, "dynamic"]), seeds)
def test_scale_loss_never_divides_by_micro_batches(params, k, scale, seed):
    """Powers of two: with and without a scale the bits are the same."""
    states = [
        run(zf.chain(*s, zf.accumulate(k), zf.sgd(0.1)), params, k, seed=seed) for s in ([], [zf.scale_loss(scale)])
    ]
    assert_trees_equal(states[0].leaves, states[1].leaves)


# ---- law 6: a held or skipped step changes nothing ----


@given(
    trees(),
    pipelines(casts=False),
    st.lists(st.sampled_from([0, torch.nan, torch.inf]), max_size=8),
    seeds,
    st.booleans(),
)
def test_bad_micro_batches_leave_no_trace(params, parts, kinds, seed, donate):
    """The run with bad micro-batches is the run without them, but for the loss scale's own state."""
    tx = zf.chain(zf.scale_loss(256.0), *(p for p in parts if p.name != "scale_loss"))
    step = zf.make_step(loss, tx, donate=donate)
    state, clean = zf.init(tx, params), zf.init(tx, params)
    for i, bad in enumerate(kinds):
        data = random_like(params, seed + i)
        if not bad:
            clean, _ = step(clean, data)
        else:
            data["live"][i % 3] = bad
        before = clone(state)
        state, metrics = step(state, data)
        assert bool(metrics["skipped"]) == bool(bad)
        if not metrics["updated"]:
            assert_trees_equal(state.leaves, before.leaves)
    strip = lambda s: (s.leaves, s.step, {k: v for k, v in s.transforms.items() if k != "scale_loss"})  # noqa: E731
    assert_trees_equal(strip(state), strip(clean))


@given(trees(), pipelines(), seeds)
def test_what_stands_right_of_a_hold_does_not_change(params, parts, seed):
    tx = zf.chain(*(p for p in parts if p.name != "accumulate"))
    cut = next(i for i, p in enumerate(tx.parts) if p.name not in ("precision", "scale_loss"))
    tx = zf.chain(*tx.parts[:cut], zf.accumulate(3), *tx.parts[cut:])
    state, step = zf.init(tx, params), zf.make_step(loss, tx)
    for i in range(7):
        new, metrics = step(state, random_like(params, seed + i))
        held = i % 3 != 2
        assert bool(metrics["updated"]) != held and int(new.step) == (i + 1) // 3 and int(new.micro_step) == i + 1
        if held:
            right = [p.name for p in tx.parts[cut + 1 :]]
            assert_trees_equal(
                [new.leaves, *(new.transforms[n] for n in right)], [state.leaves, *(state.transforms[n] for n in right)]
            )
        state = new


# ---- law 7: structure of the state ----


@given(trees((F32, F32, BF16)), pipelines(), seeds)
def test_structure_of_the_state_never_depends_on_values(params, parts, seed):
    tx = zf.chain(*parts)
    skeleton = lambda s: optree.tree_map(lambda x: torch.empty_like(x, device="meta"), s)  # noqa: E731
    first = zf.init(tx, params)
    states = [run(tx, params, n, seed=seed) for n in (1, 3)]
    states.append(zf.init(tx, random_like(params, seed + 50)))
    empty = zf.init(tx, optree.tree_map(torch.zeros_like, params))
    # Gradients in the dtype of what is stored: that of the parameters where nothing stores them otherwise.
    states.append(zf.update(tx, optree.tree_map(torch.zeros_like, empty.params), empty)[0])
    for state in states:
        assert_trees_equal(skeleton(state), skeleton(first))
        assert state.layout == first.layout


# ---- law 8: chain is associative, functions are pure ----


def nest(parts, cuts):
    """The same members in chains inside of chains."""
    if len(parts) < 3 or not cuts:
        return zf.chain(*parts)
    cut = 1 + cuts[0] % (len(parts) - 1)
    return zf.chain(nest(parts[:cut], cuts[1:]), nest(parts[cut:], cuts[1:]))


@given(trees(), pipelines(), st.lists(st.integers(0, 9), min_size=1, max_size=4), seeds)
def test_chain_is_associative(params, parts, cuts, seed):
    flat, nested = zf.chain(*parts), nest(parts, cuts)
    assert nested == flat and repr(nested) == repr(flat) and hash(nested) == hash(flat)
    assert_trees_equal(run(nested, params, 3, seed=seed), run(flat, params, 3, seed=seed))


@given(trees(), pipelines(), seeds)
def test_pure_functions_write_nothing_and_donation_changes_no_bit(params, parts, seed):
    tx = zf.chain(*parts)
    given_params = clone(params)
    step = zf.make_step(loss, tx)
    state = zf.init(tx, given_params)
    for i in range(3):
        data = random_like(params, seed + i)
        before, batch = clone(state), clone(data)
        new, _ = step(state, data)
        assert_trees_equal((state, data, given_params), (before, batch, params))
        state = new
    assert_trees_equal(run(tx, params, 3, donate=True, seed=seed), state)


@settings(max_examples=15)
@given(trees(), pipelines(), seeds)
def test_updates_are_the_same_twice(params, parts, seed):
    """Nothing is remembered outside of the state: a step from an old state gives the old result."""
    tx = zf.chain(*parts)
    step, state = zf.make_step(loss, tx), zf.init(tx, params)
    data = [random_like(params, seed + i) for i in range(3)]
    first = step(step(state, data[0])[0], data[1])[0]
    step(first, data[2])
    assert_trees_equal(step(step(state, data[0])[0], data[1])[0], first)
    assert_trees_equal(zf.make_step(loss, tx)(step(state, data[0])[0], data[1])[0], first)


# ---- law 10: one leaf alone ----

LEAFWISE = [t for t in OPTIMIZERS if t.name in ("sgd", "adam", "adamw", "low_precision_adam")]


@settings(max_examples=40)
@given(trees((F32, F32, BF16)), st.sampled_from(LEAFWISE), st.booleans(), st.sampled_from([1, 2]), seeds)
def test_one_leaf_alone_is_that_leaf_in_a_bigger_tree(params, optimizer, clip, every, seed):
    tx = zf.chain(zf.accumulate(every), *([zf.clip_by_value(0.5)] if clip else []), optimizer)
    whole = zf.init(tx, params)
    grads = [random_like(whole.params, seed + i) for i in range(3 * every)]
    for g in grads:
        whole, _ = zf.update(tx, g, whole)
    for leaf in whole.layout.leaves:
        pick = lambda tree: whole.layout.join({leaf.path: whole.layout.split(tree)[leaf.path]})  # noqa: B023, E731
        alone = zf.init(tx, pick(params))
        for g in grads:
            alone, _ = zf.update(tx, pick(g), alone)
        assert_trees_equal(alone.leaves[leaf.path], whole.leaves[leaf.path], leaf.path)


# ---- all laws at once ----


@settings(max_examples=15)
@given(pipelines(optimizers=[o for o in OPTIMIZERS if o.name not in ("masked", "partition")]))
def test_random_pipelines_conform(parts):
    # A lambda in a mask does not pickle; the conformance check says so.
    check_transform(zf.chain(*(p for p in parts if p.name != "masked")))


def test_data_of_these_tests_is_alive():
    params = {"w": torch.ones(3), "b": [torch.ones(2, 2)]}
    grads = torch.func.grad(loss)(params, random_like(params, 0))
    assert all((g != 0).all() for g in optree.tree_leaves(grads))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AssertionError):
            assert_trees_equal(run(zf.sgd(0.1), params, 1).leaves, zf.init(zf.sgd(0.1), params).leaves)
