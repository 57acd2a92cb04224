"""DTensors as values: copied into parameters, gradients and states, set as gradients, beside them in arithmetic."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import rank_programs as P
import torch
from small_parts import said
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import zerofn as zf


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def value(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def as_sum(x: torch.Tensor, mesh: Any) -> DTensor:
    """A DTensor that is a sum of what ranks have."""
    rank, size = P.rank_and_size()
    mine = x * (2 if rank == 0 else -1 / (size - 1))
    return DTensor.from_local(mine, mesh, [Partial()], run_check=False)


PLACED = {
    "Shard(0)": lambda x, mesh: distribute_tensor(x, mesh, [Shard(0)]),
    "Replicate": lambda x, mesh: distribute_tensor(x, mesh, [Replicate()]),
}
OTHERWISE = {"Shard(1)": lambda x, mesh: distribute_tensor(x, mesh, [Shard(1)]), "Partial": as_sum}


def in_place(p, x, kept):
    p.add_(x, alpha=0.5)
    p.data.lerp_(x, 0.25)
    kept.addcmul_(x, x)
    p.grad.mul_(x)


def copies(p, x, kept):
    p.copy_(x)
    p.grad.copy_(x * 2)
    kept.copy_(x)


def sets(p, x, kept):
    p.grad = x * 2
    p.data = x
    p.grad.data = x * 3


def lists(p, x, kept):
    torch._foreach_add_([p.grad, kept], [x, x])
    torch._foreach_mul_([p], [x])


def indices(p, x, kept):
    p[0] = x[0].full_tensor() if isinstance(x, DTensor) else x[0]
    p.grad[x > 0] = 0.0
    torch.where(x > 0, p.grad, kept, out=kept)


def made(p, x, kept):
    p.grad.copy_(p.grad - x * p.data + torch.maximum(kept, x))
    p.mul_(torch.equal(p.data, x) + 0.5)


PROGRAMS = [in_place, copies, sets, lists, indices, made]


def run(program: Any, model: nn.Module, opt: Any, name: str, given: Any) -> list[Any]:
    for step in range(3):
        opt.zero_grad()
        model(torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)).square().mean().backward()
        with torch.no_grad():
            # A state is there after the first step.
            for i, p in enumerate(model.parameters() if step else ()):
                program(p, given(value(tuple(p.shape), i)), opt.state[p][name])
        opt.step()
    return [[p.tolist(), p.grad.tolist(), opt.state[p][name].tolist()] for p in model.parameters()]


def attached(cells: Any) -> dict[Any, Any]:
    mesh, found = init_device_mesh("cpu", (P.rank_and_size()[1],)), {}
    for program, placed in cells:
        make, model = PLACED[placed], model_of()
        opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1, momentum=0.9)))
        found[program.__name__, placed] = run(program, model, opt, "momentum", lambda x, m=make: m(x, mesh))
        opt.detach()
    return found


def reference(program: Any) -> list[Any]:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return run(program, model, optimizer, "momentum_buffer", lambda x: x)


CELLS = list(itertools.product(PROGRAMS, PLACED))
# Each program with one placement.
SOME = [cell for i, cell in enumerate(CELLS) if (i // len(PLACED) - i) % len(PLACED) < 1]


@pytest.mark.parametrize("cells", [SOME, pytest.param(CELLS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_dtensor_is_the_tensor_that_it_stands_for(cells):
    want = {program.__name__: reference(program) for program in PROGRAMS}
    for found in zf.launch(attached, 2, cells, timeout=limit()):
        for (program, placed), numbers in found.items():
            torch.testing.assert_close(
                numbers, want[program], rtol=1e-10, atol=1e-12, msg=lambda m, at=(program, placed): f"{at}: {m}"
            )


def others() -> dict[str, Any]:
    size = P.rank_and_size()[1]
    model = model_of()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1, momentum=0.9)))
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    p, found = model[0].weight, {}
    rows = distribute_tensor(value((5, 3), 0), init_device_mesh("cpu", (size,)), [Shard(0)])
    before = p.full_tensor().detach()
    # Into a DTensor.
    with torch.no_grad():
        found["into"] = (rows * 1).copy_(p).full_tensor().tolist() == before.tolist()
        found["added"] = torch.equal((rows * 1).add_(p.data).full_tensor(), rows.full_tensor() + before)
        found["made"] = torch.equal((rows + p.data).full_tensor(), rows.full_tensor() + before)
        # What FSDP2's users write.
        ours = DTensor.from_local(
            p.to_local(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )
        found["spelled"] = torch.equal(ours.full_tensor(), before)
        rows_of_gradient = (p.grad.placements, p.data.placements, opt.state[p]["momentum"].placements)
        found["placements"] = rows_of_gradient == ((Shard(0),),) * 3 and p.device_mesh == p.grad.device_mesh
        # On a mesh that lacks a rank of the parameter, and of another shape.
        alone = init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b"))["b"]
        mine = distribute_tensor(value((5, 3), 0), alone, [Replicate()])
        found["other mesh"] = said(lambda: p.copy_(mine))
        found["other shape"] = said(lambda: p.add_(distribute_tensor(value((3, 5), 0), rows.device_mesh, [Shard(0)])))
        for name, make in OTHERWISE.items():
            x = make(value((5, 3), 0), rows.device_mesh)
            found[name] = said(lambda x=x: p.add_(x))
            placed = x.redistribute(p.device_mesh, p.placements)
            found[f"{name} placed"] = torch.equal((p + placed).full_tensor(), p + x.full_tensor())
        found["short leaf"] = model[2].weight.placements == (Shard(0),)
    # In a hook nothing is gathered: rows are taken.
    held: list[Any] = []
    first = p.register_hook(lambda g: g * rows)
    opt.zero_grad()
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    hooked = p.grad.full_tensor()
    first.remove()
    columns = rows.redistribute(placements=[Shard(1)])
    p.register_hook(lambda g: held.append(said(lambda: g * columns)))
    opt.zero_grad()
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    found["hook"] = torch.equal(hooked, p.grad.full_tensor() * rows.full_tensor())
    found["hook gathers"] = held[0]
    opt.detach()
    p = model[0].weight
    # Where parameters are whole.
    opt = zf.attach(model, zf.chain(zf.reduce_scatter(), zf.sgd(0.1, momentum=0.9)))
    found["whole"] = said(lambda: setattr(p, "grad", rows))
    opt.state[p]["momentum"].copy_(rows)
    found["state"] = torch.equal(opt.state[p]["momentum"].full_tensor(), rows.full_tensor())
    opt.detach()
    return found


def test_what_stands_otherwise_is_right_or_refused_by_name():
    for found in zf.launch(others, 2, timeout=limit()):
        told = {name: found.pop(name) for name in list(found) if isinstance(found[name], str)}
        assert all(found.values()), found
        assert told.keys() == {"other mesh", "other shape", "hook gathers", "whole", *OTHERWISE}, told
        for name, message in told.items():
            assert "write:" in message and "DTensor" in message, (name, message)


STAGES = {"all_reduce": zf.all_reduce, "reduce_scatter": zf.reduce_scatter}
WRITES = {
    "copy_": lambda p, x: p.copy_(x),
    "add_": lambda p, x: p.add_(x, alpha=0.5),
    "add_ by name": lambda p, x: p.add_(other=x),
    "__iadd__": lambda p, x: p.__iadd__(x),
    "__setitem__": lambda p, x: p.__setitem__(slice(1, None), x[1:]),
    "masked_fill_": lambda p, x: p.masked_fill_(x > 0, 2.0),
    "lerp_": lambda p, x: p.lerp_(x, 0.25),
    "addcmul_": lambda p, x: p.addcmul_(x, x),
}


def into_whole(front: Any, mesh: Any) -> dict[str, tuple[str, bool]]:
    """What a write of a DTensor into a parameter that is whole says, and whether it has written nothing."""
    model, found = model_of(), {}
    opt = zf.attach(model, zf.chain(front(), zf.sgd(0.1)))
    p, full = model[0].weight, value((5, 3), 0)
    x, rows = distribute_tensor(full, mesh, [Shard(0)]), distribute_tensor(value((2, 3), 1), mesh, [Shard(0)])
    with opt.gathered(), torch.no_grad():
        start = p.clone()
        for name, write in WRITES.items():
            found[name] = said(lambda w=write: w(p, x)), torch.equal(p, start)
        found["of another shape"] = said(lambda: p.copy_(rows)), torch.equal(p, start)
    opt.detach()
    with torch.no_grad():
        found["detached"] = said(lambda: p.copy_(x)), True
    return found


def into_wholes() -> dict[str, dict[str, Any]]:
    mesh = init_device_mesh("cpu", (P.rank_and_size()[1],))
    return {stage: into_whole(front, mesh) for stage, front in STAGES.items()}


def test_torch_refuses_a_dtensor_beside_a_whole_parameter():
    for found in zf.launch(into_wholes, 2, timeout=limit()):
        for stage in STAGES:
            for told, untouched in found[stage].values():
                assert "mixed torch.Tensor and DTensor" in told and untouched
