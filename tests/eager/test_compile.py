"""torch.compile of a model, of its blocks or of the loop, and compiled autograd: as without, at every stage."""

from __future__ import annotations

import warnings
from typing import Any

import models as zoo
import pytest
import rank_programs as P
import torch
from parity import PIPES, Run, compare
from stages import around
from time_limits import limit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerofn as zf

pytestmark = [
    # The compiler looks whether a view has a .grad, and would hide the warning if warnings were no errors here.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    # Compiled autograd makes an instance of every custom Function it meets.
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>"),
]

# aot_eager traces forward and backward as inductor does, and leaves the generation of code out.
BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(run: Run, call=None):
    x = run.data(5, 6, grad=True)
    (run.model if call is None else call)(x).float().square().mean().backward()
    return x.grad


def whole(run: Run):
    """Compiled by the user after attach; the attached model stays the one that is called."""
    return step(run, torch.compile(run.model, backend=BACKEND))


def in_place(run: Run):
    if run.step == 0:
        run.model.compile(backend=BACKEND)
    return step(run)


def block(run: Run):
    if run.step == 0:
        run.model.first.compile(backend=BACKEND)
    return step(run)


def compiled_autograd(run: Run):
    x = run.data(5, 6, grad=True)
    loss = run.model(x).float().square().mean()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=BACKEND)):
        loss.backward()
    return x.grad


def compiled_first() -> nn.Module:
    net = zoo.Net()
    net.first.compile(backend=BACKEND)
    return net


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "pipe"),
    [(whole, "scaled"), (in_place, "fp16 dynamic"), (block, "scaled"), (compiled_autograd, "fp16 dynamic")],
)
def test_compiled_after_attach(program, pipe: str):
    compare(program, zoo.Net, pipe, windows=3, tol=PIPES[pipe].tol * 2)


@pytest.mark.slow
@pytest.mark.parametrize("pipe", ["scaled", "fp16 dynamic"])
def test_compiled_before_attach(pipe: str):
    compare(step, compiled_first, pipe, windows=3, tol=PIPES[pipe].tol * 2)


class Compiled(nn.Module):
    """A compiled function over a parameter, repeated in backward."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant
        self.weight = nn.Parameter(torch.eye(6) * 0.5)
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        h = checkpoint(lambda y: torch.tanh(y @ self.weight), x, use_reentrant=self.reentrant)
        return self.last(h)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_under_compile(reentrant: bool):
    compare(in_place, lambda: Compiled(reentrant), "scaled", windows=3, tol=1e-4)


class Small(nn.Module):
    """A class of the user's: of torch's own modules `compile` makes no graph at the top."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


CASTS = {
    None: None,
    "plain": zf.sgd(0.1),
    "scaled": zf.chain(zf.scale_loss(64.0), zf.sgd(0.1)),
    "cast": zf.chain(zf.precision(param_dtype=torch.bfloat16, output_dtype=torch.float32), zf.sgd(0.1)),
}


def graphs_of(tx, how: str) -> list[list[str]]:
    """What is in the graphs that are made of a model."""
    torch._dynamo.reset()
    found = []

    def backend(graph, example):
        found.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    torch.manual_seed(0)
    model = called = Small()
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    expected = model(x).detach()
    if how == "in place, before":
        model.compile(backend=backend)
    if tx is not None:
        zf.attach(model, tx)
    if how == "in place, after":
        model.compile(backend=backend)
    if how == "function":
        called = torch.compile(model, backend=backend)
    torch.testing.assert_close(called(x), expected, rtol=2e-2, atol=2e-2)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pipe", CASTS)
def test_compile_in_place_makes_the_graphs_of_the_function(pipe: str | None):
    """One where nothing is hooked; under a cast or a scale they end where a parameter is used."""
    expected = graphs_of(CASTS[pipe], "function")
    assert [len(g) for g in expected] == ([3] if pipe in (None, "plain") else [1])
    for how in ("in place, before", "in place, after"):
        assert graphs_of(CASTS[pipe], how) == expected


# ---- on ranks ----

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
@pytest.mark.parametrize("size", [1, 3])
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
