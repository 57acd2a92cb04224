"""Backward hooks on modules: true gradients, or refused where a loss scale would show in them."""

from __future__ import annotations

from typing import Any

import models as zoo
import pytest
import torch
from parity import PIPES, Run, compare
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook, register_module_full_backward_pre_hook
from torch.utils.checkpoint import checkpoint

import zerofn as zf

SCALED = ["scaled", "bf16 scaled", "fp16 dynamic"]
INSIDE = "backward hooks on modules of a model under scale_loss(.|\n)*first: {}(.|\n)*bf16 needs none"


class FirstAgain(zoo.Net):
    """The first layer under activation checkpointing."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(checkpoint(self.first, x, use_reentrant=self.reentrant)) * self.gain)


def data(grad: bool = False) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).requires_grad_(grad)


def clamp_in(m: nn.Module, into: Any, out: Any) -> Any:
    return tuple(None if g is None else g.clamp(-1e-3, 1e-3) for g in into)


def clamp_out(m: nn.Module, out: Any) -> Any:
    return tuple(None if g is None else g.clamp(-1e-3, 1e-3) for g in out)


KINDS = {
    "register_full_backward_hook": lambda m: m.register_full_backward_hook(clamp_in),
    "register_full_backward_pre_hook": lambda m: m.register_full_backward_pre_hook(clamp_out),
    "register_backward_hook": lambda m: m.register_backward_hook(clamp_in),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pipe", SCALED)
def test_inside_they_are_refused_at_attach(kind, pipe):
    model = zoo.Net()
    handle = KINDS[kind](model.first)
    with pytest.raises(ValueError, match=INSIDE.format(kind)):
        zf.attach(model, PIPES[pipe].build(1))
    handle.remove()
    zf.attach(model, PIPES[pipe].build(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pipe", SCALED)
@pytest.mark.parametrize("again", [None, True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_inside_they_are_refused_at_the_next_call(kind, pipe, again):
    model = zoo.Net() if again is None else FirstAgain(again)
    zf.attach(model, PIPES[pipe].build(1))
    model(data(True)).square().mean().backward()
    handle = KINDS[kind](model.first)
    with pytest.raises(RuntimeError, match=INSIDE.format(kind)):
        model(data(True)).square().mean().backward()
    with torch.no_grad():
        model(data(True))
    handle.remove()
    model(data(True)).square().mean().backward()


@pytest.mark.parametrize("register", [register_module_full_backward_hook, register_module_full_backward_pre_hook])
def test_hooks_of_all_modules_are_refused(register):
    model = zoo.Net()
    zf.attach(model, PIPES["scaled"].build(1))
    handle = register(lambda *_: None)
    try:
        with pytest.raises(RuntimeError, match=INSIDE.format("register_")):
            model(data()).square().mean().backward()
    finally:
        handle.remove()
    model(data()).square().mean().backward()


def hooks_on_the_model(run: Run) -> list[Tensor]:
    """What comes to the model from outside is true."""
    seen: list[Tensor] = []

    def looks(m: nn.Module, into: Any, out: Any) -> None:
        seen.append(out[0].clone())

    model: Any = run.model
    handles = [model.register_full_backward_pre_hook(clamp_out), model.register_full_backward_hook(looks)]
    handles.append(model.last.weight.register_hook(lambda g: seen.append(g.clone()) or g.clamp(-1e-3, 1e-3)))
    run.model(run.data(5, 6)).square().mean().backward()
    for h in handles:
        h.remove()
    return seen


def hooks_on_a_part_called_from_outside(run: Run) -> list[Tensor]:
    model: Any = run.model
    handle = model.last.register_full_backward_pre_hook(clamp_out)
    h = torch.tanh(model.first(run.data(5, 6))).detach()
    model.last(h).square().mean().backward()
    handle.remove()
    model(run.data(5, 6)).square().mean().backward()
    return []


@pytest.mark.parametrize("program", [hooks_on_the_model, hooks_on_a_part_called_from_outside])
@pytest.mark.parametrize("pipe", SCALED)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
def test_what_they_see_outside_is_true(program, pipe):
    compare(program, zoo.Net, pipe)


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_backward_hook"])
def test_on_the_model_those_that_see_gradients_of_inputs_are_refused(kind):
    model = zoo.Net()
    zf.attach(model, PIPES["scaled"].build(1))
    KINDS[kind](model)
    with pytest.raises(RuntimeError, match=f"<root>: {kind}"):
        model(data(True))


def hooks_inside(run: Run) -> list[Any]:
    seen: list[Tensor] = []
    x = run.data(5, 6, grad=True)
    model: Any = run.model
    handles = [
        model.first.register_full_backward_hook(lambda m, gi, go: seen.extend((gi[0].clone(), go[0].clone()))),
        model.last.register_full_backward_hook(clamp_in),
        model.last.register_full_backward_pre_hook(clamp_out),
    ]
    model(x).square().mean().backward()
    for h in handles:
        h.remove()
    return [x.grad, *seen]


@pytest.mark.parametrize("pipe", ["fp32", "bf16", "bf16 states"])
def test_without_a_scale_they_are_right(pipe):
    compare(hooks_inside, zoo.Net, pipe)
