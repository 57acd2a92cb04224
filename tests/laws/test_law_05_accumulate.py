"""Law 5: `accumulate(1)` is the identity, `accumulate(k)` the mean of k gradients, and nobody else divides."""

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_programs import F64, OPTIMIZERS, pipelines, run, seeds, trees

import zerofn as zf
from zerofn.testing import assert_trees_close, assert_trees_equal, random_like


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


@pytest.mark.parametrize("how", ["plain", "recorded", "vmap"])
def test_the_sum_keeps_its_dtype_whatever_that_of_gradients(how):
    """fp32 gradients on bf16 parameters are allowed, and a sum that a step is recorded of is no wider for that."""
    tx = zf.chain(zf.accumulate(3), zf.sgd(0.1))
    state = zf.init(tx, {"w": torch.ones(2, dtype=torch.bfloat16)})
    expected, record = state.transforms["accumulate"]["sum"]["w"].dtype, how == "recorded"
    for _ in range(2):
        grads = {"w": torch.full((2,), 0.1)}
        state, _ = zf.update(tx, grads, state, create_graph=record)
    if how == "vmap":
        rows = {"w": torch.full((4, 2), 0.1)}
        state = torch.func.vmap(lambda g: zf.update(tx, g, state)[0])(rows)
    assert state.transforms["accumulate"]["sum"]["w"].dtype == expected == torch.bfloat16
