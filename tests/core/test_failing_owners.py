"""A function of whole leaves that raises at the owner of one: all ranks know in the same step, and may go on.

The reference is the same run without that step.
"""

import pytest
import torch
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import zerofn as zf

F64 = torch.float64


@zf.leafwise
def picky(grad, param):
    """Fails for one matrix alone, which one rank owns."""
    if param.shape == (7, 5) and grad.abs().max() > 100:
        raise ArithmeticError("too large")
    return grad / grad.norm().clamp(min=1e-8)


def wires(stage):
    if stage != "nested":
        return [stage()]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "node"))
    return [zf.shard(mesh["node"]), zf.reduce_scatter(mesh["nodes"])]


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(F64)


def loss_of(out, step):
    return out.square().mean() * (1e6 if step == 1 else 1.0)


def go_on(stage, route, steps):
    """Parameters after these steps, of which each rank goes on from the one that fails; and what was said there."""
    model = make()
    tx = zf.chain(*wires(stage), picky(), zf.sgd(0.1, momentum=0.9))
    said = ""
    x = torch.ones(4, 5, dtype=F64)
    if route == "attached":
        opt = zf.attach(model, tx)
        for i in steps:
            try:
                loss_of(model(x), i).backward()
                opt.step()
            except (ArithmeticError, RuntimeError) as error:
                said = f"{type(error).__name__}: {error}"
            opt.zero_grad()
        with opt.gathered():
            return [p.detach().clone() for p in model.parameters()], said
    state = zf.init(tx, {n: p.detach().clone() for n, p in model.named_parameters()})
    for i in steps:
        step = zf.make_step(lambda params, i=i: loss_of(functional_call(model, params, (x,)), i), tx)
        try:
            state, _ = step(state)
        except (ArithmeticError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
    return list(zf.full_params(tx, state).values()), said


@pytest.mark.parametrize("route", ["attached", pytest.param("pure", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("stage", "size"),
    [(zf.shard, 2), (zf.reduce_scatter, 2), pytest.param("nested", 4, marks=pytest.mark.slow)],
)
def test_ranks_go_on_from_an_update_that_failed_at_one_owner(stage, size, route):
    found = zf.launch(go_on, size, stage, route, range(4), timeout=limit(60))
    without = zf.launch(go_on, size, stage, route, [0, 2, 3], timeout=limit(60))
    said = [text for _, text in found]
    own = said.index("ArithmeticError: too large")
    assert said.count("ArithmeticError: too large") == 1
    for rank in set(range(size)) - {own}:
        assert f"rank {own}: ArithmeticError: too large\n  write:" in said[rank]
    for (params, _), (same, nothing) in zip(found, without, strict=True):
        assert nothing == ""
        # To the bit: the step that failed has left nothing behind.
        assert all(torch.equal(x, y) for x, y in zip(params, same, strict=True))
