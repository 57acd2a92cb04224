"""Gradients, parameters and states come to a transform in the order of the layout, whatever order they arrived in.

Lists that pair by position (`torch._foreach_add(list(grads.values()), list(params.values()))`) are right then.
"""

from __future__ import annotations

import functools

import pytest
import torch
from one_launch import one_launch
from stages import front
from torch import nn

import zerofn as zf
from zerofn.extend import Facts, Prepared, Scope, Transform, transform

# More than ten: as text "10" is before "2".
LEAVES = 12
WIDER = {3: torch.float64, 7: torch.float64}


def check(what, given):
    """Numbers of leaves, as they are in the layout."""
    assert list(given) == sorted(given, key=number), f"{what} in the order {list(given)}"


def number(path):
    return int(path.split(".")[0])


@transform
def witness(needs="element", scope="LEAF", keeps=True, optimizes=False):
    """Raises where anything that it is handed is in another order than that of the layout."""

    def init(leaves, layout):
        assert [number(leaf.path) for leaf in layout.leaves] == [*range(LEAVES)]
        check("first leaves", leaves)
        return {"m": {p: torch.zeros_like(x) for p, x in leaves.items()}}

    def prepare(state, grads, params, ctx):
        check("prepared parameters", params)
        check("prepared gradients", grads or {})
        check("a prepared state", state["m"])
        return Prepared()

    def update(grads, state, params, carry, ctx):
        check("parameters", params)
        check("gradients", grads)
        check("a state", state["m"])
        # In the other order: what stands behind is handed the right one.
        new = {p: grads[p] if not optimizes else params[p] - grads[p] for p in reversed(grads)}
        return new, {"m": {p: grads[p].to(params[p].dtype) for p in reversed(grads)}}

    facts = Facts(keeps=keeps, optimizes=optimizes)
    return Transform("witness", Scope[scope], needs, facts, init_fn=init, prepare_fn=prepare, update_fn=update)


class Guest:
    def init(self, params):
        check("parameters of a guest", params)
        return {"m": {p: torch.zeros_like(x) for p, x in params.items()}}

    def update(self, updates, state, params=None):
        check("updates of a guest", updates)
        check("parameters of a guest", params)
        check("a state of a guest", state["m"])
        return {p: -updates[p] for p in reversed(updates)}, {"m": {p: updates[p] for p in reversed(updates)}}


def some(path):
    return number(path) % 3 > 0


CHAINS = {
    "elements": lambda: [witness(), zf.clip_by_global_norm(1.0), witness(scope="TREE"), zf.sgd(0.1), zf.ema(0.5)],
    "whole": lambda: [witness(), zf.guest(Guest(), needs="element")],
    "rows": lambda: [witness("row", keeps=False), witness("leaf"), zf.sgd(0.1)],
    "at owners": lambda: [zf.offload(witness("leaf")), zf.masked(witness("leaf"), some), witness(optimizes=True)],
    "members": lambda: [
        zf.masked(witness(), some),
        witness(scope="WHOLE"),
        zf.partition({"yes": witness(optimizes=True), "no": zf.adam(0.1)}, lambda p: "yes" if some(p) else "no"),
        zf.ema(0.5),
    ],
}


class Model(nn.Module):
    """Uses its leaves in another order than it has them, and one of them in some steps alone."""

    def __init__(self):
        super().__init__()
        for i in range(LEAVES):
            self.register_parameter(f"{i:02}", nn.Parameter(torch.ones(1 if i == 5 else 4, 2).to(WIDER.get(i))))

    def forward(self, step):
        order = [i for i in (5, 2, 9, 0, 11, 4, 1, 3, 10, 6, 8, 7) if not (i == 4 and step == 1)]
        return sum((getattr(self, f"{i:02}").float() * (i + 1)).sum() for i in order)


ROUTES = ("eager", "pure", "donated")


