"""Hand-written states whose form is unusual, in the state dicts of torch: nothing of them is left out in silence."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from one_launch import one_launch
from time_limits import limit
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import zerofn as zf
from zerofn.extend import Scope, Transform, flatten

# A leaf has the name of a counter.
SHAPES = {"w": (6, 4), "b": (4,), "n": (3, 2), "one": ()}


class Moments(NamedTuple):
    m: dict
    v: dict


def zeros(leaves):
    return {path: torch.zeros_like(p) for path, p in leaves.items()}


def added(old, grads, times=1):
    return {**old, **{path: old[path] + times * g for path, g in grads.items()}}


# How a state begins, and how it goes on.
FORMS = {
    "fields of dicts": (
        lambda p: {"x": Moments(zeros(p), zeros(p))},
        lambda s, g: {"x": Moments(added(s["x"].m, g), added(s["x"].v, g, 2))},
    ),
    "a tuple with a counter": (
        lambda p: {"x": (torch.zeros(()), zeros(p))},
        lambda s, g: {"x": (s["x"][0] + 1, added(s["x"][1], g))},
    ),
    "a counter among paths": (
        lambda p: {"x": {**zeros(p), "count": torch.zeros(())}},
        lambda s, g: {"x": {**added(s["x"], g), "count": s["x"]["count"] + 1}},
    ),
    "a counter with a leaf's name": (
        lambda p: {"x": {"m": zeros(p), "n": torch.zeros(())}},
        lambda s, g: {"x": {"m": added(s["x"]["m"], g), "n": s["x"]["n"] + 1}},
    ),
    "numbers of no leaf": (
        lambda p: {"x": zeros(p), "last": torch.zeros(3)},
        lambda s, g: {"x": added(s["x"], g), "last": s["last"] + torch.arange(1.0, 4.0)},
    ),
}


def made(form, needs):
    init, update = FORMS[form]
    held = Transform(
        "held",
        Scope.WHOLE,
        needs=needs,
        init_fn=lambda p, layout: init(p),
        update_fn=lambda g, s, p, carry, ctx: (g, update(s, g)),
    )
    model = nn.ParameterDict({path: torch.ones(shape) for path, shape in SHAPES.items()})
    return model, zf.attach(model, zf.chain(zf.shard(), held, zf.sgd(2**-4)))


def trained(form, needs, steps):
    model, opt = made(form, needs)
    for step in range(steps):
        data = {path: 6.0 * (1 + (step + torch.arange(p.numel())) % 5).reshape(p.shape) for path, p in model.items()}
        sum((p * data[path]).sum() for path, p in model.items()).backward()
        opt.step()
        opt.zero_grad()
    return model, opt


def numbers(opt):
    return [x.clone() for x in flatten(opt.state.transforms)[0] if isinstance(x, torch.Tensor)]


WAYS = ("dict", "dcp", "parts", "full")


def there_and_back(form, needs, folder):
    """By way: whether what another optimizer is given is what this one has; and the sum of it."""
    found = {}
    for how in WAYS:
        model, opt = trained(form, needs, 2)
        other, into = trained(form, needs, 1)
        at = f"{folder}/{how}"
        if how == "dict":
            into.load_state_dict(opt.state_dict())
        elif how == "dcp":
            dcp.save({"o": opt.state_dict()}, checkpoint_id=at)
            mine = {"o": into.state_dict()}
            dcp.load(mine, checkpoint_id=at)
            into.load_state_dict(mine["o"])
        elif how == "parts":
            dcp.save({"o": get_optimizer_state_dict(model, opt)}, checkpoint_id=at)
            mine = {"o": get_optimizer_state_dict(other, into)}
            dcp.load(mine, checkpoint_id=at)
            set_optimizer_state_dict(other, into, mine["o"])
        else:
            full = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(other, into, get_optimizer_state_dict(model, opt, options=full), options=full)
        same = all(torch.equal(a, b) for a, b in zip(numbers(opt), numbers(into), strict=True))
        found[how] = same, sum(float(x.sum()) for x in numbers(into))
    return found


@pytest.mark.filterwarnings("ignore:.*torch.distributed")
@pytest.mark.parametrize("form", FORMS)
def test_all_of_a_state_comes_back(form, tmp_path):
    for same, total in there_and_back(form, "element", str(tmp_path)).values():
        assert same and total > 1000


QUICK = [("fields of dicts", "element"), ("a counter among paths", "element"), ("a tuple with a counter", "leaf")]
SLOW = [("a counter with a leaf's name", "element"), ("fields of dicts", "leaf")]


@pytest.mark.filterwarnings("ignore:.*torch.distributed")
@pytest.mark.parametrize("rows", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_all_of_a_state_comes_back_on_ranks(rows, tmp_path):
    for row, ranks in one_launch(2, there_and_back, [(*x, str(tmp_path / str(i))) for i, x in enumerate(rows)]).items():
        for found in ranks:
            assert all(same for same, _ in found.values()), row
            assert len({total for _, total in found.values()}) == 1 and found["full"][1] > 100, row


def test_a_missing_counter_is_named():
    model, opt = trained("a counter among paths", "element", 2)
    other, into = made("a counter among paths", "element")
    given = get_optimizer_state_dict(model, opt)
    before = numbers(into)
    first = next(iter(given["state"].values()))
    del first["zerofn/held/x/count"]
    with pytest.raises(ValueError, match="zerofn/held/x/count: missing"):
        set_optimizer_state_dict(other, into, given)
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(into), strict=True))


def saved(folder):
    _, opt = trained("fields of dicts", "leaf", 2)
    zf.save(folder, opt)


def test_owners_save_a_tuple_of_dicts_for_any_ranks(tmp_path):
    zf.launch(saved, 2, str(tmp_path / "two"), timeout=limit())
    _, expected = trained("fields of dicts", "leaf", 2)
    _, opt = made("fields of dicts", "leaf")
    zf.load(str(tmp_path / "two"), like=opt)
    # One process has the gradients that two have, whose mean is exact.
    assert all(torch.equal(a, b) for a, b in zip(numbers(opt), numbers(expected), strict=True))
    assert float(opt.state.transforms["held"]["x"].v["w"].sum()) == 2 * float(
        expected.state.transforms["held"]["x"].m["w"].sum()
    )


def refused():
    try:
        made("a counter with a leaf's name", "leaf")
    except ValueError as error:
        return str(error)


def test_a_counter_that_an_owner_would_keep_is_refused_on_every_rank():
    for message in zf.launch(refused, 2, timeout=limit()):
        assert "'x' has 'n' beside 'm'" in message and "another name, as 'n_n'" in message


class Count(NamedTuple):
    n: int
    name: str


def counts_in_python():
    """It divides by the number of its updates, which it keeps as an int, in a NamedTuple."""

    def init(leaves, layout):
        return {"count": Count(0, "mine"), "sums": {path: torch.zeros_like(x) for path, x in leaves.items()}}

    def update(grads, state, params, carry, ctx):
        n = state["count"].n + 1
        sums = {path: g + state["sums"][path] for path, g in grads.items()}
        return {path: x / n for path, x in sums.items()}, {"count": Count(n, "mine"), "sums": sums}

    return zf.chain(Transform("mine", needs="element", init_fn=init, update_fn=update), zf.sgd(0.5))


def attached_and_stepped(steps, load=None):
    model = nn.ParameterDict({"w": torch.ones(4, dtype=torch.float64)})
    opt = zf.attach(model, zf.chain(zf.shard(), counts_in_python()))
    if load is not None:
        load(opt)
    for step in steps:
        (model["w"] * (1.0 + step)).sum().backward()
        opt.step()
        opt.zero_grad()
    return opt, zf.full_params(opt.tx, opt.state)["w"].clone()


def numbers_come_back(folder):
    opt, before = attached_and_stepped(range(3))
    zf.save(folder, opt)
    kept = copy.deepcopy(opt.state_dict()), zf.load(folder, like=opt.state)
    _, want = attached_and_stepped(range(5))
    ways = {
        "zf.load": lambda o: zf.load(folder, like=o),
        "load_state_dict": lambda o: o.load_state_dict(kept[0]),
        "load_state": lambda o: o.load_state(kept[1]),
    }
    found = {}
    for name, load in ways.items():
        again, got = attached_and_stepped((3, 4), load)
        found[name] = torch.equal(got, want), again.state.transforms["mine"]["count"], torch.equal(got, before)
    bad = copy.deepcopy(kept[0])
    bad["state"][0]["zerofn/mine/count/n"] = bad["state"][0]["sums"]
    with pytest.raises(ValueError, match=r"mine/count"):
        again.load_state_dict(bad)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_numbers_of_python_come_back(ranks, tmp_path):
    for found in zf.launch(numbers_come_back, ranks, str(tmp_path / "c"), timeout=limit()):
        assert found == dict.fromkeys(("zf.load", "load_state_dict", "load_state"), (True, Count(5, "mine"), False))
