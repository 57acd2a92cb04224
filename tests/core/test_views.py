"""Transforms with a view half of their own: right in every route and stage, on one process and on ranks."""

import pytest
import rank_programs as P
import torch
from refusals import Refusals
from time_limits import limit
from torch import nn
from torch.func import functional_call

import zerofn as zf
from zerofn.extend import Transform, View, as_it_is

F64 = torch.float64
FRONTS = {
    "all_reduce": lambda: (zf.all_reduce(), mine()),
    "before all_reduce": lambda: (mine(), zf.all_reduce()),
    "reduce_scatter": lambda: (zf.reduce_scatter(), mine()),
    "before reduce_scatter": lambda: (mine(), zf.reduce_scatter()),
    "reduce_scatter, accumulate": lambda: (zf.reduce_scatter(), mine(), zf.accumulate(1)),
    "accumulate, all_reduce": lambda: (zf.accumulate(2), zf.all_reduce(), mine()),
    "accumulate, reduce_scatter": lambda: (zf.accumulate(2), zf.reduce_scatter(), mine()),
    "before accumulate, reduce_scatter": lambda: (mine(), zf.accumulate(2), zf.reduce_scatter()),
    "shard": lambda: (zf.shard(), mine()),
    "before shard": lambda: (mine(), zf.shard()),
    "shard, precision": lambda: (zf.shard(), zf.precision(), mine(), zf.accumulate(2)),
}

# What the model sees of a parameter of one leaf, and how a cotangent goes back.
FACTORS = {"weight": 2.0, "bias": -0.5}


def mine():
    """The model sees a multiple of what is stored, another one for each leaf."""

    def times(x, leaf):
        return x * FACTORS[leaf.path]

    view = View(view=times, pull=times, store=lambda x, leaf: x / FACTORS[leaf.path])
    return Transform("mine", needs="element", view_fn=lambda layout, ranks: view, through=as_it_is)


def grid(x):
    return (x * 64).round() / 64


def rounded():
    """The model sees numbers on a grid; gradients go through as if it did not (straight-through)."""
    view = View(view=lambda x, leaf: grid(x), pull=lambda g, leaf: g, store=lambda x, leaf: x)
    return Transform("rounded", needs="element", view_fn=lambda layout, ranks: view, through=as_it_is)


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 5, generator=generator, dtype=F64)


def make():
    torch.manual_seed(0)
    return nn.Linear(5, 3).to(F64)


def train(front, route, ranks):
    model, tx = make(), zf.chain(*FRONTS[front](), zf.sgd(0.05))
    return run(model, tx, route, ranks)


def run(model, tx, route, ranks):
    """Parameters in full after four steps."""
    if route == "eager":
        opt = zf.attach(model, tx)
        for step in range(4):
            sum((model(batch(r, step)) ** 2).mean() / len(ranks) for r in ranks).backward()
            opt.step()
            opt.zero_grad()
        with opt.gathered():
            return [p.detach().clone() for p in model.parameters()]
    params = {n: p.detach() for n, p in model.named_parameters()}
    state = zf.init(tx, params)

    def loss(p, step):
        return sum((functional_call(model, p, (batch(r, int(step)),)) ** 2).mean() for r in ranks) / len(ranks)

    step_fn = zf.make_step(loss, tx)
    for step in range(4):
        state, _ = step_fn(state, torch.tensor(step))
    return [x.clone() for x in zf.full_params(tx, state).values()]


def expected(every, size):
    """Plain torch: what is stored is trained through its multiple. The multiples at the end."""
    model = make()
    factors = list(FACTORS.values())
    pairs = zip(model.parameters(), factors, strict=True)
    params = [(p.detach() / f).requires_grad_() for p, f in pairs]
    for step in range(4):
        for rank in range(size):
            w, b = (f * p for p, f in zip(params, factors, strict=True))
            (((batch(rank, step) @ w.T + b) ** 2).mean() / size / every).backward()
        if (step + 1) % every == 0:
            with torch.no_grad():
                for p in params:
                    p -= 0.05 * p.grad
                    p.grad = None
    assert all((p - q).abs().max() > 1e-2 for p, q in zip(params, model.parameters(), strict=True))
    return [f * p.detach() for p, f in zip(params, factors, strict=True)]


def everything():
    rank = P.rank_and_size()[0]
    return {(f, route): train(f, route, [rank]) for f in FRONTS for route in ("eager", "pure")}


def every_of(front):
    return 2 if "accumulate" in front.replace("reduce_scatter, accumulate", "") or "precision" in front else 1


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_on_ranks_it_is_right(size):
    for found in zf.launch(everything, size, timeout=limit(60)):
        assert len(found) == 2 * len(FRONTS)
        for (front, route), got in found.items():
            for x, y in zip(got, expected(every_of(front), size), strict=True):
                # Float64; a sum over ranks in another order.
                torch.testing.assert_close(x, y, rtol=0, atol=1e-12, msg=lambda m, at=(front, route): f"{at}: {m}")


@pytest.mark.parametrize("route", ["eager", "pure"])
@pytest.mark.parametrize("front", list(FRONTS))
def test_on_one_process_it_is_right(front, route):
    for x, y in zip(train(front, route, range(2)), expected(every_of(front), 2), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


ROUNDED = {
    "all_reduce": lambda: (zf.all_reduce(), rounded()),
    "reduce_scatter": lambda: (zf.reduce_scatter(), rounded()),
    "accumulate, reduce_scatter": lambda: (zf.accumulate(1), rounded(), zf.reduce_scatter()),
    "shard": lambda: (zf.shard(), rounded()),
}


def of_rounded():
    rank = P.rank_and_size()[0]
    return {
        (name, route): run(make(), zf.chain(*front(), zf.sgd(0.05)), route, [rank])
        for name, front in ROUNDED.items()
        for route in ("eager", "pure")
    }


def test_straight_through_rounding_is_right_on_ranks():
    model = make()
    masters = [p.detach().clone() for p in model.parameters()]
    for step in range(4):
        w, b = seen = [grid(p).requires_grad_() for p in masters]
        sum(((batch(rank, step) @ w.T + b) ** 2).mean() / 2 for rank in range(2)).backward()
        masters = [p - 0.05 * x.grad for p, x in zip(masters, seen, strict=True)]
    for found in zf.launch(of_rounded, 2, timeout=limit(60)):
        for (name, route), got in found.items():
            for x, p in zip(got, masters, strict=True):
                torch.testing.assert_close(x, grid(p), rtol=0, atol=1e-12, msg=lambda m, at=(name, route): f"{at}: {m}")


# ---- refused ----

ROWS = Refusals()


ROWS.rows(
    ValueError,
    (lambda: zf.masked(mine(), lambda p: True),),
    (lambda: zf.partition({"a": mine()}, lambda p: "a"),),
    told=("mine has a view half",),
)


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
