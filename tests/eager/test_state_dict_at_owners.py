"""`opt.state_dict()` where some states live at the owners of leaves: cut by rows as all others, for any ranks."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from time_limits import limit
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from trees import flat

import zerofn as zf


@zf.leafwise(optimizer=True, init=lambda p: {"m": torch.zeros_like(p), "norm": torch.zeros(())})
def by_norm(grad, param, state, *, lr):
    """Momentum over the norm of the whole leaf; what it keeps of a leaf is a dict."""
    momentum = 0.9 * state["m"] + grad
    norm = momentum.norm()
    return param - lr * momentum / norm.clamp(min=1e-6), {"m": momentum, "norm": norm}


def matrices(path):
    return "matrix" if path.endswith("weight") else "rest"


CHAINS = {
    "muon, ZeRO-3": lambda: [zf.shard(), zf.partition({"matrix": zf.muon(0.1), "rest": zf.adamw(1e-2)}, matrices)],
    "muon, ZeRO-1": lambda: [
        zf.accumulate(2),
        zf.reduce_scatter(),
        zf.partition({"matrix": zf.muon(0.1), "rest": zf.low_precision_adam(1e-2)}, matrices),
    ],
    "a norm, ZeRO-2": lambda: [zf.reduce_scatter(), zf.clip_by_global_norm(1.0), by_norm(lr=0.1), zf.ema(0.9)],
}


def made(kind, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.Linear(3, 3))
    return model, zf.attach(model, zf.chain(*CHAINS[kind]()))


def train(model, opt, first, last):
    for step in range(first, last):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()


def everything(model, opt):
    """Whole parameters and states."""
    full = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))
    return {k: x.clone() for k, x in flat([zf.full_params(opt.tx, opt.state), full["state"]]).items()}


def saved_and_gone_on(kind, folder):
    rank = torch.distributed.get_rank()
    model, opt = made(kind)
    train(model, opt, 0, 4)
    d = opt.state_dict()
    torch.save(d, f"{folder}/{rank}.pt")
    dcp.save({"opt": d}, checkpoint_id=f"{folder}/dcp")
    by_path = get_optimizer_state_dict(model, opt)
    dcp.save({"optimizer": by_path}, checkpoint_id=f"{folder}/by_path")
    kept = flat(d["state"])
    found = {
        "plain": [k for k, x in kept.items() if type(x) is torch.Tensor and x.ndim],
        "cut": [k for k, x in kept.items() if not isinstance(x, torch.Tensor) or type(x) is not torch.Tensor],
        "all": everything(model, opt),
    }
    train(model, opt, 4, 6)
    after = everything(model, opt)

    def goes_on(how, model, opt):
        train(model, opt, 4, 6)
        now = everything(model, opt)
        found[how] = now.keys() == after.keys() and all(torch.equal(x, now[k]) for k, x in after.items())

    other = made(kind, seed=1)
    other[1].load_state_dict(torch.load(f"{folder}/{rank}.pt", weights_only=False))
    goes_on("file", *other)

    other = made(kind, seed=2)
    mine = other[1].state_dict()
    dcp.load({"opt": mine}, checkpoint_id=f"{folder}/dcp")
    other[1].load_state_dict(mine)
    goes_on("dcp", *other)

    # By names, without the stored parameters, which are the model's own.
    model, opt = made(kind)
    train(model, opt, 0, 4)
    for kept in opt.state.values():
        for name in kept:
            if isinstance(kept[name], torch.Tensor) and kept[name].is_contiguous():
                kept[name].zero_()
    mine = get_optimizer_state_dict(model, opt)
    dcp.load({"optimizer": mine}, checkpoint_id=f"{folder}/by_path")
    set_optimizer_state_dict(model, opt, mine)
    goes_on("by path", model, opt)

    model, opt = made(kind)
    try:
        opt.load_state_dict(torch.load(f"{folder}/{1 - rank}.pt", weights_only=False))
    except ValueError as error:
        found["of another rank"] = str(error)
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=pytest.mark.slow if x == "muon, ZeRO-1" else ()) for x in CHAINS]
)
@pytest.mark.filterwarnings("ignore:.*torch.distributed")
def test_training_goes_on(kind, tmp_path):
    ranks = zf.launch(saved_and_gone_on, 2, kind, str(tmp_path), timeout=limit())
    for found in ranks:
        assert found["file"] and found["dcp"] and found["by path"]
        assert "the shard of rank" in found["of another rank"], found["of another rank"]
    first, second = ranks
    assert first["cut"] == second["cut"] and first["cut"]
    # Nothing is in the dict of one rank alone.
    assert first["plain"] == second["plain"]
    for now in zf.launch(loaded_on_three, 3, kind, str(tmp_path), timeout=limit()):
        assert now.keys() == first["all"].keys() and all(torch.equal(x, now[k]) for k, x in first["all"].items())


def loaded_on_three(kind, folder):
    model, opt = made(kind, seed=3)
    mine = opt.state_dict()
    dcp.load({"opt": mine}, checkpoint_id=f"{folder}/dcp")
    opt.load_state_dict(mine)
    return everything(model, opt)
