"""Meshes, several models, weights, groups, averages, offload, full parameters and torch.func on ranks."""

import copy
import functools

import pytest
import rank_programs as P
import torch
from one_launch import one_launch
from stages import STAGES, around
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zerofn as zf

SGD = {"lr": 0.3, "momentum": 0.8}


def near(got, want, bound=1e-11):
    worst, where = P.differences(got, want)
    assert worst <= bound, (worst, where)


def sgd(ps):
    return torch.optim.SGD(ps, **SGD)


def every_stage():
    return {stage: around(stage, window=zf.accumulate(1)) for stage in STAGES}


# ------------------------------------------------------------------------------------------------ meshes


def hybrid():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    s, r = mesh["shard"], mesh["replicate"]
    clip = zf.clip_by_global_norm(0.5)
    orders = {
        "shard, all_reduce": lambda: (zf.shard(s), zf.all_reduce(r)),
        "shard, accumulate, all_reduce": lambda: (zf.shard(s), zf.accumulate(2), zf.all_reduce(r)),
        "shard, all_reduce, accumulate": lambda: (zf.shard(s), zf.all_reduce(r), zf.accumulate(2)),
        "reduce_scatter, all_reduce": lambda: (zf.reduce_scatter(s), zf.all_reduce(r)),
        "accumulate, reduce_scatter, all_reduce": lambda: (zf.accumulate(2), zf.reduce_scatter(s), zf.all_reduce(r)),
    }
    out = {}
    for name, order in orders.items():
        tx = zf.chain(*order(), clip, zf.sgd(**SGD))
        out[name, "eager"] = P.eager(tx, P.simple("diff"), 4, P.make())
        out[name, "uneven"] = P.eager(tx, P.uneven_rounds, 4, P.make())
        out[name, "pure"] = P.pure(tx, "diff", 4, P.make())
    return out


@pytest.mark.slow
def test_hybrid_sharding_on_a_2x2_mesh():
    ranks = zf.launch(hybrid, 4, timeout=limit())
    for results in ranks:
        for (name, route), got in results.items():
            program = P.uneven_rounds if route == "uneven" else P.simple("diff")
            every = 2 if "accumulate" in name else 1
            near(got, wanted_hybrid(program, every))


@functools.cache
def wanted_hybrid(program, every):
    return P.reference(4, sgd, program, 4, P.make(), every, clip=0.5)


# ---------------------------------------------------------------------------------- models and wrappers


class Eye(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))

    def forward(self, x):
        return self.layers(x)


def two_models():
    rank, _ = P.rank_and_size()
    out = {}
    stages = every_stage()
    for a, b in (("ZeRO-3", "ZeRO-2"), ("ZeRO-2", "data parallel"), ("ZeRO-3", "ZeRO-3")):
        torch.manual_seed(0)
        eye, net = Eye().double(), P.make()
        before = {n: p.detach().clone() for n, p in eye.named_parameters()}
        first = zf.attach(eye, zf.chain(*stages[a], zf.scale_loss(64.0), zf.sgd(**SGD)))
        second = zf.attach(net, zf.chain(*stages[b], zf.scale_loss(8.0), zf.sgd(**SGD)))
        for step in range(3):
            x, y = P.batch(rank, step)
            ((net(eye(x), P.branch_of("diff", rank, step)) - y) ** 2).mean().backward()
            for opt in (first, second):
                opt.step()
                opt.zero_grad()
        first.detach()
        out[a, b] = {"before": before, "after": {n: p.detach() for n, p in eye.named_parameters()}}
    return out


def test_two_models_of_different_stages_in_one_graph():
    torch.manual_seed(0)
    eye, net = Eye().double(), P.make()
    before = {n: p.detach().clone() for n, p in eye.named_parameters()}
    opts = [sgd(m.parameters()) for m in (eye, net)]
    for step in range(3):
        losses = []
        for rank in range(2):
            x, y = P.batch(rank, step)
            losses.append(((net(eye(x), P.branch_of("diff", rank, step)) - y) ** 2).mean())
        (sum(losses) / 2).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    want = {"before": before, "after": {n: p.detach() for n, p in eye.named_parameters()}}
    for results in zf.launch(two_models, 2, timeout=limit()):
        for got in results.values():
            near(got, want)


