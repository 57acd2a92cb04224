"""What is written into a whole parameter on one rank alone, where each rank stores a part of it: seen at the step."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import rank_programs as P
import torch
import torch.distributed as dist
from pairs import cover
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf

X = torch.linspace(-1, 1, 12).reshape(4, 3)
BF16 = torch.bfloat16


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    # The last leaf is smaller than there are ranks, and one has no element.
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    return model


@torch.no_grad()
def written(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(0.5)


def by_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


@torch.no_grad()
def by_checkpoint(model: nn.Module) -> None:
    model.load_state_dict({name: t * 0.5 for name, t in model.state_dict().items()})


WRITES: dict[str, Callable[[nn.Module], None]] = {"in place": written, "data": by_data, "checkpoint": by_checkpoint}


def train(tx: zf.Transform, act: Callable[[nn.Module, int], None], in_backward: bool = False) -> list[Tensor]:
    model = model_of()
    opt = zf.attach(model, tx, in_backward=in_backward)
    for step in range(3):
        if step == 1:
            act(model, P.rank_and_size()[0])
        model(X).square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.detach()
    return [p.detach().clone() for p in model.parameters()]


def plain() -> list[Tensor]:
    model = model_of()
    for step in range(3):
        if step == 1:
            written(model)
        grads = torch.autograd.grad(model(X).square().mean(), list(model.parameters()), allow_unused=True)
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                if g is not None:
                    p -= 0.1 * g
    return [p.detach() for p in model.parameters()]


PIPES: dict[str, Callable[[], list[zf.Transform]]] = {
    "late": lambda: [zf.accumulate(1), zf.reduce_scatter()],
    "early": lambda: [zf.reduce_scatter()],
    "cast": lambda: [zf.reduce_scatter(), zf.precision(param_dtype=BF16, output_dtype=torch.float32)],
}


def on_ranks(cells: list[tuple[str, str, bool]]) -> list[str]:
    """What was wrong, in words."""
    found = []
    for pipe, name, in_backward in cells:
        tx, write, where = zf.chain(*PIPES[pipe](), zf.sgd(0.1)), WRITES[name], f"{pipe} {name} {in_backward}"
        try:
            train(tx, lambda model, rank, write=write: write(model) if rank == 0 else None, in_backward)
            found.append(f"{where}: not refused")
        except RuntimeError as error:
            if "0.weight: other values" not in str(error) or "empty:" in str(error):
                found.append(f"{where}: {error}")

        def repaired(model: nn.Module, rank: int, write: Callable = write) -> None:
            if rank == 0:
                write(model)
            for p in model.parameters():
                dist.broadcast(p.data, 0)

        for act in (repaired, lambda model, rank, write=write: write(model)):
            got = train(tx, act, in_backward)
            # Two steps in fp32: a few roundings of parameters below one.
            near = all((g - w).abs().max() <= 1e-6 for g, w in zip(got, plain(), strict=True) if w.numel())
            if pipe != "cast" and not near:
                found.append(f"{where}: other numbers")
        # To read on one rank alone is no write.
        read = lambda model, rank: [float(p.data.sum()) for p in model.parameters()] if rank == 0 else None  # noqa: E731
        train(tx, read, in_backward)
    return found


EVERY = list(itertools.product(PIPES, WRITES, (False, True)))


@pytest.mark.parametrize(
    ("size", "cells"),
    [(2, cover(EVERY)), *(pytest.param(n, cover(EVERY), marks=pytest.mark.slow) for n in (1, 3))],
    ids=["2, pairs", "1", "3"],
)
def test_a_write_on_one_rank_alone_is_refused_at_the_step(size, cells):
    found = [f for told in zf.launch(on_ranks, size, cells, timeout=limit()) for f in told]
    # A lone rank writes on all ranks there are.
    assert [f for f in found if size > 1 or "not refused" not in f] == []
    assert size > 1 or len(found) == len(cells)


def whole_on_each() -> list[Tensor]:
    return train(zf.chain(zf.all_reduce(), zf.sgd(0.1)), lambda model, rank: written(model) if rank == 0 else None)


def test_under_all_reduce_every_rank_has_its_own_as_in_torch():
    mine, other = zf.launch(whole_on_each, 2, timeout=limit())
    assert not torch.equal(mine[1], other[1])


def torn() -> tuple[str, str, list[Tensor]]:
    """The error of a step within backward, of the one after it, and parameters once a state is loaded."""
    model = model_of()
    opt = zf.attach(model, zf.chain(zf.reduce_scatter(), zf.sgd(0.1)), in_backward=True)
    kept = copy.deepcopy(opt.state_dict())
    said = []
    if P.rank_and_size()[0] == 0:
        written(model)
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            model(X).square().mean().backward()
            opt.step()
        said.append(str(error.value))
        opt.zero_grad()
    opt.load_state_dict(kept)
    model(X).square().mean().backward()
    opt.step()
    opt.detach()
    return (*said, [p.detach().clone() for p in model.parameters()])


def one_step() -> list[Tensor]:
    model = model_of()
    opt = zf.attach(model, zf.sgd(0.1))
    model(X).square().mean().backward()
    opt.step()
    return [p.detach().clone() for p in model.parameters()]


def test_within_backward_the_state_is_torn_until_one_is_loaded():
    """Each rank has updated its part by the time of the step."""
    want = one_step()
    for first, second, got in zf.launch(torn, 2, timeout=limit()):
        assert "0.weight: other values" in first and "written on some ranks only" in first
        assert "load" in second
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


def saved(directory: str) -> list[str]:
    model = model_of()
    opt = zf.attach(model, zf.chain(zf.reduce_scatter(), zf.sgd(0.1)))
    if P.rank_and_size()[0] == 0:
        written(model)
    told = []
    for write in (lambda: zf.export_safetensors(f"{directory}/x.safetensors", opt), lambda: zf.save(directory, opt)):
        with pytest.raises(RuntimeError) as error:
            write()
        told.append(str(error.value))
    return told


def test_a_mixture_is_not_saved_or_exported(tmp_path):
    for told in zf.launch(saved, 2, str(tmp_path), timeout=limit()):
        for said in told:
            assert "0.weight: other values" in said and "written on some ranks only" in said
    assert not list(tmp_path.iterdir())
