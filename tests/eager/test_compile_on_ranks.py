"""torch.compile of an attached model, of its blocks or of the loop, compiled autograd, on ranks: as without."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import rank_programs as P
import torch
from stages import around
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf

# aot_eager traces forward and backward as inductor does, and leaves the generation of code out.
BACKEND = "aot_eager"
HOWS = ("model", "in place", "blocks", "loop")
# How far a compiled step may be from a plain one: fused operations round less often than single ones.
PRECISIONS = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 1e-2}


class Residual(nn.Module):
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


def pipe_of(stage: int, precision: str) -> zf.Transform:
    """Gradients have the dtype of the parameters: compiled autograd takes no others, see below."""
    # Where full parameters are resident they are the fp32 ones, if the cast stands before the reduction.
    cast = {
        "fp32": [],
        "bf16": [zf.precision(store_dtype=torch.bfloat16)],
        "fp16": [
            zf.precision(param_dtype=torch.float16, output_dtype=torch.float32),
            # Small enough not to overflow on the data here, and growing at every step.
            zf.scale_loss("dynamic", init_scale=256.0, growth_interval=1),
        ],
    }[precision]
    parts = around(stage, *cast) if stage == 3 else [*cast, *around(stage, window=P.hold())]
    return zf.chain(*parts, zf.sgd(0.05))


def train(tx: zf.Transform, how: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """By how much the parameters changed in two steps, and gradients of inputs."""
    torch._dynamo.reset()
    model = Residual()
    begun = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt = zf.attach(model, tx)
    call: Any = torch.compile(model, backend=BACKEND) if how == "model" else model
    for module in {"blocks": model.blocks, "in place": [model]}.get(how, []):
        module.compile(backend=BACKEND)

    def whole(x: Tensor) -> None:
        call(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()

    run = torch.compile(whole, backend=BACKEND) if how == "loop" else whole
    rank, _ = P.rank_and_size()
    found = []
    # By the switch, backward of a compiled function is compiled as well.
    with torch._dynamo.config.patch(compiled_autograd=how == "loop"):
        for step in range(2):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
            run(x)
            assert x.grad is not None
            found.append(x.grad)
            assert not int(opt.metrics.get("skipped", 0))
    opt.detach()
    return {n: p.detach().float() - begun[n] for n, p in model.named_parameters()}, found


def cells(size: int) -> list[tuple[int, str, str]]:
    """Every stage in every way on several ranks, each in one of the precisions."""
    hows = HOWS if size > 1 else ("model", "loop")
    return [
        (stage, list(PRECISIONS)[(stage + i + size) % len(PRECISIONS)], how)
        for stage in P.STAGES
        for i, how in enumerate(hows)
    ]


def everything() -> dict[tuple[int, str, str], Any]:
    _, size = P.rank_and_size()
    # What runs at every call and every saved tensor is compiled never, and so never anew.
    with warnings.catch_warnings(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        # The compiler looks whether a view has a .grad; compiled autograd makes an instance of every Function.
        warnings.simplefilter("ignore")
        return {
            (stage, precision, how): (train(pipe_of(stage, precision), how), train(pipe_of(stage, precision), "plain"))
            for stage, precision, how in cells(size)
        }


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_compiled_as_plain(size: int):
    for rank, found in enumerate(zf.launch(everything, size, timeout=limit(120))):
        assert len(found) == len(P.STAGES) * (len(HOWS) if size > 1 else 2)
        for (stage, precision, how), ((moved, inputs), (plain, expected)) in found.items():
            where, tol = f"rank {rank} of {size}, stage {stage}, {precision}, {how}", PRECISIONS[precision]
            for got, want in zip([*inputs, *moved.values()], [*expected, *plain.values()], strict=True):
                assert want.norm() > 0 and (got - want).norm() <= tol * want.norm(), where


def test_compiled_autograd_takes_gradients_of_the_parameters_dtype_alone():
    """Loud, and torch's own: it accumulates in the dtype of the parameter, whatever `Tensor.grad_dtype` says.

    torch 2.11 lets the first of several backwards pass.
    """
    model = Residual()
    zf.attach(model, zf.chain(zf.precision(store_dtype=torch.bfloat16, grad_dtype=torch.float32), zf.sgd(0.05)))
    with warnings.catch_warnings(), pytest.raises(RuntimeError) as caught:
        warnings.simplefilter("ignore")
        for _ in range(2):
            loss = model(torch.ones(5, 6)).float().square().mean()
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend=BACKEND)):
                loss.backward()
    assert "grad_dtype" in f"{caught.value} {caught.value.__cause__}"
