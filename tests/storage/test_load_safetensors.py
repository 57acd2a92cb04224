"""`load_safetensors`: parts of a file, for any stage and number of ranks, against the file as its library reads it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from stages import around, fronts
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.storage import safetensors as module  # inside: how much is read at once

BF16 = torch.bfloat16


IN_BF16 = {"ZeRO-3 in bf16": lambda: around("ZeRO-3", zf.precision(store_dtype=BF16))}
# On ranks the first is one of each rank's own, and means it.
STAGES = {"one process": lambda: [zf.local()]} | fronts("ZeRO-1", "ZeRO-3") | IN_BF16


class Model(nn.Module):
    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.rand(()))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.frozen = nn.Parameter(torch.rand(3, 2, 2), requires_grad=False)

    def forward(self, i):
        return self.head(self.norm(self.embed(i))) * self.gain + self.frozen.sum()


def at(stage):
    return zf.chain(*STAGES[stage](), zf.adamw(0.1), zf.ema(0.9))


def of_parameters(name):
    return "running_" not in name and "num_batches" not in name


def read(path):
    """By both routes, into other numbers than those of the file."""
    found = {}
    for stage in STAGES:
        tx, model = at(stage), Model(1)
        meta = {k: p.detach().to("meta") for k, p in model.named_parameters()}
        state = zf.load_safetensors(path, like=zf.init(tx, meta), tx=tx, only=of_parameters)
        full = {k: x.clone() for k, x in zf.full_params(tx, state).items()}
        averages = zf.full_params(tx, state, of="ema")
        assert int(state.step) == 0 and all(torch.equal(averages[k].to(full[k].dtype), full[k]) for k in full)
        opt = zf.attach(model, tx)
        assert zf.load_safetensors(path, like=opt).leaves.keys() == state.leaves.keys()
        with torch.no_grad():
            out = model.eval()(torch.arange(7))
        found[stage] = full, out.clone(), model.norm.running_mean.clone(), opt.detach().state_dict()["gain"].clone()
    return found


@pytest.mark.parametrize("world", [1, 3, pytest.param(2, marks=pytest.mark.slow)])
def test_parts_are_those_of_the_whole(tmp_path, world):
    source = Model(0)
    source.norm.running_mean.fill_(0.5)
    path = tmp_path / "model.safetensors"
    save_model(source, str(path))
    whole, want = load_file(path), {k: p.detach() for k, p in source.named_parameters()}
    assert ("embed.weight" in whole) + ("head.weight" in whole) == 1
    for found in zf.launch(read, world, str(path), timeout=limit()):
        for stage, (full, out, mean, gain) in found.items():
            narrow = BF16 if "bf16" in stage else torch.float32
            assert full.keys() == want.keys()
            assert all(torch.equal(full[k], want[k].to(narrow)) for k in want), stage
            assert torch.equal(gain, want["gain"].to(narrow)) and torch.equal(mean, source.norm.running_mean)
            if narrow == torch.float32:
                assert torch.equal(out, source.eval()(torch.arange(7)).detach())


def rows_read(path):
    """Elements that are taken out of the file, of a matrix of 64 rows of 8 and a vector of 10."""
    tx, taken, plain = zf.chain(zf.shard(), zf.sgd(0.1)), [], module._read

    class Counted:
        def __init__(self, part):
            self.part = part

        def __getitem__(self, key):
            x = self.part[key]
            taken.append(x.numel())
            return x

    module._read = lambda part, e: plain(Counted(part), e)
    like = zf.init(tx, {"w": torch.zeros(64, 8), "b": torch.zeros(10)})
    state = zf.load_safetensors(path, like=like, tx=tx)
    return sum(taken), sum(x.numel() for x in state.leaves.values()), zf.full_params(tx, state)


def test_a_rank_reads_its_own_rows(tmp_path):
    path = tmp_path / "model.safetensors"
    want = {"w": torch.randn(64, 8), "b": torch.randn(10)}
    save_file(want, path)
    for taken, own, full in zf.launch(rows_read, 3, str(path), timeout=limit()):
        # Its range, and what is left of the first and the last row.
        assert own <= taken <= own + 2 * 8
        assert torch.equal(full["w"], want["w"]) and torch.equal(full["b"], want["b"])


def test_there_and_back_and_later_states_stay(tmp_path):
    tx = zf.chain(zf.adamw(0.1), zf.ema(0.9))
    state = zf.init(tx, {"w": torch.ones(3), "b": {"c": torch.zeros(2)}})
    state, _ = zf.update(tx, {"w": torch.ones(3), "b": {"c": torch.ones(2)}}, state)
    zf.export_safetensors(tmp_path / "a", state)
    again = zf.load_safetensors(
        tmp_path / "a", like=zf.init(tx, {"w": torch.ones(3), "b": {"c": torch.zeros(2)}}), tx=tx
    )
    assert torch.equal(again.params["w"], state.params["w"]) and torch.equal(
        again.params["b"]["c"], state.params["b"]["c"]
    )
    other, _ = zf.update(tx, {"w": -torch.ones(3), "b": {"c": torch.ones(2)}}, zf.init(tx, state.params))
    loaded = zf.load_safetensors(tmp_path / "a", like=other, tx=tx)
    assert torch.equal(loaded.params["w"], state.params["w"]) and int(loaded.step) == 1
    assert loaded.transforms["adamw"]["exp_avg"]["w"] is other.transforms["adamw"]["exp_avg"]["w"]


def test_of_several_files(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    table = {"a": "one.safetensors", "b": "../elsewhere/two.safetensors"}
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": table}))
    tx = zf.sgd(0.1)
    like = zf.init(tx, {"a": torch.zeros(2), "b": torch.ones(3)})
    state = zf.load_safetensors(tmp_path / "index.json", like=like, tx=tx)
    assert state.params["a"].tolist() == [1.0, 1.0] and state.params["b"].tolist() == [0.0] * 3


WRONG = [
    "extra: is in the file and not in the model",
    "gone: is in the model and not in the file",
    r"long: is of shape \(3,\) in the file and of \(4,\) in the model",
    "whole: is of I64 in the file",
]


def test_all_that_does_not_fit_is_told_at_once(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"long": torch.ones(3), "whole": torch.ones(2, dtype=torch.int64), "extra": torch.ones(1)}, path)
    tx = zf.sgd(0.1)
    like = zf.init(tx, {"long": torch.zeros(4), "whole": torch.zeros(2), "gone": torch.zeros(1)})
    with pytest.raises(ValueError, match="the file does not fit") as error:
        zf.load_safetensors(path, like=like, tx=tx)
    for want in WRONG:
        assert error.match(want)


def on_ranks(path):
    tx = zf.chain(zf.shard(), zf.sgd(0.1))
    with pytest.raises(ValueError, match="the file does not fit"):
        zf.load_safetensors(path, like=zf.init(tx, {"long": torch.zeros(4)}), tx=tx)
    rank = torch.distributed.get_rank()
    with pytest.raises(FileNotFoundError, match="gone"):
        zf.load_safetensors(f"{path}{'.gone' * rank}", like=zf.init(tx, {"long": torch.zeros(3)}), tx=tx)
    return True


def test_every_rank_is_told(tmp_path):
    save_file({"long": torch.ones(3)}, tmp_path / "a")
    assert zf.launch(on_ranks, 2, str(tmp_path / "a"), timeout=limit()) == [True, True]


class Expanded(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.ones(1).expand(3))

    def forward(self, x):
        return (self.w * x).sum()


def test_a_buffer_that_cannot_be_written_is_refused_before_anything_is(tmp_path):
    model = Expanded()
    opt = zf.attach(model, zf.sgd(0.1))
    save_file({"w": torch.full((2,), 5.0), "scale": torch.full((3,), 7.0)}, tmp_path / "a")
    with pytest.raises(ValueError, match=r"zf.load_safetensors: these buffers(?s:.*)scale: its elements share memory"):
        zf.load_safetensors(tmp_path / "a", like=opt)
    assert torch.equal(model.w, torch.ones(2))
    save_file({"w": torch.full((2,), 5.0), "scale": torch.ones(3)}, tmp_path / "b")
    zf.load_safetensors(tmp_path / "b", like=opt)
    assert torch.equal(model.w, torch.full((2,), 5.0))
