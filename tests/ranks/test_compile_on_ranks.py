"""torch.compile of an attached model or of its blocks, and compiled autograd, on ranks: as the same without."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import rank_programs as P
import torch
from torch import Tensor, nn

import zerofn as zf

# aot_eager traces forward and backward as inductor does, and leaves the generation of code out.
BACKEND = "aot_eager"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return self.last(h)


def train(stage: int, how: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Parameters after three steps, and gradients of inputs."""
    torch._dynamo.reset()
    late = [zf.accumulate(1), zf.reduce_scatter()] if stage == 1 else []
    model = Net()
    opt = zf.attach(model, zf.chain(*(f() for f in P.FIRST[stage]), *late, zf.sgd(0.05)))
    call: Any = torch.compile(model, backend=BACKEND) if how == "model" else model
    for block in model.blocks if how == "blocks" else ():
        block.compile(backend=BACKEND)
    rank, _ = P.rank_and_size()
    found = []
    for step in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
        loss = call(x).float().square().mean()
        if how == "autograd":
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend=BACKEND)):
                loss.backward()
        else:
            loss.backward()
        assert x.grad is not None
        found.append(x.grad)
        opt.step()
        opt.zero_grad()
    opt.detach()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, found


def everything() -> dict[tuple[int, str], Any]:
    with warnings.catch_warnings():
        # The compiler looks whether a view has a .grad; compiled autograd makes an instance of every Function.
        warnings.simplefilter("ignore")
        return {(s, how): train(s, how) for s in P.FIRST for how in ("plain", "model", "blocks", "autograd")}


@pytest.mark.timeout(200)
def test_compiled_as_plain():
    begun = dict(Net().named_parameters())
    for rank, found in enumerate(zf.launch(everything, 2, timeout=180)):
        for (stage, how), (params, inputs) in found.items():
            where = f"rank {rank}, stage {stage}, {how}"
            plain, expected = found[stage, "plain"]
            for got, want in zip(inputs, expected, strict=True):
                # The same operations in fp32, of which the compiler may fuse some.
                assert want.norm() > 0 and (got - want).norm() <= 1e-5 * want.norm(), where
            for path, p in params.items():
                moved, want = p - begun[path], plain[path] - begun[path]
                assert want.norm() > 0 and (moved - want).norm() <= 1e-5 * want.norm(), where
