"""Law 8: `chain` is associative, and functions write none of their arguments."""

from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import loss, pipelines, run, seeds, trees

import zerofn as zf
from zerofn.testing import assert_trees_equal, clone, random_like


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
