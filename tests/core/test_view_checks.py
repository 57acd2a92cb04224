"""Views and wires of a third party's that do not fit: refused with the transform, the leaves, and what to write."""

import dataclasses
import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from refusals import Refusals
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.core.layout import make_layout  # inside: layouts of leaves that no model has
from zerofn.core.pipeline import pipeline  # inside: a chain resolved for leaves that are given
from zerofn.core.wires import Sharding  # inside: a wire by itself
from zerofn.extend import Dtypes, Group, Shard, Transform, View, as_it_is, over_ranks
from zerofn.testing import check_transform

F64 = torch.float64


def of(name="mine", needs="element", through=as_it_is, functions=None, **view):
    made = View(**view)
    return Transform(name, needs=needs, view_fn=lambda layout, ranks: made, through=through, **(functions or {}))


def halves(x, leaf):
    return x / 2


def twice(x, leaf):
    return x * 2


def size_of():
    return dist.get_world_size() if dist.is_initialized() else 1


# ---- View(changes=...) ----


def only_w():
    return of(view=twice, pull=twice, store=halves, changes=lambda leaf: leaf.path == "w")


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = (nn.Parameter(torch.ones(4, dtype=F64)) for _ in range(2))

    def forward(self):
        return (self.w + self.b).sum()


STAGES = {
    "data parallel": lambda: (only_w(), zf.all_reduce()),
    "ZeRO-1": lambda: (zf.accumulate(1), only_w(), zf.reduce_scatter()),
    "ZeRO-2": lambda: (zf.reduce_scatter(), only_w()),
    "ZeRO-3": lambda: (zf.shard(), only_w()),
    "before ZeRO-3": lambda: (only_w(), zf.shard()),
}


def changed(stage):
    """By route: what the model sees at first, and after one step with gradients of 1 and a rate of 1."""
    tx, found = zf.chain(*STAGES[stage](), zf.sgd(1.0)), {}
    state = zf.init(tx, {name: p.detach() for name, p in Two().named_parameters()})
    first = zf.full_params(tx, state)
    fn = lambda p: (p["w"] + p["b"]).sum()  # noqa: E731
    found["make_step"] = first, zf.full_params(tx, zf.make_step(fn, tx)(state)[0])
    grads = zf.vjp(fn, tx, state)[1](torch.ones((), dtype=F64))[0]
    found["vjp"] = first, zf.full_params(tx, zf.update(tx, grads, state)[0])
    model = Two()
    opt = zf.attach(model, tx)
    model().backward()
    opt.step()
    found["attach"] = first, zf.full_params(tx, opt.state)
    return found


def assert_only_w_is_changed(found):
    for route, (first, after) in found.items():
        for path, expected in (("w", 1.0 - 2 * 2), ("b", 1.0 - 1.0)):
            assert torch.equal(first[path], torch.ones(4, dtype=F64)), (route, path)
            assert torch.equal(after[path], torch.full((4,), expected, dtype=F64)), (route, path, after[path])


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_leaf_that_changes_leaves_out_is_seen_and_stored_as_it_lies(stage):
    assert_only_w_is_changed(changed(stage))


def changed_everywhere():
    return {stage: changed(stage) for stage in STAGES}


def test_changes_means_the_same_on_ranks():
    for found in zf.launch(changed_everywhere, 2, timeout=limit(60)):
        for routes in found.values():
            assert_only_w_is_changed(routes)


def test_a_derivative_of_bind_is_that_of_the_step():
    tx = zf.chain(only_w(), zf.sgd(1.0))
    state = zf.init(tx, {"w": torch.ones(2), "b": torch.ones(2)})
    grads = torch.func.grad(zf.bind(lambda p: (p["w"] + p["b"]).sum(), tx, state))(state.params)
    assert torch.equal(grads["w"], torch.full((2,), 2.0)) and torch.equal(grads["b"], torch.ones(2))


def test_a_pull_without_a_view_is_applied():
    tx = zf.chain(of(pull=halves), zf.sgd(1.0))
    state, _ = zf.make_step(lambda p: p["w"].sum(), tx)(zf.init(tx, {"w": torch.ones(2)}))
    assert torch.equal(state.params["w"], torch.full((2,), 0.5))


@pytest.mark.parametrize("fn", [lambda x, leaf: x, lambda x, leaf: x.view_as(x)])
def test_a_view_that_gives_its_argument_back_is_no_write_of_the_models(fn):
    model = Two()
    opt = zf.attach(model, zf.chain(of(view=fn, pull=halves), zf.sgd(1.0)))
    for _ in range(2):
        model().backward()
        opt.step()
        opt.zero_grad()
    assert torch.func.vmap(lambda x: model() * x)(torch.ones(3, dtype=F64)).shape == (3,)
    assert torch.equal(zf.full_params(opt.tx, opt.state)["w"], torch.zeros(4, dtype=F64))