def beside_ddp():
    rank, _ = P.rank_and_size()
    plain = P.make(torch.float64)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    opt = sgd([p for p in plain.parameters() if p.requires_grad])
    before = {n: p.detach().clone() for n, p in plain.named_parameters()}
    for step in range(3):
        x, y = P.batch(rank, step)
        ((ddp(x, P.branch_of("diff", rank, step)) - y) ** 2).mean().backward()
        opt.step()
        opt.zero_grad()
    want = {"before": before, "after": {n: p.detach().clone() for n, p in plain.named_parameters()}}
    for first in every_stage().values():
        got = P.eager(zf.chain(*first, zf.sgd(**SGD)), P.simple("diff"), 3, P.make())
        # DDP gives leaves that nobody used a gradient of zeros; without weight decay that changes nothing.
        near(got, want)


def test_distributed_data_parallel_agrees():
    zf.launch(beside_ddp, 2, timeout=limit())


def wrapped(every):
    """Transforms that hold per-leaf state or hand leaves out, on shards of any shape."""
    group = lambda path: "slow" if "norm" in path else "fast"  # noqa: E731
    makers = {
        "partition": lambda: (zf.partition({"slow": zf.sgd(0.05, momentum=0.5), "fast": zf.adamw(0.01)}, group),),
        "masked": lambda: (zf.masked(zf.clip_by_value(1e-3), lambda p: "bias" in p), zf.sgd(**SGD)),
        "offload": lambda: (zf.offload(zf.adamw(0.01)),),
        "schedule": lambda: (zf.sgd(zf.schedules.cosine(0.3, 10)),),
    }
    out = {}
    for i, (kind, make) in enumerate(makers.items()):
        for j, (stage, first) in enumerate(every_stage().items()):
            # All stages are compared with data parallelism.
            if j not in (0, 1 + i % 3) and not every:
                continue
            result = P.eager(zf.chain(*first, *make()), P.simple("a"), 3, P.make())
            out[kind, stage] = result
            if j != (0 if i % 2 else 1 + i % 3) and not every:
                continue
            pure = P.pure(zf.chain(*first, *make()), "a", 3, P.make())
            # Buckets differ between the routes, and so does the order in which a ring adds up three ranks.
            near(pure, {**result, "after": {n: result["after"][n] for n in pure["after"]}}, 1e-8)
    return out


@pytest.mark.parametrize(
    ("size", "every"), [(2, False), *[pytest.param(n, True, marks=pytest.mark.slow) for n in (2, 3)]]
)
def test_wrappers_agree_over_stages(size, every):
    ranks = zf.launch(wrapped, size, every, timeout=limit())
    for results in ranks:
        for (kind, stage), got in results.items():
            near(got, results[kind, "data parallel"], 1e-8 if kind in ("partition", "offload") else 1e-11)
            near(got, ranks[0][kind, stage], 0.0)


# ------------------------------------------------------------------------------------------------- ema


def averaged():
    rank, _ = P.rank_and_size()
    out = {}
    for stage, first in every_stage().items():
        tx = zf.chain(*first, zf.sgd(0.5), zf.ema(0.5))
        state = zf.init(tx, {"w": torch.zeros(5, dtype=torch.float64), "b": torch.zeros((), dtype=torch.float64)})
        step = zf.make_step(lambda p, t: ((p["w"] - t) ** 2).sum() + p["b"] * t, tx)
        for _ in range(3):
            state, _ = step(state, torch.tensor(rank + 1.0, dtype=torch.float64))
        out[stage] = zf.full_params(tx, state, "ema")
    return out


def test_averages_are_gathered():
    got = zf.launch(averaged, 3, timeout=limit())
    # The target's mean is 2 and a step goes all the way there; b falls by 1 each step.
    first = got[0]["data parallel"]
    assert torch.all(first["w"] != 0)
    for results in got:
        for full in results.values():
            torch.testing.assert_close(full, first)
            assert full["w"].shape == (5,)


# --------------------------------------------------------------------------------------------- gathered


