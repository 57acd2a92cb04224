"""Checkpoints of models that are themselves cut over ranks: to go on from, and for models that are cut otherwise."""

import pytest
import stages
import tensor_parallel as T
import torch
from time_limits import limit

import zerofn as zf

FIRST, MORE = 4, 3
# Sums over ranks and columns are made in another order: in float64, over a few steps of Adam.
BOUND = 1e-12


def pipeline(dp, name):
    return zf.chain(
        stages.FIRST[name](dp), zf.accumulate(2), zf.clip_by_global_norm(0.05), zf.adamw(lr=1e-2), zf.ema(0.9)
    )


def attached(dp, tp, name):
    model = T.cut(tp)
    return model, zf.attach(model, pipeline(dp, name))


def numbers(opt):
    state = opt.state
    return [x.clone() for x in [*state.leaves.values(), *state.transforms["adamw"]["exp_avg"].values(), state.step]]


def save_and_go_on(size, parts, name, directory):
    """Whether a run that was loaded goes on as the one that was saved, bit for bit; and what it comes to."""
    dp, tp = T.axes(size, parts)
    model, opt = attached(dp, tp, name)
    T.train(model, opt, FIRST, dp)
    zf.save(directory, opt)
    T.train(model, opt, MORE, dp, start=FIRST)
    other, again = attached(dp, tp, name)
    with torch.no_grad():
        zf.load(directory, like=again)
    T.train(other, again, MORE, dp, start=FIRST)
    same = all(torch.equal(a, b) for a, b in zip(numbers(opt), numbers(again), strict=True))
    again.detach()
    return same, T.wholes(other)


def load_and_go_on(size, parts, name, directory):
    dp, tp = T.axes(size, parts)
    model, opt = attached(dp, tp, name)
    zf.load(directory, like=opt)
    T.train(model, opt, MORE, dp, start=FIRST)
    opt.detach()
    return T.wholes(model)


def in_one_process(directory=None):
    """Plain parameters all the way, or from a checkpoint on."""
    model = T.plain()
    opt = zf.attach(model, pipeline(None, "all_reduce"))
    if directory is None:
        T.train(model, opt, FIRST)
    else:
        zf.load(directory, like=opt)
    T.train(model, opt, MORE, start=FIRST)
    opt.detach()
    return T.wholes(model)


def test_from_columns_on_two_ranks_to_one_process_and_back(tmp_path):
    want = in_one_process()
    for same, got in zf.launch(save_and_go_on, 2, 1, 2, "all_reduce", tmp_path / "two", timeout=limit()):
        assert same
        assert T.difference(got, want) < BOUND
    assert T.difference(in_one_process(tmp_path / "two"), want) < BOUND
    model = T.plain()
    opt = zf.attach(model, pipeline(None, "all_reduce"))
    T.train(model, opt, FIRST)
    zf.save(tmp_path / "one", opt)
    for got in zf.launch(load_and_go_on, 2, 1, 2, "shard", tmp_path / "one", timeout=limit()):
        assert T.difference(got, want) < BOUND


def exports(directory):
    """A file of the full model from its columns, and back."""
    dp, tp = T.axes(1, 2)
    model, opt = attached(dp, tp, "all_reduce")
    T.train(model, opt, FIRST)
    zf.export_safetensors(directory / "model", opt)
    before = {name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in T.leaves(model)}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.0)
    zf.load_safetensors(directory / "model", like=opt)
    after = {name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in T.leaves(model)}
    return all(torch.equal(after[name], x) for name, x in before.items()), before


def test_a_file_of_the_full_model_from_its_columns(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    results = zf.launch(exports, 2, tmp_path, timeout=limit())
    found = safetensors.load_file(tmp_path / "model")
    for same, before in results:
        assert same
        assert all(torch.equal(found[name], x) for name, x in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", stages.FIRST)
def test_on_a_mesh_of_both_axes_and_on_other_meshes(tmp_path, name):
    want = in_one_process()
    for same, got in zf.launch(save_and_go_on, 4, 2, 2, name, tmp_path, timeout=limit()):
        assert same
        assert T.difference(got, want) < BOUND
    assert T.difference(in_one_process(tmp_path), want) < BOUND
    for size, parts in ((1, 2), (2, 1)):
        for got in zf.launch(load_and_go_on, 2, size, parts, name, tmp_path, timeout=limit()):
            assert T.difference(got, want) < BOUND
