"""Buffers of a module, such as BatchNorm's running means, are saved with `opt` and loaded into it."""

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
from stages import FIRST
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.storage import files as _manifest  # inside: its locks and files are looked at and broken

TX = zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(1e-2))


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def batch(i, rank=0):
    return torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(100 * rank + i)) * (1 + i + 3 * rank)


def train(model, opt, steps, rank=0):
    for i in steps:
        model(batch(i, rank)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def same(a, b):
    assert a.keys() == b.keys()
    for key, x in a.items():
        assert x.dtype == b[key].dtype and x.shape == b[key].shape, key
        assert torch.equal(x.contiguous().view(-1).view(torch.uint8), b[key].contiguous().view(-1).view(torch.uint8)), (
            key
        )


def evaluated(model):
    model.eval()
    with torch.no_grad():
        out = model(batch(50))
    model.train()
    return out


def test_a_resumed_model_gives_the_same(tmp_path):
    model = net(0)
    opt = zf.attach(model, TX)
    train(model, opt, range(3))
    zf.save(tmp_path, opt)
    kept = copy.deepcopy({k: v.detach() for k, v in model.state_dict().items()})
    out = evaluated(model)
    other = net(1)
    again = zf.attach(other, TX)
    held = dict(other.named_buffers())
    assert not torch.equal(evaluated(other), out)
    zf.load(tmp_path, like=again)
    same(other.state_dict(), kept)  # what plain torch would have saved
    assert torch.equal(evaluated(other), out)
    assert all(x is held[name] for name, x in other.named_buffers())
    train(model, opt, range(3, 6))
    train(other, again, range(3, 6))
    same(other.state_dict(), model.state_dict())
    assert not torch.equal(model[1].running_mean, kept["1.running_mean"])
    assert int(other[1].num_batches_tracked) == 6


class Odd(nn.Module):
    """Buffers of every kind, filled with what depends on a seed."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.w = nn.Parameter(torch.randn(3))
        self.register_buffer("floats", torch.randn(4, 3))
        self.register_buffer("turned", torch.randn(3, 4).T)
        self.register_buffer("image", torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.register_buffer("part", torch.randn(10)[2:5])
        self.register_buffer("low", torch.randn(5).to(torch.bfloat16))
        self.register_buffer("complex", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.rand(6) > 0.5)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("special", torch.tensor([float("nan"), -0.0, 1e-45]) if seed == 0 else torch.zeros(3))
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("none", None)
        self.register_buffer("wide", torch.arange(3).expand(2, 3))
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)
        self.inner = nn.ModuleDict({"a": nn.BatchNorm1d(3)})
        self.inner["again"] = self.inner["a"]
        self.inner["a"].running_var.fill_(7.0 + seed)

    def forward(self, x):
        return x * self.w


def test_every_kind_of_buffer(tmp_path):
    model, other = Odd(0), Odd(1)
    opt, again = zf.attach(model, TX), zf.attach(other, TX)
    zf.save(tmp_path, opt)
    names = {key.removeprefix("buffers/") for key in json.loads((tmp_path / "zerofn.json").read_text())["buffers"]}
    assert names == set(model.state_dict()) - set(dict(model.named_parameters(remove_duplicate=False)))
    zf.load(tmp_path, like=again)
    same(other.state_dict(), model.state_dict())
    assert other.scratch.tolist() == [1.0, 1.0]
    assert other.image.is_contiguous(memory_format=torch.channels_last) and not other.turned.is_contiguous()


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path):
    model = net(0)
    zf.save(tmp_path, zf.attach(model, TX))
    other = net(1)
    other[1].running_mean = torch.ones(5)
    other[1].num_batches_tracked = torch.tensor(0.0)
    del other[1].running_var
    other[2].register_buffer("more", torch.ones(2))
    again = zf.attach(other, TX)
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(ValueError) as error:
        zf.load(tmp_path, like=again)
    for line in (
        "buffers/1.running_mean: shape (4,) in the checkpoint, (5,) here",
        "buffers/1.num_batches_tracked: int64 in the checkpoint, float32 here",
        "buffers/1.running_var: unexpected",
        "buffers/2.more: missing",
        "opt.load_state(zf.load(directory, like=opt.state))",
    ):
        assert line in str(error.value)
    same(other.state_dict(), before)
    # What it says to write:
    again.load_state(zf.load(tmp_path, like=again.state))
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[1].running_mean, torch.ones(5))


def as_version_1(directory):
    """What was written before buffers were saved."""
    path = Path(directory) / "zerofn.json"
    body = json.loads(path.read_text())
    for key in body.pop("buffers"):
        del body["tensors"][key]
    del body["checksum"]
    body["version"] = 1
    path.write_text(json.dumps({**body, "checksum": _manifest._checksum(body)}))


@pytest.mark.parametrize("how", ["version 1", "of a state"])
def test_a_checkpoint_without_buffers(tmp_path, how):
    model = net(0)
    opt = zf.attach(model, TX)
    train(model, opt, range(2))
    zf.save(tmp_path, opt if how == "version 1" else opt.state)
    if how == "version 1":
        as_version_1(tmp_path)
    other = net(1)
    again = zf.attach(other, TX)
    with pytest.warns(
        UserWarning, match=r"buffers \(1\.running_mean, 1\.running_var, 1\.num_batches_tracked\) stay"
    ) as told:
        zf.load(tmp_path, like=again)
    assert ("older zerofn" in str(told[0].message)) == (how == "version 1")
    assert told[0].filename == __file__
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[1].running_mean, torch.zeros(4))
    # A warning that is an error comes before anything is written.
    third = net(2)
    before = {k: v.clone() for k, v in third.state_dict().items()}
    like = zf.attach(third, TX)
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning):
        zf.load(tmp_path, like=like)
    same(third.state_dict(), before)
    # A model without buffers has nothing to be told.
    plain = nn.Linear(2, 2)
    zf.save(tmp_path / "plain", zf.attach(plain, TX).state)
    zf.load(tmp_path / "plain", like=zf.attach(nn.Linear(2, 2), TX))


def test_warnings_name_the_line_of_the_user(tmp_path):
    """However many functions of ours are in between."""
    model = net(0)
    opt = zf.attach(model, TX)
    train(model, opt, range(1))
    saves = zf.Checkpoints(tmp_path)
    saves.save(opt.state)
    like = zf.attach(net(1), TX)
    for load in (lambda: saves.load(like=like), lambda: zf.load(saves.at(1), like, strict=False)):
        with pytest.warns(UserWarning, match="buffers .* stay as they are") as told:
            load()
        assert (told[0].filename, told[0].lineno) == (__file__, load.__code__.co_firstlineno)
    begun = lambda: zf.attach(nn.Linear(2, 2, dtype=torch.bfloat16), zf.adam(1e-3))  # noqa: E731
    with pytest.warns(UserWarning, match="stored in bf16") as told:
        begun()
    assert (told[0].filename, told[0].lineno) == (__file__, begun.__code__.co_firstlineno)


def test_a_state_does_not_mind_buffers(tmp_path):
    model = net(0)
    opt = zf.attach(model, TX)
    train(model, opt, range(2))
    zf.save(tmp_path, opt)
    state = zf.load(tmp_path, like=zf.init(TX, dict(net(1).named_parameters())))
    assert all(torch.equal(x, opt.state.params[k]) for k, x in state.params.items())


def test_what_cannot_be_saved(tmp_path):
    model = net(0)
    model[0].register_buffer("graph", torch.eye(3).to_sparse())
    model[2].register_buffer("ghost", torch.ones(2, device="meta"))
    opt = zf.attach(model, TX)
    with pytest.raises(TypeError, match=r"buffers/2\.ghost: is on the meta device"):
        zf.save(tmp_path / "x", opt)
    del model[2].ghost
    with pytest.raises(
        TypeError, match=r"buffers/0\.graph: a Tensor of layout torch\.sparse_coo[\s\S]*persistent=False"
    ):
        zf.save(tmp_path / "x", opt)
    assert not (tmp_path / "x").exists()
    zf.save(tmp_path / "x", opt.state)
    clash = zf.attach(net(0), zf.adamw(1e-2).named("buffers"))
    zf.save(tmp_path / "y", clash)


def test_extra_state_is_told_of(tmp_path):
    class Quantized(nn.Linear):
        def get_extra_state(self):
            return {"scale": object()}

        def set_extra_state(self, state):
            pass

    model = nn.Sequential(Quantized(2, 2), nn.BatchNorm1d(2))
    with pytest.warns(UserWarning, match=r"get_extra_state gives, of 0, is not in the checkpoint") as told:
        zf.save(tmp_path, zf.attach(model, TX))
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match=r"of the model, is not in the checkpoint"):
        zf.save(tmp_path / "alone", zf.attach(Quantized(2, 2), TX))
    assert "buffers/1.running_mean" in json.loads((tmp_path / "zerofn.json").read_text())["tensors"]


def on_ranks(directory, save):
    """Each rank has statistics of its own data; what is resumed has those of the first."""
    rank, found = zf.collectives.world_group("test").rank, {}
    for stage, first in FIRST.items():
        model = net(0 if save else 1)
        opt = zf.attach(model, zf.chain(first(), zf.adamw(1e-2)))
        where = Path(directory) / stage
        if save:
            train(model, opt, range(2), rank)
            zf.save(where, opt)
        else:
            zf.load(where, like=opt)
        found[stage] = {name: x.clone() for name, x in model.named_buffers()}
        train(model, opt, range(2, 3), rank)
        assert int(model[1].num_batches_tracked) == 3
    return found


def test_buffers_of_the_first_rank(tmp_path):
    saved = zf.launch(on_ranks, 2, str(tmp_path), True, timeout=limit())
    resumed = zf.launch(on_ranks, 3, str(tmp_path), False, timeout=limit())
    for stage in FIRST:
        first, second = (answer[stage] for answer in saved)
        assert not torch.equal(first["1.running_mean"], second["1.running_mean"])
        other = net(1)
        zf.load(tmp_path / stage, like=zf.attach(other, zf.adamw(1e-2)))
        for found in (*(answer[stage] for answer in resumed), dict(other.named_buffers())):
            same(found, first)
