"""Law 12 over ranks: the derivative of a training run is that of one process, to second order, at every stage."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stages import PLACES, around
from support.time_limits import limit
from support.training_runs import Inputs, agree, by_hand, inputs, recipes, trained
from torch.func import grad, jvp

import zerofn as zf

F64 = torch.float64
RATE, DECAY = torch.tensor(0.05, dtype=F64), torch.tensor(0.1, dtype=F64)


def params():
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(3, 2, generator=generator, dtype=F64), "b": torch.randn(1, generator=generator, dtype=F64)}


def batches(steps, rows):
    return torch.randn(steps, rows, 3, generator=torch.Generator().manual_seed(1), dtype=F64)


def loss(p, x):
    return torch.tanh(x @ p["w"] + p["b"]).square().mean() + 0.1 * (p["w"] ** 3).sum()


def outer(stage, xs, create_graph=False):
    """What is differentiated: this rank's loss on a batch of its own after four micro-steps."""

    def after(rate, decay, w, b):
        optimizer = zf.adamw(lambda step: rate * 0.9**step, eps=1e-2, weight_decay=decay)
        tail = [zf.clip_by_global_norm(0.3), optimizer, zf.ema(0.5)]
        tx = zf.chain(*around(stage, zf.scale_loss(8.0), zf.accumulate(2)), *tail)
        state = zf.init(tx, {"w": w, "b": b}, create_graph=create_graph)
        step = zf.make_step(loss, tx, create_graph=create_graph or None)
        for x in xs[:-1]:
            state, metrics = step(state, x)
        # What is measured through a bound function, and on whole parameters.
        measured = zf.bind(loss, tx, state)(state.params, xs[-1])
        whole = zf.full_params(tx, state, of="ema")
        return measured + loss(whole, xs[-1]) + metrics["grad_norm"]

    return after


def derivatives(stage, xs):
    at = RATE, DECAY, *params().values()
    fn = outer(stage, xs)
    first = grad(fn, (0, 1, 2, 3))(*at)
    second = grad(lambda *a: sum(g.square().sum() for g in grad(fn, (0, 1, 2))(*a)), (0, 1, 2, 3))(*at)
    _, tangent = jvp(fn, at, tuple(map(torch.ones_like, at)))
    leaves = [x.clone().requires_grad_() for x in at]
    by_autograd = torch.autograd.grad(outer(stage, xs, True)(*leaves), leaves)
    return first, second, tangent, by_autograd


def on_ranks(stages, steps, rows):
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    xs = batches(steps, rows * size)[:, rank * rows : (rank + 1) * rows]
    return {stage: derivatives(stage, xs) for stage in stages}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_derivatives_over_ranks_are_those_of_one_process(size):
    """In float64, of sums in another order: 1e-10. A rank's tangent is that of its own loss, their mean the whole."""
    steps, rows = 5, 2
    want = derivatives("one process", batches(steps, rows * size))
    # Where a window ends behind the reduction, before it, and before the parameters: the others are in
    # `test_law_12_numbers`.
    stages = ["data parallel, late", "ZeRO-1", "ZeRO-3"]
    found = zf.launch(on_ranks, size, stages, steps, rows, timeout=limit(120))
    for stage in found[0]:
        for got in found:
            for k in (0, 1, 3):
                where = lambda m, at=(stage, k): f"{at}: {m}"  # noqa: E731
                torch.testing.assert_close(got[stage][k], want[k], rtol=1e-10, atol=1e-10, msg=where)
        mean = sum(got[stage][2] for got in found) / size
        torch.testing.assert_close(mean, want[2], rtol=1e-10, atol=1e-10)


def of_runs(cases):
    """Derivatives of runs by zerofn; of the batch each rank has its own rows."""
    import torch.distributed as dist

    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = []
    for stage, r, seed in cases:
        at = inputs(r.steps, seed)
        rows = at.x.shape[1] // size
        at = at._replace(x=at.x[:, rank * rows : (rank + 1) * rows])
        found.append(twice(lambda at, r=r, stage=stage: trained(r, at, stage=stage), at))
    return found


def twice(fn, at):
    """By rate, decay, first parameters, weight and batch; and of the squares of all but the last, by those."""

    def shared(*a, x=at.x):
        return fn(Inputs(a[0], a[1], a[2], x, a[3]))

    def squares(*a):
        return sum(g.square().sum() for g in grad(shared, (0, 1, 2, 3))(*a))

    a = at.rate, at.decay, at.w, at.weight
    return grad(shared, (0, 1, 2, 3))(*a), grad(squares, (0, 1, 2, 3))(*a), grad(lambda x: shared(*a, x=x))(at.x)


runs = st.tuples(st.sampled_from([stage for stage in PLACES if stage != "one process"]), recipes, st.integers(0, 99))


@pytest.mark.slow
@settings(max_examples=6)
@given(st.sampled_from([1, 2, 3]), st.lists(runs, min_size=1, max_size=3))
def test_any_run_at_any_stage_has_the_derivatives_of_the_formula(size, cases):
    """The reference has the rows of all ranks, in plain float64.

    By a rank's own rows the derivative is that of its own loss, of which all ranks' have a mean: so many times that of
    the reference.
    """
    want = [twice(lambda at, r=r: by_hand(r, at), inputs(r.steps, seed)) for _, r, seed in cases]
    found = zf.launch(of_runs, size, cases, timeout=limit(120))
    for ranks, (first, second, by_rows) in zip(zip(*found, strict=True), want, strict=True):
        for got in ranks:
            agree(got[:2], (first, second))
        agree(torch.cat([got[2] for got in ranks], 1) / size, by_rows)
