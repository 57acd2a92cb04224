"""A transform of one's own may keep what it is handed: it is copied, and states share no memory."""

import pytest
import torch

import zerofn as zf
from zerofn.extend import Facts, Transform


def mine(init, update, **facts):
    functions = {"init_fn": lambda leaves, layout: init(leaves), "update_fn": lambda g, s, p, *_: update(g, s, p)}
    return Transform("mine", needs="element", facts=Facts(**facts), **functions)


def zeros(leaves):
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
    for _ in range(3):
        model(torch.ones(1, 1)).sum().backward()
        opt.step()
        model.weight.grad.zero_()
    return model.weight.item()


def test_a_kept_gradient_is_not_what_its_caller_makes_of_it():
    tx = zf.chain(mine(zeros, keeps_gradients), zf.sgd(lr=1.0))
    state, grads = zf.init(tx, {"w": torch.zeros(1)}), {"w": torch.ones(1)}
    state, _ = zf.update(tx, grads, state)
    grads["w"].zero_()
    state, _ = zf.update(tx, grads, state)
    assert state.params["w"] == -2
    assert attached(tx) == -5
    assert attached(zf.chain(zf.partition({"a": tx}, lambda path: "a"))) == -5


@pytest.mark.parametrize("update, right", [(keeps_parameters, -2.0), (from_where_it_began, -1.0)])
def test_kept_parameters_do_not_follow_the_ones_of_the_model(update, right):
    assert attached(zf.chain(mine(lambda leaves: {"kept": dict(leaves)}, update), zf.sgd(lr=1.0))) == right


def test_a_kept_result_is_not_the_parameter():
    def update(grads, state, params):
        new = {path: state["kept"][path] - g for path, g in grads.items()}
        return new, {"kept": new}

    tx = zf.chain(mine(zeros, update, optimizes=True))
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
