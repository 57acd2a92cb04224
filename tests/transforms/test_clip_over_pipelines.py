"""One norm over several pipelines: `clip_by_global_norm(max_norm, over=...)`."""

import pytest
import rank_programs as P
import torch
from time_limits import limit
from torch import nn

import zerofn as zf

MAX_NORM = 0.05


def make():
    torch.manual_seed(0)
    return nn.Linear(4, 6).double(), nn.Linear(6, 3).double()


def batch(rank, step):
    g = torch.Generator().manual_seed(7 * rank + step)
    return torch.randn(5, 4, dtype=torch.float64, generator=g), torch.randn(5, 3, dtype=torch.float64, generator=g)


def train(first, second, chains, over_both=None):
    """Two models in one graph, each with a pipeline; `over_both` gives the gradients' squares of both, by place."""
    squares = [torch.zeros(()), torch.zeros(())]
    opts = [
        zf.attach(model, zf.chain(*order, clip, zf.adamw(1e-2)))
        for model, order, clip in zip(
            (first, second),
            chains,
            [
                # Of the first one's step the second's gradients are known already, and so the other way round.
                zf.clip_by_global_norm(MAX_NORM, over=lambda own, i=i: own + squares[1 - i])
                for i in range(2)
            ],
            strict=True,
        )
    ]
    rank, _ = P.rank_and_size()
    norms = []
    for step in range(3):
        x, y = batch(rank, step)
        ((second(first(x)) - y) ** 2).mean().backward()
        squares[:] = over_both(first, second)
        for opt in opts:
            opt.step()
        norms.append([float(opt.metrics["grad_norm"]) for opt in opts])
        for opt in opts:
            opt.zero_grad()
    for opt in opts:
        opt.detach()
    return norms, [p.detach().clone() for model in (first, second) for p in model.parameters()]


def of_whole_gradients(first, second):
    return [sum(p.grad.square().sum() for p in model.parameters()) for model in (first, second)]


def of_parts(first, second):
    """Gradients of `shard` are parts of means over ranks."""
    found = []
    for model in (first, second):
        own = sum(p.grad.to_local().square().sum() for p in model.parameters())
        found.append(zf.collectives.all_reduce(own, zf.collectives.world_group()))
    return found


def on_ranks():
    return train(*make(), [(zf.shard(),), (zf.shard(), zf.scale_loss(8.0))], of_parts)


def wanted(ranks):
    first, second = make()
    both = [*first.parameters(), *second.parameters()]
    opt, norms = torch.optim.AdamW(both, 1e-2), []
    for step in range(3):
        loss = sum(((second(first(x)) - y) ** 2).mean() for x, y in (batch(rank, step) for rank in range(ranks)))
        (loss / ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(both, MAX_NORM)))
        opt.step()
        opt.zero_grad()
    assert min(norms) > 2 * MAX_NORM, "nothing is clipped"
    return norms, [p.detach() for p in both]


def same(got, want):
    norms, params = got
    for of_step, norm in zip(norms, want[0], strict=True):
        assert of_step == pytest.approx([norm, norm], rel=1e-11)
    assert all(torch.allclose(a, b, rtol=1e-11, atol=1e-13) for a, b in zip(params, want[1], strict=True))


def test_two_pipelines_are_clipped_as_one_model():
    same(train(*make(), [(), ()], of_whole_gradients), wanted(1))


def test_on_ranks():
    for got in zf.launch(on_ranks, 2, timeout=limit()):
        same(got, wanted(2))


def one_step(over, *more):
    tx = zf.chain(zf.clip_by_global_norm(1.0, over=over), *more, zf.sgd(1.0))
    return zf.update(tx, {"w": torch.tensor([3.0, 4.0])}, zf.init(tx, {"w": torch.zeros(2)}))


def test_what_another_pipeline_has_left_out_all_leave_out():
    state, metrics = one_step(lambda squares: float("nan"), zf.skip_nonfinite())
    assert bool(metrics["skipped"]) and torch.equal(state.params["w"], torch.zeros(2))


def test_a_derivative_goes_through_what_the_others_have():
    def loss(others):
        state, _ = one_step(lambda squares: squares + others)
        return state.params["w"].sum()

    # w = -g / (sqrt(25 + s) + 1e-6): its derivative by s at 11.
    got = torch.func.grad(loss)(torch.tensor(11.0))
    assert float(got) == pytest.approx(7.0 / (2 * 6.0 * (6.0 + 1e-6) ** 2), rel=1e-5)


def other_sums():
    rank, _ = P.rank_and_size()
    tx = zf.chain(zf.all_reduce(), zf.clip_by_global_norm(1.0, over=lambda s: s + rank), zf.sgd(1.0))
    state = zf.init(tx, {"w": torch.zeros(2)})
    with pytest.raises(RuntimeError, match=r"(?s)returned (25|26) on this rank.*on other ranks"):
        zf.update(tx, {"w": torch.tensor([3.0, 4.0])}, state)
    return True


def test_other_sums_on_other_ranks_are_refused():
    assert zf.launch(other_sums, 2, timeout=limit()) == [True, True]
