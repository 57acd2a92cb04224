"""The stations of a chain against tables written by hand, and transforms that say what they do not do."""

import re
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from refusals import Refusals
from time_limits import limit

import zerofn as zf
from zerofn.core.layout import make_layout  # inside: layouts of leaves that no model has
from zerofn.core.pipeline import pipeline  # inside: a chain resolved for leaves that are given
from zerofn.core.wires import Sharding  # inside: a wire by itself
from zerofn.extend import (
    Facts,
    Flat,
    Group,
    Misplaced,
    Owner,
    Partial,
    Replicate,
    Shard,
    Transform,
    View,
    as_it_is,
    no_view,
    over_ranks,
    transform,
)
from zerofn.testing import check_transform

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
P, R, S, F = Partial(), Replicate(), Shard(0), Flat()
# Over four ranks, and over two axes of two: rows for all, fewer rows than four ranks, a vector, and a number.
PARAMS = {"w": torch.zeros(6, 5), "few": torch.zeros(2, 3), "b": torch.zeros(3), "s": torch.zeros(())}
NODE, NODES = "node", "nodes"


def ranks(rank=0, size=4):
    """The groups of a rank that talks to nobody: of all ranks, or along an axis of a mesh of two by two."""

    def group(function, mesh):
        if mesh is None:
            return Group(rank, size, tuple(range(size)))
        place = rank % 2 if mesh == NODE else rank // 2
        members = [r for r in range(4) if (r // 2 == rank // 2 if mesh == NODE else r % 2 == rank % 2)]
        return Group(place, 2, tuple(members))

    return group


def stations(tx, params=PARAMS, rank=0, size=4):
    return pipeline(tx, make_layout(params)[0], "a test", ranks(rank, size)).stations


def table(tx, leaf="w", **where):
    """Behind each transform: dtype, placements, what it is scaled by."""
    return [
        (s.transform, spec.dtype, spec.placements, spec.scaled_by)
        for s in stations(tx, **where)
        for spec in [s.gives[leaf]]
    ]


TABLES = {
    "one process": (
        lambda: [zf.precision(param_dtype=BF16), zf.scale_loss(), zf.accumulate(2), zf.adamw(1e-3)],
        [
            ("model", BF16, (), ("scale_loss",)),
            ("precision", F32, (), ("scale_loss",)),
            ("scale_loss", F32, (), ()),
            ("accumulate", F32, (), ()),
            ("adamw", F32, (), ()),
        ],
    ),
    "data parallel": (
        lambda: [zf.all_reduce(), zf.adamw(1e-3)],
        [("model", F32, (P,), ()), ("all_reduce", F32, (R,), ()), ("adamw", F32, (R,), ())],
    ),
    "ZeRO-1": (
        lambda: [zf.accumulate(2), zf.reduce_scatter(), zf.adamw(1e-3)],
        [
            ("model", F32, (P,), ()),
            ("accumulate", F32, (P,), ()),
            ("reduce_scatter", F32, (S,), ()),
            ("adamw", F32, (S,), ()),
        ],
    ),
    "ZeRO-2": (
        lambda: [zf.reduce_scatter(), zf.accumulate(2), zf.adamw(1e-3)],
        [
            ("model", F32, (P,), ()),
            ("reduce_scatter", F32, (S,), ()),
            ("accumulate", F32, (S,), ()),
            ("adamw", F32, (S,), ()),
        ],
    ),
    "ZeRO-3 in fp16, summed in fp32": (
        lambda: [
            zf.shard(),
            zf.precision(param_dtype=F16),
            zf.scale_loss(),
            zf.clip_by_global_norm(1.0),
            zf.adamw(1e-3),
        ],
        [
            ("model", F16, (P,), ("scale_loss",)),
            ("shard", F32, (S,), ("scale_loss",)),
            ("precision", F32, (S,), ("scale_loss",)),
            ("scale_loss", F32, (S,), ()),
            ("clip_by_global_norm", F32, (S,), ()),
            ("adamw", F32, (S,), ()),
        ],
    ),
    "bf16 in storage": (
        lambda: [
            zf.shard(),
            zf.precision(store_dtype=BF16, grad_dtype=F32, reduce_dtype=F32),
            zf.low_precision_adam(1e-3),
        ],
        [
            ("model", BF16, (P,), ()),
            ("shard", F32, (S,), ()),
            ("precision", F32, (S,), ()),
            ("low_precision_adam", BF16, (S,), ()),
        ],
    ),
    "hybrid": (
        lambda: [
            zf.shard(NODE),
            zf.precision(param_dtype=BF16),
            zf.accumulate(2),
            zf.all_reduce(NODES),
            zf.adamw(1e-3),
        ],
        [
            ("model", BF16, (P, P), ()),
            ("shard", BF16, (S, P), ()),
            ("precision", F32, (S, P), ()),
            ("accumulate", F32, (S, P), ()),
            ("all_reduce", F32, (S, R), ()),
            ("adamw", F32, (S, R), ()),
        ],
    ),
    "nodes": (
        lambda: [zf.shard(NODE), zf.accumulate(2), zf.reduce_scatter(NODES), zf.sgd(0.1)],
        [
            ("model", F32, (P, P), ()),
            ("shard", F32, (S, P), ()),
            ("accumulate", F32, (S, P), ()),
            ("reduce_scatter", F32, (S, S), ()),
            ("sgd", F32, (S, S), ()),
        ],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_stations_against_a_table_by_hand(name):
    make, expected = TABLES[name]
    size = 1 if name == "one process" else 4
    assert table(zf.chain(*make()), size=size) == expected


def test_leaves_are_cut_by_rows_as_torch_cuts_and_numbers_flat():
    last = stations(zf.chain(zf.shard(), zf.sgd(0.1)))[-1].gives
    assert {path: spec.placements for path, spec in last.items()} == {"w": (S,), "few": (S,), "b": (S,), "s": (F,)}
    # torch's chunks: 6 rows over 4 ranks are 2, 2, 2 and 0; 3 numbers 1, 1, 1 and 0.
    every = [stations(zf.chain(zf.shard(), zf.sgd(0.1)), rank=rank)[-1].gives for rank in range(4)]
    assert [x["w"].range for x in every] == [(0, 10), (10, 20), (20, 30), (30, 30)]
    assert [x["few"].range for x in every] == [(0, 3), (3, 6), (6, 6), (6, 6)]
    assert [x["b"].range for x in every] == [(0, 1), (1, 2), (2, 3), (3, 3)]


def test_a_part_of_two_rows_is_cut_by_rows_over_two_ranks():
    """Six rows over a node of two are three and three, and over two nodes two and one of them."""
    every = [stations(zf.chain(zf.shard(NODE), zf.reduce_scatter(NODES), zf.sgd(0.1)), rank=r)[-1] for r in range(4)]
    assert [s.gives["w"].range for s in every] == [(0, 10), (15, 25), (10, 15), (25, 30)]
    assert {s.gives["w"].parts for s in every} == {4}


def test_whole_leaves_are_handed_over_at_their_owners():
    matrices = {"w": torch.zeros(6, 5), "v": torch.zeros(4, 4)}
    tx = zf.chain(zf.shard(), zf.muon(lr=0.1))
    last = stations(tx, matrices)[-1]
    # The largest first, each to the rank that has the least.
    assert {path: spec.placements for path, spec in last.handed.items()} == {"w": (Owner(0),), "v": (Owner(1),)}
    assert {path: spec.placements for path, spec in last.gives.items()} == {"w": (S,), "v": (S,)}
    both = zf.chain(zf.shard(NODE), zf.reduce_scatter(NODES), zf.muon(lr=0.1))
    assert stations(both, matrices)[-1].handed["v"].placements == (Owner(0), Owner(1))


def test_what_is_summed_up_over_a_window_is_sent_in_the_dtype_of_the_sum():
    """And what was only cast up from bf16 in bf16, which has all of its digits."""
    half = zf.precision(param_dtype=BF16)
    at_once = stations(zf.chain(zf.shard(NODE), half, zf.all_reduce(NODES), zf.sgd(0.1)))
    window = stations(zf.chain(zf.shard(NODE), half, zf.accumulate(2), zf.all_reduce(NODES), zf.sgd(0.1)))
    assert [s.gives["w"].sum_dtype for s in at_once] == [BF16, BF16, BF16, BF16, BF16]
    assert [s.gives["w"].sum_dtype for s in window] == [BF16, BF16, BF16, F32, F32, F32]


def test_dtypes_by_label():
    by_label = {"head": F32, "rest": BF16}
    tx = zf.chain(zf.shard(), zf.precision(by_label, labels=lambda p: "head" if p == "b" else "rest"), zf.sgd(0.1))
    first = stations(tx)[1]
    assert {path: spec.dtype for path, spec in first.gives.items()} == {"w": BF16, "few": BF16, "b": F32, "s": BF16}
    assert {spec.dtype for spec in stations(tx)[2].gives.values()} == {F32}


def test_the_stage_follows_from_the_stations():
    def stage(*parts, size=4):
        return zf.plan(zf.chain(*parts, zf.sgd(0.1)), PARAMS, world_size=size).road.zero

    assert [
        stage(),
        stage(zf.all_reduce()),
        stage(zf.accumulate(2), zf.reduce_scatter()),
        stage(zf.reduce_scatter(), zf.accumulate(2)),
        stage(zf.reduce_scatter()),
        stage(zf.shard(), zf.accumulate(2)),
        stage(zf.shard(), size=1),
    ] == [0, 0, 1, 2, 2, 3, 0]


# ---- transforms of one's own ----


@dataclass(frozen=True)
class Ranges(Sharding):
    """Ranges of one length, wherever rows end."""

    cuts: ClassVar[bool] = True

    def span(self, leaf):
        each = -(-leaf.numel // self.group.size)
        return tuple(min(x * each, leaf.numel) for x in (self.group.rank, self.group.rank + 1))


def own(through, wire=Ranges, name="own", **more):
    def view(layout, ranks):
        return over_ranks(wire(ranks("own", None)), resident=False)

    return Transform(name, needs="element", view_fn=view, through=through, **more)


def test_what_a_transform_leaves_unsaid_its_view_says():
    silent = table(zf.chain(own(as_it_is), zf.sgd(0.1)))
    assert silent == [("model", F32, (P,), ()), ("own", F32, (F,), ()), ("sgd", F32, (F,), ())]
    said = table(zf.chain(own(lambda spec: spec.after("sharded_by")), zf.sgd(0.1)))
    assert said == silent


def test_it_stands_in_the_plan_by_what_it_says():
    def compresses(spec):
        return spec.after("changed_by").to(BF16)

    def update(grads, state, params, carry, ctx):
        return {path: g.to(BF16) for path, g in grads.items()}, state

    own = Transform("compress", needs="element", facts=Facts(), through=compresses, update_fn=update)
    found = zf.plan(zf.chain(zf.shard(), own, zf.sgd(0.1)), {"w": torch.zeros(4, 3)}, world_size=2)
    row = next(r for r in found.road.stations if r.transform == "compress")
    assert (row.dtype, row.placements, row.bytes) == (BF16, (S,), 2 * 3 * 2)
    lines = str(found).splitlines()
    assert any(line.split()[:4] == ["compress", "all", "1", "bfloat16"] for line in lines)
    assert any(line.startswith("ZeRO-3 on 2 ranks: 24 B of gradients until a step; sent for one: ") for line in lines)


def moves_all(spec):
    return replace(spec, placements=tuple(S for _ in spec.placements))


def to_bf16(spec):
    return spec.to(BF16)


LIES = {
    "rows of a wire that cuts anywhere": (
        own(lambda spec: spec.placed(S)),
        r"w: its `through` says Shard\(0\), elements 0 to 10 here, and its wire leaves elements 0 to 8 of the leaf",
    ),
    "the whole of a wire that cuts": (
        own(lambda spec: spec.placed(R)),
        r"w: its `through` says Replicate\(\), elements 0 to 30 here, and its wire leaves elements 0 to 8",
    ),
    "another dimension": (own(lambda spec: spec.placed(Shard(1))), r"w: its `through` says Shard\(1\), and its wire"),
    "a cut without a wire": (
        Transform("own", needs="element", through=moves_all),
        r"w: its `through` says Shard\(0\) along an axis of 4 ranks, where it sends nothing",
    ),
    "a rank with all of it": (
        own(lambda spec: spec.placed(Owner(0))),
        r"w: its `through` says Owner\(0\), elements 0 to 30 here, and its wire leaves elements 0 to 8",
    ),
    "a dtype that its wire does not give": (
        own(lambda spec: spec.to(BF16)),
        r"w: its `through` says torch.bfloat16, and its view gives torch.float32",
    ),
    "another leaf": (
        Transform("own", needs="element", through=lambda spec: replace(spec, shape=(1,))),
        "w: its `through` changes a field that it may not",
    ),
    "a dtype without an update half": (
        Transform("own", needs="element", through=to_bf16),
        r"w: its `through` says torch.bfloat16, and it has no update half: gradients go on in torch.float32",
    ),
    "a dtype that its view does not give": (
        Transform("own", needs="element", view_fn=lambda *_: View(pull=lambda g, leaf: 2 * g), through=to_bf16),
        r"w: its `through` says torch.bfloat16, and it has no update half: gradients go on in torch.float32",
    ),
    "a factor": (
        Transform("own", needs="element", through=lambda spec: replace(spec, scaled_by=("own",))),
        "w: its `through` says that it is multiplied by a factor",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_what_it_says_otherwise_is_refused_by_leaf(name):
    """Where a state is made: a chain is only an order of transforms."""
    tx, message = LIES[name]
    # One that has no view stands behind what reduces.
    order = zf.chain(*([zf.all_reduce()] if tx.view_fn is no_view else []), tx, zf.sgd(0.1))
    with pytest.raises(ValueError, match=message) as error:
        stations(order, {"w": PARAMS["w"]})
    assert "chain(..., own, ...)" in str(error.value) and "write: " in str(error.value)


@transform
def rounded(says):
    """Gradients in bf16, said or not."""

    def update(grads, state, params, carry, ctx):
        return {path: g.to(BF16) for path, g in grads.items()}, state

    def through(spec):
        return spec.after("changed_by").to(BF16 if says else None)

    return Transform("rounded", needs="element", update_fn=update, through=through)


@transform
def by_ranges(says):
    """Parts that end within rows."""

    def view(layout, ranks):
        return over_ranks(Ranges(ranks("by_ranges", None)), resident=False)

    def through(spec):
        return spec.after("sharded_by").placed(S) if says else spec.after("sharded_by")

    return Transform("by_ranges", needs="element", view_fn=view, through=through)


def test_a_view_with_a_factor_is_scaled_by_it_until_the_first_update_half():
    view = View(factor=lambda state: state["by"])
    times = Transform(
        "times",
        needs="element",
        view_fn=lambda layout, ranks: view,
        through=as_it_is,
        init_fn=lambda leaves, layout: {"by": torch.tensor(2.0)},
    )
    assert table(zf.chain(zf.shard(), times, zf.clip_by_value(1.0), zf.sgd(0.1))) == [
        ("model", F32, (P,), ("times",)),
        ("shard", F32, (S,), ("times",)),
        ("times", F32, (S,), ("times",)),
        ("clip_by_value", F32, (S,), ()),
        ("sgd", F32, (S,), ()),
    ]


def trained_with_a_factor():
    """A factor of which `through` says nothing: what is behind it has true gradients, by both routes."""
    view = View(factor=lambda state: torch.tensor(8.0))
    times = Transform("times", needs="element", view_fn=lambda layout, ranks: view, through=as_it_is)
    found = []
    for parts in ((times,), (zf.shard(), times), (times, zf.shard()), (zf.accumulate(1), times, zf.reduce_scatter())):
        tx, model = zf.chain(*parts, zf.sgd(1.0)), torch.nn.Linear(3, 2, bias=False)
        torch.nn.init.zeros_(model.weight)
        step = zf.make_step(lambda p, x: (p["weight"] @ x).sum(), tx)
        state, _ = step(zf.init(tx, {"weight": model.weight.detach()}), torch.tensor([1.0, 2.0, 3.0]))
        opt = zf.attach(model, tx)
        model(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        opt.step()
        found += [zf.full_params(tx, state)["weight"], zf.full_params(tx, opt.state)["weight"]]
    return found


def test_nobody_has_to_unscale_a_factor():
    expected = torch.tensor([[-1.0, -2.0, -3.0]] * 2)
    for found in (trained_with_a_factor(), *zf.launch(trained_with_a_factor, 2, timeout=limit(60))):
        assert len(found) == 8 and all(torch.equal(x, expected) for x in found), found


# ---- refused ----

ROWS = Refusals()


@ROWS(ValueError, re.compile(r"chain\(..., shard, ..., own, ...\) of b\n.*single numbers"))
def a_leaf():
    def only_matrices(spec):
        if spec.shape is not None and len(spec.shape) != 2:
            raise Misplaced("shard", "rows of a vector are single numbers", "zf.masked(own(), by_path)")
        return spec.after("changed_by")

    tx = zf.chain(zf.shard(), Transform("own", needs="element", through=only_matrices), zf.sgd(0.1))
    yield
    stations(tx, {"w": torch.zeros(4, 4), "b": torch.zeros(4)})


LEAVES = {"w": torch.ones(5, 3), "b": torch.ones(3)}


@ROWS(AssertionError, re.compile(r"(?s)rounded\(says=False\).*w: in torch.bfloat16, where .*torch.float32"))
def one_that_rounds_and_does_not_say_so():
    check_transform(rounded(says=True), LEAVES)
    yield
    check_transform(rounded(says=False), LEAVES)


@ROWS(ValueError, "w: its `through` says torch.bfloat16, and it has no update half")
def one_that_says_so_and_does_nothing():
    yield
    check_transform(Transform("idle", needs="element", through=to_bf16), LEAVES)


@ROWS(AssertionError, re.compile(r"(?s)by_ranges\(says=True\).*w: its `through` says Shard\(0\)"))
def one_that_cuts_elsewhere_than_it_says():
    check_transform(by_ranges(says=False), LEAVES)
    yield
    check_transform(by_ranges(says=True), LEAVES)


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
