"""torch.compile of a model or of its blocks, and compiled autograd: the same gradients, whatever the scale."""

from __future__ import annotations

import models as zoo
import pytest
import torch
from parity import PIPES, Run, compare
from torch import nn
from torch.utils.checkpoint import checkpoint

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