# ---- what a view needs ----


def of_rows(x, leaf):
    return x / x.norm(dim=-1, keepdim=True) if len(leaf.shape) > 1 else x * 1.0


def normed(x, leaf):
    return x / x.norm()


NEEDING = {
    "leaf": lambda: of(needs="leaf", view=normed, pull=lambda g, leaf: g),
    "row": lambda: of(needs="row", view=of_rows, pull=lambda g, leaf: g),
    "row of vectors": lambda: of(
        needs="row", view=twice, pull=twice, store=halves, changes=lambda leaf: len(leaf.shape) == 1
    ),
}


def seen(kind, order):
    cut = zf.shard() if "shard" in order else zf.reduce_scatter()
    parts = (cut, NEEDING[kind]()) if order.endswith("mine") else (NEEDING[kind](), cut)
    tx = zf.chain(*parts, zf.sgd(0.1))
    params = {"w": torch.arange(1.0, 13, dtype=F64).reshape(4, 3), "b": torch.arange(1.0, 4, dtype=F64)}
    try:
        return zf.full_params(tx, zf.init(tx, params))
    except ValueError as error:
        return str(error)


def all_seen():
    orders = ("shard, mine", "reduce_scatter, mine", "mine, shard", "mine, reduce_scatter")
    return {(kind, order): seen(kind, order) for kind in NEEDING for order in orders}


def test_a_view_that_needs_more_than_a_piece_is_refused_behind_a_cut_and_right_in_front():
    one = all_seen()
    for found in zf.launch(all_seen, 2, timeout=limit(60)):
        for (kind, order), got in found.items():
            if kind == "row of vectors" or order.startswith("mine"):
                for path, expected in one[kind, order].items():
                    torch.testing.assert_close(got[path], expected, rtol=0, atol=1e-15)
                continue
            cut = order.split(",", maxsplit=1)[0]
            assert f"chain(..., {cut}, ..., mine, ...): a view behind what cuts leaves over ranks" in got
            assert f"\n  w: mine needs whole {'leaves' if kind == 'leaf' else 'rows'} (needs={kind!r})" in got
            assert ("\n  b: " in got) == (kind == "leaf") and f"\n  write: chain(mine, {cut}, ...)" in got


def idle_traffic():
    tx = zf.chain(NEEDING["leaf"](), zf.shard(), zf.sgd(0.1))
    return [part.name for part in pipeline(tx, make_layout({"w": torch.ones(4, 3)})[0], "a test").updates]


def test_a_view_alone_sends_no_gradients_to_owners():
    assert zf.launch(idle_traffic, 2, timeout=limit(30)) == [[".grad_norm", "sgd"]] * 2


# ---- what a view reads ----


def learned(needs="element", per_element=True):
    def init(leaves, layout):
        kept = {p: torch.full_like(x, 1.5) if per_element else torch.full((), 1.5) for p, x in leaves.items()}
        return {"s": kept}

    def by(x, leaf, state):
        return x * state["s"][leaf.path]

    return of("learned", needs, view=by, pull=by, reads=True, functions={"init_fn": init})


def reading(per_element, needs, front):
    parts = (learned(needs, per_element), zf.shard()) if front else (zf.shard(), learned(needs, per_element))
    tx = zf.chain(*parts, zf.sgd(0.1))
    try:
        return zf.full_params(tx, zf.init(tx, {"w": torch.ones(4, 2)}))["w"]
    except ValueError as error:
        return str(error)


def all_reading():
    return {
        case: reading(*case)
        for case in ((True, "element", True), (True, "element", False), (False, "element", True), (False, "leaf", True))
    }


def test_a_state_of_pieces_is_not_read_by_a_view_of_whole_leaves():
    expected = torch.full((4, 2), 1.5)
    for found in zf.launch(all_reading, 2, timeout=limit(30)):
        told = found[True, "element", True]
        assert "\n  w: the view sees the leaf, (4, 2), and its state is of a flat piece of it" in told
        assert "write: chain(shard(), learned, ...)" in told
        assert torch.equal(found[True, "element", False], expected) and torch.equal(
            found[False, "element", True], expected
        )
        assert "\n  w: its state is at one rank alone, the owner of the leaf" in found[False, "leaf", True]


# ---- what contradicts a chain ----


def cast_to(name, dtype):
    dtypes = Dtypes(param_dtype=dtype)
    return of(name, view=lambda x, leaf: x.to(dtype), pull=lambda g, leaf: g.to(dtypes.gradient(leaf)), dtypes=dtypes)


