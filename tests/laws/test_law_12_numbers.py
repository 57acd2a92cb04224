"""Law 12 over ranks, by numbers that all of them have: arguments of `leafwise`, schedules, totals, metrics.

The reference is one process on the same numbers, and that is held against differences in float64.
"""

import functools

import pytest
import torch
from stages import STAGES, around
from time_limits import limit
from torch.func import grad, jvp

import zerofn as zf
from zerofn.extend import Prepared, Scope, Transform, squared_norm, transform

F64 = torch.float64
# One element is on the first rank alone, so that others have an empty piece; and there are rows for all ranks.
START = {"one": torch.tensor([1.3], dtype=F64), "rows": torch.arange(1.0, 7.0, dtype=F64).view(3, 2) / 3}


@zf.leafwise(optimizer=True, needs="element")
def descent(grad, param, *, lr):
    return param - lr * grad


@zf.leafwise(needs="element")
def scaled_and_shifted(grad, param, *, by):
    factors, shift = by
    return factors[0] * grad + factors[1].sum() * param + shift["all"]


@zf.leafwise(needs="row", init=torch.zeros_like)
def along_rows(grad, param, state, *, beta):
    state = beta * state + grad
    return state / (1 + state.abs().sum(-1, keepdim=True)), state


@transform
def unit_norm():
    """That of docs/extend/tree-numbers.md."""

    def prepare(state, grads, params, ctx):
        norm = ctx.total(squared_norm, grads).sqrt()
        ctx.report("norm_before", norm)
        return Prepared(carry=norm)

    def update(grads, state, params, norm, ctx):
        return {path: g / norm for path, g in grads.items()}, state

    return Transform("unit_norm", Scope.TREE, needs="number", prepare_fn=prepare, update_fn=update)


@transform
def below_a_mean(decay):
    """Keeps a running mean of norms, a number that is in the state."""

    def prepare(state, grads, params, ctx):
        mean = state["mean"] + ctx.replicated(decay) * (ctx.total(squared_norm, grads) - state["mean"])
        return Prepared(carry=(1 + mean).rsqrt(), state={"mean": mean})

    functions = {"init_fn": lambda leaves, layout: {"mean": torch.ones((), dtype=F64)}, "prepare_fn": prepare}
    update = lambda grads, state, params, carry, ctx: ({p: carry * g for p, g in grads.items()}, state)  # noqa: E731
    return Transform("below_a_mean", Scope.TREE, needs="number", update_fn=update, **functions)


CASES = {
    "rate": lambda r: [descent(lr=r)],
    "schedule": lambda r: [descent(lr=lambda step: r / (1 + step))],
    "tree of arguments": lambda r: [scaled_and_shifted(by=([r, r.view(1, 1) ** 2], {"all": r / 5})), zf.sgd(0.1)],
    "rows": lambda r: [along_rows(beta=r), zf.sgd(0.1)],
    "total": lambda r: [unit_norm(), zf.sgd(r)],
    "mean of totals": lambda r: [below_a_mean(r), zf.sgd(0.1)],
    "members": lambda r: [zf.partition({"one": descent(lr=r), "rows": zf.chain(unit_norm(), zf.sgd(r))}, str)],
    "clip": lambda r: [zf.clip_by_global_norm(r * 5, over=lambda squares: squares + r), zf.sgd(0.1)],
}
METRICS = {"rate": "lr", "schedule": "lr", "total": "norm_before", "clip": "grad_norm"}


def loss(p):
    return 0.2 * (p["one"].sin().sum() + 0.3 * (p["rows"] ** 2).sum()) ** 2


def after(case, stage, rate, one, create_graph=False):
    tx = zf.chain(*around(stage), *CASES[case](rate))
    state = zf.init(tx, {**START, "one": one}, create_graph=create_graph)
    step = zf.make_step(loss, tx, create_graph=create_graph or None)
    for _ in range(3):
        state, metrics = step(state)
    shown = metrics[METRICS[case]] ** 2 if case in METRICS else 0
    return loss(zf.full_params(tx, state)) + shown


def derivatives(case, stage="one process"):
    at = torch.tensor(0.3, dtype=F64), START["one"]
    fn = lambda *a: after(case, stage, *a)  # noqa: E731
    first = grad(fn, (0, 1))(*at)
    second = grad(lambda *a: sum(g.square().sum() for g in grad(fn, (0, 1))(*a)), (0, 1))(*at)
    _, tangent = jvp(fn, at, tuple(map(torch.ones_like, at)))
    leaves = [x.clone().requires_grad_() for x in at]
    by_autograd = torch.autograd.grad(after(case, stage, *leaves, create_graph=True), leaves)
    return *first, *second, tangent, *by_autograd


# Each case at one stage, and each stage with one case or two; "members" are "rate" and "total".
QUICK = [(case, STAGES[i % len(STAGES)]) for i, case in enumerate(CASES) if case not in ("rate", "total")]


of_one_process = functools.cache(derivatives)


def all_of(pairs):
    return {(case, stage): derivatives(case, stage) for case, stage in pairs}


@pytest.mark.parametrize("case", CASES)
def test_one_process_has_the_derivatives_of_differences(case):
    by_rate, by_first, *_, tangent, again, once_more = of_one_process(case)
    at, h = (torch.tensor(0.3, dtype=F64), START["one"]), 1e-6
    run = lambda rate, one: after(case, "one process", rate, one)  # noqa: E731
    torch.testing.assert_close(by_rate, (run(at[0] + h, at[1]) - run(at[0] - h, at[1])) / (2 * h), rtol=1e-7, atol=1e-7)
    by_hand = (run(at[0], at[1] + h) - run(at[0], at[1] - h)) / (2 * h)
    torch.testing.assert_close(by_first.sum(), by_hand, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(tangent, by_rate + by_first.sum())
    torch.testing.assert_close((again, once_more), (by_rate, by_first))


@pytest.mark.parametrize(
    ("size", "pairs"),
    [
        (2, QUICK),
        pytest.param(3, [(case, stage) for case in CASES for stage in STAGES], marks=pytest.mark.slow),
    ],
    ids=["2", "3, all"],
)
def test_derivatives_by_numbers_are_those_of_one_process(size, pairs):
    want = {case: of_one_process(case) for case in CASES}
    for found in zf.launch(all_of, size, pairs, timeout=limit(120)):
        for (case, stage), got in found.items():
            where = lambda m, at=(case, stage): f"{at}: {m}"  # noqa: E731
            torch.testing.assert_close(got, want[case], rtol=1e-9, atol=1e-9, msg=where)
