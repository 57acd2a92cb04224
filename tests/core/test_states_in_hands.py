"""A state in people's hands: saved by torch, printed, given other parameters, and labelled by anything."""

from __future__ import annotations

import copy
import enum
import pickle
from collections import OrderedDict, namedtuple

import pytest
import torch
from stages import around
from time_limits import limit

import zerofn as zf
from zerofn.testing import assert_trees_equal, random_like

BF16 = torch.bfloat16
Pair = namedtuple("Pair", "a b")


def params():
    tied = torch.arange(6.0).reshape(2, 3)
    return OrderedDict(b={"w": [tied, (torch.ones(3), None)]}, a=torch.ones(()), again=tied)


PIPELINES = {
    "adamw": lambda: [zf.adamw(0.1)],
    "16 bits": lambda: [zf.precision(store_dtype=BF16), zf.low_precision_adam(0.1), zf.ema(0.9)],
    "a window": lambda: [zf.scale_loss(), zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.sgd(0.1, momentum=0.9)],
    "groups": lambda: [zf.partition({0: zf.adamw(0.1), (1, "x"): zf.sgd(0.1)}, lambda p: (1, "x") if "w" in p else 0)],
    "of torch": lambda: [zf.from_torch(torch.optim.Adagrad, lr=0.1)],
    "whole leaves": lambda: [
        zf.partition({True: zf.muon(0.1), False: zf.adamw(0.1)}, lambda path: path.endswith("w.0"))
    ],
}


def after(tx, steps=3):
    state = zf.init(tx, params())
    for i in range(steps):
        state, _ = zf.update(tx, state.layout.join_once(random_like(state.leaves, i)), state)
    return state


@pytest.mark.parametrize("kind", PIPELINES)
def test_torch_loads_with_its_defaults_what_it_has_saved_of_a_state(kind, tmp_path):
    tx = zf.chain(*PIPELINES[kind]())
    state = after(tx)
    torch.save({"state": state, "epoch": 3}, tmp_path / "s.pt")
    loaded = torch.load(tmp_path / "s.pt")["state"]
    for other in (loaded, copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert other.layout == state.layout
        assert_trees_equal(other, state)
        assert_trees_equal(other.params, state.params)
        assert not any(x is y for x, y in zip(other.leaves.values(), state.leaves.values(), strict=True))
        grads = state.layout.join_once(random_like(state.leaves, 7))
        assert_trees_equal(zf.update(tx, grads, other), zf.update(tx, grads, state))


def test_containers_of_ones_own_are_named_by_torch(tmp_path):
    state = zf.init(zf.sgd(0.1), Pair(torch.ones(2), torch.ones(1)))
    torch.save(state, tmp_path / "s.pt")
    with pytest.raises(pickle.UnpicklingError, match="Pair"):
        torch.load(tmp_path / "s.pt")
    with torch.serialization.safe_globals([Pair]):
        assert_trees_equal(torch.load(tmp_path / "s.pt").params, state.params)


def test_containers_in_states_of_older_versions_are_dicts_by_their_keys():
    from zerofn._compat.saved_states import state_from  # inside: what an older version wrote

    function, (form, leaves, transforms, *rest) = zf.init(zf.sgd(0.1), {"w": torch.ones(2)}).__reduce__()
    assert function is state_from
    m, n = torch.ones(2), torch.zeros(2)
    old = {**transforms, "mine": {"x": Pair({"w": m}, {"w": n}), "value": {"w": (m, [n])}, "words": ("text", None)}}
    found = state_from(form, leaves, old, *rest).transforms
    assert_trees_equal(found["sgd"], transforms["sgd"])
    assert_trees_equal(found["mine"], {"x": {"a": {"w": m}, "b": {"w": n}}, "value": {"w": {"0": m, "1": {"0": n}}}})


@pytest.mark.parametrize("optimizer", [zf.adamw(zf.schedules.cosine(0.1, 10)), zf.low_precision_adam(0.1)])
def test_what_an_optimizer_gives_is_loaded_with_the_defaults(optimizer, tmp_path):
    models, opts = [torch.nn.Linear(3, 2) for _ in range(2)], []
    for model in models:
        opts.append(zf.attach(model, zf.chain(zf.accumulate(1), optimizer)))
        model(torch.ones(3)).sum().backward()
        opts[-1].step()
    for kept, load in ((opts[0].state_dict, opts[1].load_state_dict), (lambda: opts[0].state, opts[1].load_state)):
        torch.save(kept(), tmp_path / "o.pt")
        load(torch.load(tmp_path / "o.pt"))
        assert_trees_equal(dict(opts[1].state.leaves), dict(opts[0].state.leaves))
        assert_trees_equal(opts[1].state.transforms, opts[0].state.transforms)


def every_stage(directory):
    return [on_ranks(stage, f"{directory}/{stage}-") for stage in range(4)]


def on_ranks(stage, directory):
    group = zf.collectives.world_group()
    rank = group.rank
    tx = zf.chain(*around(stage, window=zf.accumulate(2)), zf.adamw(0.1))
    step = zf.make_step(lambda p, x: (x @ p["w"] + p["b"].sum()).square().mean(), tx)
    start = {"w": torch.arange(10.0).reshape(5, 2), "b": torch.ones(1)}
    data = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(rank))
    state = zf.init(tx, start)
    for x in data[:2]:
        state, _ = step(state, x)
    torch.save(state, f"{directory}{rank}.pt")
    loaded = torch.load(f"{directory}{rank}.pt")
    assert loaded.layout == state.layout
    assert_trees_equal(loaded, state)
    for x in data[2:]:
        (loaded, _), (state, _) = step(loaded, x), step(state, x)
    assert_trees_equal(loaded, state)
    zf.collectives.all_reduce(torch.ones(1), group)  # all files are there
    cut = state.layout.placement.size > 1
    if cut:
        other = torch.load(f"{directory}{(group.rank + 1) % group.size}.pt")
        with pytest.raises(ValueError, match="of a state that has the shards of rank"):
            zf.update(tx, state.params, other)
    # Shards of other numbers, made of whole leaves.
    whole = {"w": torch.full((5, 2), 3.0), "b": torch.full((1,), 4.0)}
    if cut:
        with pytest.raises(ValueError, match="the whole leaf, of which this rank has a shard"):
            state.replace(params=whole)
    new = state.replace(params=zf.init(tx, whole).params)
    assert_trees_equal(zf.full_params(tx, new), whole)
    assert_trees_equal(new.transforms, state.transforms)
    return True


