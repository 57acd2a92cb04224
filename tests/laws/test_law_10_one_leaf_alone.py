"""Law 10: one leaf alone is that leaf in a bigger tree."""

from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import BF16, F32, OPTIMIZERS, seeds, trees

import zerofn as zf
from zerofn.testing import assert_trees_equal, random_like

LEAFWISE = [t for t in OPTIMIZERS if t.name in ("sgd", "adam", "adamw", "low_precision_adam")]


@settings(max_examples=20)
@given(trees((F32, F32, BF16)), st.sampled_from(LEAFWISE), st.booleans(), st.sampled_from([1, 2]), seeds)
def test_one_leaf_alone_is_that_leaf_in_a_bigger_tree(params, optimizer, clip, every, seed):
    tx = zf.chain(zf.accumulate(every), *([zf.clip_by_value(0.5)] if clip else []), optimizer)
    whole = zf.init(tx, params)
    grads = [random_like(whole.params, seed + i) for i in range(3 * every)]
    for g in grads:
        whole, _ = zf.update(tx, g, whole)
    for leaf in whole.layout.leaves:

        def pick(tree, path=leaf.path):
            found = {place: x for _, place, x in whole.layout.match(tree, "another tree", "")}
            return whole.layout.join({path: found[path]})

        alone = zf.init(tx, pick(params))
        for g in grads:
            alone, _ = zf.update(tx, pick(g), alone)
        assert_trees_equal(alone.leaves[leaf.path], whole.leaves[leaf.path], leaf.path)
