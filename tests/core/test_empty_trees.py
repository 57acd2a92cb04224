"""A tree without parameters, and groups without leaves, as optax takes them: nothing is trained, steps are counted."""

import pytest
import torch
from time_limits import limit

import zerofn as zf

PIPES = {
    "adamw": lambda: zf.adamw(0.1),
    "many": lambda: zf.chain(zf.accumulate(1), zf.clip_by_global_norm(1.0), zf.adamw(0.1), zf.ema(0.9)),
    "bf16": lambda: zf.chain(
        zf.precision(store_dtype=torch.bfloat16),
        zf.scale_loss("dynamic"),
        zf.skip_nonfinite(),
        zf.low_precision_adam(0.1),
    ),
    "groups": lambda: zf.partition({"a": zf.sgd(0.1), "b": zf.muon(0.1)}, lambda path: "a"),
    "masked": lambda: zf.chain(zf.masked(zf.clip_by_value(1.0), lambda path: True), zf.sgd(0.1)),
    "offloaded": lambda: zf.offload(zf.adamw(0.1)),
}
FRONTS = {"all_reduce": zf.all_reduce, "reduce_scatter": zf.reduce_scatter, "shard": zf.shard}
TREES = ({}, [], {"a": {}, "b": []})


def stepped(tx, tree):
    """Parameters and counts after two steps by `make_step`, and after one more by `update`."""
    state, step = zf.init(tx, tree), zf.make_step(lambda p, x: x.square(), tx)
    for _ in range(2):
        state, metrics = step(state, torch.tensor(3.0))
    assert float(metrics["loss"]) == 9.0 and bool(metrics["updated"])
    state, _ = zf.update(tx, tree, state)
    _, pull = zf.vjp(lambda p, x: 2 * x, tx, state, torch.ones(2))
    grads, by_input = pull(torch.ones(2))
    assert torch.equal(by_input, torch.full((2,), 2.0))
    return state.params, zf.full_params(tx, state), grads, int(state.step), int(state.micro_step)


@pytest.mark.parametrize("name", PIPES)
def test_an_empty_tree_is_trained_as_any_other(name, tmp_path):
    tx = PIPES[name]()
    for i, tree in enumerate(TREES):
        assert stepped(tx, tree) == (tree, tree, tree, 3, 3)
        assert str(zf.plan(tx, tree)) and str(zf.describe(zf.init(tx, tree)))
        zf.save(tmp_path / str(i), zf.init(tx, tree))
        assert zf.load(tmp_path / str(i), like=zf.init(tx, tree)).params == tree


def test_an_empty_group_does_nothing():
    rows = {"w": torch.ones(2)}
    tx = zf.partition({"a": zf.sgd(0.5), "b": zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(0.1))}, lambda path: "a")
    state, metrics = zf.update(tx, rows, zf.init(tx, rows))
    assert torch.equal(state.params["w"], torch.full((2,), 0.5)) and float(metrics["partition.b.grad_norm"]) == 0.0


def on_ranks():
    return {
        name: [stepped(zf.chain(front(), PIPES["many"]()), tree) for tree in TREES] for name, front in FRONTS.items()
    }


def test_an_empty_tree_on_ranks():
    for found in zf.launch(on_ranks, 2, timeout=limit()):
        for rows in found.values():
            assert rows == [(tree, tree, tree, 3, 3) for tree in TREES]