def look_inside():
    rank, size = P.rank_and_size()
    want = dict(P.make().named_parameters())
    for stage, first in every_stage().items():
        model = P.make()
        opt = zf.attach(model, zf.chain(*first, zf.sgd(0.1)))
        x, y = P.batch(rank, 0)
        plain = P.make()(x)
        with opt.gathered() as full:
            assert full is model
            state = {n: t.clone() for n, t in full.state_dict().items()}
            assert torch.equal(full(x), plain)
        assert all(torch.equal(state[n], t) for n, t in P.make().state_dict().items()), stage
        if stage == "ZeRO-3":
            pieces = {n: p.to_local() for n, p in model.named_parameters()}
            assert all(
                x.ndim in (1, want[n].ndim) and x.numel() <= -(-want[n].numel() // size) for n, x in pieces.items()
            )
            assert all(p.shape == want[n].shape for n, p in model.named_parameters())
        with opt.gathered(), torch.no_grad():
            model.inp.weight.mul_(2.0)
            model.blocks[1].gain.fill_(3.0)
        model.inp.bias.grad = None
        changed = P.make()
        with torch.no_grad():
            changed.inp.weight.mul_(2.0)
            changed.blocks[1].gain.fill_(3.0)
        torch.testing.assert_close(model(x), changed(x), rtol=1e-13, atol=1e-13)
        ((model(x) - y) ** 2).mean().backward()
        opt.step()
        opt.zero_grad()
        after = opt.detach()
        assert type(after.inp._parameters) is dict and not after._forward_hooks
        moved = (after.inp.weight - changed.inp.weight).abs().max()
        assert after.inp.weight.shape == (6, 5) and 0 < moved < 0.5, stage
        again = zf.attach(after, zf.chain(*every_stage()[stage], zf.sgd(0.1)))
        again.detach()
    return True


def test_full_parameters_can_be_read_and_written():
    assert all(zf.launch(look_inside, 2, timeout=limit()))


# ----------------------------------------------------------------------------------------------- weights


def tokens(rank, step):
    return [3, 0, 5, 1, 4, 2][(2 * rank + step) % 6]


def weighted(stage, route):
    """Means over unequal numbers of rows; a rank may have none."""
    rank, _ = P.rank_and_size()
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    tx = zf.chain(*around(stage, zf.accumulate(2, weighted=True)), zf.sgd(0.5))
    if route == "eager":
        opt = zf.attach(model, tx)
    else:
        state = zf.init(tx, dict(model.named_parameters()))
        step_fn = zf.make_step(lambda p, x: (x @ p["weight"].T + p["bias"]).square().mean(), tx)
    for step in range(4):
        n = tokens(rank, step)
        x = P.batch(rank, step, rows=8)[0][:n]
        if route == "eager":
            model(x).square().mean().backward()  # NaN without rows
            opt.step(weight=n)
            opt.zero_grad()
        else:
            state, _ = step_fn(state, x, weight=n)
    if route == "eager":
        opt.detach()
        return {n: p.detach().clone() for n, p in model.named_parameters()}
    return dict(zf.full_params(tx, state))


def weighted_reference(size):
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    opt = torch.optim.SGD(model.parameters(), 0.5)
    for window in range(2):
        rows = [P.batch(r, s, rows=8)[0][: tokens(r, s)] for s in (2 * window, 2 * window + 1) for r in range(size)]
        model(torch.cat(rows)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def test_weights_count_over_ranks_too():
    want = weighted_reference(3)
    rows = [(s, r) for s in ("ZeRO-1", "data parallel, late") for r in ("eager", "pure")]
    rows += [(s, "pure") for s in ("ZeRO-2", "ZeRO-3", "data parallel")]
    for row, ranks in one_launch(3, weighted, rows).items():
        for got in ranks:
            for n, x in want.items():
                torch.testing.assert_close(got[n], x, rtol=1e-12, atol=1e-12, msg=lambda m, at=row: f"{at}: {m}")


@pytest.mark.parametrize("stage", ["ZeRO-2", "ZeRO-3", "data parallel"])
def test_unequal_weights_after_the_reduction_are_refused(stage):
    with pytest.raises(zf.RankError, match=r"accumulate.*before.*reduc"):
        zf.launch(weighted, 3, stage, "eager", timeout=limit())


# -------------------------------------------------------------------------------------------- functional


def through_bind():
    """grad, second derivatives and vmap of a bound function, against the mean over ranks in one process."""
    from torch.func import grad, jvp

    rank, size = P.rank_and_size()
    g = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(s, generator=g, dtype=torch.float64)  # noqa: E731
    params = {"w": draw(3, 5), "b": draw(3), "s": draw(), "e": draw(0)}
    xs, v = draw(size, 4, 5), {k: draw(*p.shape) for k, p in params.items()}

    def loss(p, x):
        return (torch.tanh(x @ p["w"].T + p["b"]) * p["s"]).square().sum() + p["e"].sum()

    def mean(p):
        return sum(loss(p, x) for x in xs) / size

    want_grad = grad(mean)(params)
    want_hvp = jvp(grad(mean), (params,), (v,))[1]
    assert all(t.abs().max() > 0 for k, t in want_hvp.items() if k != "e")

    def penalty(p):
        return sum((t**2).sum() for t in grad(mean)(p).values())

    want_penalty = grad(penalty)(params)
    for stage, first in every_stage().items():
        if stage != "ZeRO-1":  # whose bound function sees what is resident, before its late reduction
            tx = zf.chain(*first, zf.scale_loss(32.0), zf.sgd(0.1))
            through_one(stage, tx, loss, params, xs[rank], v, (want_grad, want_hvp, want_penalty))
    return True


def through_one(stage, tx, loss, params, local, v, wants):
    from torch.func import grad, jvp, vmap

    want_grad, want_hvp, want_penalty = wants
    state = zf.init(tx, params)
    fn = zf.bind(loss, tx, state)
    stored = state.params
    resolved = zf.core.pipeline.pipeline(tx, state.layout, "test")
    cut = {leaf.path: resolved.road.store(v[leaf.path], leaf) for leaf in state.layout.leaves}
    cut = {path: cut[path] for path in stored}

    def check(got, want):
        full = zf.full_params(tx, zf.core.state.State(dict(got), *_rest(state)))
        for path, t in want.items():
            torch.testing.assert_close(full[path], t, rtol=1e-11, atol=1e-11, msg=lambda m: f"{stage} {m}")

    check(grad(fn)(stored, local), want_grad)
    check(jvp(lambda p: grad(fn)(p, local), (stored,), (cut,))[1], want_hvp)
    if stage != "data parallel":
        # Full gradients are the same on all ranks, so a sum over them would count them once for each rank.
        check(grad(lambda p: sum((t**2).sum() for t in grad(fn)(p, local).values()))(stored), want_penalty)
    each = vmap(grad(fn), in_dims=(None, 0))(stored, local.unsqueeze(1))
    check({path: t.sum(0) for path, t in each.items()}, want_grad)


def _rest(state):
    return state.transforms, state.step, state.micro_step, state.layout


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_torch_func_through_bind(size):
    assert all(zf.launch(through_bind, size, timeout=limit()))


# ------------------------------------------------------------------------------- second order, eager


def parameter_gradient_penalty():
    """The norm of the gradient as part of the loss: under shard each rank adds up its own part of it."""
    rank, size = P.rank_and_size()
    torch.manual_seed(0)
    model = Eye().double()
    plain = copy.deepcopy(model)
    opt = zf.attach(model, zf.chain(zf.shard(), zf.scale_loss(16.0), zf.sgd(0.1)))
    x, y = P.batch(rank, 0)
    loss = ((model(x) - y) ** 2).mean()
    gs = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum((g**2).sum() for g in gs)).backward()
    losses = [((plain(P.batch(r, 0)[0]) - P.batch(r, 0)[1]) ** 2).mean() for r in range(size)]
    mean = sum(losses) / size
    full = torch.autograd.grad(mean, list(plain.parameters()), create_graph=True)
    (mean + sum((g**2).sum() for g in full)).backward()
    for p, q, leaf in zip(model.parameters(), plain.parameters(), opt._own.pipe.layout.leaves, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(
            p.grad.to_local().reshape(-1), opt._own.pipe.sharding.store(q.grad, leaf), rtol=1e-11, atol=1e-12
        )
        assert q.grad.abs().max() > 0
    return True


def test_second_order_in_parameters_under_shard():
    assert all(zf.launch(parameter_gradient_penalty, 3, timeout=limit()))
