"""`sam` asks for a second gradient: at every stage, by both routes, against a loop in float64."""

import re

import pytest
import torch
from models import Regression, regression_batch
from refusals import Refusals
from stages import around
from time_limits import limit
from torch.func import functional_call

import zerofn as zf

F64, RHO, LR = torch.float64, 0.7, 0.3


def loss_of(model, params, x, y):
    return (functional_call(model, params, (x,)) - y).square().mean()


def by_hand(steps, window, ranks):
    model = Regression()
    params = {k: p.detach() for k, p in model.named_parameters()}
    moment, first = {}, []
    for t in range(steps):
        total = {k: torch.zeros_like(p) for k, p in params.items()}
        for i in range(window):

            def mean(params, at=t * window + i):
                return sum(loss_of(model, params, *regression_batch(at, r)) for r in ranks) / len(ranks)

            g, loss = torch.func.grad_and_value(mean)(params)
            norm = sum(x.square().sum() for x in g.values()).sqrt()
            g = torch.func.grad(mean)({k: p + RHO * g[k] / norm for k, p in params.items()})
            total = {k: x + g[k] / window for k, x in total.items()}
            first.append(float(loss))
        moment = {k: 0.5 * moment[k] + x if moment else x for k, x in total.items()}
        params = {k: p - LR * moment[k] for k, p in params.items()}
    return params, first


FRONTS = {
    "alone": lambda: [zf.sam(RHO)],
    "scaled": lambda: [zf.scale_loss(64.0), zf.sam(RHO)],
    "clip": lambda: [zf.sam(RHO), zf.clip_by_value(1e3)],
}


def trained(front, stage, window, route, ranks):
    model = Regression()
    held = [zf.accumulate(window)] if window > 1 else []
    tx = zf.chain(*around(stage), *FRONTS[front](), *held, zf.sgd(LR, momentum=0.5))
    told = []
    if route == "pure":
        state = zf.init(tx, {k: p.detach() for k, p in model.named_parameters()})
        step = zf.make_step(lambda p, x, y: (loss_of(model, p, x, y), x.sum()), tx)
        for t in range(4 * window):
            x, y = regression_batch(t, ranks[0])
            state, metrics = step(state, x, y)
            assert metrics["aux"] == x.sum()
            told.append(float(metrics["loss"]))
        return {k: x.clone() for k, x in zf.full_params(tx, state).items()}, told
    opt = zf.attach(model, tx)
    for t in range(4 * window):
        x, y = regression_batch(t, ranks[0])

        def closure(x=x, y=y):
            if route == "cleared":
                opt.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        told.append(opt.step(closure).item())
        opt.zero_grad()
    return {k: p.detach().clone() for k, p in opt.detach().named_parameters()}, told


def on_a_rank(cells):
    rank = torch.distributed.get_rank()
    return [trained(*cell, [rank]) for cell in cells]


EVERY = [
    (front, stage, window, route)
    for front in FRONTS
    for stage in ("ZeRO-3", "ZeRO-2", "data parallel")
    for window in (1, 2)
    for route in ("pure", "eager", "cleared")
]
SOME = EVERY[::5]


@pytest.mark.parametrize(
    ("cells", "size"),
    [(EVERY[2::7], 1), (SOME[::2], 2), *[pytest.param(EVERY, n, marks=pytest.mark.slow) for n in (2, 3)]],
    ids=["some on 1", "some on 2", "all on 2", "all on 3"],
)
def test_stages_are_the_formula(cells, size):
    if size == 1:
        found = [[trained(*cell, [0]) for cell in cells]]
    else:
        found = zf.launch(on_a_rank, size, cells, timeout=limit(120))
    wrong = []
    for i, cell in enumerate(cells):
        want, losses = by_hand(4, cell[2], range(size))
        worst = [max(float((x[i][0][k] - want[k]).abs().max()) for k in want) for x in found]
        told = sum(torch.tensor(x[i][1], dtype=F64) for x in found) / size
        worst.append(float((told - torch.tensor(losses, dtype=F64)).abs().max()))
        wrong += [(cell, worst)] if not max(worst) < 1e-10 else []
    assert not wrong


def test_the_second_point_is_left_by_an_error_and_by_an_overflow():
    model = Regression()
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    opt, calls = zf.attach(model, zf.chain(zf.skip_nonfinite(), zf.sgd(LR))), []
    opt.detach()
    opt = zf.attach(model, zf.chain(zf.sam(RHO), zf.skip_nonfinite(), zf.sgd(LR)))

    def closure(factor=1.0):
        calls.append(factor)
        if len(calls) == 2:
            raise KeyError("of the second call")
        loss = model(regression_batch(0, 0)[0]).square().mean() * factor
        loss.backward()
        return loss

    with pytest.raises(KeyError, match="of the second call"):
        opt.step(closure)
    opt.zero_grad()
    opt.step(lambda: closure(torch.inf))
    assert bool(opt.metrics["skipped"])
    for k, p in model.named_parameters():
        assert torch.equal(p, before[k])
    opt.zero_grad()
    opt.step(closure)
    assert all(not torch.equal(p, before[k]) for k, p in model.named_parameters())


def test_a_derivative_goes_through_both_gradients():
    tx = zf.chain(zf.sam(0.5), zf.sgd(0.1))
    step = zf.make_step(lambda p, x: (p["w"] * x).square().sum(), tx)
    w, x = torch.tensor([1.0, 2.0], dtype=F64), torch.tensor([0.5, 1.5], dtype=F64)
    state = zf.init(tx, {"w": w})

    def by_formula(x):
        g = 2 * w * x**2
        return (w - 0.1 * 2 * (w + 0.5 * g / (g.norm() + 1e-12)) * x**2).square().sum()

    slope = torch.func.grad(lambda x: step(state, x)[0].params["w"].square().sum())(x)
    torch.testing.assert_close(slope, torch.func.grad(by_formula)(x))


ROWS = Refusals()
ROWS.rows(
    ValueError,
    (
        lambda: zf.attach(Regression(), zf.chain(zf.sam(), zf.sgd(0.1)), in_backward=True),
        re.compile("a transform asks for a second gradient"),
    ),
    (
        lambda: zf.chain(zf.clip_by_value(1.0), zf.sam(), zf.sgd(0.1)),
        re.compile(r"chain\(..., sam, ..., clip_by_value"),
    ),
    (lambda: zf.chain(zf.accumulate(2), zf.sam(), zf.sgd(0.1)), re.compile(r"chain\(..., sam, ..., accumulate")),
    (
        lambda: zf.init(zf.chain(zf.masked(zf.sam(), {"w": True}), zf.sgd(0.1)), {"w": torch.ones(1)}),
        re.compile(r"masked\((.|\n)*as a member of the chain itself"),
    ),
    (
        lambda: zf.init(zf.chain(zf.sam(), zf.sam(), zf.sgd(0.1)), {"w": torch.ones(1)}),
        re.compile("each would get the one of the other"),
    ),
)


@ROWS(ValueError, "opt.step() through sam", "opt.step(closure)")
def a_step_without_a_closure():
    model = Regression()
    opt = zf.attach(model, zf.chain(zf.sam(), zf.sgd(0.1)))
    model(regression_batch(0, 0)[0]).sum().backward()
    yield dict(model.named_parameters())
    opt.step()


@ROWS(ValueError, "zf.update through sam", "zf.make_step")
def an_update_of_a_gradient():
    tx = zf.chain(zf.sam(), zf.sgd(0.1))
    state = zf.init(tx, {"w": torch.ones(1)})
    yield state
    zf.update(tx, {"w": torch.ones(1)}, state)


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
