"""A hand-written optimizer that looks at the whole gradient is not run in a held or skipped step."""

import itertools

import pytest
import torch
from pairs import cover
from stages import STAGES, around
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.extend import Facts, Prepared, Scope, Transform, counter, squared_norm, transform

F64 = torch.float64
CALLS = []


@transform
def normalized_sgd(lr=0.1):
    """A step of length `lr` against the gradient; counts its updates, and refuses to be run without gradients."""

    def prepare(state, grads, params, ctx):
        CALLS.append("prepare")
        norm = ctx.total(squared_norm, {path: g for path, g in grads.items()}).sqrt()
        ctx.report("length", norm)
        return Prepared(carry=norm, state={"steps": state["steps"] + 1})

    def update(grads, state, params, norm, ctx):
        CALLS.append("update")
        return {path: params[path] - lr * g / norm for path, g in grads.items()}, {}

    return Transform(
        "normalized_sgd",
        Scope.TREE,
        needs="number",
        facts=Facts(optimizes=True, reports=frozenset(["length"])),
        init_fn=lambda leaves, layout: {"steps": counter()},
        prepare_fn=prepare,
        update_fn=update,
    )


def every(path):
    return True


WAYS = {
    "alone": normalized_sgd,
    "behind a clip": lambda: zf.chain(zf.clip_by_global_norm(1e9), normalized_sgd()),
    "in a partition": lambda: zf.partition({"all": normalized_sgd()}, lambda path: "all"),
    "masked": lambda: zf.masked(zf.chain(zf.clip_by_value(1e9), normalized_sgd()), every),
    "on the host": lambda: zf.offload(normalized_sgd()),
    "with an average": lambda: zf.chain(normalized_sgd(), zf.ema(0.5)),
}
HOLDS = {
    "window": lambda stage: around(stage, window=zf.accumulate(2)) + ([] if stage == "ZeRO-1" else [zf.accumulate(2)]),
    "skipped": lambda stage: [*around(stage, window=zf.accumulate(1)), zf.skip_nonfinite()],
}


def batches(hold):
    """Two steps go through, of four gradients or of two: 3 and 4, of which the mean over a window is taken."""
    first, second = torch.tensor([[3.0, 4.0]], dtype=F64), torch.tensor([[-1.0, 2.0]], dtype=F64)
    bad = torch.full((1, 2), torch.nan, dtype=F64)
    return [first, second, second, second] if hold == "window" else [bad, first, bad, second]


def wanted(hold):
    """By hand: steps of length 0.1 against the means."""
    g = batches(hold)
    moves = [(g[0] + g[1]) / 2, (g[2] + g[3]) / 2] if hold == "window" else [g[1], g[3]]
    return -0.1 * sum(m / m.norm() for m in moves)


def steps_of(states):
    """The counter of the optimizer, wherever it is nested."""
    below = [steps_of(x) for x in states.values() if isinstance(x, dict)]
    return next((n for n in [states.get("steps"), *below] if n is not None), None)


def trained(stage, hold, way, route):
    tx = zf.chain(*HOLDS[hold](stage), WAYS[way]())
    names, counts, calls = set(), [], []
    if route == "eager":
        model = nn.Linear(2, 1, bias=False, dtype=F64)
        nn.init.zeros_(model.weight)
        opt = zf.attach(model, tx)
    else:
        state = zf.init(tx, {"weight": torch.zeros(1, 2, dtype=F64)})
        step = zf.make_step(lambda p, x: (p["weight"] * x).sum(), tx, donate=route == "donated")
    for x in batches(hold):
        CALLS.clear()
        if route == "eager":
            model(x).sum().backward()
            opt.step()
            opt.zero_grad()
            state, metrics = opt.state, opt.metrics
        else:
            state, metrics = step(state, x)
            metrics.pop("loss")
        names.add(frozenset(metrics))
        counts.append(int(steps_of(state.transforms)))
        calls.append(bool(CALLS))
    assert counts == [0, 1, 1, 2] and calls == [False, True, False, True] and len(names) == 1, (counts, calls, names)
    if route == "eager":
        with opt.gathered():
            return model.weight.detach().clone()
    return zf.full_params(tx, state)["weight"]


CELLS = list(itertools.product(STAGES, WAYS, ("pure", "donated", "eager")))


def on_ranks(hold, cells):
    return {(stage, way, route): trained(stage, hold, way, route) for stage, way, route in cells}


@pytest.mark.parametrize(
    ("ranks", "cells"), [(2, cover(CELLS)), *[pytest.param(n, CELLS, marks=pytest.mark.slow) for n in (1, 2)]]
)
@pytest.mark.parametrize("hold", HOLDS)
def test_it_is_run_when_a_step_goes_through_and_at_no_other_time(hold, ranks, cells):
    for found in zf.launch(on_ranks, ranks, hold, cells, timeout=limit()):
        for where, weight in found.items():
            torch.testing.assert_close(weight, wanted(hold), msg=str(where))