def test_each_rank_saves_and_loads_its_own(tmp_path):
    assert zf.launch(every_stage, 2, str(tmp_path), timeout=limit()) == [[True] * 4] * 2


def test_other_parameters_are_taken_and_the_rest_stays():
    tx = zf.chain(zf.precision(store_dtype=BF16), zf.low_precision_adam(0.1), zf.ema(0.9))
    state = after(tx)
    given = state.layout.join(random_like(state.leaves, 9))
    new = state.replace(params=given)
    assert_trees_equal(new.params, given)
    assert_trees_equal((new.transforms, new.step, new.micro_step), (state.transforms, state.step, state.micro_step))
    assert not set(map(id, new.leaves.values())) & set(map(id, zf.extend.flatten(given)[0]))
    given["a"].zero_()
    assert new.params["a"] != 0
    opt = zf.attach(torch.nn.Linear(2, 1), zf.sgd(0.1))
    opt.load_state(opt.state.replace(params={"weight": torch.ones(1, 2), "bias": torch.zeros(1)}))
    assert opt.state.params["weight"].tolist() == [[1.0, 1.0]]


WRONG = {
    "a shape": (lambda p: {**p, "a": torch.ones(2)}, r"a: of shape \(2,\) instead of \(\)"),
    "a dtype": (lambda p: {**p, "a": torch.ones((), dtype=BF16)}, "a: torch.bfloat16 instead of torch.float32"),
    "a device": (lambda p: {**p, "a": torch.ones((), device="meta")}, "a: on meta instead of cpu"),
    "no tensor": (lambda p: {**p, "a": 1.0}, "a: a float instead of a tensor"),
    "a leaf too few": (lambda p: {k: v for k, v in p.items() if k != "a"}, "a: missing"),
    "a leaf too many": (lambda p: {**p, "c": torch.ones(1)}, "c: extra"),
    "a tie undone": (lambda p: {**p, "again": p["again"] + 1}, "again: other numbers than at|b.w.0: other numbers"),
    "two": (lambda p: {**p, "a": torch.ones(2), "again": torch.ones(1)}, r"again: of shape[\s\S]*"),
}


def test_a_derivative_goes_through_other_parameters():
    tx, x = zf.sgd(0.1), torch.tensor([2.0, 3.0])
    state, step = zf.init(tx, {"w": torch.zeros(2)}), zf.make_step(lambda p: (p["w"] ** 3).sum(), tx)

    def outer(w):
        return step(state.replace(params={"w": w}))[0].params["w"].sum()

    torch.testing.assert_close(torch.func.grad(outer)(x), 1 - 0.6 * x)
    w = x.clone().requires_grad_()
    assert not state.replace(params={"w": w}).params["w"].requires_grad
    assert state.replace(params={"w": w}, create_graph=True).params["w"].requires_grad


