"""Leaves are cut by rows of their first dimension, and what needs rows is handed them where they lie."""

import pytest
import torch
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofn as zf

F64 = torch.float64
# 5 rows of 4, 5, 1 row of 6, 3 rows of 2 x 2, one number.
SHAPES = {"w": (5, 4), "b": (5,), "wide": (1, 6), "filters": (3, 2, 2), "gain": ()}


@zf.leafwise(init=torch.zeros_like, needs="row")
def rows_alone(grad, param, state):
    """Momentum, each row over its own length, and less its own mean."""
    state = 0.9 * state + grad
    behind = tuple(range(1, grad.ndim))
    if not behind:
        return state, state
    return (state - state.mean(behind, keepdim=True)) / (1e-3 + param.square().sum(behind, keepdim=True).sqrt()), state


def parameters():
    generator = torch.Generator().manual_seed(3)
    return {k: torch.randn(shape, generator=generator, dtype=F64) for k, shape in SHAPES.items()}


def loss(params, x):
    return sum((p * p * x[k]).sum() + (p * x[k]).sum() for k, p in params.items())


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {k: torch.randn(shape, generator=generator, dtype=F64) for k, shape in SHAPES.items()}


def middle():
    return zf.centralize(), rows_alone(), zf.sgd(0.05)


def trained(front, batches):
    tx = zf.chain(*front, *middle())
    state, step = zf.init(tx, parameters()), zf.make_step(loss, tx)
    for x in batches:
        state, _ = step(state, x)
    return zf.full_params(tx, state), state


def on_ranks():
    import torch.distributed as dist

    from zerofn.core.state_entries import entries  # inside: every tensor of a state with the key of a checkpoint
    from zerofn.ranks.group import Traffic  # inside: counts what is sent

    sent, count = [], Traffic.sent
    Traffic.sent = lambda self, op, n: sent.append(n if op == "all_to_all" else 0) or count(self, op, n)
    rank, found = dist.get_rank(), {}
    for stage, front in {"shard": [zf.shard()], "reduce_scatter": [zf.reduce_scatter()]}.items():
        sent.clear()
        full, state = trained(front, [batch(rank, i) for i in range(10)])
        found[stage] = full, sum(sent), {e.path: e.value.numel() for e in entries(state) if e.owner == "rows_alone"}
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "node"))
        front = [zf.shard(mesh["node"]), zf.reduce_scatter(mesh["nodes"])]
        found["nodes"] = *trained(front, [batch(rank, i) for i in range(10)])[:1], None, None
    return found


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_rows_are_those_of_one_process(size):
    """And nothing travels to an owner, also of `wide`, which has one row."""
    whole, _ = trained([], [{k: sum(batch(r, i)[k] for r in range(size)) / size for k in SHAPES} for i in range(10)])
    start = parameters()
    found = zf.launch(on_ranks, size, timeout=limit(60))
    for by_stage in found:
        for full, _, _ in by_stage.values():
            for k, x in whole.items():
                assert (x - start[k]).abs().max() > 1e-2
                # Float64; gradients of ranks are added up in another order.
                torch.testing.assert_close(full[k], x, rtol=0, atol=1e-12)
    for stage in ("shard", "reduce_scatter"):
        here = [by_stage[stage] for by_stage in found]
        assert sum(states["w"] for _, _, states in here) == 20 and sum(states["wide"] for _, _, states in here) == 6
        assert sum(n for _, n, _ in here) == 0


def state_dicts(directory):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Shard

    def attached():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).to(F64)
        return model, zf.attach(model, zf.chain(zf.shard(), zf.adamw(0.1)))

    def go_on(model, opt):
        for i in range(2):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()), dtype=F64)
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        with opt.gathered():
            return [p.detach().clone() for p in model.parameters()]

    model, opt = attached()
    go_on(model, opt)
    given = opt.state_dict()
    there = {
        k: (tuple(x.shape), type(x) is DTensor and list(x.placements) == [Shard(0)], tuple(x.to_local().shape))
        for k, x in given["zerofn"]["params"].items()
    }
    dcp.save(given, checkpoint_id=directory)
    want = go_on(model, opt)
    other, again = attached()
    read = again.state_dict()
    dcp.load(read, checkpoint_id=directory)
    again.load_state_dict(read)
    return there, want, go_on(other, again)


def test_state_dicts_are_of_the_shape_of_leaves(tmp_path):
    found = zf.launch(state_dicts, 2, str(tmp_path), timeout=limit(90))
    rows = {"0.weight": ((3, 3), (2, 3)), "0.bias": ((3,), (2,)), "1.bias": ((1,), (0,))}
    for rank, (there, want, got) in enumerate(found):
        for name, parts in rows.items():
            shape = {"0.weight": (5, 3), "0.bias": (5,), "1.bias": (1,)}[name]
            assert there[name] == (shape, True, parts[rank])
        assert there["1.weight"] == ((1, 5), True, ((1, 5), (0, 5))[rank])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
