"""`check_transform` finds a transform that does other things than its `Facts` say."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import Refusals

import zerofn as zf
from zerofn.extend import COUNT, Facts, Prepared, Transform, concrete, counter, transform
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


def begins_as_the_gradient(grads, state, params, carry, ctx):
    """As torch's SGD: a momentum is the first gradient itself, and another tensor afterwards."""
    first = state[COUNT] == 0
    if not concrete(first):
        kept = {path: torch.where(first, g, 0.9 * state["kept"][path] + g) for path, g in grads.items()}
    else:
        kept = {path: g if first else 0.9 * state["kept"][path] + g for path, g in grads.items()}
    return {path: x * 1 for path, x in kept.items()}, {"kept": kept, COUNT: state[COUNT] + 1}


def keeps_the_third(grads, state, params, carry, ctx):
    third = state[COUNT] == 2
    now = {path: g if concrete(third) and third else g * 1 for path, g in grads.items()}
    return dict(grads), {"kept": now, COUNT: state[COUNT] + 1}


def zeros_and_a_count(leaves, layout):
    return {**zeros(leaves, layout), COUNT: counter()}


def drifts(grads, state, params, carry, ctx):
    return {path: g + 0.1 * (params[path] - state["kept"][path]) for path, g in grads.items()}, {
        "kept": {path: params[path] * 1 for path in grads}
    }


def one_for_all(leaves, layout):
    one = torch.zeros(1)
    return {"kept": dict.fromkeys(leaves, one)}


def adds_one(grads, state, params, carry, ctx):
    return grads, {"kept": {path: state["kept"][path] + 1 for path in grads}}


def keeps_twice(grads, state, params, carry, ctx):
    kept = {path: 0.9 * state["kept"][path] + g for path, g in grads.items()}
    return {path: g + state["again"][path] for path, g in grads.items()}, {"kept": kept, "again": dict(kept)}


def zeros_twice(leaves, layout):
    return {"kept": zeros(leaves, layout)["kept"], "again": zeros(leaves, layout)["kept"]}


def keeps_as_it_prepares(state, grads, params, ctx):
    return Prepared(state={"kept": dict(params)})


def gives_a_view(grads, state, params, carry, ctx):
    return {path: params[path].view(-1).view_as(g) for path, g in grads.items()}, state


def gives_what_it_is_given(grads, state, params, carry, ctx):
    return dict(grads), {}


def gives_gradients(grads, state, params, carry, ctx):
    return {path: g if params[path].numel() == 1 else params[path] - 0.1 * g for path, g in grads.items()}, state


def between(new, state, old, carry, ctx):
    return new, {"kept": {path: (old[path] + x) / 2 for path, x in new.items()}}


def of_two(leaves, layout):
    return {COUNT: counter()}


def every_second(state, grads, params, ctx):
    count = (state[COUNT] + 1) % 2
    return Prepared(state={COUNT: count}, emit=bool(count == 0))


OWN = Facts(keeps=False)

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
    "keeps the first": (
        "its state after micro-step 1 does",
        dict(facts=OWN, init_fn=zeros_and_a_count, update_fn=begins_as_the_gradient),
    ),
    "keeps the third": (
        "its state after micro-step 3 does",
        dict(facts=OWN, init_fn=zeros_and_a_count, update_fn=keeps_the_third),
    ),
    "keeps parameters": (
        "its first state does",
        dict(facts=OWN, init_fn=lambda leaves, layout: {"kept": dict(leaves)}, update_fn=drifts),
    ),
    "keeps as it prepares": (
        "its state after micro-step 1 does",
        dict(facts=OWN, init_fn=zeros, prepare_fn=keeps_as_it_prepares, update_fn=gives_what_it_is_given),
    ),
    "begins with one tensor": (
        "no memory at two places; its first state does",
        dict(facts=OWN, needs="leaf", init_fn=one_for_all, update_fn=adds_one),
    ),
    "keeps one tensor twice": (
        "no memory at two places; its state after micro-step 1 does",
        dict(facts=OWN, init_fn=zeros_twice, update_fn=keeps_twice),
    ),
    "gives a parameter": (
        "it gives no parameter of another leaf, nor a view of one. It does, in micro-step 1.",
        dict(facts=OWN, needs="leaf", update_fn=gives_a_view),
    ),
    "gives a gradient for a parameter": (
        "it gives no gradient, and no parameter of another leaf, nor a view of one. It does, in micro-step 1.",
        dict(facts=Facts(optimizes=True, keeps=False), needs="leaf", update_fn=gives_gradients),
    ),
    "sees_old": (
        "sees_old=False says that it reads no old parameters",
        dict(facts=Facts(watches=True, sees_old=False), init_fn=zeros, update_fn=between),
    ),
    "rate": ("rate=0.1", dict(facts=Facts(optimizes=True, rate=0.1), update_fn=descends)),
    "settable": ("'zeta'", dict(facts=Facts(optimizes=True, settable=(("zeta", 1.0),)), update_fn=descends)),
}


@transform
def liar(kind: str) -> Transform:
    return Transform("liar", **{"needs": "element", **LIARS[kind][1]})


@pytest.mark.parametrize("kind", LIARS)
def test_a_transform_that_lies_is_found(kind: str) -> None:
    with pytest.raises(AssertionError) as told:
        check_transform(liar(kind))
    assert LIARS[kind][0] in str(told.value)
    assert "liar(kind=" in str(told.value)


@transform
def drops() -> Transform:
    return Transform("drops", needs="element", update_fn=drops_a_leaf)


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


@pytest.mark.parametrize(
    "build",
    [
        lambda: zf.chain(zf.scale_loss(), zf.accumulate(3, weighted=True), zf.clip_by_global_norm(1.0), zf.adamw(0.1)),
        lambda: zf.partition({"a": zf.sgd(0.1, momentum=0.9), "b": zf.lion(0.1)}, by_length),
        lambda: zf.offload(zf.rmsprop(0.1)),
        # In the forward of the law's attached model, parameters that are cast are plain tensors.
        lambda: zf.chain(zf.precision(param_dtype=torch.bfloat16), zf.sgd(0.1), zf.watch(squares)),
    ],
)
def test_those_that_say_the_truth_pass(build: Callable[[], Transform]) -> None:
    check_transform(build())


def squares(old, new):
    return {"square": (new - old).square().sum()}


def by_length(path: str) -> str:
    return "a" if len(path) % 2 else "b"


@transform
def midpoint() -> Transform:
    """The mean of the old and the new parameters."""
    functions = {"init_fn": zeros, "update_fn": between}
    return Transform("midpoint", needs="element", facts=Facts(watches=True), **functions)


# ---- found ----

ROWS = Refusals()


ROWS.rows(
    ValueError,
    (lambda: check_transform(drops()), "drops: an update that does not fit its leaves\n  gain: left out"),
)
ROWS.rows(AssertionError, (lambda: check_transform(weighs_nothing()), "does not use ctx.weight"))


@ROWS(AssertionError, re.compile(r"donate=True gives the bits[^\n]*\n  transforms.midpoint.kept"))
def a_runner_that_hands_on_the_new_parameters_for_the_old(monkeypatch):
    tx = zf.chain(zf.adamw(lr=0.1), midpoint())
    check_transform(tx)
    monkeypatch.setattr(Facts, "compares", property(lambda facts: False))
    yield
    check_transform(tx)


@pytest.mark.parametrize("row", ROWS)
def test_found(row, monkeypatch):
    row.check(monkeypatch=monkeypatch)
