"""`zf.replay` and `zf.record`: which transform, leaf and element differs, or is not finite first."""

import pytest
import torch
from support.time_limits import limit

import zerofn as zf
from zerofn.testing import assert_trees_equal, clone

TX = zf.chain(zf.clip_by_global_norm(1.0), zf.low_precision_adam(0.1), zf.ema(0.9))


def params():
    return {"a": torch.ones(2, 3), "b": torch.zeros(4)}


def loss(p, x):
    return (p["a"] @ x).square().sum() + (p["b"] - 1).square().sum()


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_that_is_reproducible(donate):
    step, state = zf.make_step(loss, TX, donate=donate), zf.init(TX, params())
    before = clone(state)
    assert zf.replay(step, state, torch.ones(3)) is None
    assert_trees_equal(state.params, before.params)
    dropping = zf.make_step(lambda p, x: loss(p, torch.nn.functional.dropout(x)), TX)
    assert zf.replay(dropping, state, torch.ones(3)) is None


def test_the_first_element_that_differs():
    """In the order of the chain: moments before parameters."""
    calls = []

    def forgetful(p, x):
        calls.append(0)
        other = torch.ones(4).index_fill(0, torch.tensor([2]), float(len(calls)))
        return loss(p, x) + (p["b"] * other).sum()

    tx = zf.sgd(0.1, momentum=0.9)
    found = zf.replay(zf.make_step(forgetful, tx), zf.init(tx, params()), torch.ones(3))
    assert found[:4] == ("sgd", "momentum", "b", 2) and found.values == (-1.0, 0.0)


def test_where_a_nan_began():
    """The batch of the sixth step; the state goes on to be NaN, and what is older than the last four is gone."""
    step, state = zf.record(zf.make_step(loss, TX), last=4), zf.init(TX, params())
    for i in range(8):
        state, _ = step(state, torch.tensor([1.0, torch.nan if i == 5 else 0.5, 0.0]))
    assert [number for number, *_ in step.kept] == [4, 5, 6, 7]
    found = step.trouble()
    assert found.step == 5 and found[:4] == ("low_precision_adam", "exp_avg", "a", 0)
    well = zf.record(zf.make_step(loss, TX))
    well(zf.init(TX, params()), torch.ones(3))
    assert well.trouble() is None


def on_ranks():
    import torch.distributed as dist

    tx, calls = zf.chain(zf.shard(), zf.sgd(0.1)), []

    def forgetful(p, x):
        calls.append(0)
        return loss(p, x) + len(calls) * p["b"][3]

    return dist.get_rank(), zf.replay(zf.make_step(forgetful, tx), zf.init(tx, params()), torch.ones(3))


def test_each_rank_tells_of_its_part():
    for rank, found in zf.launch(on_ranks, 2, timeout=limit(60)):
        assert found is None if rank == 0 else found[:4] == ("params", "", "b", 1)


def test_looking_for_trouble_draws_nothing_from_the_generator():
    noisy = zf.make_step(lambda p, x: loss(p, x * torch.rand(3)), TX)
    step = zf.record(noisy)
    step(zf.init(TX, params()), torch.ones(3))
    before = torch.get_rng_state()
    assert step.trouble() is None
    assert torch.equal(torch.get_rng_state(), before)


def test_keywords_are_kept_as_they_were():
    tx = zf.chain(zf.accumulate(2, weighted=True), zf.sgd(0.1))
    step, weight = zf.record(zf.make_step(loss, tx)), torch.tensor(2.0)
    step(zf.init(tx, params()), torch.ones(3), weight=weight)
    weight.fill_(5.0)
    assert float(step.kept[0][3]["weight"]) == 2.0
