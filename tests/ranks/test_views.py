"""A transform with a view half of its own, on ranks: right in the pure route where it can be, refused where not."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from time_limits import limit
from torch import nn
from torch.func import functional_call

import zerofn as zf
from zerofn._types import Role, Transform

F64 = torch.float64
FRONTS = {
    "all_reduce": lambda: (zf.all_reduce(), twice()),
    "reduce_scatter": lambda: (zf.reduce_scatter(), twice()),
    "reduce_scatter, accumulate": lambda: (zf.reduce_scatter(), twice(), zf.accumulate(1)),
    "accumulate, all_reduce": lambda: (zf.accumulate(2), zf.all_reduce(), twice()),
    "accumulate, reduce_scatter": lambda: (zf.accumulate(2), zf.reduce_scatter(), twice()),
    "shard": lambda: (zf.shard(), twice()),
    "shard, precision": lambda: (zf.shard(), zf.precision(), twice(), zf.accumulate(2)),
}
# What gathers and reduces at once, each leaf through all of its views.
RIGHT = ("all_reduce", "reduce_scatter", "reduce_scatter, accumulate")


@dataclass(frozen=True)
class Twice:
    """The model sees twice what is stored."""

    only_dtype: ClassVar[bool] = False

    def view(self, x, leaf):
        return 2 * x

    def pull(self, g, leaf):
        return 2 * g

    def store(self, x, leaf):
        return x / 2

    def changes(self, leaf):
        return True


def twice():
    return Transform("twice", Role.GRADIENT, needs="element", stage_fn=lambda layout: Twice())


def rank_of():
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 5, generator=generator, dtype=F64)


def make():
    torch.manual_seed(0)
    return nn.Linear(5, 3).to(F64)


def train(front, route, ranks):
    model, tx = make(), zf.chain(*FRONTS[front](), zf.sgd(0.05))
    if route == "eager":
        opt = zf.attach(model, tx)
        for step in range(4):
            sum((model(batch(r, step)) ** 2).mean() / len(ranks) for r in ranks).backward()
            opt.step()
            opt.zero_grad()
        return [x.clone() for x in opt.state.leaves.values()]
    params = {n: p.detach() for n, p in model.named_parameters()}
    state = zf.init(tx, params)

    def loss(p, step):
        return sum((functional_call(model, p, (batch(r, int(step)),)) ** 2).mean() for r in ranks) / len(ranks)

    step_fn = zf.make_step(loss, tx)
    for step in range(4):
        state, _ = step_fn(state, torch.tensor(step))
    return [x.clone() for x in zf.full_params(tx, state).values()]


def expected(every, size):
    """Plain torch: what is stored is trained through twice itself."""
    model = make()
    params = [p.detach().clone().requires_grad_() for p in model.parameters()]
    for step in range(4):
        for rank in range(size):
            w, b = (2 * p for p in params)
            (((batch(rank, step) @ w.T + b) ** 2).mean() / size / every).backward()
        if (step + 1) % every == 0:
            with torch.no_grad():
                for p in params:
                    p -= 0.05 * p.grad
                    p.grad = None
    assert all((p - q).abs().max() > 1e-2 for p, q in zip(params, model.parameters(), strict=True))
    return [p.detach() for p in params]


def everything():
    found = {}
    for front in FRONTS:
        for route in ("eager", "pure"):
            try:
                found[front, route] = train(front, route, [rank_of()])
            except ValueError as error:
                found[front, route] = str(error)
    return found


def test_on_ranks_it_is_right_or_refused_by_name():
    for found in zf.launch(everything, 2, timeout=limit(60)):
        assert len(found) == 2 * len(FRONTS)
        for (front, route), got in found.items():
            if front in RIGHT and route == "pure":
                for x, y in zip(got, expected(1, 2), strict=True):
                    # Float64; a sum over ranks in another order.
                    torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
                continue
            assert isinstance(got, str), (front, route)
            assert "twice) on several ranks\n  why:   twice has a view half of its own" in got
            assert got.startswith("zf.attach with" if route == "eager" else "zf.init with")
            assert "torch.nn.utils.parametrize" in got


@pytest.mark.parametrize("route", ["eager", "pure"])
@pytest.mark.parametrize("front", list(FRONTS))
def test_on_one_process_it_is_right(front, route):
    every = 2 if "accumulate" in front.replace("reduce_scatter, accumulate", "") or "precision" in front else 1
    for x, y in zip(train(front, route, range(2)), expected(every, 2), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "group", [lambda t: zf.masked(t, lambda p: True), lambda t: zf.partition({"a": t}, lambda p: "a")]
)
def test_in_a_group_it_would_have_no_effect(group):
    with pytest.raises(ValueError, match="twice has a view half"):
        group(twice())
