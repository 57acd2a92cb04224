"""torch.compile of functions that meet parameters of an attached model and their gradients: as uncompiled."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf

STAGES = {
    "shard": lambda: zf.chain(zf.shard(), zf.adamw(1e-2)),
    "shard, cast": lambda: zf.chain(
        zf.shard(),
        zf.precision(param_dtype=torch.bfloat16, output_dtype=torch.float32),
        zf.scale_loss(64.0),
        zf.adamw(1e-2),
    ),
    "reduce_scatter": lambda: zf.chain(zf.reduce_scatter(), zf.adamw(1e-2)),
    "all_reduce": lambda: zf.chain(zf.all_reduce(), zf.adamw(1e-2)),
    "one process": lambda: zf.adamw(1e-2),
}
X = torch.linspace(-1, 1, 12).view(3, 4)


def norm_of_gradient(p: Tensor) -> Tensor:
    return torch.zeros(()) if p.grad is None else p.grad.norm()


# Of a model with gradients. A norm, a sum or a mean of this rank's part alone would be another number.
READS = {
    "a parameter": lambda m: (m[0].weight * 2).norm(),
    "a gradient": lambda m: norm_of_gradient(m[0].weight),
    "all gradients": lambda m: torch.stack([norm_of_gradient(p) for p in m.parameters()]).norm(),
    "data": lambda m: m[0].weight.data.mean(),
    "detach": lambda m: m[0].weight.detach().square().sum(),
    "penalty": lambda m: m(X).sum() + full(m[0].weight.square().sum()),
}
# The same things, given as arguments.
GIVEN = {
    "parameter": (lambda m: m[0].weight, lambda p: (p * 2).norm()),
    "gradient": (lambda m: m[0].weight.grad, lambda g: g * 2),
    "its norm": (lambda m: m[0].weight.grad, lambda g: g.norm()),
    "data": (lambda m: m[0].weight.data, lambda x: x.square().mean()),
    "detach": (lambda m: m[0].weight.detach(), lambda x: x.sum()),
}


@torch.no_grad()
def scale(m: nn.Module, opt: Any) -> None:
    for p in m.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def exchange(m: nn.Module, opt: Any) -> None:
    for p in m.parameters():
        if p.grad is not None:
            p.grad = p.grad * 2


@torch.no_grad()
def decay(m: nn.Module, opt: Any) -> None:
    for p in m.parameters():
        p.mul_(0.9)
        p.data.mul_(0.9)


def clear(m: nn.Module, opt: Any) -> None:
    m.zero_grad()


def drop(m: Any, opt: Any) -> None:
    m[2].bias.grad = None


def clip(m: nn.Module, opt: Any) -> None:
    torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)


WRITES = (scale, exchange, decay, clear, drop, clip)


def attached(stage: str) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return model, zf.attach(model, STAGES[stage]())


def full(x: Any) -> Any:
    if x is None or not hasattr(x, "full_tensor"):
        return None if x is None else x.detach().clone()
    return x.full_tensor().detach()


def said(error: Exception) -> str:
    return str(error).splitlines()[0]


def read(stage: str, what: str, backend: str | None) -> Any:
    model, _ = attached(stage)
    model(X).sum().backward()
    if what in READS:
        fn, args = (lambda: READS[what](model)), ()
    else:
        of, fn = GIVEN[what.removeprefix("given ")]
        args = (of(model),)
        if args[0] is None:
            return None
    try:
        return full((fn if backend is None else torch.compile(fn, backend=backend))(*args))
    except RuntimeError as error:
        return said(error)


def written(stage: str, write: Any, backend: str | None) -> Any:
    model, opt = attached(stage)
    model(X).square().sum().backward()
    fn = write if backend is None else torch.compile(write, backend=backend)
    try:
        for _ in range(2):
            fn(model, opt)
        found = [full(p.grad) for p in model.parameters()]
        if write is not clear:
            opt.step()
    except RuntimeError as error:
        return said(error)
    with opt.gathered():
        return [*found, *(p.detach().clone() for p in model.parameters())]


def trained(stage: str, where: str, backend: str | None) -> list[Tensor]:
    """Losses and parameters of a model that is compiled at some moment, with gradients that are there or not."""
    model, opt = attached(stage)
    call: Any = model
    found = []
    for i in range(5):
        if backend is not None and i == 1:
            for module in {"in place": [model], "blocks": model.children()}.get(where, ()):
                module.compile(backend=backend)
            call = torch.compile(model, backend=backend) if where == "function" else model
        loss = call(X + i).float().square().mean()
        loss.backward()
        found.append(loss.detach())
        if i != 0 or stage in ("reduce_scatter", "all_reduce"):
            # In the first round gradients stay, where they may.
            opt.step()
            opt.zero_grad(set_to_none=bool(i % 2))
    with opt.gathered():
        return [*found, *(p.detach().clone() for p in model.parameters())]


def everything(stages: list[str], backend: str, each: int) -> dict[tuple, tuple[Any, Any]]:
    """Every `each`-th cell, compiled and not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cells = [(read, s, what) for s in stages for what in (*READS, *(f"given {k}" for k in GIVEN))]
        cells += [(written, s, fn) for s in stages for fn in WRITES]
        cells += [(trained, s, w) for s in stages for w in ("function", "in place", "blocks")]
        return {
            (fn.__name__, stage, getattr(x, "__name__", x)): (fn(stage, x, None), fn(stage, x, backend))
            for fn, stage, x in cells[::each]
        }


def compare(stages: list[str], backend: str, size: int, each: int = 1) -> None:
    for found in zf.launch(everything, size, stages, backend, each, timeout=limit(200)):
        for cell, (want, got) in found.items():
            if isinstance(want, list | Tensor):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda m, cell=cell: f"{cell}: {m}")
            else:
                assert got == want, cell
            alive = [x for x in (want if isinstance(want, list) else [want]) if isinstance(x, Tensor)]
            # Elsewhere gradients have left.
            assert cell[1] != "shard" or not alive or any(float(x.norm()) for x in alive), cell


def test_compiled_beside_shards():
    compare(["shard"], "eager", 2, each=6)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "size"), [("eager", 2), ("aot_eager", 1)])
def test_compiled_beside_every_stage(backend: str, size: int):
    # Over ranks torch 2.13 stops at an assertion of aot_eager: it compares the class of a tensor with DTensor itself.
    compare([*STAGES], backend, size)
