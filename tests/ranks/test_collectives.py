"""Collectives on real gloo ranks, against one process in float64 that plays all ranks at once.

Everything of one world size runs in one launch. Every rank knows every rank's data (it is drawn from one
seed), so it computes the reference itself; the data differ by rank, so a missing or double factor shows.
"""

import os
import pickle
import subprocess
import sys
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from time_limits import limit
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import zerofn as zf
from zerofn.collectives import (
    all_gather,
    all_gather_tree,
    all_reduce,
    all_reduce_tree,
    mesh_group,
    reduce_scatter,
    reduce_scatter_tree,
    replicate,
    replicate_tree,
    world_group,
)
from zerofn.core.rank_agreement import agree_on_all  # inside: what ranks ask each other
from zerofn.ranks.backend import barrier, gather_objects  # inside: the collectives below, of one process and of several
from zerofn.ranks.collectives import (  # inside: collectives on tensors that are given, and works under way
    all_gather_into,
    all_reduce_,
    reduce_scatter_into,
)
from zerofn.ranks.group import Traffic  # inside: counts what is sent
from zerofn.ranks.process_groups import shutdown  # inside: which groups are open, and what a process tells the others

WORLDS = [1, 2, 3, 4]


def close(got, want, tol=1e-12):
    """Equal to rounding: exactly where a test chose numbers that are exact, to `tol` for the float64 ones."""
    leaves = torch.utils._pytree.tree_leaves(want)
    if all(t.dtype != torch.float64 for t in leaves):
        tol = 0
    elif any(t.dtype != torch.float64 for t in leaves):
        tol = 1e-6
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


class World:
    """All ranks' data, and the collectives as one process would compute them on lists of all shards."""

    n, batch = 3, 5

    def __init__(self, purpose="test"):
        self.group = world_group(purpose)
        self.rank, self.size = self.group.rank, self.group.size
        gen = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(shape, generator=gen, dtype=torch.float64)

        total = self.n * self.size
        self.shards = [draw(self.n) for _ in range(self.size)]
        self.fulls = [draw(total) for _ in range(self.size)]
        self.v_shards = [draw(self.n) for _ in range(self.size)]
        self.v_fulls = [draw(total) for _ in range(self.size)]
        self.mix_full = [draw(total, total) for _ in range(self.size)]
        self.mix_shard = [draw(self.n, self.n) for _ in range(self.size)]
        self.samples_full = [draw(self.batch, total) for _ in range(self.size)]
        self.samples_shard = [draw(self.batch, self.n) for _ in range(self.size)]

    def case(self, name):
        """The distributed map, the map on all ranks' inputs at once, inputs, tangents, mixers and samples."""
        if name == "all_gather":
            return (
                lambda x: all_gather(x, self.group),
                lambda xs: [torch.cat(tuple(xs))] * self.size,
                (self.shards, self.v_shards, self.mix_full, self.samples_full),
            )
        return (
            lambda x: reduce_scatter(x, self.group),
            lambda xs: list(sum(xs).chunk(self.size)),
            (self.fulls, self.v_fulls, self.mix_shard, self.samples_shard),
        )


