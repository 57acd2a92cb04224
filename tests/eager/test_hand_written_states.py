"""Hand-written states whose form is unusual, in the state dicts of torch: nothing of them is left out in silence."""

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


def zeros(leaves):
    return {path: torch.zeros_like(p) for path, p in leaves.items()}


def added(old, grads, times=1):
    return {**old, **{path: old[path] + times * g for path, g in grads.items()}}


# How a state begins, and how it goes on.
FORMS = {
    "dicts of dicts": (
        lambda p: {"x": {"m": zeros(p), "v": zeros(p)}},
        lambda s, g: {"x": {"m": added(s["x"]["m"], g), "v": added(s["x"]["v"], g, 2)}},
    ),
    "dicts with a counter": (
        lambda p: {"x": {"0": torch.zeros(()), "1": zeros(p)}},
        lambda s, g: {"x": {"0": s["x"]["0"] + 1, "1": added(s["x"]["1"], g)}},
    ),
    "a counter with a leaf's name": (
        lambda p: {"x": zeros(p), "n": torch.zeros(())},
        lambda s, g: {"x": added(s["x"], g), "n": s["n"] + 1},
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


QUICK = [("dicts of dicts", "element"), ("a counter with a leaf's name", "element"), ("dicts with a counter", "leaf")]
SLOW = [("a counter with a leaf's name", "leaf"), ("dicts of dicts", "leaf")]


@pytest.mark.filterwarnings("ignore:.*torch.distributed")
@pytest.mark.parametrize("rows", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_all_of_a_state_comes_back_on_ranks(rows, tmp_path):
    for row, ranks in one_launch(2, there_and_back, [(*x, str(tmp_path / str(i))) for i, x in enumerate(rows)]).items():
        for found in ranks:
            assert all(same for same, _ in found.values()), row
            assert len({total for _, total in found.values()}) == 1 and found["full"][1] > 100, row


def test_a_missing_counter_is_named():
    model, opt = trained("dicts with a counter", "element", 2)
    other, into = made("dicts with a counter", "element")
    given = get_optimizer_state_dict(model, opt)
    before = numbers(into)
    first = next(iter(given["state"].values()))
    del first["zerofn/held/x/0"]
    with pytest.raises(ValueError, match="zerofn/held/x/0: missing"):
        set_optimizer_state_dict(other, into, given)
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(into), strict=True))


def saved(folder):
    _, opt = trained("dicts of dicts", "leaf", 2)
    zf.save(folder, opt)


def test_owners_save_dicts_of_dicts_for_any_ranks(tmp_path):
    zf.launch(saved, 2, str(tmp_path / "two"), timeout=limit())
    _, expected = trained("dicts of dicts", "leaf", 2)
    _, opt = made("dicts of dicts", "leaf")
    zf.load(str(tmp_path / "two"), like=opt)
    # One process has the gradients that two have, whose mean is exact.
    assert all(torch.equal(a, b) for a, b in zip(numbers(opt), numbers(expected), strict=True))
    got, want = (o.state.transforms["held"]["x"] for o in (opt, expected))
    assert float(got["v"]["w"].sum()) == 2 * float(want["m"]["w"].sum())
