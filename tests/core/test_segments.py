"""A segment fed with all leaves, with buckets, or with one leaf at a time in any order: the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zerofn as zf
from zerofn.core import executor  # inside: how large a bucket is, and which transforms run together
from zerofn.core.executor import stretch, stretches  # inside: how large a bucket is, and which transforms run together
from zerofn.core.layout import make_layout  # inside: layouts of leaves that no model has
from zerofn.core.pipeline import pipeline  # inside: a chain resolved for leaves that are given
from zerofn.testing import assert_trees_equal

SHAPES = {"a.weight": (3, 4), "a.bias": (4,), "b.weight": (4, 2), "b.bias": (2,), "none": (2,), "empty.bias": (0,)}


def label(path):
    return {"weight": "matrix", "bias": "vector"}.get(path.rpartition(".")[2], "nobody")


def directions():
    return zf.chain(zf.scale_by_adam(), zf.add_decayed_weights(0.1), zf.scale_by_lr(zf.schedules.cosine(0.1, 9)))


CHAINS = {
    "neighbours run as one": lambda: zf.chain(zf.clip_by_value(0.5), directions(), zf.ema(0.9)),
    "a partition": lambda: zf.chain(
        zf.masked(zf.clip_by_value(0.5), lambda path: path.endswith("bias")),
        zf.partition(
            {"matrix": zf.chain(zf.trace(0.9), zf.scale_by_lr(0.1)), "vector": directions(), "nobody": None}, label
        ),
        zf.masked(zf.ema(0.5), lambda path: path.startswith("a")),
    ),
    "rounded by a counter": lambda: zf.chain(
        zf.partition(
            {"matrix": zf.low_precision_adam(0.1), "vector": zf.offload(zf.sgd(0.1)), "nobody": None},
            label,
        ),
        zf.ema(0.9),
    ),
}


def started(kind, seed):
    """Parts, states and gradients after one step; one leaf has no gradient, and one no transform in a partition."""
    generator = torch.Generator().manual_seed(seed)
    params = {path: torch.randn(shape, generator=generator) for path, shape in SHAPES.items()}
    if kind == "rounded by a counter":
        params = {path: x.bfloat16() for path, x in params.items()}
    tx = CHAINS[kind]()
    state = zf.init(tx, params)
    grads = {p: torch.randn(x.shape, generator=generator).to(x.dtype) for p, x in params.items()}
    state, _ = zf.update(tx, grads, state)
    grads = {p: torch.randn(x.shape, generator=generator).to(x.dtype) for p, x in params.items() if p != "b.bias"}
    layout, _ = make_layout(params)
    pipe = pipeline(tx, layout, "test")
    parts = [p for p in pipe.updates if not p.name.startswith(".")]
    return parts, state, grads, pipe.context(micro_step=state.micro_step)


@pytest.mark.parametrize("kind", CHAINS)
@settings(max_examples=6, deadline=None)
@given(st.data(), st.integers(0, 5))
def test_however_it_is_fed(kind, data, seed):
    found = []
    ways = data.draw(st.permutations(list(started(kind, seed)[1].leaves)))
    cuts = data.draw(st.sets(st.integers(1, len(ways) - 1)))
    for order, at in ((list(started(kind, seed)[1].leaves), ()), (ways, range(1, len(ways))), (ways, sorted(cuts))):
        parts, state, grads, ctx = started(kind, seed)
        segment = executor.Segment(stretch(parts), state.transforms, state.leaves, ctx)
        out = {}
        for low, high in zip((0, *at), (*at, len(order)), strict=True):
            here = {p: state.leaves[p] for p in order[low:high]}
            out |= segment.feed({p: grads[p] for p in here if p in grads}, here)
        states, emitted = segment.states()
        assert emitted is True and not segment.held
        found.append(({p: out[p] for p in sorted(out)}, states))
    assert_trees_equal(found[1], found[0])
    assert_trees_equal(found[2], found[0])
    parts, state, grads, ctx = started(kind, seed)
    whole, states, _ = executor.run(stretches(parts), grads, state.transforms, state.leaves, ctx)
    assert_trees_equal(({p: whole[p] for p in sorted(whole)}, states), found[0])
    moved = [p for p in grads if p in whole and whole[p].numel() and not torch.equal(whole[p], state.leaves[p])]
    assert len(moved) >= 3


def test_a_schedule_that_fails_in_a_group_has_written_nothing():
    """Not even the sums of a window, which is open then."""

    def fails(step):
        return 0.1 / (1 - step)

    rates = {"matrix": zf.sgd(0.1, momentum=0.9), "vector": zf.sgd(fails)}
    model = torch.nn.Linear(2, 2)
    opt = zf.attach(model, zf.chain(zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.partition(rates, label_of)))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
        opt.zero_grad()
    before = {p: x.clone() for p, x in opt.state.leaves.items()}
    sums = [x.clone() for x in opt.state.transforms["accumulate"]["sum"].values()]
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ZeroDivisionError):
        opt.step()
    assert_trees_equal(dict(opt.state.leaves), before)
    assert_trees_equal(list(opt.state.transforms["accumulate"]["sum"].values()), sums)


def label_of(path):
    return "matrix" if path == "weight" else "vector"