def transforms(name):
    """All derivatives of a nonlinear function of the collective, to second order, by every road there is."""
    w = World()
    op, op_all, (xs, vs, mixes, samples) = w.case(name)
    r, x, v, mix, sample = w.rank, xs[w.rank], vs[w.rank], mixes[w.rank], samples[w.rank]

    def out_of(y, m):
        return torch.tanh(m @ y) * y

    def loss_of(y, m, c):
        return (out_of(y, m) * c).sum()

    def local(x, c):  # this rank's loss; the objective is the sum of all ranks' losses
        return loss_of(op(x), mix, c)

    def total(stack, cs):
        ys = op_all(list(stack.unbind(0)))
        return sum(loss_of(y, m, c) for y, m, c in zip(ys, mixes, cs, strict=True))

    stack, v_stack = torch.stack(xs), torch.stack(vs)
    cs = [s[0] for s in samples]
    c = cs[r]
    want_g = grad(total)(stack, cs)[r]
    want_hv = jvp(lambda s: grad(total)(s, cs), (stack,), (v_stack,))[1][r]

    def g(x):
        return grad(local)(x, c)

    close(g(x), want_g)
    close(vjp(lambda x: local(x, c), x)[1](torch.ones((), dtype=x.dtype))[0], want_g)
    module = torch.nn.Module()
    module.register_parameter("w", torch.nn.Parameter(x.clone()))
    module.forward = lambda c: local(module.w, c)
    close(grad(lambda p: functional_call(module, p, (c,)))({"w": x})["w"], want_g)

    leaf = x.clone().requires_grad_()
    local(leaf, c).backward()
    close(leaf.grad, want_g)
    (first,) = torch.autograd.grad(local(leaf, c), leaf, create_graph=True)
    close(first.detach(), want_g)
    close(torch.autograd.grad((first * v).sum(), leaf)[0], want_hv)

    close(grad(lambda x: (g(x) * v).sum())(x), want_hv)  # reverse over reverse
    close(jvp(g, (x,), (v,))[1], want_hv)  # forward over reverse
    close(grad(lambda x: jvp(lambda x: local(x, c), (x,), (v,))[1])(x), want_hv)  # reverse over forward
    third = jvp(lambda s: jvp(lambda s: grad(total)(s, cs), (s,), (v_stack,))[1], (stack,), (v_stack,))[1][r]
    close(jvp(lambda x: grad(lambda x: (g(x) * v).sum())(x), (x,), (v,))[1], third, 1e-11)

    outs = jvp(lambda s: torch.stack(op_all(list(s.unbind(0)))), (stack,), (v_stack,))
    close(jvp(op, (x,), (v,)), (outs[0][r], outs[1][r]))
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(op(forward_ad.make_dual(x, v)))
        close((primal, tangent), (outs[0][r], outs[1][r]))

    # Per-sample: sample b of every rank belongs together.
    each = torch.stack([grad(total)(stack, [s[b] for s in samples])[r] for b in range(w.batch)])
    close(vmap(grad(local), in_dims=(None, 0))(x, sample), each)
    close(vmap(grad(local), in_dims=(None, 1))(x, sample.T.contiguous()), each)
    close(grad(lambda x: vmap(local, in_dims=(None, 0))(x, sample).sum())(x), each.sum(0))
    many = torch.stack([x, 2 * x, x - 1], dim=1)
    close(vmap(op, in_dims=1, out_dims=1)(many), torch.stack([op(t) for t in many.unbind(1)], dim=1))
    nested = vmap(vmap(op, in_dims=0), in_dims=1)(many.unsqueeze(0).expand(2, -1, -1).movedim(1, 2))
    close(nested, torch.stack([op(t) for t in many.unbind(1)])[:, None].expand(-1, 2, -1))
    tangents = torch.stack([v, x])
    hv = vmap(lambda t: jvp(g, (x,), (t,))[1])(tangents)
    close(hv[0], want_hv)

    # Jacobians: output i of every rank gets the cotangent, input j of every rank the tangent.
    def h(x):
        return out_of(op(x), mix)

    def h_all(stack):
        return torch.stack([out_of(y, m) for y, m in zip(op_all(list(stack.unbind(0))), mixes, strict=True)])

    jac = jacrev(h_all)(stack)  # (rank, out, rank, in)
    close(jacrev(h)(x), jac[:, :, r, :].sum(0))
    close(jacfwd(h)(x), jac[r].sum(1))
    full_hessian = hessian(lambda s: total(s, cs))(stack)
    close(jacfwd(g)(x), full_hessian[r].sum(1))
    close(jacrev(g)(x), full_hessian[:, :, r, :].sum(0))


