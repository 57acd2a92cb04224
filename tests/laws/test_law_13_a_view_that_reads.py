"""Law 13, of a view whose functions read its transform's state: rounding to a grid that every update halves.

Against the same training written by hand in float64, in every stage and route.
"""

from dataclasses import replace

import pytest
import torch
from routes import mean_square, micro_steps
from stages import STAGES, around
from time_limits import limit
from torch import nn
from torch.func import functional_call

import zerofn as zf
from zerofn._compat.functorch import COMPILES_STATES  # inside: whether this torch makes one graph of a step
from zerofn.extend import Transform, View, as_it_is, transform

RATE, FIRST, STEPS = 0.1, 0.5, 8


def rounded(x, grid):
    return (x / grid).round() * grid


@transform
def on_a_grid(first=FIRST):
    """Forward sees weights on a grid, and gradients come straight through; the grid is halved at each update."""

    def update(grads, state, params, carry, ctx):
        return grads, {"grid": state["grid"] / 2}

    view = View(
        view=lambda x, leaf, state: rounded(x, state["grid"]),
        # What pulls back reads it too: cotangents of a coarse grid count for less.
        pull=lambda g, leaf, state: g / (1 + state["grid"]),
        reads=True,
    )
    functions = {"init_fn": lambda leaves, layout: {"grid": torch.tensor(first)}, "update_fn": update}
    return Transform("on_a_grid", needs="element", view_fn=lambda layout, ranks: view, through=as_it_is, **functions)


