"""`check_transform` finds a transform that does other things than its `Facts` say."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zerofn as zf
from zerofn.extend import COUNT, Facts, Prepared, Transform, counter, transform
from zerofn.testing import check_transform


def keeps_gradients(grads, state, params, carry, ctx):
    return grads, state


def descends(grads, state, params, carry, ctx):
    return {path: params[path] - 0.1 * g for path, g in grads.items()}, state


def drops_a_leaf(grads, state, params, carry, ctx):
    return {path: g for path, g in grads.items() if path != "gain"}, state


def zeros(leaves, layout):
    return {"kept": {path: torch.zeros_like(x) for path, x in leaves.items()}}


def keeps_what_it_is_handed(grads, state, params, carry, ctx):
    return grads, {"kept": {path: g.view(-1).view_as(g) for path, g in grads.items()}}


def of_two(leaves, layout):
    return {COUNT: counter()}


def every_second(state, grads, params, ctx):
    count = (state[COUNT] + 1) % 2
    return Prepared(state={COUNT: count}, emit=bool(count == 0))


LIARS: dict[str, tuple[str, dict[str, Any]]] = {
    "optimizes": ("it gives gradients", dict(facts=Facts(optimizes=True), update_fn=keeps_gradients)),
    "never holds": ("in 1, 2, 3, 4 of the first 4", dict(facts=Facts(window=4), update_fn=keeps_gradients)),
    "holds two of three": (
        "in 2 of the first 3",
        dict(facts=Facts(window=3), init_fn=of_two, prepare_fn=every_second, update_fn=keeps_gradients),
    ),
    "holds and says nothing": (
        "in none of the first 1",
        dict(init_fn=of_two, prepare_fn=every_second, update_fn=keeps_gradients),
    ),
    "reports": ("reports=['heat']", dict(facts=Facts(reports=frozenset(["heat"])), update_fn=keeps_gradients)),
    "keeps": (
        "keeps=False",
        dict(facts=Facts(keeps=False), init_fn=zeros, update_fn=keeps_what_it_is_handed),
    ),
    "rate": ("rate=0.1", dict(facts=Facts(optimizes=True, rate=0.1), update_fn=descends)),
    "settable": ("'zeta'", dict(facts=Facts(optimizes=True, settable=(("zeta", 1.0),)), update_fn=descends)),
}


@transform
def liar(kind: str) -> Transform:
    return Transform("liar", needs="element", **LIARS[kind][1])


@pytest.mark.parametrize("kind", LIARS)
def test_a_transform_that_lies_is_found(kind: str) -> None:
    with pytest.raises(AssertionError) as told:
        check_transform(liar(kind))
    assert LIARS[kind][0] in str(told.value)
    assert "liar(kind=" in str(told.value)


@transform
def drops() -> Transform:
    return Transform("drops", needs="element", update_fn=drops_a_leaf)


def test_a_transform_that_drops_a_leaf_is_found() -> None:
    with pytest.raises(ValueError, match="drops: an update that does not fit its leaves\n  gain: left out"):
        check_transform(drops())


@transform
def weighs_nothing() -> Transform:
    """A window of two that says that it weighs micro-batches."""

    def init(leaves, layout):
        return {COUNT: counter(), "sum": {path: torch.zeros_like(x) for path, x in leaves.items()}}

    def update(grads, state, params, carry, ctx):
        sums = {path: x + grads[path] for path, x in state["sum"].items()}
        return {path: x / 2 for path, x in sums.items()}, {"sum": sums}

    facts = Facts(window=2, weighted=True)
    return Transform(
        "weighs_nothing", needs="element", facts=facts, init_fn=init, prepare_fn=every_second, update_fn=update
    )


def test_weights_that_are_not_used_are_found() -> None:
    with pytest.raises(AssertionError, match=r"does not use ctx\.weight"):
        check_transform(weighs_nothing())


@pytest.mark.parametrize(
    "build",
    [
        lambda: zf.chain(zf.scale_loss(), zf.accumulate(3, weighted=True), zf.clip_by_global_norm(1.0), zf.adamw(0.1)),
        lambda: zf.partition({"a": zf.sgd(0.1, momentum=0.9), "b": zf.lion(0.1)}, by_length),
        lambda: zf.offload(zf.rmsprop(0.1)),
    ],
)
def test_those_that_say_the_truth_pass(build: Callable[[], Transform]) -> None:
    check_transform(build())


def by_length(path: str) -> str:
    return "a" if len(path) % 2 else "b"
