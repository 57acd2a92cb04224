"""Metrics: the norm before any clipping whoever clips, names that do not collide, and nothing decided by a name."""

from __future__ import annotations

import pickle

import pytest
import torch
from public_names import NAMES

import zerofn as zf
from zerofn.testing import assert_trees_equal

PARAMS = {"w": torch.zeros(3), "b": torch.zeros(2)}
GRADS = {"w": torch.tensor([3.0, -4.0, 12.0]), "b": torch.tensor([84.0, 0.0])}
NORM = 85.0  # of all of it; 13 and 84 of the leaves


@zf.leafwise
def halve(grad, param):
    return grad / 2


def run(tx, grads=GRADS, steps=1, **options):
    state, metrics = zf.init(tx, PARAMS), {}
    for _ in range(steps):
        state, metrics = zf.update(tx, grads, state, **options)
    return state, metrics


CLIP, SGD = zf.clip_by_global_norm, zf.sgd(1.0)
CLIPS = {
    "none": zf.chain(SGD),
    "one": zf.chain(CLIP(1.0), SGD),
    "offloaded": zf.chain(zf.offload(CLIP(1.0)), SGD),
    "two": zf.chain(CLIP(2.0), CLIP(1.0), SGD),
    "the second offloaded": zf.chain(CLIP(2.0), zf.offload(CLIP(1.0)), SGD),
    "the first offloaded": zf.chain(zf.offload(CLIP(2.0)), CLIP(1.0), SGD),
    "a chain offloaded": zf.chain(zf.offload(zf.chain(CLIP(1.0), zf.adamw(0.1)))),
    "named": zf.chain(CLIP(1.0).named("first"), SGD),
    "held": zf.chain(zf.accumulate(2), zf.offload(CLIP(1.0)), SGD),
    "by value after": zf.chain(CLIP(1.0), zf.clip_by_value(0.1), SGD),
}


@pytest.mark.parametrize("route", ["pure", "eager"])
@pytest.mark.parametrize("clips", CLIPS)
def test_the_norm_is_that_before_any_clipping(clips, route):
    tx = CLIPS[clips]
    if route == "pure":
        _, metrics = run(tx, steps=2)
    else:
        model = torch.nn.ParameterDict({k: p.clone() for k, p in PARAMS.items()})
        opt = zf.attach(model, tx)
        for _ in range(2):
            sum((model[k] * g).sum() for k, g in GRADS.items()).backward()
            opt.step()
            opt.zero_grad()
        metrics = opt.metrics
    assert float(metrics["grad_norm"]) == pytest.approx(NORM, rel=1e-6)


def test_a_clip_behind_other_transforms_shows_what_it_is_given():
    assert float(run(zf.chain(halve(), zf.offload(CLIP(1.0)), SGD))[1]["grad_norm"]) == pytest.approx(NORM / 2)


def groups_of(path):
    return "x" if path == "w" else "y"


@pytest.mark.parametrize("how", ["as built", "pickled", "in a chain", "offloaded"])
def test_transforms_of_one_kind_show_numbers_of_their_own(how):
    parts = [
        zf.masked(CLIP(1.0), lambda path: path == "w"),
        zf.masked(CLIP(100.0), {"w": False, "b": True}),
        zf.masked(CLIP(1e9), {"w": True, "b": True}).named("all"),
        zf.partition({"x": CLIP(0.5), "y": CLIP(0.25)}, {"w": "x", "b": "y"}),
    ]
    if how == "pickled":
        parts = [parts[0], *pickle.loads(pickle.dumps(zf.chain(*parts[1:], SGD))).parts[:-1]]
    elif how == "in a chain":
        parts = [zf.chain(*parts)]
    elif how == "offloaded":
        parts = [zf.offload(zf.chain(*parts))]
    tx = zf.chain(*parts, SGD)
    expected = {
        "masked.on.grad_norm": 13.0,
        "masked_2.on.grad_norm": 84.0,
        "all.on.grad_norm": (1 + 84**2) ** 0.5,
        "partition.x.grad_norm": 1.0,
        "partition.y.grad_norm": 84.0,
        "grad_norm": (0.5**2 + 0.25**2) ** 0.5,
    }
    _, metrics = run(tx)
    found = {k: float(v) for k, v in metrics.items() if "grad_norm" in k}
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_named_group_has_its_name_in_rates_and_metrics(in_backward):
    """The rates that are set under that name arrive, in all ways in which update halves are run."""
    tx = zf.partition({"x": zf.sgd(0.5), "y": zf.sgd(0.25)}, groups_of).named("mine")
    model = torch.nn.ParameterDict({k: p.clone() for k, p in PARAMS.items()})
    opt = zf.attach(model, tx, in_backward=in_backward)
    assert [g["name"] for g in opt.param_groups] == ["mine.x", "mine.y"]
    opt.param_groups[1]["lr"] = 0.125
    sum((model[k] * g).sum() for k, g in GRADS.items()).backward()
    opt.step()
    assert {k: float(opt.metrics[k]) for k in ("mine.x.lr", "mine.y.lr")} == {"mine.x.lr": 0.5, "mine.y.lr": 0.125}
    assert_trees_equal({k: p.detach() for k, p in model.items()}, {"w": -0.5 * GRADS["w"], "b": -0.125 * GRADS["b"]})


