"""Law 4: what is seen of what is stored is what was stored, and gradients are the vjp of the view."""

import optree
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from random_programs import BF16, F16, F32, F64, seeds, trees

import zerofn as zf
from zerofn.testing import assert_trees_equal, random_like


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