def trained(stage, kind, route):
    tx = zf.chain(*front(stage), *CHAINS[kind]())
    if route == "eager":
        model = Model()
        opt = zf.attach(model, tx)
        for step in range(4):
            model(step if kind != "whole" else 0).backward()
            opt.step()
            opt.zero_grad()
        return True
    state = zf.init(tx, [{"w": p.detach()} for p in Model().parameters()])
    loss = lambda params, x: sum((leaf["w"].float() * x).sum() for leaf in reversed(params))  # noqa: E731
    step = zf.make_step(loss, tx, donate=route == "donated")
    for _ in range(4):
        state, _ = step(state, torch.ones(()))
    return True


STAGES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
EVERY = tuple((stage, route) for stage in STAGES for route in ROUTES)
# A donated step is that of the pure route, and writes.
SOME = tuple((stage, ("eager", "donated")[i % 2]) for i, stage in enumerate(STAGES))


def on_ranks(kind, several, cells):
    from zerofn.core import executor  # inside: how large a bucket is, and which transforms run together

    whole, done = executor.BUCKET_BYTES, 0
    if several:  # buckets of a leaf or two
        executor.BUCKET_BYTES = 64
    for stage, route in cells:
        try:
            done += trained(stage, kind, route)
        except BaseException as error:
            error.add_note(f"{stage}, {route}")
            raise
    executor.BUCKET_BYTES = whole
    return done


@functools.cache
def all_kinds(several, ranks, cells):
    return one_launch(ranks, on_ranks, [(kind, several, cells) for kind in CHAINS])


@pytest.mark.parametrize(
    ("several", "ranks", "cells"),
    [
        (True, 1, EVERY[-3:]),
        (True, 2, SOME),
        *[pytest.param(several, 3, EVERY, marks=pytest.mark.slow) for several in (False, True)],
    ],
)
@pytest.mark.parametrize("kind", CHAINS)
def test_what_a_transform_is_handed_is_in_the_order_of_the_layout(kind, several, ranks, cells):
    assert set(all_kinds(several, ranks, cells)[kind, several, cells]) == {len(cells)}


class Foreach:
    """p - 0.1 * (g + 0.5 * p), by lists that are paired by position."""

    def init(self, params):
        return {}

    def update(self, updates, state, params=None):
        steps = torch._foreach_mul(torch._foreach_add(list(updates.values()), list(params.values()), alpha=0.5), -0.1)
        return dict(zip(updates, steps, strict=True)), state


def shrunk(stage):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    nn.init.constant_(model[0].weight, 1.0)
    nn.init.constant_(model[1].weight, 100.0)
    opt = zf.attach(model, zf.chain(*front(stage), zf.guest(Foreach(), needs="element")))
    for _ in range(2 if stage == "ZeRO-1" else 1):
        model(torch.zeros(1, 2)).sum().backward()  # gradients of zero: every weight shrinks by a twentieth
        opt.step()
        opt.zero_grad()
    with opt.gathered():
        return [layer.weight.detach().clone() for layer in model]


def test_lists_are_paired_by_position():
    for stage, ranks in one_launch(2, shrunk, [(x,) for x in ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")]).items():
        for found in ranks:
            for weight, want in zip(found, (0.95, 95.0), strict=True):
                torch.testing.assert_close(weight, torch.full((2, 2), want), msg=lambda m, at=stage: f"{at}: {m}")


def test_a_tied_gradient_at_its_second_place_alone():
    w, v = torch.ones(2, 2), torch.ones(2)
    tx = zf.chain(of_two := seen([]), zf.sgd(0.1))
    zf.update(tx, {"a": None, "b": torch.ones(2), "c": torch.ones(2, 2)}, zf.init(tx, {"a": w, "b": v, "c": w}))
    assert of_two.config["into"] == [["a", "b"]]


@transform
def seen(into):
    def update(grads, state, params, carry, ctx):
        into.append(list(grads))
        return grads, state

    return Transform("seen", needs="element", update_fn=update)
