"""Law 9: save, load, continue is continue, bit for bit. Other numbers of ranks: `tests/storage/test_resharding.py`."""

import tempfile

from hypothesis import given, settings
from random_programs import F32, loss, pipelines, run, seeds, trees

import zerofn as zf
from zerofn.testing import assert_trees_equal, random_like


@settings(max_examples=5)
@given(trees((F32,)), pipelines(), seeds)
def test_going_on_from_what_was_saved_is_going_on(params, parts, seed):
    tx = zf.chain(*parts)
    step, state = zf.make_step(loss, tx), run(tx, params, 3, seed=seed)
    with tempfile.TemporaryDirectory() as directory:
        zf.save(directory, state)
        loaded = zf.load(directory, like=zf.init(tx, random_like(params, seed + 7)))
    assert_trees_equal(loaded, state)
    for i in range(3, 6):
        data = random_like(params, seed + i)
        (state, _), (loaded, _) = step(state, data), step(loaded, data)
    assert_trees_equal(loaded, state)
    assert int(state.micro_step) == 6