FACTORIES = sorted({n for n, f in NAMES.items() if hasattr(f, "__rebuild__")} | {"grad_norm", "guest"})


@pytest.mark.parametrize("name", FACTORIES)
def test_a_transform_of_ones_own_may_have_the_name_of_any_of_ours(name):
    """Its name and its keywords are its own: nothing of the pipeline is decided by them."""

    def own(grad, param, *, every=1, weighted=True, max_norm=1.0, transform=None, name="x", params=(), lr=9.0):
        return grad / 2

    own.__name__ = own.__qualname__ = name
    named = zf.leafwise(own)
    tx = zf.chain(zf.accumulate(2), named(), zf.adamw(0.1))
    plain = zf.chain(zf.accumulate(2), halve(), zf.adamw(0.1))
    (state, metrics), (other, expected) = run(tx, steps=2), run(plain, steps=2)
    assert {k: float(x) for k, x in metrics.items()} == {k: float(x) for k, x in expected.items()}
    assert float(metrics["grad_norm"]) == pytest.approx(NORM / 2)
    assert_trees_equal(state.params, other.params)
    with pytest.raises(ValueError, match="weights nothing"):
        run(tx, weight=3.0)


@pytest.mark.parametrize("name", FACTORIES)
def test_an_optimizer_of_ones_own_may_have_the_name_of_any_of_ours(name):
    def own(grad, param, *, name="x", params=(), every=1, weighted=True, max_norm=1.0, lr=0.5):
        return param - lr * grad

    own.__name__ = own.__qualname__ = name
    model = torch.nn.ParameterDict({k: p.clone() for k, p in PARAMS.items()})
    opt = zf.attach(model, zf.chain(zf.scale_loss(8.0), zf.leafwise(own, optimizer=True)()))
    for _ in range(2):
        opt.zero_grad()
        sum((model[k] * g).sum() for k, g in GRADS.items()).backward()
        opt.step()
    assert float(opt.metrics["grad_norm"]) == pytest.approx(NORM)
    assert float(opt.metrics["lr"]) == 0.5
    assert_trees_equal({k: p.detach() for k, p in model.items()}, {k: -g for k, g in GRADS.items()})


HELD = {
    "accumulate": zf.chain(zf.accumulate(3), CLIP(1.0), zf.adamw(0.1)),
    "no clip": zf.chain(zf.accumulate(3), zf.adamw(lambda step: 0.1 + 0.1 * step)),
    "parts": zf.chain(zf.accumulate(3), zf.scale_by_adam(), zf.add_decayed_weights(0.1), zf.scale_by_lr(0.1)),
    "scaled": zf.chain(zf.scale_loss("dynamic"), zf.accumulate(3), zf.adamw(0.1)),
    "skipped": zf.chain(zf.skip_nonfinite(), CLIP(1.0), zf.sgd(0.1), zf.ema(0.9)),
    "groups": zf.chain(
        zf.accumulate(3),
        zf.partition({"a": zf.chain(CLIP(1.0), zf.adamw(0.1)), "b": zf.sgd(0.2)}, lambda p: "a" if p == "w" else "b"),
    ),
    "offloaded": zf.chain(zf.accumulate(3), zf.offload(zf.chain(CLIP(1.0), zf.adamw(0.1)))),
    "norms of leaves": zf.chain(zf.accumulate(3), zf.lamb(lambda step: 0.1 + 0.1 * step)),
    "norms in a group": zf.chain(
        zf.accumulate(3), zf.partition({"a": zf.lars(0.1), "b": zf.sgd(0.2)}, lambda p: "a" if p == "w" else "b")
    ),
    "masked": zf.chain(zf.accumulate(3), zf.masked(zf.sgd(0.1), lambda p: p == "w"), zf.ema(0.9)),
}


