"""A profiler around forward and backward alone, which ends while gradients are still on their way."""

import time

import rank_programs as P
import torch
from stages import FIRST
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.ranks.collectives import (  # inside: collectives on tensors that are given, and works under way
    all_gather_into,
    all_reduce_,
    reduce_scatter_into,
)


def handles():
    """Work of every kind that is begun under a profiler and ends after it."""
    group, n = zf.collectives.world_group("profiled"), 1 << 20
    for _ in range(20):
        with torch.profiler.profile():
            if group.rank == 1:
                time.sleep(0.02)
            x, full, wide = torch.ones(n), torch.empty(2 * n), torch.ones(2 * n)
            works = [all_gather_into(full, x, group, async_op=True)]
            works += [reduce_scatter_into(x.clone(), wide, group, async_op=True)]
            works += [all_reduce_(x.clone(), group, async_op=True)]
        for work in works:
            work.wait()
        assert torch.equal(full, torch.ones(2 * n))


def models():
    """What a profile shows of training, and the losses."""
    rank, _ = P.rank_and_size()
    shown, losses = {}, {}
    for stage, first in FIRST.items():
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)])
        opt = zf.attach(model, zf.chain(first(), zf.sgd(0.1)))
        x = torch.randn(4, 300, generator=torch.Generator().manual_seed(rank))
        for profiled in (True, True, True, False):
            if profiled:
                with torch.profiler.profile() as profiler:
                    loss = model(x).square().mean()
                    loss.backward()
                shown[stage] = {event.key for event in profiler.key_averages()}
            else:
                loss = model(x).square().mean()
                loss.backward()
            opt.step()
            opt.zero_grad()
        losses[stage] = float(loss)
    return shown, losses


def everything():
    handles()
    return models()


def test_a_profiler_that_ends_before_the_reductions_do():
    for shown, losses in zf.launch(everything, 2, timeout=limit()):
        assert len({round(loss, 6) for loss in losses.values()}) == 1
        for stage, keys in shown.items():
            # It sees the model's operations and that a collective began.
            assert "aten::addmm" in keys and any(key.startswith("zerofn::") for key in keys), (stage, keys)
