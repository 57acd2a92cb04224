"""Nodes of ranks: parameters gathered within a node, gradients reduced between nodes once in a window."""

import functools
from pathlib import Path

import pytest
import rank_programs as P
import torch
from time_limits import limit
from torch.distributed.device_mesh import init_device_mesh

import zerofn as zf
from zerofn.ranks.process_groups import registry  # inside: which groups are open, and what a process tells the others

SGD = {"lr": 0.3, "momentum": 0.8}
EVERY = 2


def axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "node"))
    return mesh["node"], mesh["nodes"]


def orders():
    node, nodes = axes()
    return {
        "states over all ranks": (zf.shard(node), zf.accumulate(EVERY), zf.reduce_scatter(nodes)),
        "states over a node": (zf.shard(node), zf.accumulate(EVERY), zf.all_reduce(nodes)),
        "sums over all ranks": (zf.shard(node), zf.reduce_scatter(nodes), zf.accumulate(EVERY)),
        "no window": (zf.shard(node), zf.reduce_scatter(nodes)),
    }


def sgd(ps):
    return torch.optim.SGD(ps, **SGD)


def near(got, want, bound=1e-11):
    """In float64; sums over ranks are in another order."""
    worst, where = P.differences(got, want)
    assert worst <= bound, (worst, where)


def by_every_route():
    """A node's states alone: `test_hybrid_sharding_on_a_2x2_mesh`."""
    out = {}
    for name, order in orders().items():
        tx = zf.chain(*order, zf.clip_by_global_norm(0.5), zf.sgd(**SGD))
        if name != "states over a node":
            out[name, "eager"] = P.eager(tx, P.simple("diff"), 4, P.make())
            out[name, "pure"] = P.pure(tx, "diff", 4, P.make())
    tx = zf.chain(*orders()["sums over all ranks"], zf.clip_by_global_norm(0.5), zf.sgd(**SGD))
    out["sums over all ranks", "uneven"] = P.eager(tx, P.uneven_rounds, 4, P.make())
    return out


@functools.cache
def wanted(program, every):
    return P.reference(4, sgd, program, 4, P.make(), every, clip=0.5)


@pytest.mark.slow
def test_every_order_and_route_is_one_process_with_one_norm():
    for results in zf.launch(by_every_route, 4, timeout=limit()):
        for (name, route), got in results.items():
            program = P.uneven_rounds if route == "uneven" else P.simple("diff")
            want = wanted(program, 1 if name == "no window" else EVERY)
            near(got, want)
            # The norm over both axes, before clipping, at the end of each window.
            norms = got["norms"] if name == "no window" else got["norms"][EVERY - 1 :: EVERY]
            assert norms == pytest.approx(want["norms"], rel=1e-11), (name, route)


# ------------------------------------------------------------------------------------ bytes between nodes

SIZES = {"w": (7, 6), "b": (5,)}


def params(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in SIZES.items()}


def loss(p, x):
    return torch.tanh(x @ p["w"]).square().mean() + (p["b"] * x.mean()).sum()


class Small(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        for name, x in params(seed).items():
            self.register_parameter(name, torch.nn.Parameter(x))

    def forward(self, x):
        return loss({"w": self.w, "b": self.b}, x)


def rows(rank, i):
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * rank + i), dtype=torch.float64)


def between(nodes):
    """What this rank has sent to other nodes, on whichever channel: bytes of gradients and of parameters."""
    groups = [g for g in registry.groups.values() if g is not None and g.ranks == nodes]
    sums = [sum(g.traffic.by_op.get(op, 0) for g in groups) for op in ("reduce_scatter", "all_gather", "all_reduce")]
    for group in groups:
        group.traffic.reset()
    return sums


def sent():
    rank, _ = P.rank_and_size()
    found = {}
    for name, order in orders().items():
        tx = zf.chain(*order, zf.sgd(**SGD))
        model = Small()
        opt = zf.attach(model, tx)
        state, step = zf.init(tx, params()), zf.make_step(loss, tx)
        for route in ("eager", "pure"):
            between((rank % 2, rank % 2 + 2))
            for i in range(2 * EVERY):
                if route == "eager":
                    model(rows(rank, i)).backward()
                    opt.step()
                    opt.zero_grad()
                else:
                    state, _ = step(state, rows(rank, i))
            found[name, route] = between((rank % 2, rank % 2 + 2))
    return found


def half_of(x, half):
    """By rows; of one row by elements."""
    parts = (x if x.ndim and len(x) > 1 else x.reshape(-1)).chunk(2)
    return parts[half] if half < len(parts) else x.reshape(-1)[:0]