def chain_of(stage):
    window = [] if stage == "data parallel" else [zf.accumulate(2)]
    return zf.chain(on_a_grid(), *around(stage, *window), zf.sgd(RATE, momentum=0.9))


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batches(rank):
    return torch.randn(STEPS, 6, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def by_hand(stage, size):
    """Plain PyTorch on all ranks' batches: the parameters after each micro-step."""
    model, window = model_of(), 1 if stage == "data parallel" else 2
    given = dict(model.named_parameters())
    momentum, sums = ({n: torch.zeros_like(p) for n, p in given.items()} for _ in range(2))
    # The grid is halved by each micro-step that gets to it: it stands before the window.
    grid, found = FIRST, []
    for i in range(STEPS):
        for rank in range(size):
            seen = {n: rounded(p.detach(), grid).requires_grad_() for n, p in given.items()}
            loss = functional_call(model, seen, (batches(rank)[i],)).square().mean()
            for (n, x), g in zip(seen.items(), torch.autograd.grad(loss, list(seen.values())), strict=True):
                assert x.shape == g.shape
                sums[n] += g / (1 + grid) / size / window
        grid /= 2
        if (i + 1) % window == 0:
            for n, p in given.items():
                momentum[n] = 0.9 * momentum[n] + sums[n]
                p.data -= RATE * momentum[n]
                sums[n].zero_()
        found.append({n: p.detach().clone() for n, p in given.items()})
    return found


def stored(tx, state):
    """The whole of what is stored, which no grid has rounded."""
    return {n: x.clone() for n, x in zf.gather(tx, state, state.params).items()}


def train(stage, route, rank, tmp=None):
    """The whole parameters after each micro-step, and the grids."""
    tx, model, found, grids = chain_of(stage), model_of(), [], []
    if route == "eager":
        opt = zf.attach(model, tx)
        for i, x in enumerate(batches(rank)):
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
            found.append(stored(tx, opt.state))
            grids.append(float(opt.state.transforms["on_a_grid"]["grid"]))
            if tmp is not None and i == STEPS // 2:
                # Another model goes on from what is saved: its views read the state that was loaded.
                zf.save(tmp, opt)
                opt.detach()
                model = model_of()
                opt = zf.attach(model, tx)
                zf.load(tmp, opt)
    else:
        state = zf.init(tx, {n: p.detach() for n, p in model.named_parameters()})
        step = zf.make_step(lambda p, x: functional_call(model, p, (x,)).square().mean(), tx)
        for x in batches(rank):
            state, _ = step(state, x)
            found.append(stored(tx, state))
            grids.append(float(state.transforms["on_a_grid"]["grid"]))
    return found, grids


def check(found, stage, size):
    (steps, grids), expected = found, by_hand(stage, size)
    assert grids == [FIRST / 2 ** (i + 1) for i in range(STEPS)]
    start = dict(model_of().named_parameters())
    for mine, theirs in zip(steps, expected, strict=True):
        for n, x in mine.items():
            # Sums over two batches, or ranks, in another order.
            torch.testing.assert_close(x - start[n], theirs[n] - start[n], rtol=1e-11, atol=1e-13)
    assert all((x - start[n]).abs().max() > 1e-3 for n, x in steps[-1].items())


@pytest.mark.parametrize("route", ["eager", "pure"])
@pytest.mark.parametrize("stage", STAGES)
def test_on_one_process(stage, route):
    check(train(stage, route, 0), stage, 1)


def on_a_rank(tmp):
    import torch.distributed as dist

    rank = dist.get_rank()
    found = {(stage, route): train(stage, route, rank) for stage in STAGES for route in ("eager", "pure")}
    return found, train("ZeRO-3", "eager", rank, tmp)


def test_on_two_ranks(tmp_path):
    for found, resumed in zf.launch(on_a_rank, 2, str(tmp_path / "saved"), timeout=limit(60)):
        for (stage, _), each in found.items():
            check(each, stage, 2)
        check(resumed, "ZeRO-3", 2)


RESIDENT = {
    "data parallel": lambda: zf.chain(zf.all_reduce(), on_a_grid(), zf.sgd(RATE)),
    # Its grid is halved by micro-steps that are held, too.
    "ZeRO-2": lambda: zf.chain(zf.reduce_scatter(), on_a_grid(), zf.accumulate(2), zf.sgd(RATE)),
    "ZeRO-1": lambda: zf.chain(zf.accumulate(2), zf.reduce_scatter(), on_a_grid(), zf.sgd(RATE)),
}


def resident(stage, route, rank, size=1):
    """What is stored after each micro-step, where the model keeps what it sees: of the grid of the step to come."""
    tx, given = RESIDENT[stage](), torch.cat([batches(r) for r in range(rank, rank + size)], 1)
    steps = micro_steps(route, model_of(), tx, given, lambda out: out.square().mean())
    return [stored(tx, state) for state, _ in steps]


def resident_on_a_rank():
    rank = torch.distributed.get_rank()
    for stage in RESIDENT:
        want = resident(stage, "pure", rank)
        for route in ("eager", "in backward") if stage == "data parallel" else ("eager",):
            for a, b in zip(resident(stage, route, rank), want, strict=True):
                assert all(torch.equal(x, b[n]) for n, x in a.items()), (stage, route)
    return {stage: resident(stage, "pure", rank) for stage in RESIDENT}


def test_where_resident_parameters_are_made_after_an_update():
    expected, start = {stage: resident(stage, "pure", 0, 2) for stage in RESIDENT}, dict(model_of().named_parameters())
    for found in zf.launch(resident_on_a_rank, 2, timeout=limit(60)):
        for stage, steps in found.items():
            for mine, theirs in zip(steps, expected[stage], strict=True):
                # Means over two ranks, and over one batch of twice the length.
                torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)
            assert all((x - start[n]).abs().max() > 1e-3 for n, x in steps[-1].items())


def reduced_in_fp32(route):
    """Parameters in bf16 after each step, where what is reduced is yet to be pulled through the view."""
    tx = zf.chain(zf.precision(reduce_dtype=torch.float32), zf.all_reduce(), on_a_grid(1 / 3), zf.sgd(RATE))
    given = batches(torch.distributed.get_rank()).bfloat16()
    return [stored(tx, state) for state, _ in micro_steps(route, model_of().bfloat16(), tx, given, mean_square)]