def tensor_parallel():
    """`replicate` and `all_reduce`, as a layer cut by columns and then by rows uses them."""
    w = World()
    d, hidden = 4, 2
    gen = torch.Generator().manual_seed(1)
    x, vx, c = (torch.randn(d, generator=gen, dtype=torch.float64) for _ in range(3))
    w1, w2, v1, v2 = (torch.randn(w.size, hidden, d, generator=gen, dtype=torch.float64) for _ in range(4))
    r = w.rank

    def local(x, a, b, c):
        y = all_reduce(b.T @ torch.tanh(a @ replicate(x, w.group)), w.group)
        return (torch.sin(y) * y * c).sum()  # the same number on every rank

    def whole(x, a, b, c):
        y = b.reshape(-1, d).T @ torch.tanh(a.reshape(-1, d) @ x)
        return (torch.sin(y) * y * c).sum()

    mine, theirs = (x, w1[r], w2[r], c), (x, w1, w2, c)
    args = (0, 1, 2)
    close(local(*mine), whole(*theirs))

    def pick(gx, ga, gb):
        return gx, ga[r], gb[r]

    want = pick(*grad(whole, args)(*theirs))
    close(grad(local, args)(*mine), want)
    leaves = [t.clone().requires_grad_() for t in mine[:3]]
    local(*leaves, c).backward()
    close(tuple(t.grad for t in leaves), want)

    def hvp_whole(x, a, b):
        return jvp(lambda *p: grad(whole, args)(*p, c), (x, a, b), (vx, v1, v2))[1]

    want_hv = pick(*hvp_whole(x, w1, w2))
    close(jvp(lambda *p: grad(local, args)(*p, c), mine[:3], (vx, v1[r], v2[r]))[1], want_hv)

    def along(x, a, b):  # <gradient, v>: what differs by rank has to be summed to be one number
        gx, ga, gb = grad(local, args)(x, a, b, c)
        return (gx * vx).sum() + all_reduce((ga * v1[r]).sum() + (gb * v2[r]).sum(), w.group)

    close(grad(along, args)(*mine[:3]), want_hv)
    first = torch.autograd.grad(local(*leaves, c), leaves, create_graph=True)
    inner = (first[0] * vx).sum() + all_reduce((first[1] * v1[r]).sum() + (first[2] * v2[r]).sum(), w.group)
    close(torch.autograd.grad(inner, leaves), want_hv)
    batch = torch.stack([c, 2 * c, x])
    each = [torch.stack(t) for t in zip(*(pick(*grad(whole, args)(x, w1, w2, s)) for s in batch), strict=True)]
    close(vmap(grad(local, args), in_dims=(None, None, None, 0))(*mine[:3], batch), tuple(each))
    summed = grad(lambda *p: vmap(lambda s: local(*p, s))(batch).sum(), args)(*mine[:3])
    close(summed, tuple(t.sum(0) for t in each))
    close(jacrev(lambda x: local(x, *mine[1:]))(x), want[0])
    if w.size > 1:
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            replicate(x.clone().requires_grad_(), w.group).add_(1)