@pytest.mark.parametrize("name", HELD)
def test_a_held_or_skipped_step_has_the_same_metrics(name):
    tx = HELD[name]
    state, seen = zf.init(tx, PARAMS), []
    for i in range(7):
        bad = name in ("skipped", "scaled") and i % 3 == 0
        state, metrics = zf.update(tx, {k: g * float("nan") if bad else g for k, g in GRADS.items()}, state)
        seen.append(zf.floats(metrics))
    assert {x["updated"] for x in seen} == {0.0, 1.0}
    assert len({frozenset(x) for x in seen}) == 1
    assert seen[0].keys() >= {"grad_norm"} and any(key.endswith("lr") for key in seen[0])
    for x in seen:
        for key, value in x.items():
            if key.endswith("grad_norm"):
                assert (value == 0.0) == (x["updated"] == 0.0), (key, x)


MOVING = {
    "momentum": zf.chain(zf.accumulate(3), zf.trace(0.5), CLIP(1.0), zf.adamw(0.1)),
    "looked at": zf.chain(zf.skip_nonfinite(), zf.accumulate(2), zf.trace(0.5), zf.skip_nonfinite(), zf.rmsprop(0.1)),
    "group": zf.chain(
        zf.accumulate(2),
        zf.trace(0.5),
        zf.partition({"a": zf.chain(CLIP(1.0), zf.adamw(0.1)), "b": zf.sgd(0.2)}, lambda p: "a" if p == "w" else "b"),
    ),
}


# Compiling takes four seconds for each.
EITHER = [("batched", name) for name in MOVING]
EITHER += [pytest.param("compiled", name, marks=pytest.mark.slow) for name in MOVING]


@pytest.mark.parametrize(("how", "name"), EITHER)
def test_a_held_step_that_is_computed_and_not_chosen_has_the_same_metrics(name, how):
    """Behind a momentum gradients of a held step are not zero, and yet nothing has come."""
    tx, seen = MOVING[name], []

    def loss(params, x):
        return sum((params[k] * g).sum() for k, g in GRADS.items()) * x

    step = plain = zf.make_step(loss, tx)
    if how == "compiled":
        if torch.__version__ < "2.13":
            pytest.skip("a step runs uncompiled in a graph")
        torch._dynamo.reset()
        step = torch.compile(plain, fullgraph=True, backend="aot_eager")
    if how == "batched":
        step = torch.func.vmap(plain)
    state = zf.init(tx, PARAMS)
    one = state
    if how == "batched":
        state = torch.func.vmap(lambda x: zf.init(tx, {k: p * x for k, p in PARAMS.items()}))(torch.ones(2))
    for i in range(7):
        x = torch.tensor(float("nan") if i == 4 else 1.0)
        one, wanted = plain(one, x)
        state, metrics = step(state, x.expand(2) if how == "batched" else x)
        last = {k: v[-1] if how == "batched" else v for k, v in metrics.items()}
        assert zf.floats(last) == pytest.approx(zf.floats(wanted), rel=1e-6, nan_ok=True), i
        seen.append(float(wanted["updated"]))
    assert set(seen) == {0.0, 1.0}


def test_steps_left_out_are_counted_in_held_steps_too():
    tx = zf.chain(zf.accumulate(2), zf.skip_nonfinite(), zf.sgd(0.1))
    state, seen = zf.init(tx, PARAMS), []
    for bad in (True, False, False, False, True, False):
        state, metrics = zf.update(tx, {k: g * float("nan") if bad else g for k, g in GRADS.items()}, state)
        seen.append(int(metrics["skipped_steps"]))
    assert seen == [0, 1, 1, 1, 1, 2]


def test_the_rate_of_a_held_step_is_that_of_the_update_to_come():
    state, rates = zf.init(HELD["no clip"], PARAMS), []
    for _ in range(6):
        state, metrics = zf.update(HELD["no clip"], GRADS, state)
        rates.append(round(zf.floats(metrics)["lr"], 6))
    assert rates == [0.1, 0.1, 0.1, 0.2, 0.2, 0.2]
    assert int(state.transforms["adamw"]["step"]) == 2
