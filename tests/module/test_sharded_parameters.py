"""Sharded parameters outside of the model: parametrizations are refused where they are made; arguments by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from time_limits import limit
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import zerofn as zf


class Triangle(nn.Module):
    """A parametrization that can be undone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "exponential": lambda m: parametrizations.orthogonal(m, orthogonal_map="matrix_exp"),
    "cayley": lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley"),
    "householder": lambda m: parametrizations.orthogonal(m, orthogonal_map="householder"),
    "triangle": lambda m: parametrize.register_parametrization(m, "weight", Triangle()),
    "weight norm": parametrizations.weight_norm,
}


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def messages() -> dict[str, str]:
    """What is said where a sharded model is parametrized; before `attach` all of it works."""
    found, tx = {}, zf.chain(zf.shard(), zf.sgd(0.1))
    for name, way in WAYS.items():
        model = fresh()
        opt = zf.attach(model, tx)
        try:
            way(model[0])
        except RuntimeError as e:
            found[name] = str(e)
        opt.detach()
        model = fresh()
        way(model[0])
        opt = zf.attach(model, tx)
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.detach()
    return found


def test_they_are_refused_where_they_are_made_and_go_before_attach():
    for found in zf.launch(messages, 2, timeout=limit(60)):
        assert found.keys() == WAYS.keys()
        for message in found.values():
            # torch itself exchanges the memory of tensors that hold others, or makes a second parameter over one.
            # orthogonal() writes into a view of what is like the parameter.
            assert message.startswith(("Cannot swap", "Creating a Parameter", "fill_ of a view of what was")) or (
                "0.weight" in message and "before zf.attach, or after opt.detach()" in message.replace("\n", " ")
            ), message


def by_name() -> list[bool]:
    """Whether functions that are given a parameter by name compute what they compute of the whole."""
    model = fresh()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    p, x = model[0].weight, torch.arange(16.0).view(2, 8)
    with torch.no_grad():
        full = p.clone()
        found = [
            torch.numel(input=p) == full.numel(),
            torch.equal(torch.sum(input=p), full.sum()),
            torch.equal(torch.zeros_like(input=p).full_tensor(), torch.zeros(4, 4)),
            torch.equal(torch.detach(input=p).full_tensor(), full),
            torch.equal(x.view_as(other=p), x.view(4, 4)),
        ]
    opt.detach()
    return found


def test_a_parameter_may_be_given_by_name():
    assert zf.launch(by_name, 2, timeout=limit(60)) == [[True] * 5] * 2
