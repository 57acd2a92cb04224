"""Law 13, of a view that is a function of its transform's state: a loss scale written with `zerofn.extend` alone.

It is the one of docs/extend/view-with-a-state.md: an exponent. In every stage and route it gives the bits of
`scale_loss` with the same rule, through overflows, a NaN and growth.
"""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from refusals import Refusals
from routes import mean_square, micro_steps
from stages import STAGES, around
from time_limits import limit
from torch import nn

import zerofn as zf
import zerofn.extend
from zerofn.extend import Transform, View, as_it_is, transform

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "view-with-a-state.md"
HALF = torch.float16
STEPS, NAN_AT, FIRST = 12, 7, 20


def power_of_two():
    """The transform of the page."""
    code = re.search(r"```python\n(.*?)\n\ntx = ", PAGE.read_text(), re.S)
    names = {"__name__": "page", "torch": torch, **vars(zf.extend)}
    exec(compile(code[1], "page", "exec", dont_inherit=True), names)
    return names["power_of_two"]


@transform
def times(by):
    """Cotangents carry a number that never changes, and nobody looks at them."""
    view = View(factor=lambda state: torch.tensor(by))
    return Transform("times", needs="element", view_fn=lambda layout, ranks: view, through=as_it_is)


class Watch(nn.Module):
    """Notes the cotangent of what passes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda g: self.seen.append(g.clone()))
        return x


def model_of(*last):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), *last)


def train(scale, stage, route, rank=0):
    """Of every micro-step: stored parameters and moments, the scale in force, and whether parameters changed."""
    middle = [zf.precision(param_dtype=HALF), scale, zf.accumulate(2)]
    tx = zf.chain(*around(stage, *middle), zf.clip_by_global_norm(0.5), zf.adamw(1e-2))
    batches = torch.randn(STEPS, 6, 5, generator=torch.Generator().manual_seed(rank))
    if rank == 0:
        batches[NAN_AT] = torch.nan
    model, found = model_of(), []
    if route == "pure":
        batches = batches.to(HALF)
    for state, metrics in micro_steps(route, model, tx, batches, mean_square):
        moments = [x.clone() for slot in ("exp_avg", "exp_avg_sq") for x in state.transforms["adamw"][slot].values()]
        sums = [x.clone() for x in state.transforms["accumulate"]["sum"].values()]
        parts = [x.clone() for x in state.leaves.values()]
        found.append((parts + moments + sums, float(metrics["loss_scale"]), bool(metrics["updated"])))
    return found


def compare(rank=0):
    """The stages and routes in which the two differ, and by both the scales, and whether parameters changed."""
    mine, wrong, courses = power_of_two(), [], {}
    for stage in STAGES:
        for route in ("eager", "pure"):
            built_in = train(zf.scale_loss(init_scale=2.0**FIRST, growth_interval=3), stage, route, rank)
            outside = train(mine(exponent=FIRST, patience=3), stage, route, rank)
            for (xs, scale, went), (ys, own, came) in zip(built_in, outside, strict=True):
                same = len(xs) == len(ys) and all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))
                if not same or scale != own or went != came:
                    wrong.append((stage, route))
            courses[stage, route] = [scale for _, scale, _ in outside], [came for *_, came in outside]
    return wrong, courses


def check(found):
    wrong, courses = found
    assert not wrong and len(courses) == 2 * len(STAGES)
    for scales, updated in courses.values():
        # It overflowed at first, grew again, and went down for the NaN; and there were updates.
        assert scales[0] == 2.0 ** (FIRST - 1) and scales[NAN_AT] == scales[NAN_AT - 1] / 2 and sum(updated) >= 2
        assert any(now > was for was, now in pairwise(scales))


def test_on_one_process():
    check(compare())


def on_a_rank():
    import torch.distributed as dist

    return compare(dist.get_rank())


def test_on_two_ranks():
    for found in zf.launch(on_a_rank, 2, timeout=limit(120)):
        check(found)


@pytest.mark.parametrize("route", ["eager", "pure"])
@pytest.mark.parametrize("stage", STAGES)
def test_two_factors_are_one(stage, route):
    """2 ** 3 and 2 ** 4, from two transforms of which neither knows the other, are `scale_loss(2 ** 7)`."""
    seen = []
    for scale in ([times(8.0), times(16.0)], [zf.scale_loss(128.0)]):
        watch = Watch()
        model = model_of(watch)
        tx = zf.chain(*around(stage, zf.precision(param_dtype=HALF), *scale), zf.sgd(0.1, momentum=0.9))
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
        ((state, _),) = micro_steps(route, model, tx, [x if route == "eager" else x.to(HALF)], mean_square)
        seen.append([*watch.seen, *state.leaves.values()])
    for a, b in zip(*seen, strict=True):
        assert torch.equal(a, b)
    # Inside of the model they are multiplied: without a factor the mean of 18 squares has none so large.
    assert len(seen[0]) == 5 and seen[0][0].abs().max() > 1.0


def test_the_boundary_is_closed_around_it():
    """Second derivatives through an attached model are those of the plain one, in float64."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    penalties = []
    for tx in (None, zf.chain(times(48.0), zf.sgd(0.1))):
        model = model_of().double()
        opt = None if tx is None else zf.attach(model, tx)
        given = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
        g.square().sum().backward()
        penalties.append([given.grad, *(p.grad for p in model.parameters())])
        assert opt is None or opt.state.transforms["times"] == {}
    for a, b in zip(*penalties, strict=True):
        # 48 is no power of two: dividing by it rounds.
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_within_backward():
    """A factor that looks for nothing may stand where leaves are updated as their gradients come."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    found = []
    for scale in ([], [times(64.0)]):
        model = model_of()
        opt = zf.attach(model, zf.chain(*scale, zf.adamw(1e-2)), in_backward=True)
        model(x).square().mean().backward()
        opt.step()
        found.append([p.detach().clone() for p in model.parameters()])
    for a, b, before in zip(*found, model_of().parameters(), strict=True):
        assert torch.equal(a, b) and not torch.equal(a, before)


# ---- refused ----

ROWS = Refusals()


@ROWS(ValueError, "odd: View(factor=...) that gives", over=[torch.ones(2), torch.tensor(2), 2.0])
def what_is_no_number_of_the_state(by):
    view = View(factor=lambda state: by)
    tx = zf.chain(Transform("odd", needs="element", view_fn=lambda layout, ranks: view, through=as_it_is), zf.sgd(0.1))
    yield
    zf.init(tx, {"w": torch.zeros(2)})


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