def trees():
    """Collectives of a dict equal those of its leaves, in value and derivative, with one message for the names."""
    w = World("tree")
    gen = torch.Generator().manual_seed(2 + w.rank)
    shapes = {"b": (2,), "a": (3, 2), "none": (0,), "c": (1,), "d": (4,)}
    wide = {k: torch.randn(s[0] * w.size, *s[1:], generator=gen, dtype=torch.float64) for k, s in shapes.items()}
    wide["d"] = wide["d"].float()
    narrow = {k: t[: t.shape[0] // w.size].clone() for k, t in wide.items()}
    pairs = [
        (all_gather_tree, all_gather, narrow, "all_gather"),
        (reduce_scatter_tree, reduce_scatter, wide, "reduce_scatter"),
        (replicate_tree, replicate, narrow, None),
        (all_reduce_tree, all_reduce, narrow, "all_reduce"),
    ]
    for tree_op, op, tree, name in pairs:
        w.group.traffic.reset()
        got = tree_op(tree, w.group)
        if w.size > 1:
            # Before each, what is sent is compared.
            assert w.group.traffic.calls_by_op == ({name: 4, "match": 6} if name else {})  # one leaf is empty
        assert list(got) == list(tree)
        # Not bit for bit: the order in which a ring adds depends on where in the buffer a number lies.
        close(got, {k: op(t, w.group) for k, t in tree.items()})

        def loss(tree, via):
            out = via(tree)
            return sum((torch.sin(t) * t * (i + 1)).sum().double() for i, t in enumerate(out.values()))

        def by_leaf(t, op=op):
            return {k: op(x, w.group) for k, x in t.items()}

        def by_tree(t, tree_op=tree_op):
            return tree_op(t, w.group)

        close(grad(loss)(tree, by_tree), grad(loss)(tree, by_leaf))
        v = {k: torch.ones_like(t) for k, t in tree.items()}
        close(
            jvp(lambda t: grad(loss)(t, by_tree), (tree,), (v,))[1],
            jvp(lambda t: grad(loss)(t, by_leaf), (tree,), (v,))[1],
        )
        batch = {k: torch.stack([t, 2 * t], dim=1) for k, t in tree.items()}
        dims = ({k: 1 for k in tree},)
        close(
            vmap(grad(lambda t: loss(t, by_tree)), dims)(batch),
            vmap(grad(lambda t: loss(t, by_leaf)), dims)(batch),
        )
        leaves = {k: t.clone().requires_grad_() for k, t in tree.items()}
        loss(leaves, by_tree).backward()
        close({k: t.grad for k, t in leaves.items()}, grad(loss)(tree, by_leaf))
        if tree_op in (replicate_tree, all_reduce_tree):  # one leaf batched, the others not
            some = {**tree, "b": torch.stack([tree["b"], 3 * tree["b"]])}
            mixed = vmap(by_tree, ({k: 0 if k == "b" else None for k in tree},))(some)
            close(mixed["b"][1], op(3 * tree["b"], w.group))
        assert tree_op({}, w.group) == {}
    if w.size > 1:
        with pytest.raises(ValueError, match=rf"axis 0 that divides by {w.size}, got shape \({w.size + 1},\)"):
            reduce_scatter(torch.ones(w.size + 1), w.group)
        with pytest.raises(ValueError, match="axis 0"):
            all_gather(torch.ones(()), w.group)
        for tree_op, _, tree, _ in (pairs[0], pairs[1], pairs[3]):
            with pytest.raises(ValueError, match="of what differs between ranks"):
                tree_op(tree if w.rank else {}, w.group)


def dtypes():
    """Values and gradients in every dtype, the dtype of the result, and the dtype sums are made in."""
    w = World("dtypes")
    n = w.size
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = (torch.arange(4, dtype=dtype) + 1) * (w.rank + 1)
        x.requires_grad_()
        full = all_gather(x, w.group)
        close(full.detach(), torch.cat([(torch.arange(4, dtype=dtype) + 1) * (s + 1) for s in range(n)]))
        (full * full * (w.rank + 1)).sum().backward()  # 2 x sum(rank + 1), small integers: exact
        close(x.grad, (2 * x * n * (n + 1) / 2).detach())
        y = torch.full((2 * n,), float(w.rank + 1), dtype=dtype, requires_grad=True)
        part = reduce_scatter(y, w.group)
        close(part.detach(), torch.full((2,), n * (n + 1) / 2, dtype=dtype))
        (part * (w.rank + 1)).sum().backward()
        close(y.grad, torch.arange(1, n + 1, dtype=dtype).repeat_interleave(2))
        z = all_reduce(x.detach(), w.group)
        close(z, (torch.arange(4, dtype=dtype) + 1) * (n * (n + 1) / 2))

    # 256 + 1 needs nine bits: bfloat16 has eight. In float32 the sum of small parts survives.
    master = torch.ones(2, requires_grad=True)
    tiny = 2.0**-8 if w.rank else 1.0
    seen = all_gather(master, w.group, dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert seen.dtype == torch.bfloat16
    (seen * tiny).sum().backward()
    close(master.grad, torch.full((2,), 1 + (n - 1) * 2.0**-8))  # float32 all the way back
    coarse = torch.ones(2, requires_grad=True)
    (all_gather(coarse, w.group, dtype=torch.bfloat16) * tiny).sum().backward()
    if n == 2:
        close(coarse.grad, torch.ones(2))  # added in bfloat16: the small part is lost
    # Half of a float16 maximum from each of three ranks: only a wider sum holds it.
    big = torch.full((n,), 30000.0, dtype=torch.float16)
    wide = reduce_scatter(big, w.group, dtype=torch.float32, reduce_dtype=torch.float32)
    close(wide, torch.full((1,), 30000.0 * n))
    repl = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    (replicate(repl, w.group, reduce_dtype=torch.float32) * tiny).sum().backward()
    close(repl.grad, torch.full((3,), 1 + (n - 1) * 2.0**-8).bfloat16())
    eighth = torch.full((2,), float(w.rank)).to(torch.float8_e4m3fn)
    moved = torch.empty(2 * n, dtype=torch.float8_e4m3fn)
    all_gather_into(moved, eighth, w.group)
    close(moved.float(), torch.arange(n).float().repeat_interleave(2))
    if n > 1:
        with pytest.raises(TypeError, match="reduce_dtype"):
            all_reduce_(eighth, w.group)


def raw():
    """Collectives into buffers: values, aliases, handles, traffic."""
    w = World("raw")
    n, r, group = w.size, w.rank, w.group
    group.traffic.reset()
    buffer = torch.full((3 * n,), -1.0)
    mine = buffer[3 * r : 3 * r + 3]
    mine.fill_(r)
    all_gather_into(buffer, mine, group)  # in place: the input is a part of the output
    close(buffer, torch.arange(n).float().repeat_interleave(3))
    work = all_gather_into(buffer, torch.full((3,), r + 1.0), group, async_op=True)
    work.wait()
    close(buffer, torch.arange(1, n + 1).float().repeat_interleave(3))
    total = torch.arange(3.0 * n) * (r + 1)
    reduce_scatter_into(total[3 * r : 3 * r + 3], total, group)
    close(total[3 * r : 3 * r + 3], torch.arange(3.0 * n)[3 * r : 3 * r + 3] * n * (n + 1) / 2)
    out = torch.empty(3)
    reduce_scatter_into(out, torch.ones(3 * n), group, async_op=True).wait()
    close(out, torch.full((3,), float(n)))
    for op, want in (("sum", n * (n + 1) / 2), ("max", n), ("min", 1)):
        t = torch.tensor([r + 1.0])
        all_reduce_(t, group, op)
        assert t.item() == want
        all_reduce_(t, group, "max", async_op=True).wait()
    for empty in (torch.empty(0),):
        all_gather_into(empty, empty, group)
        reduce_scatter_into(empty, empty, group)
        all_reduce_(empty, group)
    barrier(group)
    assert gather_objects({"rank": r}, group) == [{"rank": s} for s in range(n)]
    if n > 1:
        ring = (n - 1) * 12  # (n - 1) / n of 3 n float32
        calls = {
            "all_gather": 2,
            "reduce_scatter": 2,
            "all_reduce": 6,
            "barrier": 1,
            "objects": 1,
        }
        assert group.traffic.calls_by_op == calls
        assert group.traffic.by_op["all_gather"] == group.traffic.by_op["reduce_scatter"] == 2 * ring
        assert group.traffic.by_op["all_reduce"] == 6 * (2 * (n - 1) * 4 // n)
    else:
        assert group.traffic.calls == group.traffic.bytes == 0
    with pytest.raises(ValueError, match="division before the sum"):
        all_reduce_(t, group, "avg")


def agreement():
    group = World("agree").group
    n, r = group.size, group.rank
    agree_on_all({"the pipeline": "same"}, group, {})
    if n == 1:
        return
    with pytest.raises(ValueError, match=r"disagree on the pipeline: .*rank 0 has 'adam'"):
        agree_on_all({"the pipeline": "adam" if r == 0 else "sgd"}, group, {})
    with pytest.raises(ValueError, match=rf"ranks? .*{n - 1} ha(s|ve) 'b{'0' * 15}"):
        # Values that are alike in their first characters are told at full enough length.
        agree_on_all({"the step": "b" + "0" * 40 + ("1" if r == n - 1 else "0")}, group, {})
    agree_on_all({"the pipeline": "still usable"}, group, {})


def groups():
    """One channel per purpose, our own, closed and opened again."""
    default = dist.group.WORLD
    a, b, again = world_group("a"), world_group("b"), world_group("a")
    assert a is again and a is not b and deepcopy({"g": a})["g"] is a
    n = a.size
    assert (a.rank, a.size) == (dist.get_rank(), dist.get_world_size()) and a.ranks == tuple(range(n))
    if n == 1:
        assert a.pg is None and pickle.loads(pickle.dumps(a)).size == 1
        return
    assert a.pg is not default and b.pg is not a.pg
    with pytest.raises(TypeError, match="pickle what it was made from"):
        pickle.dumps(a)
    shutdown()
    assert world_group("a") is not a
    assert dist.is_initialized(), "the default group is not ours to close"
    dist.all_reduce(torch.ones(1))
    t = torch.ones(1)
    all_reduce_(t, world_group("a"))
    assert t.item() == n
    # The user closes everything and starts over: groups made before are not handed out again.
    stale = world_group("a")
    dist.barrier()
    dist.destroy_process_group()
    fresh = world_group("a")  # initialises from the environment, as under torchrun
    assert fresh is not stale and dist.is_initialized()
    all_reduce_(t, fresh)
    assert t.item() == n * n
    shutdown()
    assert not dist.is_initialized(), "that one was ours"


def everything():
    torch.set_default_dtype(torch.float32)
    for name in ("all_gather", "reduce_scatter"):
        transforms(name)
    for check in (tensor_parallel, trees, dtypes, raw, agreement, groups):
        check()
    return True


@pytest.mark.parametrize("nproc", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in WORLDS[2:])])
def test_collectives(nproc):
    assert zf.launch(everything, nproc, timeout=limit()) == [True] * nproc


# ------------------------------------------------------------------------------------------------ meshes


def meshes():
    from torch.distributed.device_mesh import init_device_mesh

    r = dist.get_rank()
    counted = torch.__version__ >= "2.14"  # torch's own next group, that of a mesh too, then waits for ever
    if (
        r in (0, 1) and not counted
    ):  # a group that only some ranks belong to: names must not depend on how many those are
        dist.new_group([0, 1], use_local_synchronization=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard, repl = mesh_group(mesh["shard"]), mesh_group(mesh, "replicate")
    assert shard is mesh_group(mesh, "shard") and shard.pg is not mesh.get_group("shard")
    assert shard is not mesh_group(mesh["shard"], purpose="other")
    assert (shard.size, shard.rank, shard.ranks) == (2, r % 2, (0, 1) if r < 2 else (2, 3))
    assert (repl.size, repl.rank, repl.ranks) == (2, r // 2, (0, 2) if r % 2 == 0 else (1, 3))
    x = torch.tensor([10.0 * r])
    close(all_gather(x, shard), torch.tensor([0.0, 10.0]) if r < 2 else torch.tensor([20.0, 30.0]))
    close(all_gather(x, repl), torch.tensor([0.0, 20.0]) if r % 2 == 0 else torch.tensor([10.0, 30.0]))
    t = torch.tensor([float(r)])
    all_reduce_(t, repl, "max")
    assert t.item() == (2 if r % 2 == 0 else 3)

    whole = mesh_group(init_device_mesh("cpu", (4,)))
    assert whole.size == 4
    row = mesh_group(init_device_mesh("cpu", (4, 1), mesh_dim_names=("a", "b"))["b"])
    assert row.size == 1 and row.pg is None and row.ranks == (r,)

    with pytest.raises(ValueError, match=r"shape \(2, 2\).*mesh\['shard'\]"):
        mesh_group(mesh)
    with pytest.raises(ValueError, match=r"no axis 'tensor'; it has \['replicate', 'shard'\]"):
        mesh_group(mesh, "tensor")
    with pytest.raises(TypeError, match="DeviceMesh, got str"):
        mesh_group("shard")
    some = dist.device_mesh.DeviceMesh("cpu", [0, 1, 2])
    for _ in range(2):
        if r == 3:
            with pytest.raises(ValueError, match="rank 3 is not in the mesh of ranks"):
                mesh_group(some)
        else:
            assert mesh_group(some).size == 3
    one = dist.device_mesh.DeviceMesh("cpu", [2])
    if r == 2:
        assert mesh_group(one).size == 1
    else:
        with pytest.raises(ValueError, match="not in the mesh"):
            mesh_group(one)
    crossed = mesh["shard"] if r == 0 else mesh["replicate"]
    with pytest.raises(ValueError, match="the ranks disagree on the mesh"):
        mesh_group(crossed, purpose="crossed")
    if r in (0, 1):
        dist.new_group([0, 1], use_local_synchronization=True)
    late = pytest.raises(RuntimeError, match=r"(?s)by rank, .* process groups have been made.*on every rank")
    with late if counted else nullcontext():
        assert mesh_group(mesh["shard"], purpose="late").size == 2
    stale = mesh["shard"]
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="its process group is gone"):
        mesh_group(stale)
    os.environ["WORLD_SIZE"] = "1"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    foreign = pytest.raises(ValueError, match=r"the mesh names rank \d, but the world has 1 rank;")
    with foreign if r < 2 else pytest.raises((ValueError, IndexError, AssertionError)):
        mesh_group(stale)
    return True


def test_meshes():
    assert zf.launch(meshes, 4, timeout=limit()) == [True] * 4


# --------------------------------------------------------------------------------------------- one process


def test_a_world_of_one_needs_nothing():
    group = world_group()
    assert group.size == 1 and group.pg is None and not dist.is_initialized()
    x = torch.ones(3, requires_grad=True)
    for op in (all_gather, reduce_scatter, replicate, all_reduce):
        assert op(x, group) is x
    assert all_gather(x, group, dtype=torch.bfloat16).dtype == torch.bfloat16
    for into in (all_gather_into, reduce_scatter_into):

        def copied(x, into=into):
            out = torch.empty_like(x)
            into(out, x, group)
            return out

        close(vmap(copied)(torch.eye(2)), torch.eye(2))
        close(torch.compile(copied, fullgraph=True, backend="eager")(torch.eye(2)), torch.eye(2))
    barrier(group)
    shutdown()
    agree_on_all({"anything": "x"}, group, {})


def test_traffic():
    traffic = Traffic()
    traffic.sent("all_reduce", 600)
    traffic.sent("reduce_scatter", 300)
    assert traffic.by_op == {"all_reduce": 600, "reduce_scatter": 300}
    assert "all_reduce" in repr(traffic)
    traffic.reset()
    assert (traffic.bytes, traffic.calls) == (0, 0)


TORCHRUN = """
import torch, torch.distributed as dist
import zerofn
from zerofn.ranks.process_groups import world_group
from zerofn.ranks.collectives import all_reduce_
assert not dist.is_initialized(), "nothing at import"
group = world_group("script")
t = torch.tensor([group.rank + 1.0])
all_reduce_(t, group)
print(f"sum {t.item()} of {group.size}\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0 of 2") == 2
    assert "terminate called" not in done.stderr and "not called" not in done.stderr, done.stderr
    alone = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=limit())
    assert "sum 1.0 of 1" in alone.stdout, alone.stderr


def disagree():
    agree_on_all({"the parameters": str(dist.get_rank())}, world_group(), {})


def test_a_disagreement_reaches_the_caller():
    with pytest.raises(zf.RankError, match=r"disagree on the parameters: rank 0 has '0', rank 1 has '1'"):
        zf.launch(disagree, 2, timeout=limit())
