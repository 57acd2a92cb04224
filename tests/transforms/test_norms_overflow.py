"""Norms, overflow and skipping are the same on all ranks, whatever part of the gradient each of them holds."""

import math

import pytest
import rank_programs as P
import torch
from stages import STAGES, around
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofn as zf

ORDERS = (*STAGES, "hybrid", "hybrid zero2")


def pipe(order, *rest, mesh=None):
    scale = zf.scale_loss("dynamic", init_scale=1024.0, growth_interval=100)
    if order in STAGES:
        return zf.chain(*around(order, scale, window=P.hold()), *rest)
    if order == "hybrid":
        return zf.chain(zf.shard(mesh["shard"]), zf.all_reduce(mesh["replicate"]), scale, *rest)
    return zf.chain(zf.reduce_scatter(mesh["shard"]), zf.all_reduce(mesh["replicate"]), scale, *rest)


def orders(size):
    return [o for o in ORDERS if size == 4 or not o.startswith("hybrid")]


class Three(nn.Module):
    """`y = a*x0 + b*x1 + c*x2`: the gradients of its leaves are set at will."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (self.a * x[:5]).sum() + self.b.sum() * x[5] + self.c * x[6]


def data(rank, bad_rank, bad_at, value):
    x = torch.arange(1.0, 8.0) * (rank + 1)
    if rank == bad_rank:
        x[bad_at] = value
    return x


def steps(size, route):
    """Steps with inf or NaN on one rank in one element, each followed by a clean one."""
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if size == 4 else None
    out = {}
    plan = [(r, at, v) for r in range(size) for at, v in ((0, math.inf), (4, math.nan), (5, -math.inf), (6, math.nan))]
    for order in orders(size):
        model = Three()
        tx = pipe(order, zf.clip_by_global_norm(2.0), zf.sgd(0.1, momentum=0.9), mesh=mesh)
        seen = []
        if route == "eager":
            opt = zf.attach(model, tx)
        else:
            state = zf.init(tx, dict(model.named_parameters()))
            step = zf.make_step(lambda p, x: (p["a"] * x[:5]).sum() + p["b"].sum() * x[5] + p["c"] * x[6], tx)
        for bad in [*plan, (None, 0, 0.0), (None, 0, 0.0)]:
            x = data(rank, *bad)
            if route == "eager":
                model(x).backward()
                opt.step()
                opt.zero_grad()
                m = opt.metrics
            else:
                state, m = step(state, x)
            seen.append(
                (bool(m["skipped"]), bool(m["updated"]), float(m["loss_scale"]), float(m.get("grad_norm", -1.0)))
            )
        if route == "eager":
            opt.detach()
            final = {n: p.detach().clone() for n, p in model.named_parameters()}
        else:
            final = dict(zf.full_params(tx, state))
        out[order] = seen, final
    return out


def by_hand(size):
    """Two clean steps of SGD with momentum on clipped mean gradients."""
    g = torch.arange(1.0, 8.0, dtype=torch.float64) * (size + 1) / 2
    norm = float(g.norm())
    d = g * min(1.0, 2.0 / (norm + 1e-6))
    return norm, 1.0 - 0.1 * d - 0.1 * 1.9 * d


@pytest.mark.parametrize(
    ("size", "route"),
    [
        (2, "eager"),
        (3, "pure"),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((2, "pure"), (3, "eager"), (4, "eager"), (4, "pure"))),
    ],
)
def test_one_bad_element_on_one_rank_skips_the_step_on_all(size, route):
    ranks = zf.launch(steps, size, size, route, timeout=limit())
    norm, final = by_hand(size)
    for order in orders(size):
        for result in ranks:
            seen, params = result[order]
            assert seen == ranks[0][order][0], order
            assert all(s[:2] == (True, False) for s in seen[:-2]), order
            assert [s[2] for s in seen[:-2]] == [max(1024.0 / 2 ** (i + 1), 1.0) for i in range(len(seen) - 2)], order
            for skipped, updated, _, found in seen[-2:]:
                assert (skipped, updated) == (False, True), order
                assert found == pytest.approx(norm, rel=1e-6), order
            flat = torch.cat([params[n].reshape(-1) for n in "abc"]).double()
            # fp32 parameters near one.
            torch.testing.assert_close(flat, final, rtol=0, atol=3e-7)


def norm_of_little():
    tx = zf.chain(zf.shard(), zf.clip_by_global_norm(1.0), zf.sgd(1.0))
    state = zf.init(tx, {"w": torch.tensor([2.0], dtype=torch.float64)})
    state, metrics = zf.make_step(lambda p: (p["w"] * 3).sum(), tx)(state)
    return metrics["grad_norm"], zf.full_params(tx, state)["w"]


def test_a_rank_without_elements_adds_its_norm_in_the_dtype_of_the_others():
    """The second rank has nothing of a leaf of one element, and sent 4 bytes where the first sent 8."""
    for norm, w in zf.launch(norm_of_little, 2, timeout=limit()):
        assert norm == 3.0 and norm.dtype == torch.float64
        torch.testing.assert_close(w, torch.tensor([2 - 3 / (3 + 1e-6)], dtype=torch.float64), rtol=0, atol=1e-15)