def by_formula(half):
    """Of a ring of 2: half of a buffer for a scatter and for a gather, all of it for an all-reduce; fp64.

    A rank has one half of each leaf of its node's, in buffers of equal parts for each node; a flag goes with each leaf.
    """
    eight, leaves, windows = 8, len(SIZES), 2
    of_node = [half_of(torch.empty(shape), half) for shape in SIZES.values()]
    cut = sum(half_of(x, 0).numel() for x in of_node)
    own = sum(x.numel() for x in of_node)
    scattered, gathered, reduced = eight * (cut + leaves), eight * cut, eight * (own + leaves)
    steps = windows * EVERY
    # The norm is one number an update, where nodes have different parts. An attached model keeps a node's parts of
    # parameters from update to update; a step as a function gathers them from its state.
    return {
        ("states over all ranks", "eager"): [windows * scattered, windows * gathered, windows * eight],
        ("states over all ranks", "pure"): [windows * scattered, steps * gathered, windows * eight],
        ("states over a node", "eager"): [0, 0, windows * reduced],
        ("states over a node", "pure"): [0, 0, windows * reduced],
        ("sums over all ranks", "eager"): [steps * scattered, windows * gathered, windows * eight],
        ("sums over all ranks", "pure"): [steps * scattered, steps * gathered, windows * eight],
        ("no window", "eager"): [steps * scattered, steps * gathered, steps * eight],
        ("no window", "pure"): [steps * scattered, steps * gathered, steps * eight],
    }


def test_nodes_talk_once_in_a_window():
    for rank, found in enumerate(zf.launch(sent, 4, timeout=limit())):
        assert found == by_formula(rank % 2)


def all_reduced_in_a_window(first):
    """Bytes that this rank has sent to other nodes by all-reduce in one window, and what `zf.plan` says of them."""
    rank, _ = P.rank_and_size()
    node, nodes = axes()
    tx = zf.chain(first(node), zf.accumulate(EVERY), zf.all_reduce(nodes), zf.sgd(**SGD))
    model = Small()
    opt = zf.attach(model, tx)
    between((rank % 2, rank % 2 + 2))
    for i in range(EVERY):
        model(rows(rank, i)).backward()
        opt.step()
        opt.zero_grad()
    return between((rank % 2, rank % 2 + 2))[2], zf.plan(tx, params(), 4).road.sent["all_reduce"]


def test_behind_a_reduce_scatter_nodes_talk_in_every_backward_and_the_plan_says_so():
    once = zf.launch(all_reduced_in_a_window, 4, zf.shard, timeout=limit())
    each = zf.launch(all_reduced_in_a_window, 4, zf.reduce_scatter, timeout=limit())
    for (sent_once, planned_once), (sent_each, planned_each) in zip(once, each, strict=True):
        assert sent_once > 0 and planned_once > 0
        assert (sent_each, planned_each) == (EVERY * sent_once, EVERY * planned_once)


# ------------------------------------------------------------------------------- checkpoints between all


SAVED = 2 * EVERY  # at the end of a window: in the middle nodes have sums of their own


def trained(tx, first, last, state=None):
    rank, size = P.rank_and_size()
    state, step = zf.init(tx, params()) if state is None else state, zf.make_step(loss, tx)
    for i in range(first, last):
        # Rows of four ranks on any number of them.
        mine = torch.cat([rows(r, i) for r in range(4) if r % size == rank])
        state, _ = step(state, mine)
    return state


def flat():
    return {"one": (zf.accumulate(EVERY),), "zero 3": (zf.shard(), zf.accumulate(EVERY))}


def saved_and_loaded(directory):
    """Each pipeline saves, and each reads what every other one has saved, in a whole state."""
    pipes = {**orders(), **flat()}
    del pipes["one"], pipes["no window"]
    for name, order in pipes.items():
        tx = zf.chain(*order, zf.adamw(1e-2))
        zf.save(Path(directory) / name, trained(tx, 0, SAVED))
        assert zf.plan(tx, params(), world_size=4, rank=P.rank_and_size()[0]) == zf.describe(zf.init(tx, params()))
    found = {}
    for name in pipes:
        for other, order in pipes.items():
            tx = zf.chain(*order, zf.adamw(1e-2))
            state = zf.load(Path(directory) / name, like=zf.init(tx, params(1)))
            found[name, other] = zf.full_params(tx, trained(tx, SAVED, 3 * EVERY, state))
    return found


@pytest.mark.slow
def test_checkpoints_between_hierarchies_flat_sharding_and_one_process(tmp_path):
    tx = zf.chain(*flat()["one"], zf.adamw(1e-2))
    want, before = trained(tx, 0, 3 * EVERY).params, params()
    change = max(float((want[k] - before[k]).abs().max()) for k in want)
    for results in zf.launch(saved_and_loaded, 4, str(tmp_path), timeout=limit()):
        for got in results.values():
            assert all(float((got[k] - want[k]).abs().max()) <= 1e-11 * change for k in want)
    for where in tmp_path.iterdir():
        state = trained(tx, SAVED, 3 * EVERY, zf.load(where, like=zf.init(tx, params(1))))
        assert all(float((state.params[k] - want[k]).abs().max()) <= 1e-11 * change for k in want), where


