"""`zf.bind` on several ranks: derivatives are in the stored layout, wherever in the chain the reduction stands."""

from __future__ import annotations

import pytest
import torch

import zerofn as zf

PARAMS = {"w": torch.arange(1.0, 6.0), "b": torch.tensor([2.0, 3.0, -1.0])}
PIPELINES = {
    "zero-1": lambda: zf.chain(zf.accumulate(2), zf.reduce_scatter(), zf.sgd(1.0)),
    "zero-2": lambda: zf.chain(zf.reduce_scatter(), zf.accumulate(2), zf.sgd(1.0)),
    "zero-3": lambda: zf.chain(zf.shard(), zf.accumulate(2), zf.sgd(1.0)),
    "late all_reduce": lambda: zf.chain(zf.accumulate(2), zf.all_reduce(), zf.sgd(1.0)),
}


def loss(params, x):
    return ((params["w"] * x) ** 2).sum() + (params["b"] ** 3).sum()


def on_rank(name: str):
    tx = PIPELINES[name]()
    state = zf.init(tx, PARAMS)
    rank = torch.distributed.get_rank()
    fn = zf.bind(loss, tx, state)
    x = torch.full((5,), 1.0 + rank)
    grads = torch.func.grad(fn)(state.params, x)
    shapes = {k: (g.shape, state.params[k].shape) for k, g in grads.items()}
    return float(fn(state.params, x)), grads, shapes


@pytest.mark.parametrize("name", list(PIPELINES))
def test_bind_sees_full_parameters_and_gives_stored_gradients(name):
    ranks = zf.launch(on_rank, 2, name)
    # x is 1 on one rank and 2 on the other: 55 x^2 + 34, and the mean of 2 w x^2 is 5 w.
    assert [value for value, _, _ in ranks] == [55.0 + 34.0, 220.0 + 34.0]
    for _, _, shapes in ranks:
        assert all(g == p for g, p in shapes.values())
    for leaf, whole in {"w": 5 * PARAMS["w"], "b": 3 * PARAMS["b"] ** 2}.items():
        parts = [grads[leaf].flatten() for _, grads, _ in ranks]
        got = parts[0] if name == "late all_reduce" else torch.cat(parts)
        assert torch.equal(got[: whole.numel()], whole)


WEIGHTED = {
    "all_reduce": lambda: zf.chain(zf.accumulate(2, weighted=True), zf.all_reduce(), zf.sgd(1.0)),
    "reduce_scatter": lambda: zf.chain(zf.accumulate(2, weighted=True), zf.reduce_scatter(), zf.sgd(1.0)),
}


def _message(fn, *args) -> str:
    try:
        fn(*args)
    except ValueError as error:
        return str(error)
    return "no error"


def late(name: str):
    rank, tx = torch.distributed.get_rank(), WEIGHTED[name]()
    state, fn = (start := zf.init(tx, PARAMS)), zf.bind(loss, tx, start)
    x = torch.full((5,), 1.0 + rank)
    by_hand = {k: v.clone().requires_grad_() for k, v in state.params.items()}
    refused = [
        _message(torch.func.grad(fn), state.params, x),
        _message(torch.func.vmap(torch.func.grad(fn), (None, 0)), state.params, x[None]),
        _message(lambda: torch.func.grad(lambda p: torch.func.vmap(fn, (None, 0))(p, x[None]).sum())(state.params)),
        _message(lambda: fn(by_hand, x).backward()),
    ]
    value = float(fn(state.params, x)), float(torch.func.vmap(fn, (None, 0))(state.params, x[None]))
    of_input = torch.func.grad(fn, argnums=1)(state.params, x)
    for _ in range(2):
        _, pullback = zf.vjp(loss, tx, state, x)
        state, _ = zf.update(tx, pullback(torch.ones(()))[0], state, weight=1 + 2 * rank)
    return refused, value, of_input, zf.full_params(tx, state)


@pytest.mark.parametrize("name", list(WEIGHTED))
def test_a_late_weighted_pipeline_is_evaluated_but_not_differentiated_through_bind(name):
    for rank, (refused, value, of_input, params) in enumerate(zf.launch(late, 2, name)):
        for message in refused:
            assert "accumulate(weighted=True) comes before the reduction" in message and "zf.vjp(fn" in message
        assert value == ((89.0, 89.0), (254.0, 254.0))[rank]
        assert torch.equal(of_input, 2 * PARAMS["w"] ** 2 * (1.0 + rank))
        # Weights 1 and 3 of gradients 2 w and 8 w.
        assert torch.equal(params["w"], PARAMS["w"] - 6.5 * PARAMS["w"])


def shards_to_update():
    tx = PIPELINES["zero-1"]()
    state = zf.init(tx, PARAMS)
    grads = torch.func.grad(zf.bind(loss, tx, state))(state.params, torch.ones(5))
    return _message(zf.update, tx, grads, state)


def test_reduced_gradients_for_a_late_reduction_name_the_remedy():
    for message in zf.launch(shards_to_update, 2):
        assert "shape" in message and "write: gradients from zf.vjp" in message and "torch.func" not in message
