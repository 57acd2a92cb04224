"""A view of one's own on a model that tensor parallelism has cut sees local tensors, whatever the stage."""

import functools

import pytest
import tensor_parallel as T
from time_limits import limit
from torch.distributed.tensor import DTensor

import zerofn as zf
from zerofn.extend import Transform, View, as_it_is

STEPS = 10
# Sums over ranks and over columns are made in another order; ten steps of Adam in float64 carry that on.
BOUND = 1e-11


def _half(x, leaf):
    assert not isinstance(x * 1, DTensor)
    return x * 0.5


def half():
    view = View(view=_half, pull=_half, store=lambda x, leaf: x * 2)
    return Transform("half", needs="element", view_fn=lambda layout, ranks: view, through=as_it_is)


def stages(dp):
    return {
        "nothing": (half(),),
        "all_reduce": (half(), zf.all_reduce(dp)),
        "reduce_scatter": (half(), zf.reduce_scatter(dp)),
        "shard": (half(), zf.shard(dp)),
        "behind shard": (zf.shard(dp), half()),
        "scaled": (half(), zf.shard(dp), zf.scale_loss(64.0)),
    }


def rest():
    return zf.clip_by_global_norm(0.05), zf.adamw(lr=1e-2)


def programs(size, names, directory):
    dp, tp = T.axes(size, 2)
    out = {}
    for name in names:
        model = T.cut(tp)
        opt = zf.attach(model, zf.chain(*stages(dp)[name], *rest()))
        T.train(model, opt, STEPS, dp)
        zf.save(directory / name, opt)
        with opt.gathered():
            seen = {path: T.whole(p.detach()) for path, p in model.named_parameters()}
        opt.detach()
        out[name] = T.wholes(model), seen
    return out


@functools.cache
def alone():
    return T.alone(zf.chain(half(), *rest()), STEPS)[0]


def check(found, directory):
    """What `detach` leaves, what is gathered and what one process loads are what the model computes with."""
    for name, (left, seen) in found.items():
        opt = zf.attach(model := T.plain(), zf.chain(half(), *rest()))
        zf.load(directory / name, like=opt, strict=False)
        opt.detach()
        for got in (left, seen, T.wholes(model)):
            assert T.difference(got, alone()) < BOUND, name


def test_over_two_ranks_of_tensor_parallelism_it_is_one_process(tmp_path):
    found = zf.launch(programs, 2, 1, ["nothing", "all_reduce", "shard", "scaled"], tmp_path, timeout=limit())
    check(found[0], tmp_path)


@pytest.mark.slow
def test_on_a_mesh_of_both_axes_every_stage_is_one_process(tmp_path):
    names = [name for name in stages(None) if name != "nothing"]
    check(zf.launch(programs, 4, 2, names, tmp_path, timeout=limit(120))[0], tmp_path)
