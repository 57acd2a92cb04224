"""`opt.state[p]` over ranks at every stage: what is read and written by index is the whole's, or it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import rank_programs as P
import torch
from one_launch import one_launch
from stages import around
from time_limits import limit
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerofn as zf


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    # Leaves of several rows, of fewer rows than ranks, and of one element.
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def row(x: Tensor, p: Tensor) -> None:
    x[-1] = 0.25


def column(x: Tensor, p: Tensor) -> None:
    x[..., 0] = x[..., 0] * 2


def mask(x: Tensor, p: Tensor) -> None:
    x[x.abs() > x.abs().mean()] = 0.0


def by_norm(x: Tensor, p: Tensor) -> None:
    x.mul_(x / x.norm())


def beside_the_parameter(x: Tensor, p: Tensor) -> None:
    x.add_(p.detach(), alpha=0.1)


def whole(x: Tensor, p: Tensor) -> None:
    x.copy_(torch.arange(p.numel(), dtype=torch.float64).view(p.shape) / 10)


def fill(x: Tensor, p: Tensor) -> None:
    x.index_fill_(0, torch.tensor([0]), 0.5)


WRITES: list[Callable[[Tensor, Tensor], None]] = [row, column, mask, by_norm, beside_the_parameter, whole, fill]


def numbers(x: Tensor) -> list[Any]:
    return [x.norm().item(), x.mean().item(), x.max().item(), x[0].tolist(), list(x.shape), (x * 2).sum().item()]


def trained(model: nn.Module, opt: Any, name: str) -> list[Any]:
    """Steps with writes into the state between them: what is read of it."""
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
    found = []
    for write in WRITES:
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
        for p in model.parameters():
            write(opt.state[p][name], p)
            found.append(numbers(opt.state[p][name]))
    return found


def attached(stage: str) -> tuple[list[Any], list[list[float]], list[Any]]:
    model = model_of()
    opt = zf.attach(model, zf.chain(*around(stage, window=zf.accumulate(1)), zf.sgd(0.1, momentum=0.9)))
    found = trained(model, opt, "momentum")
    with opt.gathered():
        params = [p.detach().tolist() for p in model.parameters()]
    shapes = []
    for p in model.parameters():
        kept = opt.state[p]["momentum"]
        if type(kept) is not Tensor:
            local = kept.to_local()
            shapes.append((type(local), tuple(local.shape)))
            # Over the same memory.
            local.fill_(3.0)
            assert torch.equal(opt.state[p]["momentum"].full_tensor(), torch.full(kept.shape, 3.0, dtype=kept.dtype))
    opt.detach()
    return found, params, shapes


# Of (5, 3), (5,), (1, 5) and (1,) rows as torch's chunks.
TWO = [[(3, 3), (3,), (1, 5), (1,)], [(2, 3), (2,), (0, 5), (0,)]]
THREE = [[(2, 3), (2,), (1, 5), (1,)], [(2, 3), (2,), (0, 5), (0,)], [(1, 3), (1,), (0, 5), (0,)]]


@pytest.mark.parametrize("stages, shapes", [(("data parallel", "ZeRO-1", "ZeRO-2"), TWO), (("ZeRO-3",), THREE)])
def test_a_state_is_read_and_written_as_in_one_process(stages, shapes):
    plain = model_of()
    want = trained(plain, optimizer := torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9), "momentum_buffer")
    for (stage,), ranks in one_launch(len(shapes), attached, [(stage,) for stage in stages]).items():
        for rank, (found, params, local) in enumerate(ranks):
            near = {"rtol": 1e-10, "atol": 1e-13, "msg": lambda m, at=stage: f"{at}: {m}"}
            torch.testing.assert_close(found, want, **near)
            torch.testing.assert_close(params, [p.tolist() for p in plain.parameters()], **near)
            assert local == ([(Tensor, shape) for shape in shapes[rank]] if stage != "data parallel" else []), stage
    assert optimizer.state


def said(fn: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as error:
        fn()
    return str(error.value)


def cut_twice() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "node"))
    first = zf.shard(mesh["node"]), zf.accumulate(1), zf.reduce_scatter(mesh["nodes"])
    model = model_of()
    opt = zf.attach(model, zf.chain(*first, zf.sgd(0.1, momentum=0.9)))
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    opt.step()
    p = model[0].weight
    kept = opt.state[p]["momentum"]
    assert kept.shape == (5, 3)
    kept.fill_(2.0)
    kept.mul_(0.5)
    assert all(bool((x == 1.0).all()) for x in [opt.state[p]["momentum"].to_local()])
    told = [said(lambda: kept.norm()), said(lambda: kept.__setitem__(0, 0.0)), said(lambda: kept[0])]
    opt.detach()
    return told


def at_an_owner() -> tuple[list[str], float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 4, bias=False)).double()
    opt = zf.attach(model, zf.chain(zf.reduce_scatter(), zf.muon(0.1)))
    for _ in range(2):
        opt.zero_grad()
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        opt.step()
        for p in model.parameters():
            # What is elementwise is said on every rank, and done where the state is.
            opt.state[p]["momentum"].mul_(0.5)
    told, total = [], 0.0
    for p in model.parameters():
        kept = opt.state[p]["momentum"]
        if type(kept) is Tensor:
            total += kept.sum().item()
            continue
        told += [said(lambda kept=kept: kept.norm()), said(lambda kept=kept: kept.__setitem__(0, 0.0))]
    opt.detach()
    return told, total


@pytest.mark.parametrize("program, ranks", [(cut_twice, 4), (at_an_owner, 2)])
def test_what_is_not_gathered_refuses_by_name(program, ranks):
    results = zf.launch(program, ranks, timeout=limit())
    for found in results:
        told = found if program is cut_twice else found[0]
        assert told
        for message in told:
            assert "opt.state[p]['momentum']" in message and "write:" in message
    if program is at_an_owner:
        assert all("which rank" in message for told, _ in results for message in told)
        assert sum(total for _, total in results) != 0


def asked_alone() -> str:
    model = model_of()
    opt = zf.attach(model, zf.chain(zf.reduce_scatter(), zf.sgd(0.1, momentum=0.9)))
    told = ""
    if P.rank_and_size()[0] == 0:
        told = said(lambda: opt.state[model[0].weight]["momentum"].norm())
    else:
        said(opt.detach)
    return told


def test_a_rank_that_asks_alone_is_told():
    told, _ = zf.launch(asked_alone, 2, timeout=limit())
    assert "norm of opt.state[p]['momentum']" in told and "not on every rank" in told
