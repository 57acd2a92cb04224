"""torch's functions of state dicts on a sharded model: distributed tensors of the leaves' shapes, and whole ones."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from time_limits import limit
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import zerofn as zf

BF16 = torch.bfloat16
FULL = StateDictOptions(full_state_dict=True)
ON_THE_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_THE_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Model(nn.Module):
    """5 rows, one row, a number, a tie, a buffer."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 5)
        self.last = nn.Linear(5, 1)
        self.tied = nn.Linear(5, 1, bias=False)
        self.tied.weight = self.last.weight
        self.gain = nn.Parameter(torch.tensor(0.5 + seed))
        self.register_buffer("shift", torch.arange(5.0))

    def forward(self, x):
        h = torch.tanh(self.first(x) * self.gain + self.shift.to(x.dtype))
        return self.last(h) + self.tied(h * h)


CHAINS = {
    "shard": lambda: zf.chain(zf.shard(), zf.adamw(0.1)),
    "bf16": lambda: zf.chain(zf.shard(), zf.precision(param_dtype=BF16), zf.accumulate(2), zf.adamw(0.1)),
    "stored in bf16": lambda: zf.chain(zf.shard(), zf.precision(store_dtype=BF16), zf.low_precision_adam(0.1)),
}


def attached(name, seed=0):
    model = Model(seed)
    opt = zf.attach(model, CHAINS[name]())
    for i in range(2):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))
        model(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    return model, opt


def whole(model, opt):
    with opt.gathered():
        return {k: x.clone() for k, x in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(x, b[k]) and x.dtype == b[k].dtype for k, x in a.items())


def on_ranks(folder):
    from torch.distributed.tensor import DTensor, Shard

    for name in CHAINS:
        model, opt = attached(name)
        want = whole(model, opt)
        given = get_model_state_dict(model)
        for k, x in given.items():
            assert x.shape == want[k].shape, k
            cut = k not in ("gain", "shift")
            assert (isinstance(x, DTensor) and x.placements == (Shard(0),)) == cut, k
            chunks = want[k].chunk(dist.get_world_size()) if cut else []
            mine = chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else want[k][:0] if cut else want[k]
            assert torch.equal(x.to_local() if cut else x, mine), k
        assert same(get_model_state_dict(model, options=FULL), want)
        first = get_model_state_dict(model, options=ON_THE_FIRST)
        assert same(first, want) if dist.get_rank() == 0 else not first

        # A parameter of five rows lies in the same memory, and one of fewer rows than ranks does not: both are set.
        doubled = {k: 2 * x for k, x in given.items()}
        set_model_state_dict(model, doubled)
        assert same(whole(model, opt), {k: 2 * x for k, x in want.items()})
        # torch puts DTensors into the dict that it is given.
        set_model_state_dict(model, dict(want), options=FULL)
        assert same(whole(model, opt), want)
        tripled = {k: 3 * x for k, x in want.items()} if dist.get_rank() == 0 else {}
        set_model_state_dict(model, tripled, options=FROM_THE_FIRST)
        assert same(whole(model, opt), {k: 3 * x for k, x in want.items()})
        # torch puts DTensors into the dict that it is given.
        set_model_state_dict(model, dict(want), options=FULL)

        # The parameters stay, and are those that are trained.
        ours = [id(p) for p in model.parameters()]
        model.load_state_dict({k: 2 * x for k, x in given.items()}, assign=True)
        assert [id(p) for p in model.parameters()] == ours
        assert same(whole(model, opt), {k: 2 * x for k, x in want.items()})
        model.load_state_dict(want, assign=True)

        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/{name}")
        other, again = attached(name, seed=1)
        assert not same(whole(other, again), want)
        read = {"model": get_model_state_dict(other)}
        dcp.load(read, checkpoint_id=f"{folder}/{name}")
        set_model_state_dict(other, read["model"])
        assert same(whole(other, again), want)
        # A parameter without dimensions lies on one rank, which saves and loads it, in place too.
        set_model_state_dict(other, dict(Model(seed=1).state_dict()), options=FULL)
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/{name}, as it is")
        dcp.load({"model": other.state_dict()}, checkpoint_id=f"{folder}/{name}, as it is")
        assert same(whole(other, again), want)
        # It trains on, from what was loaded.
        for m in (model, other):
            m(torch.ones(2, 3)).float().square().mean().backward()
        grads = [[p.grad.to_local() for p in m.parameters()] for m in (model, other)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        if name == "shard":
            torch.save(want, f"{folder}/whole-{dist.get_rank()}.pt")
    return True


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_they_are_whole_and_cut_as_torch_cuts(size, tmp_path):
    """And a plain model on one process reads the checkpoint that ranks have written by torch's functions."""
    assert zf.launch(on_ranks, size, str(tmp_path), timeout=limit(120)) == [True] * size
    want = torch.load(tmp_path / "whole-0.pt")
    plain = Model(1)
    read = {"model": get_model_state_dict(plain)}
    dcp.load(read, checkpoint_id=tmp_path / "shard", no_dist=True)
    set_model_state_dict(plain, read["model"])
    assert same(plain.state_dict(), want)