class Color(enum.Enum):
    RED = 1
    BLUE = 2


LABELS = {
    "str": ("fast", "slow"),
    "int": (0, 1),
    "bool": (True, False),
    "None": (None, 0),
    "an Enum": (Color.RED, Color.BLUE),
    "a tuple": (("block", 0), ("block", 1)),
    "mixed": (Color.RED, 3),
    "with dots and slashes": ("a.b/c", "a.b"),
}


@pytest.mark.parametrize("form", ["a function", "a tree"])
@pytest.mark.parametrize("kind", LABELS)
def test_labels_are_whatever_hashes(kind, form, tmp_path):
    fast, slow = LABELS[kind]
    start = {"a": torch.ones(2), "b": {"c": torch.ones(3), "d": torch.ones(())}}
    labels = {"a": fast, "b": slow} if form == "a tree" else (lambda path: fast if path == "a" else slow)
    tx = zf.chain(zf.partition({fast: zf.sgd(1.0, momentum=0.9), slow: zf.adamw(0.1)}, labels), zf.ema(0.5))
    named = zf.chain(
        zf.partition({"x": zf.sgd(1.0, momentum=0.9), "y": zf.adamw(0.1)}, {"a": "x", "b": "y"}), zf.ema(0.5)
    )
    state, like = (zf.init(t, start) for t in (tx, named))
    for i in range(2):
        grads = random_like(start, i)
        (state, metrics), (like, _) = zf.update(tx, grads, state), zf.update(named, grads, like)
    assert_trees_equal(state.params, like.params)
    assert f"partition.{fast}.lr" in metrics and set(state.transforms["partition"]) == {str(fast), str(slow)}
    zf.save(tmp_path / "z", state)
    assert_trees_equal(zf.load(tmp_path / "z", like=zf.init(tx, start)), state)
    torch.save(state, tmp_path / "s.pt")
    assert_trees_equal(torch.load(tmp_path / "s.pt"), state)
    assert str(fast) in str(zf.plan(tx, start)) and str(fast) in str(zf.describe(state))
    again = pickle.loads(pickle.dumps(zf.partition({fast: zf.sgd(1.0), slow: None}, {"a": fast, "b": slow})))
    assert again == zf.partition({fast: zf.sgd(1.0), slow: None}, {"a": fast, "b": slow})


def test_labels_of_groups_of_an_attached_model():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    tx = zf.partition({0: zf.sgd(0.1), Color.RED: zf.adamw(0.1)}, lambda path: 0 if path[0] == "0" else Color.RED)
    opt = zf.attach(model, tx)
    model(torch.ones(2)).sum().backward()
    opt.param_groups[0]["lr"] = 0.5
    before = model[0].bias.detach().clone()
    opt.step()
    torch.testing.assert_close(model[0].bias, before - 0.5 * model[0].bias.grad)
    opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("kind", LABELS)
def test_dtypes_by_any_label(kind):
    head, rest = LABELS[kind]
    tx = zf.chain(
        zf.precision({head: torch.float32, rest: BF16}, labels=lambda p: head if p == "a" else rest), zf.sgd(1.0)
    )
    state = zf.init(tx, {"a": torch.ones(2), "b": torch.ones(2)})
    seen = zf.bind(lambda p: (p["a"].dtype, p["b"].dtype), tx, state)(state.params)
    assert seen == (torch.float32, BF16)
    with pytest.raises(ValueError, match="labels without a dtype"):
        zf.init(zf.chain(zf.precision({head: BF16}, labels=lambda p: rest), zf.sgd(1.0)), {"a": torch.ones(2)})


def test_groups_print_one_transform_a_line():
    tx = zf.chain(zf.partition({0: zf.chain(zf.clip_by_value(1.0), zf.sgd(0.1)), Color.RED: None}, {"a": 0}))
    assert repr(tx) == (
        "chain(\n"
        "    partition(\n"
        "        transforms={\n"
        "            0: chain(\n"
        "                clip_by_value(max_value=1.0),\n"
        "                sgd(lr=0.1),\n"
        "            ),\n"
        "            <Color.RED: 1>: None,\n"
        "        },\n"
        "        labels={'a': 0},\n"
        "    ),\n"
        ")"
    )
