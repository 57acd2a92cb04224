"""Without a loss scale and an output cast nothing of the boundary that a scale needs is run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from time_limits import limit
from torch import nn

import zerofn as zf

BF16 = torch.bfloat16
PACKAGE = str(Path(zf.__file__).parent)
# What a scale acts in.
BOUNDARY = {"crossing", "scaled_checks"}


def run_by(fn: Callable[[], Any]) -> set[tuple[str, str]]:
    """Modules of the package, and functions of theirs, that run while `fn` does."""
    found: set[tuple[str, str]] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found.add((Path(code.co_filename).stem, code.co_qualname))

    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return found


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1)).to(dtype)


def of_a_step(tx: zf.Transform, dtype: torch.dtype = torch.float32) -> set[tuple[str, str]]:
    net = model(dtype)
    opt = zf.attach(net, tx)
    x = torch.randn(5, 3, dtype=dtype, requires_grad=True)

    def forward_and_backward() -> None:
        net(x).float().square().mean().backward()

    forward_and_backward()
    opt.step()
    opt.zero_grad()
    found = run_by(forward_and_backward)
    assert all(p.grad is not None for p in net.parameters()) and x.grad is not None
    return found


def states(**more: Any) -> list[zf.Transform]:
    return [zf.accumulate(4), zf.clip_by_global_norm(1.0), zf.low_precision_adam(3e-3, **more)]


PIPELINES: dict[str, list[zf.Transform]] = {
    "bf16 states": [zf.precision(store_dtype=BF16), *states()],
    "bf16 states, sharded": [zf.shard(), zf.precision(store_dtype=BF16), *states()],
    "fp32 masters": [zf.precision(param_dtype=BF16), zf.clip_by_global_norm(1.0), zf.adamw(1e-3)],
    "fp32 gradients": [zf.precision(store_dtype=BF16, grad_dtype=torch.float32), *states(rounding="kahan")],
    "fp32": [zf.accumulate(4), zf.adamw(1e-3)],
}


@pytest.mark.parametrize("name", PIPELINES)
def test_nothing_of_the_boundary_runs(name):
    found = of_a_step(zf.chain(*PIPELINES[name]))
    assert not {entry for entry in found if entry[0] in BOUNDARY}
    # A cast alone is torch's own, in forward and in backward.
    assert (("view", "LinearMap.backward") in found) == (name == "fp32 gradients")


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_without_precision_nothing_at_all_runs(name):
    tx = zf.chain(*(states() if name == "bf16" else PIPELINES["fp32"]))
    assert of_a_step(tx, BF16 if name == "bf16" else torch.float32) == set()


def test_with_a_scale_it_is_seen_to_run():
    found = of_a_step(zf.chain(zf.scale_loss(8.0), zf.adamw(1e-3)))
    assert {module for module, _ in found} >= BOUNDARY and ("scaled_checks", "check_closed") in found
    found = of_a_step(zf.chain(zf.precision(output_dtype=BF16), zf.adamw(1e-3)))
    assert {module for module, _ in found} >= BOUNDARY and ("scaled_checks", "check_closed") not in found


def one_rank() -> set[tuple[str, str]]:
    return of_a_step(zf.chain(*PIPELINES["bf16 states, sharded"]))


def test_on_ranks_nothing_of_the_boundary_runs():
    for found in zf.launch(one_rank, 2, timeout=limit(60)):
        assert {module for module, _ in found} >= {"gather_on_use"}
        assert not {entry for entry in found if entry[0] in BOUNDARY}


def test_objects_of_any_class_may_come_out_where_nothing_is_copied():
    class Result:
        def __init__(self, hidden: torch.Tensor):
            self.hidden = hidden

    class Gives(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return Result(super().forward(x))

    net = Gives(3, 1)
    zf.attach(net, zf.chain(zf.precision(param_dtype=BF16), zf.adamw(1e-3)))
    net(torch.ones(2, 3)).hidden.float().sum().backward()
    assert net.weight.grad is not None and torch.equal(net.weight.grad, torch.full((1, 3), 2.0))
