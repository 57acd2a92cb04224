"""Models of torch's tensor parallelism are attached behind `fully_shard`; without it they are refused by path."""

import pytest
import tensor_parallel as T
import torch
from time_limits import limit
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import zerofn as zf

FIRST, MORE = 4, 3
# Sums over ranks and columns are made in another order: in float64, over a few steps of Adam.
BOUND = 1e-11


def rest():
    return zf.accumulate(2), zf.clip_by_global_norm(0.05), zf.adamw(lr=1e-2), zf.ema(0.9)


def both(dp, tp):
    model = T.cut(tp)
    for block in model.blocks:
        fully_shard(block, mesh=dp)
    return fully_shard(model, mesh=dp)


def save_and_go_on(size, directory):
    """Norms, and what a run that was saved and one that was loaded come to."""
    dp, tp = T.axes(size, 2)
    model = both(dp, tp)
    opt = zf.attach(model, zf.chain(*rest()))
    norms = T.train(model, opt, FIRST, dp)
    zf.save(directory, opt)
    norms += T.train(model, opt, MORE, dp, start=FIRST)
    other = both(dp, tp)
    again = zf.attach(other, zf.chain(*rest()))
    zf.load(directory, like=again)
    T.train(other, again, MORE, dp, start=FIRST)
    return norms, T.wholes(model), T.wholes(other)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_behind_fully_shard_it_is_one_process(tmp_path, size):
    want, told = T.alone(zf.chain(*rest()), FIRST + MORE)
    for norms, *found in zf.launch(save_and_go_on, 2 * size, size, tmp_path, timeout=limit()):
        assert norms == pytest.approx(told, rel=BOUND)
        for got in found:
            assert T.difference(got, want) < BOUND
    model = T.plain()
    opt = zf.attach(model, zf.chain(*rest()))
    zf.load(tmp_path, like=opt)
    T.train(model, opt, MORE, start=FIRST)
    opt.detach()
    assert T.difference(T.wholes(model), want) < BOUND


def said_without(first):
    dp, tp = T.axes(1, 2)
    model = T.cut(tp)
    before = dict(model.named_parameters())
    said = []
    for chain in (zf.chain(first(dp), zf.adamw(1e-2)), zf.adamw(1e-2)):
        with pytest.raises(ValueError) as error:
            zf.attach(model, chain)
        said.append(str(error.value))
    # A DTensor of the user's own.
    alone = nn.Linear(4, 4)
    alone.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), tp, [Shard(0)]))
    with pytest.raises(ValueError) as error:
        zf.attach(alone, chain)
    assert "weight: a DTensor" in str(error.value)
    assert all(p is before[path] for path, p in model.named_parameters())
    return said


@pytest.mark.parametrize("first", [zf.shard, zf.reduce_scatter])
def test_without_it_dtensors_are_refused_by_path(first):
    for said in zf.launch(said_without, 2, first, timeout=limit()):
        for message in said:
            assert "gain: a DTensor" in message and "blocks.1.up.weight: a DTensor" in message
            assert "fully_shard(block, mesh=mesh['dp'])" in message
