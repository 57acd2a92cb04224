"""torch.compile of a model or of its blocks, and compiled autograd: the same gradients, whatever the scale."""

from __future__ import annotations

import models as zoo
import pytest
import torch
from parity import PIPES, Run, compare
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofn as zf

pytestmark = [
    pytest.mark.slow,
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


@pytest.mark.parametrize("pipe", ["scaled", "fp16 dynamic"])
@pytest.mark.parametrize("program", [whole, in_place, block, compiled_autograd])
def test_compiled_after_attach(program, pipe: str):
    compare(program, zoo.Net, pipe, windows=3, tol=PIPES[pipe].tol * 2)


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


@pytest.mark.parametrize("pipe", CASTS)
def test_compile_in_place_makes_the_graphs_of_the_function(pipe: str | None):
    """One where nothing is hooked; under a cast or a scale they end where a parameter is used."""
    expected = graphs_of(CASTS[pipe], "function")
    assert [len(g) for g in expected] == ([3] if pipe in (None, "plain") else [1])
    for how in ("in place, before", "in place, after"):
        assert graphs_of(CASTS[pipe], how) == expected
