"""Transforms that give or keep a tensor which is another's: the numbers are those of copies, in every route."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zerofn as zf
from zerofn.extend import Facts, Transform
from zerofn.testing import check_transform

OPTIMIZERS = {
    "adamw": lambda: zf.adamw(0.1, weight_decay=0.1),
    "sgd": lambda: zf.sgd(0.1, momentum=0.9, weight_decay=0.1),
    "low precision": lambda: zf.low_precision_adam(0.1),
    "a direction": lambda: zf.chain(zf.scale_by_adam(), zf.scale_by_lr(0.1)),
    "held": lambda: zf.chain(zf.accumulate(1), zf.adamw(0.1)),
}


def turned(params: dict[str, Tensor], clone: bool) -> dict[str, Tensor]:
    """The parameters of the next leaf."""
    paths = list(params)
    found = dict(zip(paths, map(params.get, [*paths[1:], paths[0]]), strict=True))
    return {path: x.clone() if clone else x for path, x in found.items()}


def gives_others(clone: bool) -> Transform:
    def update(grads, state, params, carry, ctx):
        return turned(params, clone), state

    return Transform("gives_others", update_fn=update)


def turns(clone: bool) -> Transform:
    """An optimizer."""

    def update(grads, state, params, carry, ctx):
        return turned(params, clone), state

    return Transform("turns", facts=Facts(optimizes=True), update_fn=update)


class Turned:
    """A transformation of another library."""

    def __init__(self, clone: bool):
        self.clone = clone

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        return turned(params, self.clone), state


def start() -> dict[str, Tensor]:
    return {"a": torch.arange(4.0), "b": torch.full((4,), 5.0), "c": torch.linspace(-1, 1, 4)}


def trained(route: str, tx: Transform) -> dict[str, Tensor]:
    """Parameters after three steps."""

    def loss(p, x):
        return (p["a"] * p["b"] * p["c"] * x).sum()

    x = torch.linspace(0.5, 2, 4)
    if route == "eager":
        model = nn.ParameterDict(start())
        opt = zf.attach(model, tx)
        for _ in range(3):
            loss(model, x).backward()
            opt.step()
            opt.zero_grad()
        return {path: p.detach() for path, p in model.items()}
    step, state = zf.make_step(loss, tx, donate=route == "donated"), zf.init(tx, start())
    for _ in range(3):
        state, _ = step(state, x)
    return dict(state.params)


@pytest.mark.parametrize("route", ["pure", "donated", "eager"])
@pytest.mark.parametrize("end", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["transform", "another library's"])
def test_parameters_of_another_leaf_are_read_before_they_are_written(kind, end, route):
    found, expected = (
        trained(route, zf.chain(gives_others(c) if kind == "transform" else Turned(c), OPTIMIZERS[end]()))
        for c in (False, True)
    )
    for path, x in found.items():
        assert torch.equal(x, expected[path])
        assert not torch.equal(x, start()[path])


@pytest.mark.parametrize("route", ["pure", "donated", "eager"])
def test_new_parameters_may_be_the_old_ones_of_other_leaves(route):
    found = trained(route, zf.chain(turns(False)))
    for path, x in found.items():
        assert torch.equal(x, start()[path])  # three leaves, three turns
    step, state = zf.make_step(lambda p, x: (p["a"] * x).sum(), zf.chain(turns(False))), zf.init(turns(False), start())
    state, _ = step(state, torch.ones(4))
    assert torch.equal(state.params["a"], start()["b"]) and torch.equal(state.params["c"], start()["a"])


ZEROS = torch.zeros(4)


@zf.leafwise(init=lambda p: ZEROS, needs="element")
def momentum(grad, param, state):
    state = 0.9 * state + grad
    return state, state


@pytest.mark.parametrize("trained", ["a", "b"])
def test_first_states_of_one_tensor_are_loaded_apart(trained):
    """What is loaded is written into the states that there are."""
    saved = None
    for steps in (1, 0):
        model = nn.ParameterDict(start())
        opt = zf.attach(model, zf.chain(momentum(), zf.sgd(0.1)))
        for _ in range(steps):
            model[trained].sum().backward()
            opt.step()
        saved = saved or copy.deepcopy(opt.state_dict())
    opt.load_state_dict(saved)
    value = opt.state.transforms["momentum"]["value"]
    assert value[trained].tolist() == [1.0] * 4
    assert all(x.tolist() == [0.0] * 4 for path, x in value.items() if path != trained)
    assert ZEROS.tolist() == [0.0] * 4


@zf.extend.transform
def says_it_gives_none() -> Transform:
    def update(grads, state, params, carry, ctx):
        return {path: params[path].view_as(g) for path, g in grads.items()}, state

    return Transform("says_it_gives_none", facts=Facts(keeps=False), update_fn=update)


def test_a_transform_that_says_it_gives_no_others_is_found():
    with pytest.raises(AssertionError, match=r"it gives no parameter of another leaf, nor a view of one\. It does"):
        check_transform(says_it_gives_none())


def test_a_transform_alone():
    """What `Transform.init` and `update` give is not written by who writes parameters and gradients afterwards."""

    def update(grads, state, params, carry, ctx):
        return grads, {"last": dict(grads)}

    alone = Transform("alone", init_fn=lambda leaves, layout: {"last": dict(leaves)}, update_fn=update)
    params, grads = start(), {path: torch.ones(4) for path in start()}
    state = alone.init(params)
    params["a"].fill_(7.0)
    assert state["last"]["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    _, state = alone.update(grads, state, params)
    grads["a"].fill_(7.0)
    assert state["last"]["a"].tolist() == [1.0] * 4


def mine(init, update, **facts):
    functions = {"init_fn": lambda leaves, layout: init(leaves), "update_fn": lambda g, s, p, *_: update(g, s, p)}
    return Transform("mine", needs="element", facts=Facts(**facts), **functions)


def zeros_of(leaves):
    return {"kept": {path: torch.zeros_like(x) for path, x in leaves.items()}}


def keeps_gradients(grads, state, params):
    return {path: g + state["kept"][path] for path, g in grads.items()}, {"kept": dict(grads)}


def keeps_parameters(grads, state, params):
    return {path: g + params[path] - state["kept"][path] for path, g in grads.items()}, {"kept": dict(params)}


def from_where_it_began(grads, state, params):
    return {path: g + params[path] - state["kept"][path] for path, g in grads.items()}, state


def attached(tx):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    opt = zf.attach(model, tx)
    for gradient in (1.0, 2.0, 4.0):
        model(torch.full((1, 1), gradient)).sum().backward()
        opt.step()
        model.weight.grad.zero_()
    return model.weight.item()


def test_a_kept_gradient_is_not_what_its_caller_makes_of_it():
    tx = zf.chain(mine(zeros_of, keeps_gradients), zf.sgd(lr=1.0))
    state, grads = zf.init(tx, {"w": torch.zeros(1)}), {"w": torch.ones(1)}
    state, _ = zf.update(tx, grads, state)
    grads["w"].zero_()
    state, _ = zf.update(tx, grads, state)
    assert state.params["w"] == -2
    assert attached(tx) == -10
    assert attached(zf.chain(zf.partition({"a": tx}, lambda path: "a"))) == -10


@pytest.mark.parametrize("update, right", [(keeps_parameters, -5.0), (from_where_it_began, -4.0)])
def test_kept_parameters_do_not_follow_the_ones_of_the_model(update, right):
    assert attached(zf.chain(mine(lambda leaves: {"kept": dict(leaves)}, update), zf.sgd(lr=1.0))) == right


def test_a_kept_result_is_not_the_parameter():
    def update(grads, state, params):
        new = {path: state["kept"][path] - g for path, g in grads.items()}
        return new, {"kept": new}

    tx = zf.chain(mine(zeros_of, update, optimizes=True))
    state = zf.init(tx, {"w": torch.zeros(1)})
    state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
    assert state.params["w"].data_ptr() != state.transforms["mine"]["kept"]["w"].data_ptr()


def test_first_states_share_no_memory():
    one = torch.zeros(())
    tx = zf.chain(mine(lambda leaves: {"kept": dict.fromkeys(leaves, one)}, from_where_it_began), zf.sgd(lr=1.0))
    found = [
        x
        for _ in range(2)
        for x in zf.init(tx, {"a": torch.zeros(()), "b": torch.zeros(())}).transforms["mine"]["kept"].values()
    ]
    assert len({x.data_ptr() for x in (*found, one)}) == 5


def test_a_first_state_is_never_there_twice():
    """Each tensor goes when it is copied: of ten all are there at the first copy, and one at the last."""
    made, alive = [], []

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.clone.default and any(x() is args[0] for x in made):
                alive.append(sum(x() is not None for x in made))
            return func(*args, **(kwargs or {}))

    def init(leaves):
        kept = zeros_of(leaves)
        made.extend(map(weakref.ref, kept["kept"].values()))
        return kept

    with Counts():
        zf.init(zf.chain(mine(init, keeps_gradients), zf.sgd(lr=1.0)), {f"w{i}": torch.ones(2) for i in range(10)})
    assert alive == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
