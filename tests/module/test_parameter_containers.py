"""Containers of parameters that forward builds hold the model's parameters, as in plain PyTorch."""

from __future__ import annotations

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
    "shard": (zf.shard(),),
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


PICKS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda m: m.rows[1:],
    "slice of a slice": lambda m: m.rows[1:][::2],
    "copy": lambda m: m.named.copy().values(),
    "or": lambda m: (m.named | m.more).values(),
    "update": merged,
    "list": lambda m: nn.ParameterList([m.rows[2], m.named["b"]]),
    "pairs": lambda m: nn.ParameterDict([("x", m.rows[0]), ["y", m.rows[3]]]).values(),
    "fromkeys": lambda m: nn.ParameterDict().fromkeys("ab", m.rows[1]).values(),
    "default": lambda m: [nn.ParameterDict().setdefault("x", m.more["c"])],
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
    want, got = plain_change(PICKS[pick]), change(PICKS[pick], chain, again)
    # A scale is a power of two. Sums in float64 are rounded to fp32 once, torch's own each time: some units of 6e-8.
    assert all(torch.allclose(got[name], x, rtol=0, atol=1e-6) for name, x in want.items())
    assert any(x.abs().max() > 1e-2 for x in want.values())


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("pick", PICKS)
def test_what_forward_builds_of_parameters_trains_them(pick, chain, again):
    compare(pick, chain, again)


def every_pick() -> None:
    for pick in PICKS:
        for chain in ("shard", "shard, cast and scale"):
            compare(pick, chain, again=pick == "slice")


def test_it_does_so_on_ranks():
    zf.launch(every_pick, 2, timeout=limit(60))


@pytest.mark.parametrize("chain", ["cast", "shard"])
def test_a_detached_tensor_in_a_container_stays_one(chain):
    got = change(lambda m: [*nn.ParameterList([m.rows[0].detach()]), m.rows[1]], chain, again=False)
    want = plain_change(lambda m: [*nn.ParameterList([m.rows[0].detach()]), m.rows[1]])
    assert torch.allclose(got["rows.1"], want["rows.1"], rtol=0, atol=1e-6) and want["rows.1"].any()
    assert not got["rows.0"].any() and not want["rows.0"].any()


@pytest.mark.parametrize("chain", CHAINS)
def test_a_single_assignment_is_refused(chain):
    def pick(m: Any) -> Any:
        found = nn.ParameterDict()
        found["x"] = m.rows[0]
        return found.values()

    model = Rows(pick)
    zf.attach(model, zf.chain(*CHAINS[chain], zf.sgd(0.5)))
    if chain == "shard":
        # On one process a parameter is seen as it is stored.
        model(X)
        return
    with pytest.raises(RuntimeError, match=r"put into an nn.ParameterDict in forward, at 'x'"):
        model(X)


def hooks() -> set[int]:
    return set(nn.modules.module._global_parameter_registration_hooks)


def attached(model: nn.Module) -> tuple[Any, set[int]]:
    before = hooks()
    opt = zf.attach(model, zf.chain(WIDE, zf.sgd(0.5)))
    return opt, hooks() - before


def test_other_modules_are_left_alone_and_the_hook_goes():
    model = Rows(PICKS["slice"])
    opt, mine = attached(model)
    made = nn.ParameterList([torch.ones(3), model.rows[0]])
    assert type(made[0]) is nn.Parameter and made[1] is model.rows[0]
    assert len(mine) == 1
    opt.detach()
    assert not mine & hooks()


def test_the_hook_of_a_model_that_went_without_detach_goes_with_the_next_one():
    mine = attached(Rows(PICKS["slice"]))[1]
    assert len(mine) == 1
    gc.collect()
    attached(Rows(PICKS["slice"]))
    assert not mine & hooks()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# Of `slice.indices`, in torch's own container, before torch 2.13.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize("pick", ["slice", "copy"])
def test_in_a_compiled_model_too(pick):
    model = Rows(PICKS[pick])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt = zf.attach(model, zf.chain(WIDE, zf.scale_loss(64.0), zf.sgd(0.5)))
    torch.compile(model, backend="aot_eager")(X).sum().backward()
    opt.step()
    for name, x in plain_change(PICKS[pick]).items():
        assert torch.allclose(model.get_parameter(name).detach() - before[name], x, rtol=0, atol=1e-6)