def reduced_on_a_rank():
    want = reduced_in_fp32("pure")
    for route in ("eager", "in backward"):
        for a, b in zip(reduced_in_fp32(route), want, strict=True):
            assert all(torch.equal(x, b[n]) for n, x in a.items()), route
    return True


def test_a_reduced_gradient_is_rounded_after_the_view_has_pulled_it():
    assert all(zf.launch(reduced_on_a_rank, 2, timeout=limit()))


def test_bound_functions_and_whole_parameters_see_it():
    tx = zf.chain(on_a_grid(), zf.sgd(RATE))
    state = zf.init(tx, {"w": torch.tensor([0.3, 0.8])})
    assert zf.full_params(tx, state)["w"].tolist() == [0.5, 1.0]
    assert zf.bind(lambda p: p["w"].sum(), tx, state)(state.params) == 1.5
    out, pullback = zf.vjp(lambda p: (p["w"] ** 2).sum(), tx, state)
    (grads,) = pullback(torch.tensor(1.5))
    assert out == 1.25 and grads["w"].tolist() == [1.0, 2.0]
    # A state of before sees its own grid, whatever has been done since.
    new, _ = zf.update(tx, grads, state)
    assert zf.full_params(tx, new)["w"].tolist() == [0.25, 0.5]
    assert zf.full_params(tx, state)["w"].tolist() == [0.5, 1.0]


def test_a_batch_of_members_with_one_grid():
    tx = zf.chain(on_a_grid(), zf.sgd(RATE))
    step = zf.make_step(lambda p: (p["w"] ** 2).sum(), tx)
    start = torch.tensor([[0.3, 0.8], [-0.7, 0.1]])
    every = torch.func.vmap(lambda w: step(zf.init(tx, {"w": w}))[0].params["w"])(start)
    assert torch.equal(every, torch.stack([step(zf.init(tx, {"w": w}))[0].params["w"] for w in start]))


def test_a_state_that_is_no_constant_is_refused_by_path():
    tx = zf.chain(on_a_grid(), zf.sgd(RATE))
    state, w = zf.init(tx, {"w": torch.ones(2)}), torch.ones(2)
    step = zf.make_step(lambda p: (p["w"] ** 2).sum(), tx)

    def by_grid(grid):
        return step(replace(state, transforms={**state.transforms, "on_a_grid": {"grid": grid}}))[0].params["w"].sum()

    for run in (torch.func.grad(by_grid), lambda grid: torch.func.vmap(by_grid)(grid.expand(2))):
        with pytest.raises(RuntimeError, match=r"on_a_grid\.grid"):
            run(torch.tensor(0.5))
    # By what it does not read there are derivatives, straight through.
    slope = torch.func.grad(lambda w: step(zf.init(tx, {"w": w}))[0].params["w"].sum())(w)
    assert torch.allclose(slope, torch.full((2,), 1 - RATE * 2 / (1 + FIRST) / (1 + FIRST)))


def test_inside_of_the_compiler_it_runs_uncompiled():
    # What other tests have compiled decides what the compiler tries, and so what it complains of.
    torch._dynamo.reset()
    tx = zf.chain(on_a_grid(), zf.sgd(RATE))
    step = zf.make_step(lambda p: (p["w"] ** 2).sum(), tx)
    state = zf.init(tx, {"w": torch.tensor([0.3, 0.8])})
    expected, _ = step(state)
    found, _ = torch.compile(step, backend="eager")(state)
    assert torch.equal(found.params["w"], expected.params["w"])
    with pytest.raises(Exception, match=r"make_step\(torch.compile" if COMPILES_STATES else "before 2.13"):
        torch.compile(zf.make_step(lambda p: p["w"].sum(), tx), backend="eager", fullgraph=True)(state)
