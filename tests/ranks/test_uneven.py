"""Collectives of what differs between ranks: right for rows, refused on every rank for anything else."""

import pytest
import torch
from time_limits import limit
from torch.func import grad, jacrev, jvp, vmap

import zerofn as zf
from zerofn.collectives import (
    all_gather,
    all_gather_tree,
    all_reduce,
    all_reduce_tree,
    reduce_scatter,
    reduce_scatter_tree,
    replicate,
    replicate_tree,
    world_group,
)

# Rows of each of up to three ranks; some have none.
ROWS = [(3, 1, 0), (0, 2, 5), (2, 2, 1), (0, 1, 0)]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def data(rows, size):
    gen = torch.Generator().manual_seed(len(rows) * sum(rows))
    draw = lambda *shape: torch.randn(shape, generator=gen, dtype=torch.float64)  # noqa: E731
    n = sum(rows[:size])
    return [draw(r, 2) for r in rows[:size]], [draw(r, 2) for r in rows[:size]], [draw(n, 2) for _ in range(size)]


def gathers(group):
    """Values and derivatives to second order, against one process that plays all ranks."""
    me, size = group.rank, group.size
    for rows in ROWS:
        xs, vs, cs = data(rows, size)

        def loss_of(y, c):
            return (torch.sin(y) * y * c).sum()

        def total(xs, cs=cs):
            return sum(loss_of(torch.cat(xs), c) for c in cs)

        def local(x, c=cs[me]):
            return loss_of(all_gather(x, group), c)

        close(all_gather(xs[me], group), torch.cat(xs))
        close(grad(local)(xs[me]), grad(total)(xs)[me])
        want = jvp(lambda *xs: grad(total)(list(xs)), tuple(xs), tuple(vs))[1][me]
        close(jvp(grad(local), (xs[me],), (vs[me],))[1], want)
        close(grad(lambda x, v=vs[me]: (grad(local)(x) * v).sum())(xs[me]), want)
        leaf = xs[me].clone().requires_grad_()
        local(leaf).backward()
        close(leaf.grad, grad(total)(xs)[me])
        samples = torch.stack([cs[me], 2 * cs[me]])
        each = [grad(total)(xs, [k * c for c in cs])[me] for k in (1, 2)]
        close(vmap(grad(local), (None, 0))(xs[me], samples), torch.stack(each))
        narrow = all_gather(xs[me].float(), group, dtype=torch.bfloat16, reduce_dtype=torch.float32)
        close(narrow, torch.cat(xs).float().bfloat16())


def trees(group):
    me, size = group.rank, group.size
    parts = {name: data(rows, size)[0] for name, rows in zip("abcd", ROWS, strict=True)}
    parts["c"] = [x.float() for x in parts["c"]]
    mine = {name: xs[me] for name, xs in parts.items()}
    close(all_gather_tree(mine, group), {name: torch.cat(xs) for name, xs in parts.items()})

    def loss(out):
        return sum((torch.sin(t) * t * (me + i)).sum().double() for i, t in enumerate(out.values()))

    by_leaf = grad(lambda t: loss({k: all_gather(x, group) for k, x in t.items()}))(mine)
    close(grad(lambda t: loss(all_gather_tree(t, group)))(mine), by_leaf)


def states(group):
    """What a sharded state holds, as `zf.shard` has cut it."""
    params = {"w": torch.arange(15.0).reshape(5, 3), "b": torch.arange(2.0), "s": torch.tensor(7.0)}
    state = zf.init(zf.chain(zf.shard(), zf.sgd(0.1)), params)
    assert len({state.params["w"].numel()} | {15 - state.params["w"].numel()}) > 1 or group.size == 3
    close(all_gather_tree(state.params, group), {k: v.reshape(-1) for k, v in params.items()})
    for k, v in params.items():
        close(all_gather(state.params[k], group), v.reshape(-1))


def refused(group):
    """By name of what differs, the message on this rank."""
    me = group.rank
    first = me == 0
    x = torch.ones(2 * group.size, 3)
    programs = {
        "columns": lambda: all_gather(torch.ones(2, 3 + me), group),
        "dimensions": lambda: all_gather(torch.ones(2, 3) if first else torch.ones(2), group),
        "no dimension": lambda: all_gather(torch.ones(2) if first else torch.ones(()), group),
        "dtype": lambda: all_gather(x if first else x.double(), group),
        "dtype of the result": lambda: all_gather(x, group, dtype=torch.bfloat16 if first else None),
        "rows to scatter": lambda: reduce_scatter(torch.ones((2 + me) * group.size), group),
        "rows that do not divide": lambda: reduce_scatter(torch.ones(2 * group.size + (not first)), group),
        "dtype to scatter": lambda: reduce_scatter(x if first else x.double(), group),
        "length to sum": lambda: all_reduce(torch.ones(3 + me), group),
        "shape to sum": lambda: all_reduce(torch.ones(2, 3) if first else torch.ones(3, 2), group),
        "another collective": lambda: all_gather(x, group) if first else all_reduce(x, group),
        "a gradient": lambda: grad(lambda x: replicate(x, group).sum())(torch.ones(3 + me)),
        "a batch": lambda: vmap(lambda x: all_gather(x, group))(torch.ones(2 + me, 3)),
        "outputs of a Jacobian": lambda: jacrev(lambda x: all_gather(x, group)[: 2 + me].sin())(torch.ones(3)),
        "leaves": lambda: all_gather_tree({"a": x, "b": x} if first else {"a": x}, group),
        "names": lambda: all_reduce_tree({"a": x} if first else {"c": x}, group),
        "dtypes of leaves": lambda: all_gather_tree({"a": x, "b": x if first else x.double()}, group),
        "shapes of leaves": lambda: all_reduce_tree({"a": x, "b": x.reshape(3, -1) if first else x}, group),
        "leaves to scatter": lambda: reduce_scatter_tree({"a": x if first else x[:-1]}, group),
        "gradients of leaves": lambda: grad(lambda x: replicate_tree({"a": x}, group)["a"].sum())(torch.ones(3 + me)),
        "gradients of other leaves": lambda: grad(lambda t: replicate_tree(t, group)["a" if first else "b"].sum())(
            {"a": torch.ones(3), "b": torch.ones(3)}
        ),
    }
    out = {}
    for name, program in programs.items():
        try:
            program()
            out[name] = "no error"
        except ValueError as error:
            out[name] = str(error)
        # The ranks understand each other afterwards.
        close(all_gather(torch.full((1 + me,), float(me)), group)[-1], torch.tensor(group.size - 1.0))
    return out


def everything():
    group = world_group("uneven")
    for check in (gathers, trees, states):
        check(group)
    return refused(group)


@pytest.mark.parametrize("nproc", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_uneven_parts_are_gathered_and_all_else_is_refused_on_every_rank(nproc):
    ranks = zf.launch(everything, nproc, timeout=limit(60))
    for rank, out in enumerate(ranks):
        for name, message in out.items():
            assert "rank 0: " in message and "rank 1" in message and "on every rank" in message, (rank, name, message)
    assert "all_gather of shape (2, 4), torch.float32" in ranks[0]["columns"]
    assert "c: " in ranks[0]["names"] and "a: " in ranks[1]["names"]


def test_one_message_of_two_numbers_goes_before():
    def calls():
        group = world_group("counted")
        all_gather(torch.ones(2, 3), group)
        return group.traffic.calls_by_op, group.traffic.bytes

    assert zf.launch(calls, 2, timeout=limit()) == [({"match": 1, "all_gather": 1}, 16 + 24)] * 2