# ---------------------------------------------------------------------- what sees more than a piece of a leaf


@zf.leafwise
def over_its_norm(grad, param):
    return grad / grad.norm().clamp(min=1e-12)


def of_leaves():
    by_shape = {"matrix": zf.muon(0.1), "rest": zf.adamw(1e-2)}
    return over_its_norm(), zf.partition(by_shape, lambda path: "matrix" if path == "w" else "rest")


def whole_leaves():
    rank, _ = P.rank_and_size()
    node, nodes = axes()
    tx = zf.chain(zf.shard(node), zf.reduce_scatter(nodes), *of_leaves())
    model = Small()
    opt = zf.attach(model, tx)
    for i in range(3):
        model(rows(rank, i)).backward()
        opt.step()
        opt.zero_grad()
    state, step = zf.init(tx, params()), zf.make_step(loss, tx)
    for i in range(3):
        state, _ = step(state, rows(rank, i))
    point = torch.func.grad(zf.bind(loss, tx, state))(state.params, rows(rank, 9))
    with opt.gathered():
        after = {name: p.detach().clone() for name, p in model.named_parameters()}
    return after, zf.full_params(tx, state), zf.gather(tx, state, point), zf.global_norm(point, tx, state)


def test_what_needs_whole_leaves_is_run_at_owners():
    tx = zf.chain(*of_leaves())

    def joint(p, i):
        return sum(loss(p, rows(rank, i)) for rank in range(4)) / 4

    state, step = zf.init(tx, params()), zf.make_step(joint, tx)
    for i in range(3):
        state, _ = step(state, i)
    point = torch.func.grad(joint)(state.params, 9)
    for eager, pure, gradient, norm in zf.launch(whole_leaves, 4, timeout=limit()):
        for got, want in ((eager, state.params), (pure, state.params), (gradient, point)):
            # In float64, through five iterations of Newton and Schulz.
            assert all(torch.allclose(got[k], want[k], rtol=1e-10, atol=1e-12) for k in want)
        assert float(norm) == pytest.approx(float(zf.global_norm(point)), rel=1e-11)


# ------------------------------------------------------------------------- the eager route's other ways


def other_ways():
    rank, _ = P.rank_and_size()
    node, nodes = axes()
    found = {}
    for name, chain, options in (
        ("in backward", (zf.reduce_scatter(nodes), zf.adamw(1e-2)), {"in_backward": True}),
        ("masters", (zf.precision(param_dtype=torch.float32), zf.reduce_scatter(nodes), zf.adamw(1e-2)), {}),
        ("copies", (zf.reduce_scatter(nodes), zf.precision(param_dtype=torch.float32), zf.adamw(1e-2)), {}),
        ("scaled", (zf.scale_loss(64.0), zf.reduce_scatter(nodes), zf.adamw(1e-2)), {}),
    ):
        model = Small()
        opt = zf.attach(model, zf.chain(zf.shard(node), *chain), **options)
        for i in range(3):
            if i == 2:
                # Written by hand: what is stored is what was written.
                with opt.gathered():
                    model.w.data.mul_(0.5)
            model(rows(rank, i)).backward()
            opt.step()
            opt.zero_grad()
        opt.detach()
        found[name] = {key: p.detach().double() for key, p in model.named_parameters()}
    return found, by_weight(rank, node, nodes)


def weight(rank, i):
    return (3, 0, 5, 1, 4, 2, 6, 7)[2 * rank + i]


def by_weight(rank, node, nodes):
    """Whole parameters after one window of two micro-batches, which weigh differently on all ranks."""
    window, found = zf.accumulate(2, weighted=True), {}
    for name, chain in {
        "behind both": (zf.shard(node), zf.reduce_scatter(nodes), window),
        "behind both, states over a node": (zf.shard(node), zf.all_reduce(nodes), window),
        "between": (zf.shard(node), window, zf.reduce_scatter(nodes)),
    }.items():
        tx = zf.chain(*chain, zf.sgd(0.5))
        state, step = zf.init(tx, params()), zf.make_step(lambda p, i: loss(p, rows(rank, i)), tx)
        for i in range(2):
            state, _ = step(state, i, weight=weight(rank, i))
        found[name] = zf.full_params(tx, state)
    return found


