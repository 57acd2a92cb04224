"""How a tensor of a state lies over ranks: cut with its leaf, a number, or declared fixed; `init` is not asked."""

import functools

import pytest
import torch
from one_launch import one_launch
from refusals import Refusals
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.core.layout import (  # inside: layouts of older files
    as_plain,
    from_plain,
    make_layout,  # inside: layouts of leaves that no model has
)
from zerofn.extend import Facts, Transform, entries, transform
from zerofn.testing import check_transform

# Cut unevenly, flat, and so that a rank of two has six elements of the first, and of three has none of the last.
SHAPES = {"w": (5, 3), "b": (4,), "one": (1,)}
STAGES = {
    "shard": lambda: [zf.shard()],
    "reduce_scatter": lambda: [zf.reduce_scatter()],
    "late": lambda: [zf.accumulate(1), zf.reduce_scatter()],
}


def like(x):
    return torch.zeros_like(x)


def six(x):
    return torch.zeros(6)


@transform
def keeps(start, fixed=(), needs="element"):
    """Adds one to all that it keeps of a leaf in each step, and changes no gradient."""

    def more(x):
        return {k: more(y) for k, y in x.items()} if isinstance(x, dict) else x + 1

    def init(leaves, layout):
        return {"kept": {path: start(x) for path, x in leaves.items()}}

    def update(grads, state, params, carry, ctx):
        return grads, {"kept": {path: more(state["kept"][path]) for path in grads}}

    return Transform("keeps", needs=needs, facts=Facts(fixed=fixed), init_fn=init, update_fn=update)


def leafwise(start, needs="element"):
    return zf.leafwise(lambda g, p, s: (g, s), init=start, needs=needs)()


class Guest:
    """Of another library: a tree with dicts by path."""

    def __init__(self, start):
        self.start = start

    def init(self, params):
        return ({path: self.start(x) for path, x in params.items()}, torch.tensor(0), "a word")

    def update(self, updates, state, params=None):
        return updates, ({path: x + 1 for path, x in state[0].items()}, state[1] + 1, state[2])


def masked(t):
    return zf.masked(t, lambda path: True)


FIXED = ("kept",)
RIGHT = {
    "like the leaf": lambda: keeps(like),
    "a number": lambda: keeps(lambda x: torch.zeros(())),
    "a tree": lambda: keeps(lambda x: {"m": like(x), "n": {"count": torch.zeros(()), "v": like(x)}}),
    "fixed": lambda: keeps(six, FIXED),
    "fixed below a key": lambda: keeps(lambda x: {"x": torch.zeros(6)}, FIXED),
    "fixed and empty": lambda: keeps(lambda x: torch.zeros(0), FIXED),
    "fixed in masked": lambda: masked(keeps(six, FIXED)),
    "fixed in offload": lambda: zf.offload(keeps(six, FIXED)),
    "rows": lambda: keeps(like, needs="row"),
    "a tree of rows": lambda: keeps(lambda x: {"m": like(x), "w": like(x)}, needs="row"),
    "fixed beside rows": lambda: keeps(six, FIXED, needs="row"),
    "whole leaves in any shape": lambda: keeps(lambda x: torch.zeros(*x.shape, 2), needs="leaf"),
    "a guest": lambda: zf.guest(Guest(like), needs="element"),
}


def everything():
    """All of them in one chain."""
    return zf.chain(*(make().named(name.replace(" ", "_")) for name, make in RIGHT.items()))


ELEMENT, ROW = r"in other shapes than the shards of its leaves", r"in other shapes than the rows that a rank has"
REFUSED = {
    "six numbers": (lambda: keeps(six), ELEMENT, "keeps/kept/"),
    "six in leafwise": (lambda: leafwise(six), ELEMENT, "<lambda>/value/"),
    "two for each element": (lambda: leafwise(lambda x: torch.zeros(*x.shape, 2)), ELEMENT, "value/w"),
    "one of a tree": (lambda: keeps(lambda x: {"m": like(x), "h": torch.zeros(3)}), ELEMENT, "kept/w/h"),
    "empty": (lambda: keeps(lambda x: torch.zeros(0)), ELEMENT, "kept/w"),
    "in masked": (lambda: masked(keeps(six)), ELEMENT, "masked/on/kept/"),
    "fixed by another name": (lambda: keeps(six, ("value",)), ELEMENT, "kept/"),
    "guest": (lambda: zf.guest(Guest(six), needs="element"), ELEMENT, "Guest/inner/0/"),
    "statistics of rows": (lambda: keeps(of_rows, needs="row"), ROW, "kept/w"),
    "a number of rows": (lambda: leafwise(lambda x: x.new_zeros(()), "row"), ROW, "value/w"),
}


def of_rows(x):
    return x.new_zeros(x.shape[:1])


