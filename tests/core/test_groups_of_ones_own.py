"""Groups of a third party: with other names of arguments, and with an update half of their own."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from stages import FIRST
from time_limits import limit

import zerofn as zf
from zerofn.extend import Transform, transform

GRADIENT = torch.arange(1.0, 13).reshape(4, 3)


def everything(path: str) -> str:
    return "a"


@zf.leafwise(needs="leaf")
def by_norm(grad, param):
    return grad / grad.norm()


@transform
def by_kind(policies: Mapping[str, Transform], kinds: Callable[[str], str]) -> Transform:
    """`partition` with other names of arguments."""
    group = zf.partition(dict(policies), kinds)
    return replace(group, name="by_kind", named_fn=None, members_fn=_members("by_kind", group))


@transform
def halved(policies: Mapping[str, Transform], kinds: Callable[[str], str]) -> Transform:
    """`partition`, and half of what comes of it."""
    group = zf.partition(dict(policies), kinds)

    def update(grads, state, params, carry, ctx):
        out, new = group.update_fn(grads, state, params, carry, ctx)
        return {path: 0.5 * x for path, x in out.items()}, new

    return replace(group, name="halved", update_fn=update, named_fn=None, members_fn=_members("halved", group))


def _members(name: str, group: Transform):
    found = group.members_fn
    assert found is not None
    return lambda layout: {prefix.replace("partition.", f"{name}."): x for prefix, x in found(layout).items()}


def test_offload_goes_to_the_members_of_any_group() -> None:
    tx = zf.offload(by_kind({"a": zf.adamw(1e-2)}, everything))
    assert [part.members[0].parts for part in tx.parts] == [(zf.adamw(1e-2),)]

    def after_a_step(tx: Transform) -> torch.Tensor:
        state, _ = zf.update(tx, {"w": torch.ones(2)}, zf.init(tx, {"w": torch.ones(2)}))
        return state.params["w"]

    assert torch.equal(after_a_step(zf.chain(tx)), after_a_step(zf.chain(zf.adamw(1e-2))))
    assert not torch.equal(after_a_step(zf.chain(tx)), torch.ones(2))


def step_of_halved(stage: str) -> torch.Tensor:
    tx = zf.chain(FIRST[stage](), halved({"a": by_norm()}, everything), zf.sgd(lr=1.0))
    state = zf.init(tx, {"w": torch.zeros(4, 3)})
    state, _ = zf.make_step(lambda params: (params["w"] * GRADIENT).sum(), tx)(state)
    return zf.full_params(tx, state)["w"]


@pytest.mark.parametrize("stage", FIRST)
def test_an_update_of_its_own_is_kept_where_members_need_whole_leaves(stage: str) -> None:
    expected = -0.5 * GRADIENT / GRADIENT.norm()
    torch.testing.assert_close(step_of_halved(stage), expected)
    for found in zf.launch(step_of_halved, 2, stage, timeout=limit()):
        torch.testing.assert_close(found, expected)
