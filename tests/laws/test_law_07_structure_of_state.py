"""Law 7: structure, dtypes and shapes of a state never depend on values."""

import optree
import torch
from hypothesis import given
from random_programs import BF16, F32, pipelines, run, seeds, trees

import zerofn as zf
from zerofn.testing import assert_trees_equal, random_like


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