def wired(wire=Sharding, resident=True, through=as_it_is, **view):
    def view_of(layout, ranks):
        return dataclasses.replace(over_ranks(wire(ranks("wired", None)), resident), **view)

    return Transform("wired", needs="element", view_fn=view_of, through=through)


def init_of(tx):
    tx = zf.chain(tx, zf.sgd(0.1))
    state = zf.init(tx, {"w": torch.ones(4, 6), "b": torch.ones(3)})
    return zf.make_step(lambda p: p["w"].sum() + p["b"].sum(), tx)(state)


def test_a_view_of_another_shape_is_refused_by_leaf():
    for kind in ("view", "pull", "store"):
        told = (
            rf"mine: its view does not fit its leaves\n  w: `{kind}` gives shape \(24,\) of a tensor of shape \(4, 6\)"
        )
        with pytest.raises(ValueError, match=told) as caught:
            init_of(of(**{"view": twice, "pull": twice, "store": halves, kind: lambda x, leaf: x.flatten()}))
        assert "\n  b: " not in str(caught.value)
    with pytest.raises(ValueError, match="b: `view` gives a NoneType of a tensor"):
        init_of(of(view=lambda x, leaf: None))


# ---- wires ----


@dataclass(frozen=True)
class Longer(Sharding):
    """Each rank sends one number more for a gradient than the one before."""

    def pack(self, *args):
        rows = super().pack(*args)
        return torch.cat([rows, rows.new_zeros(len(rows), self.group.rank + 1)], dim=1)


