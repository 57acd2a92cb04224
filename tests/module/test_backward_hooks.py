"""Backward hooks on modules: true gradients, or refused where a loss scale would show in them."""

from __future__ import annotations

from typing import Any

import models as zoo
import pytest
import torch
from parity import Run, compare
from torch import Tensor, nn

SCALED = ["scaled", "bf16 scaled", "fp16 dynamic"]


def clamp_in(m: nn.Module, into: Any, out: Any) -> Any:
    return tuple(None if g is None else g.clamp(-1e-3, 1e-3) for g in into)


def clamp_out(m: nn.Module, out: Any) -> Any:
    return tuple(None if g is None else g.clamp(-1e-3, 1e-3) for g in out)


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