def trained(stage, tx, steps=2, before=None, after=None):
    model = nn.ParameterDict({path: torch.ones(shape) for path, shape in SHAPES.items()})
    opt = zf.attach(model, zf.chain(*STAGES[stage](), tx, zf.sgd(0.5)))
    if before:
        zf.load(before, like=opt)
    for _ in range(steps):
        sum(p.square().sum() for p in model.values()).backward()
        opt.step()
        opt.zero_grad()
    if after:
        zf.save(after, opt)
    with opt.gathered():
        return {path: x.detach().clone() for path, x in model.items()}, opt


def on_ranks(stage, before, after):
    return trained(stage, everything(), 2, before, after)[0]


def read(stage, at):
    """What one process reads of a checkpoint."""
    _, opt = trained(stage, everything(), 0, at)
    return {e.key: e.value for e in entries(opt.state) if isinstance(e.value, torch.Tensor)}


@pytest.mark.parametrize("stage", ["shard", *[pytest.param(s, marks=pytest.mark.slow) for s in STAGES if s != "shard"]])
def test_what_may_be_kept_is_saved_for_any_number_of_ranks(stage, tmp_path):
    one, on, two, three = (str(tmp_path / name) for name in ("one", "on", "two", "three"))
    params = on_ranks(stage, None, one)
    on_ranks(stage, one, on)
    for found in zf.launch(on_ranks, 2, stage, None, two, timeout=limit()):
        assert all(torch.equal(found[path], x) for path, x in params.items())
    zf.launch(on_ranks, 3, stage, two, three, timeout=limit())
    for mine, theirs, steps in ((two, one, 2), (three, on, 4)):
        got, want = read(stage, mine), read(stage, theirs)
        kept = [x for k, x in want.items() if "kept" in k or "inner" in k]
        # Of each leaf one tensor, of trees two and three, and empty ones.
        assert len(kept) >= len(SHAPES) * (len(RIGHT) + 3) and all(bool((x == steps).all()) for x in kept)
        assert got.keys() == want.keys() and [k for k in want if not torch.equal(got[k], want[k])] == []


def refused(stage):
    found = {}
    for name, (make, _, _) in REFUSED.items():
        try:
            trained(stage, make())
        except ValueError as error:
            found[name] = str(error)
    return found


@functools.cache
def all_refused():
    return one_launch(2, refused, [("shard",), ("reduce_scatter",)])


@pytest.mark.parametrize("stage", ["shard", "reduce_scatter"])
def test_what_nothing_tells_of_is_refused_by_path(stage):
    for found in all_refused()[stage,]:
        assert found.keys() == REFUSED.keys()
        for name, (_, said, path) in REFUSED.items():
            assert said in found[name] and path in found[name] and 'needs="leaf"' in found[name], found[name]


def test_nothing_is_refused_where_nothing_is_cut():
    for make, _, _ in REFUSED.values():
        params, _ = trained("shard", make())
        assert all(torch.equal(x, torch.zeros_like(x)) for x in params.values())


def without_momentum(folder):
    """Slots without elements, on a rank that has no element of any leaf either."""
    model = nn.ParameterDict({"one": torch.ones(1), "also": torch.ones(())})
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.5)))
    (3 * model["one"].sum() + model["also"]).backward()
    opt.step()
    zf.save(folder, opt)


def test_empty_slots_and_empty_shards_are_told_apart(tmp_path):
    zf.launch(without_momentum, 3, str(tmp_path / "c"), timeout=limit())
    model = nn.ParameterDict({"one": torch.ones(1), "also": torch.ones(())})
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.5)))
    zf.load(tmp_path / "c", like=opt)
    assert model["one"].tolist() == [-0.5] and model["also"] == 0.5 and opt.state.step == 1


def coincides(folder):
    model = nn.ParameterDict({"w": torch.ones(4, 3)})
    zf.save(folder, zf.attach(model, zf.chain(zf.shard(), keeps(six), zf.sgd(0.5))))


def test_a_length_that_happens_to_be_a_shards_fits_no_other_number_of_ranks(tmp_path):
    zf.launch(coincides, 2, str(tmp_path / "c"), timeout=limit())
    opt = zf.attach(nn.ParameterDict({"w": torch.ones(4, 3)}), zf.chain(keeps(six), zf.sgd(0.5)))
    with pytest.raises(ValueError, match="keeps/kept/w"):
        zf.load(tmp_path / "c", like=opt)


# ---- refused ----

ROWS = Refusals()


@ROWS(
    AssertionError,
    "a first state in other shapes",
    over=["six numbers", "statistics of rows", "fixed by another name"],
)
def a_state_that_check_transform_finds(name):
    tx = REFUSED[name][0]()
    yield
    check_transform(tx)


@ROWS(AssertionError, "keeps/kept/")
def a_slot_that_is_not_fixed():
    check_transform(keeps(six, FIXED))
    yield
    check_transform(keeps(like, FIXED))


@ROWS(ValueError, "zerofn 0.2 has pickled on several ranks", "zf.save")
def a_pickled_layout_of_an_older_version():
    plain = as_plain(make_layout({"w": torch.ones(2)})[0])
    plain["placement"]["slots"] = ({"kind": "SlotForm", "owner": "keeps", "slot": "kept", "form": "fixed"},)
    yield
    from_plain(plain)


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