@dataclass(frozen=True)
class LongerParts(Sharding):
    def send_parts(self, parts, leaves, async_op=False):
        longer = [torch.cat([part, part.new_zeros(self.group.rank)]) for part in parts]
        taller = [dataclasses.replace(x, shape=torch.Size([2 * (x.numel // 2 + self.group.rank)])) for x in leaves]
        return super().send_parts(longer, taller, async_op)


@dataclass(frozen=True)
class Overlapping(Sharding):
    def span(self, leaf):
        return super().span(leaf) if self.group.rank else (0, leaf.numel)


@dataclass(frozen=True)
class Endless(Sharding):
    def span(self, leaf):
        return 0, leaf.numel + 1


class NoWire:
    def __init__(self, group):
        self.group, self.reduce_dtype, self.cuts = group, None, True


def tried(wire, resident):
    tx = zf.chain(wired(wire, resident), zf.sgd(0.1))
    model = nn.Linear(6, 4)
    told = []
    for make in (lambda: zf.init(tx, dict(model.named_parameters())), lambda: zf.attach(model, tx)):
        try:
            make()
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def all_tried():
    torch.manual_seed(0)
    return {
        (wire.__name__, resident): tried(wire, resident)
        for wire in (Sharding, Longer, LongerParts, Overlapping, Endless, NoWire)
        for resident in (False, True)
    }


def test_wires_that_do_not_fit_together_are_refused_on_every_rank():
    """gloo would end all processes."""
    first, second = zf.launch(all_tried, 2, timeout=limit(60))
    assert first.keys() == second.keys()
    for (kind, resident), told in first.items():
        assert len(told) == len(second[kind, resident]) == (0 if kind == "Sharding" else 2), (kind, told)
        for a, b in zip(told, second[kind, resident], strict=True):
            if kind in ("Longer", "LongerParts", "Overlapping"):
                assert a == b and "ValueError: wired: its wire does not fit together over ranks\n" in a
            if kind == "Longer":
                assert "weight: gradients to be summed have 56 bytes on rank 0, 60 bytes on rank 1" in a
            if kind == "LongerParts":
                assert "weight: parts to be gathered have 48 bytes on rank 0, 52 bytes on rank 1" in a
            if kind == "Overlapping":
                assert "\n  weight: rank 0 has elements 0 to 24, not to 12" in a and "\n  bias: rank 0" in a
            if kind == "Endless":
                assert "wired: the `span` of its wire is no range of the leaf\n" in a
                assert "\n  weight: (0, 25), and the leaf has elements 0 to 24" in a
            if kind == "NoWire":
                assert (
                    a.startswith("TypeError: wired: over_ranks(NoWire(...), ...)\n") and "NoWire has no on, span" in a
                )


def left_out():
    return tried(lambda group: Sharding(group), True), zf_error(wired(changes=lambda leaf: leaf.path == "weight"))


def zf_error(tx):
    try:
        zf.init(zf.chain(tx, zf.sgd(0.1)), {"weight": torch.ones(4), "bias": torch.ones(4)})
    except ValueError as error:
        return str(error)


def test_a_wire_carries_all_leaves():
    for fine, told in zf.launch(left_out, 2, timeout=limit(30)):
        assert not fine
        assert told.startswith(
            "wired: a view with a wire carries all leaves over ranks\n  bias: `changes` leaves it out\n"
        )


# ---- check_transform ----


def talking(x, leaf):
    if dist.is_initialized():
        dist.all_reduce(x := x.clone())
        x = x / size_of()
    return x


def writes(x, leaf):
    return x.mul_(2)


@zf.extend.transform
def faulty(kind):
    return FAULTS[kind]()


FAULTS = {
    "writes": lambda: of(view=writes, pull=twice, store=halves),
    "store": lambda: of(view=twice, pull=twice),
    "pull": lambda: of(view=twice, pull=lambda g, leaf: g * 3, store=halves),
    "pull alone": lambda: of(pull=twice),
    "talks": lambda: of(view=lambda x, leaf: x * 1.0, pull=talking),
    "element of a row": lambda: of(view=of_rows, pull=lambda g, leaf: g),
    "element of a leaf": lambda: of(view=lambda x, leaf: x / x.norm() if x.numel() else x * 1, pull=lambda g, leaf: g),
    "number of a leaf": lambda: of(
        needs="number", view=lambda x, leaf: x / x.norm() if x.numel() else x * 1, pull=lambda g, leaf: g
    ),
    "row of a leaf": lambda: of(
        needs="row", view=lambda x, leaf: x / x.norm() if x.numel() else x * 1, pull=lambda g, leaf: g
    ),
    "shards": lambda: Transform("mine", needs="element", through=lambda s: s.after("sharded_by").placed(Shard(0))),
    "averages": lambda: Transform("mine", needs="element", through=lambda s: s.after("averaged_by")),
    "rows": NEEDING["row"],
    "changes": only_w,
    "grid": lambda: of(view=lambda x, leaf: (x * 8).round() / 8, pull=lambda g, leaf: g),
    "scaled": lambda: of(view=twice, pull=twice, store=halves),
}
LAWS = {
    "writes": "a view writes into none of its arguments: they are what is stored.\n  block.0.bias: `view` wrote it",
    "store": "view after store is the identity on what is seen.\n  block.0.bias: 5 of 5",
    "pull": "`pull` of a linear view is its transpose: the vjp of the view.\n  block.0.bias: <view",
    "pull alone": "`pull` of a linear view is its transpose",
    "talks": "a view without a wire talks to no other rank: .*\n  block.0.bias: `pull` called torch.distributed.all_re",
    "element of a row": "it says needs='element': a flat piece of a leaf is seen, pulled back and stored",
    "element of a leaf": "it says needs='element': a flat piece",
    "number of a leaf": "it says needs='number': a flat piece",
    "row of a leaf": "it says needs='row': some rows of a leaf are seen",
    "shards": "its `through` says 'sharded_by', and no view of it has a wire",
    "averages": "its `through` says 'averaged_by', and no view of it has a wire",
}


@pytest.mark.parametrize("kind", list(FAULTS))
def test_check_transform_finds_the_view_that_breaks_a_law(kind):
    if kind not in LAWS:
        check_transform(faulty(kind))
        return
    with pytest.raises(AssertionError, match=LAWS[kind]):
        check_transform(faulty(kind))
    assert not dist.is_initialized() and Group().size == 1


# ---- refused ----

ROWS = Refusals()


SECOND = {
    "precision": lambda: zf.precision(store_dtype=torch.bfloat16),
    "b": lambda: cast_to("b", torch.half),
}


@ROWS(ValueError, "chain(..., a, ..., {}, ...), each with View(dtypes=...)", over=SECOND)
def two_sets_of_dtypes(second):
    yield
    zf.init(zf.chain(cast_to("a", torch.bfloat16), SECOND[second](), zf.sgd(0.1)), {"w": torch.ones(2)})


FRONT = {"clip_by_global_norm": lambda: zf.clip_by_global_norm(1.0), "centralize": zf.centralize}


@ROWS(ValueError, "{} comes before wired: each rank would see its own part", over=FRONT)
def a_wire_behind_what_changes_gradients(front):
    """Whatever its `through` leaves unsaid, on one process too."""
    zf.init(zf.chain(zf.accumulate(2), wired(), FRONT[front](), zf.sgd(1.0)), {"w": torch.zeros(4)})
    yield
    zf.init(zf.chain(zf.accumulate(2), FRONT[front](), wired(), zf.sgd(1.0)), {"w": torch.zeros(4)})


ROWS.rows(
    ValueError,
    (
        lambda: init_of(of(factor=lambda state: state["nope"])),
        re.compile(r"mine: View.factor=.... that reads 'nope'\n  why:   its state has no 'nope'"),
    ),
)
ROWS.rows(KeyError, (lambda: init_of(of(view=lambda x, leaf, state: x * state["nope"], reads=True)), "nope"))


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
