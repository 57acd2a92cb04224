"""Attached models whose leaves are cut by a wire of one's own, or twice: they go on from their checkpoints.

torch's distributed tensors cannot say how such leaves are cut, so `opt.state_dict()` has no form for them.
"""

import pytest
import torch
import torch.distributed as dist
from page_programs import of_page
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofn as zf


def shard_evenly():
    """The sharding of the page on transforms, which cuts leaves anywhere."""
    return of_page("shard_evenly")()


def twice():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "node"))
    return zf.chain(zf.shard(mesh["node"]), zf.reduce_scatter(mesh["nodes"]))


def train(model, opt, steps):
    for step in steps:
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3) + step
        model(x).square().sum().backward()
        opt.step()
        opt.zero_grad()


def goes_on(cut, folder):
    """Parameters from a start that was loaded, by each way of loading, without those of the run that went on."""

    def attached():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        return model, zf.attach(model, zf.chain(cut(), zf.adamw(0.05)))

    model, opt = attached()
    train(model, opt, range(2))
    zf.save(folder, opt)
    before = zf.full_params(opt.tx, opt.state)
    before = {path: x.clone() for path, x in before.items()}
    train(model, opt, range(2, 4))
    want = {path: x - before[path] for path, x in zf.full_params(opt.tx, opt.state).items()}
    found = {}
    for how in ("like=opt", "load_state", "its own state"):
        other, into = attached()
        if how == "like=opt":
            zf.load(folder, like=into)
        else:
            into.load_state(zf.load(folder, like=into.state))
        if how == "its own state":
            into.load_state(into.state)
        train(other, into, range(2, 4))
        found[how] = {path: x - before[path] for path, x in zf.full_params(into.tx, into.state).items()}
        into.detach()
    return want, found, dist.get_rank()


CUTS = [pytest.param(shard_evenly, 2, id="evenly"), pytest.param(twice, 4, id="twice", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("cut", "ranks"), CUTS)
def test_an_attached_model_goes_on(cut, ranks, tmp_path):
    for want, found, _ in zf.launch(goes_on, ranks, cut, str(tmp_path / "c"), timeout=limit()):
        assert all(change.abs().max() > 1e-2 for change in want.values())
        for how, got in found.items():
            for path, change in want.items():
                assert torch.equal(got[path], change), (how, path)