def test_in_backward_masters_weights_and_writes_by_hand():
    model = Small()
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    for i in range(3):
        if i == 2:
            model.w.data.mul_(0.5)
        (sum(model(rows(rank, i)) for rank in range(4)) / 4).backward()
        opt.step()
        opt.zero_grad()
    want = {key: p.detach() for key, p in model.named_parameters()}
    change = max(float((want[k] - x).abs().max()) for k, x in params().items())
    cells = [(rank, i) for rank in range(4) for i in range(2)]
    sums = {
        key: sum(weight(*at) * torch.func.grad(loss)(params(), rows(*at))[key] for at in cells) / 28 for key in want
    }
    for results, weighted in zf.launch(other_ways, 4, timeout=limit()):
        for name, got in weighted.items():
            for key, x in params().items():
                torch.testing.assert_close(got[key] - x, -0.5 * sums[key], rtol=1e-11, atol=1e-12, msg=name)
        for name, got in results.items():
            # Compute in fp32, over three steps: 2**-24 for each of some ten operations.
            bound = 1e-5 if name in ("masters", "copies") else 1e-11
            assert all(float((got[k] - want[k]).abs().max()) <= bound * change for k in want), name


def state_dict_loaded():
    """Parameters after two more steps: of the run that saved its state dict, and of another model that loaded it."""
    node, nodes = axes()

    def attached(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(6, 8).double()
        return model, zf.attach(model, zf.chain(zf.shard(node), zf.reduce_scatter(nodes), zf.adamw(0.1)))

    def two_steps(model, opt):
        for step in range(2):
            draw = torch.Generator().manual_seed(10 * step + P.rank_and_size()[0])
            model(torch.randn(3, 6, generator=draw, dtype=torch.float64)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        with opt.gathered():
            return [p.detach().clone() for p in model.parameters()]

    first, second = attached(0), attached(1)
    before = two_steps(*first)
    second[1].load_state_dict(first[1].state_dict())
    return before, two_steps(*first), two_steps(*second)


def test_a_state_dict_of_leaves_that_are_cut_twice_goes_on():
    for before, want, got in zf.launch(state_dict_loaded, 4, timeout=limit()):
        for old, a, b in zip(before, want, got, strict=True):
            assert torch.equal(a, b) and not torch.equal(a, old)


# -------------------------------------------------------------------------------------------- bad input


def refused():
    def said(fn):
        try:
            fn()
        except (ValueError, KeyError, RuntimeError) as error:
            return f"{error}"
        return "nothing"

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "node"))
    node, nodes = axes()
    out = {}
    for name, first, second in (
        ("same axis", zf.shard(node), zf.reduce_scatter(node)),
        ("same axis, all_reduce", zf.shard(node), zf.all_reduce(node)),
        ("all ranks first", zf.shard(), zf.reduce_scatter(nodes)),
        ("two axes at once", zf.shard(mesh), zf.reduce_scatter(nodes)),
    ):
        out[name] = said(lambda first=first, second=second: zf.init(zf.chain(first, second, zf.sgd(0.1)), params()))
    out["no such axis"] = said(lambda: zf.shard(mesh["rows"]))
    tx = zf.chain(zf.shard(node), zf.reduce_scatter(nodes), zf.sgd(0.1))
    # On one node only: its other parts would be old.
    model = Small()
    opt = zf.attach(model, tx)
    model(rows(0, 0)).backward()
    if P.rank_and_size()[0] < 2:
        with torch.no_grad():
            model.w.mul_(2.0)
    out["one node writes"] = said(opt.step)
    return out


def test_bad_input():
    with pytest.raises(ValueError, match=r"(?s)both cut the parameters.*along two axes of a mesh"):
        zf.chain(zf.shard(), zf.reduce_scatter(), zf.sgd(0.1))
    for said in zf.launch(refused, 4, timeout=limit()):
        for name in ("same axis", "same axis, all_reduce", "all ranks first"):
            assert "both reduce over ranks" in said[name] and "mesh['nodes']" in said[name], said[name]
        assert "has 2 axes and a transform works along one" in said["two axes at once"]
        assert "rows" in said["no such axis"]
        assert "w" in said["one node writes"] and "written on some ranks only" in said["one node writes"], said


def flat_meshes():
    """Axes of size one: the others alone are at work."""
    size = P.rank_and_size()[1]
    found = {}
    for shape in ((size, 1), (1, size)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("nodes", "node"))
        tx = zf.chain(zf.shard(mesh["node"]), zf.accumulate(EVERY), zf.reduce_scatter(mesh["nodes"]), zf.sgd(**SGD))
        state = trained(tx, 0, 2 * EVERY)
        found[shape] = zf.full_params(tx, state)
    return found


def test_axes_of_size_one():
    tx = zf.chain(zf.accumulate(EVERY), zf.sgd(**SGD))
    want = trained(tx, 0, 2 * EVERY).params
    for results in zf.launch(flat_meshes, 2, timeout=limit()):
        assert len(results) == 2
        for got in results.values():
            assert all(torch.allclose(got[k], want[k], rtol=1e-11, atol=0) for k in want)
