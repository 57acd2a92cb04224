"""Containers of parameters that forward builds are refused; lists and dicts of them train them."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from time_limits import limit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerofn as zf

# float64 in the model, so that the change of fp32 parameters is that of plain torch to their rounding.
WIDE = zf.precision(param_dtype=torch.float64)
CHAINS: dict[str, tuple[Any, ...]] = {
    "cast": (WIDE,),
    "scale": (zf.scale_loss(64.0),),
    "shard, cast and scale": (zf.shard(), WIDE, zf.scale_loss(64.0)),
}


class Rows(nn.Module):
    """A model that computes with what `pick` makes of its containers."""

    def __init__(self, pick: Callable[[Any], Iterable[Tensor]], again: bool = False):
        super().__init__()
        self.rows = nn.ParameterList([torch.full((3,), 0.6 + 0.1 * i) for i in range(4)])
        self.named = nn.ParameterDict({"a": torch.full((3,), 0.5), "b": torch.full((3,), 1.5)})
        self.more = nn.ParameterDict({"c": torch.full((3,), 0.75)})
        self.pick, self.again = pick, again

    def inner(self, x: Tensor) -> Tensor:
        for row in self.pick(self):
            x = torch.tanh(x * row)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)


def merged(model: Any) -> Any:
    found = nn.ParameterDict()
    found |= model.named
    return found.values()


def assigned(model: Any) -> Any:
    found = nn.ParameterDict()
    found["x"] = model.rows[0]
    return found.values()


# What torch's containers are made of in forward, and what to write in its place.
PICKS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "slice": (lambda m: m.rows[1:], lambda m: [*m.rows][1:]),
    "copy": (lambda m: m.named.copy().values(), lambda m: dict(m.named).values()),
    "or": (lambda m: (m.named | m.more).values(), lambda m: (dict(m.named) | dict(m.more)).values()),
    "update": (merged, lambda m: dict(m.named).values()),
    "list": (lambda m: nn.ParameterList([m.rows[2], m.named["b"]]), lambda m: [m.rows[2], m.named["b"]]),
    "assignment": (assigned, lambda m: [m.rows[0]]),
}
X = torch.linspace(0.2, 0.6, 3)


def plain_change(pick: Callable[[Any], Any]) -> dict[str, Tensor]:
    model = Rows(pick)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(X).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


def change(pick: Callable[[Any], Any], chain: str, again: bool) -> dict[str, Tensor]:
    model = Rows(pick, again)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt = zf.attach(model, zf.chain(*CHAINS[chain], zf.sgd(0.5)))
    model(X).sum().backward()
    opt.step()
    with opt.gathered():
        return {name: p.detach() - before[name] for name, p in model.named_parameters()}


def compare(pick: str, chain: str, again: bool) -> None:
    refused, right = PICKS[pick]
    with pytest.raises(RuntimeError, match=r"put into an nn.Parameter(List|Dict) in forward, at '\w+'(.|\n)*a list or"):
        change(refused, chain, again)
    want, got = plain_change(right), change(right, chain, again)
    # A scale is a power of two. Sums in float64 are rounded to fp32 once, torch's own each time: some units of 6e-8.
    assert all(torch.allclose(got[name], x, rtol=0, atol=1e-6) for name, x in want.items())
    assert any(x.abs().max() > 1e-2 for x in want.values())


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("pick", PICKS)
def test_containers_that_forward_builds(pick, chain, again):
    compare(pick, chain, again)


def every_pick() -> None:
    for pick in PICKS:
        compare(pick, "shard, cast and scale", again=pick == "slice")


def test_on_ranks():
    zf.launch(every_pick, 2, timeout=limit(60))


def test_a_tensor_of_its_own_in_a_container():
    pick = lambda m: [*nn.ParameterList([m.rows[0].detach().clone()]), m.rows[1]]  # noqa: E731
    got, want = change(pick, "cast", again=False), plain_change(pick)
    assert torch.allclose(got["rows.1"], want["rows.1"], rtol=0, atol=1e-6) and want["rows.1"].any()
    assert not got["rows.0"].any() and not want["rows.0"].any()


def hooks() -> set[int]:
    return set(nn.modules.module._global_parameter_registration_hooks)


def attached(model: nn.Module) -> tuple[Any, set[int]]:
    before = hooks()
    opt = zf.attach(model, zf.chain(WIDE, zf.sgd(0.5)))
    return opt, hooks() - before


def test_other_modules_are_left_alone_and_the_hook_goes():
    model = Rows(PICKS["slice"][1])
    opt, mine = attached(model)
    made = nn.ParameterList([torch.ones(3), model.rows[0]])
    assert type(made[0]) is nn.Parameter and made[1] is model.rows[0]
    assert len(mine) == 1
    opt.detach()
    assert not mine & hooks()


def test_the_hook_of_a_model_that_went_without_detach_goes_with_the_next_one():
    mine = attached(Rows(PICKS["slice"][1]))[1]
    assert len(mine) == 1
    gc.collect()
    attached(Rows(PICKS["slice"][1]))
    assert not mine & hooks()


class Nested(Rows):
    """A model whose error is raised two checkpoints deep."""

    def forward(self, x: Tensor) -> Tensor:
        again = functools.partial(checkpoint, use_reentrant=False)
        return again(lambda x: again(self.inner, x), x)


def saved_tensors_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.mark.parametrize("outside", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
@pytest.mark.parametrize("chain", ["cast", "shard, cast and scale"])
def test_an_error_leaves_no_hooks_of_checkpoints_open(chain, outside):
    """Whoever keeps the error keeps frames, as a notebook does: torch 2.11 closes such hooks with the frames."""
    model = Nested(PICKS["slice"][0])
    zf.attach(model, zf.chain(*CHAINS[chain], zf.sgd(0.5)))
    with outside():
        before = saved_tensors_hooks()
        try:
            model(X)
        except RuntimeError as error:
            kept = error
        assert saved_tensors_hooks() == before
    assert saved_tensors_hooks() is None and "nn.ParameterList in forward" in str(kept)
    # The numbers of a model that has nothing to do with it.
    assert plain_change(PICKS["list"][1])["rows.2"].any()
