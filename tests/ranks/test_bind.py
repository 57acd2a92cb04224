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
