"""Law 6: a held or skipped step changes nothing but its own counter."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from random_programs import loss, pipelines, seeds, trees

import zerofn as zf
from zerofn.testing import assert_trees_equal, clone, random_like


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
