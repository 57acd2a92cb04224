"""Sequence parallelism on gloo ranks: numbers, derivatives and bytes against one process with whole sequences."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import zerofn as zf
from zerofn.collectives import all_to_all, world_group

DTYPE = torch.float64


def near(got, want, tol=1e-12):
    """Float64, in which sums over heads and ranks are made in another order."""
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


# ------------------------------------------------------------------------------------------------ all_to_all


def derivatives():
    """All derivatives of a nonlinear function of `all_to_all`, against all ranks' tensors in one process."""
    group = world_group("all to all")
    n, r = group.size, group.rank
    lengths, heads, splits = [3, 0, 2, 1][:n], 5, [2, 1, 2, 0][: n - 1]
    splits = [*splits, heads - sum(splits)]
    for split_dim, concat_dim, cut in ((0, 2, None), (-3, -1, splits)):
        parts = [draw(heads, 2, length, seed=7 + s) for s, length in enumerate(lengths)]
        tangents = [draw(heads, 2, length, seed=70 + s) for s, length in enumerate(lengths)]

        def op(x, split_dim=split_dim, concat_dim=concat_dim, cut=cut):
            return all_to_all(x, group, split_dim, concat_dim, splits=cut)

        def op_all(xs, cut=cut):
            whole = torch.cat(xs, dim=2)
            return list(whole.tensor_split(n, dim=0) if cut is None else whole.split(cut, dim=0))

        def loss_of(y, rank):
            return (torch.sin(y) * y.cumsum(-1) * (rank + 1)).sum()

        def local(x):
            return loss_of(op(x), r)

        def total(*xs):
            return sum(loss_of(y, rank) for rank, y in enumerate(op_all(list(xs))))

        x, v = parts[r], tangents[r]
        every = tuple(range(n))
        near(op(x), op_all(parts)[r])
        want = grad(total, every)(*parts)[r]
        want_hv = jvp(grad(total, every), tuple(parts), tuple(tangents))[1][r]
        near(grad(local)(x), want)
        near(vjp(local, x)[1](torch.ones((), dtype=DTYPE))[0], want)
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(local(leaf), leaf, create_graph=True)
        near(first.detach(), want)
        near(torch.autograd.grad((first * v).sum(), leaf)[0], want_hv)
        near(grad(lambda x: (grad(local)(x) * v).sum())(x), want_hv)  # noqa: B023
        near(jvp(grad(local), (x,), (v,))[1], want_hv)
        near(grad(lambda x: jvp(local, (x,), (v,))[1])(x), want_hv)  # noqa: B023
        near(jvp(op, (x,), (v,)), (op_all(parts)[r], op_all(tangents)[r]))
        many = torch.stack([x, 2 * x, x - 1], dim=1)
        near(vmap(op, in_dims=1)(many), torch.stack([op(t) for t in many.unbind(1)]))
        near(vmap(grad(local), in_dims=1)(many), torch.stack([grad(local)(t) for t in many.unbind(1)]))
        # Its adjoint is itself, dimensions swapped, with the lengths that ranks had.
        near(all_to_all(op(x), group, concat_dim, split_dim, splits=lengths), x)
        near(torch.func.vjp(op, x)[1](op(v))[0], v)
    # Jacobians: out[0, k] of rank s is x[s, 0] of rank k. Rows, and columns, of all ranks come together.
    small = draw(n, 1, seed=r)
    rows = jacrev(lambda x: all_to_all(x, group, 0, 1))(small)[0, :, :, 0]
    columns = jacfwd(lambda x: all_to_all(x, group, 0, 1))(small)[0, :, :, 0]
    mine = torch.zeros(n, n, dtype=DTYPE)
    mine[r] = 1.0
    near((rows, columns), (mine, mine.T))
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.float8_e4m3fn):
        told = torch.full((n, 1), float(r)).to(dtype)
        assert all_to_all(told, group, 0, 1).double().tolist() == [[float(s) for s in range(n)]]
    if n > 1:
        group.traffic.reset()
        all_to_all(draw(2 * n, 3), group, 0, 1)
        assert group.traffic.by_op["all_to_all"] == (n - 1) * 2 * 3 * 8
    refusals(group)


def refusals(group):
    """On every rank, and the next call is right."""
    n, r = group.size, group.rank
    x = torch.ones(4, 3, 2)
    with pytest.raises(ValueError, match="needs two dimensions of x, which has 3"):
        all_to_all(x, group, 1, 1)
    with pytest.raises(ValueError, match="needs two dimensions of x, which has 3"):
        all_to_all(x, group, 1, 3)
    with pytest.raises(ValueError, match=f"needs {n} lengths that add up to 4"):
        all_to_all(x, group, 0, 1, splits=[4, *[1] * (n - 1)] if n > 1 else [3])
    if n > 1:
        with pytest.raises(ValueError, match="of what differs between ranks"):
            all_to_all(x.double() if r else x, group, 0, 1)
        with pytest.raises(ValueError, match="of what differs between ranks"):
            all_to_all(x, group, 0, 1 + (r == 0))
        with pytest.raises(ValueError, match="of what differs between ranks"):
            all_to_all(x, group, 0, 1 if r else 0)
    assert all_to_all(x, group, 0, 1).shape[1] == 3 * n


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_all_to_all_is_its_own_adjoint_to_any_order(world):
    zf.launch(derivatives, world, timeout=limit())


# ------------------------------------------------------------------------------------------------ attention


def plain(q, k, v, attn_mask=None, scale=1.0):
    """An attention of one's own, of (batch, heads, sequence, features), that has derivatives of any order."""
    few = k.shape[1]
    if few and q.shape[1] != few:
        k, v = (x.repeat_interleave(q.shape[1] // few, dim=1) for x in (k, v))
    scores = q @ k.mT * scale
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ v


def attend():
    """Outputs, gradients and Hessian-vector products of parts are those of whole sequences; bytes equal the formula."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    group = zf.collectives.mesh_group(mesh)
    n, r = group.size, group.rank
    found = []
    for heads, few, long, keys in ((4, 4, 8, 8), (5, 5, 7, 9), (n, 1, 5, 5), (1, 1, 6, 6), (4 * n, 2 * n, 4, 4)):
        whole = tuple(draw(2, h, s, 3, seed=i) for i, (h, s) in enumerate(((heads, long), (few, keys), (few, keys))))
        v = tuple(torch.cos(x) for x in whole)
        mask = draw(long, keys, seed=9)

        def part(xs):
            return tuple(x.tensor_split(n, dim=2)[r] for x in xs)

        parallel = zf.sequence_parallel(plain, mesh)

        def loss(f, xs, m):
            return torch.sin(f(*xs, attn_mask=m, scale=0.5)).pow(2).sum()

        near(parallel(*part(whole), mask, scale=0.5), *part([plain(*whole, mask, scale=0.5)]))
        want = grad(lambda *xs: loss(plain, xs, mask), (0, 1, 2))  # noqa: B023
        got = grad(lambda *xs: loss(parallel, xs, mask), (0, 1, 2))  # noqa: B023
        near(got(*part(whole)), part(want(*whole)))
        near(jvp(got, part(whole), part(v))[1], part(jvp(want, whole, v)[1]))
        # Masks by this rank's queries, and by its keys alone, as padding is told.
        rows, columns = mask.tensor_split(n, dim=0)[r], mask[:1].tensor_split(n, dim=1)[r]
        near(parallel(*part(whole), rows), *part([plain(*whole, mask)]))
        near(parallel(*part(whole), attn_mask=columns), *part([plain(*whole, mask[:1])]))
        near(parallel(*part(whole), attn_mask=columns[0]), *part([plain(*whole, mask[0])]))
        near(parallel(*part(whole), attn_mask=mask[0]), *part([plain(*whole, mask[0])]))
        near(parallel(*part(whole), attn_mask=mask[0, 0]), *part([plain(*whole, mask[0, 0])]))
        by_head = draw(heads, long, keys, seed=10)
        near(parallel(*part(whole), attn_mask=by_head), *part([plain(*whole, by_head)])) if few == heads else None
        if n > 1 and long > n:
            with pytest.raises(ValueError, match=r"attn_mask of .* for this rank's"):
                parallel(*part(whole), rows.tensor_split(n, dim=1)[r])
        group.traffic.reset()
        sent = [x.requires_grad_() for x in part(whole)]
        parallel(*sent).sum().backward()
        if n > 1:
            many = heads if not (heads % n == 0 and few % n == 0) else few
            mine = [
                s.numel() // s.shape[1] * h * 8
                for s, h in zip((*sent, sent[0]), (heads, many, many, heads), strict=True)
            ]
            found.append((group.traffic.by_op["all_to_all"], mine, (heads, long)))
    return found


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_attention_over_parts_is_that_over_whole_sequences(world):
    ranks = zf.launch(attend, world, timeout=limit())
    for rank in ranks:
        for sent, mine, (heads, long) in rank:
            if heads % world == 0 and long % world == 0:
                # Four all-to-alls forward and four back, of (N - 1) / N of what a rank has.
                assert sent == sum(2 * (world - 1) * m // world for m in mine)


class Attention(nn.Module):
    def __init__(self, heads, few):
        super().__init__()
        self.heads, self.few, self.out = heads, few, nn.Linear(2 * heads, 6, dtype=DTYPE)
        self.q = nn.Linear(6, 2 * heads, dtype=DTYPE)
        self.kv = nn.Linear(6, 4 * few, dtype=DTYPE)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.heads, 2)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (self.few, 4)).transpose(1, 2).chunk(2, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Attention by our own call of torch's function, by `nn.MultiheadAttention`, and inside of a checkpoint."""

    def __init__(self, heads=3, few=1, repeats=True):
        torch.manual_seed(0)
        super().__init__()
        self.repeats = repeats
        self.tokens = nn.Embedding(11, 6, dtype=DTYPE)
        self.positions = nn.Embedding(16, 6, dtype=DTYPE)
        self.blocks = nn.ModuleList([Attention(heads, few), Attention(heads, few)])
        self.many = nn.MultiheadAttention(6, heads, batch_first=True, dtype=DTYPE)
        self.head = nn.Linear(6, 11, bias=False, dtype=DTYPE)

    def forward(self, tokens, positions):
        x = self.tokens(tokens) + self.positions(positions)
        x = self.blocks[0](x)
        if self.repeats and torch.is_grad_enabled():
            x = checkpoint(self.blocks[1], x, use_reentrant=False)
        else:
            x = self.blocks[1](x)
        x = x + self.many(x, x, x, need_weights=False)[0]
        return self.head(x)


def fresh():
    return Model()


LENGTH, MICRO = 13, 2


def batch(step, data):
    """Tokens, targets (of which those of -100 do not count, more of them in some sequences than in others)."""
    g = torch.Generator().manual_seed(100 * step + data)
    tokens = torch.randint(11, (2, LENGTH + 1), generator=g)
    targets = tokens[:, 1:].clone()
    targets[0, 4 + 3 * data :] = -100
    return tokens[:, :-1], targets


def losses_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100)


def reference(pipeline, shards, updates):
    """One process, whole sequences: the mean over all tokens that count in the batches of a window."""
    model = fresh()
    opt = zf.attach(model, zf.chain(zf.accumulate(MICRO * shards, weighted=True), pipeline()))
    told = []
    for step in range(MICRO * updates):
        for data in range(shards):
            tokens, targets = batch(step, data)
            logits = model(tokens, torch.arange(LENGTH))
            loss, count = zf.sequence_mean(losses_of(logits, targets), weights=targets.flatten() != -100)
            told.append(float(loss.detach()))
            loss.backward()
            opt.step(weight=count)
            opt.zero_grad()
    return {k: p.detach().clone() for k, p in model.named_parameters()}, told


def update():
    return zf.chain(zf.clip_by_global_norm(0.5), zf.sgd(0.3, momentum=0.9))


ROADS = {
    "data parallel": lambda mesh, window: [window, zf.all_reduce()],
    "zero 1": lambda mesh, window: [window, zf.reduce_scatter()],
    "zero 3 along the sequence": lambda mesh, window: [zf.shard(mesh["sequence"]), window, zf.all_reduce(mesh["data"])],
}


def train(shape, road, route, updates):
    """Parameters after some updates, and the losses, on a mesh of data x sequence."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
    data, (place, parts) = mesh.get_local_rank("data"), (mesh.get_local_rank("sequence"), shape[1])
    model = fresh()
    tx = zf.chain(*ROADS[road](mesh, zf.accumulate(MICRO, weighted=True)), update())
    handle = zf.sequence_parallel(model, mesh["sequence"])
    told = []

    def of(step):
        tokens, targets = (x.tensor_split(parts, dim=1)[place] for x in batch(step, data))
        return tokens, targets, torch.arange(LENGTH).tensor_split(parts)[place]

    def mean(logits, targets):
        return zf.sequence_mean(losses_of(logits, targets), mesh["sequence"], targets.flatten() != -100)

    if route == "eager":
        opt = zf.attach(model, tx)
        for step in range(MICRO * updates):
            tokens, targets, positions = of(step)
            loss, count = mean(model(tokens, positions), targets)
            told.append(float(loss.detach()))
            loss.backward()
            opt.step(weight=count)
            opt.zero_grad()
        state = opt.state
        full = {k: p.detach().clone() for k, p in opt.detach().named_parameters()}
    else:
        model.repeats = False  # what a checkpoint repeats is after `functional_call`, and finds other parameters
        state = zf.init(tx, {k: p.detach() for k, p in model.named_parameters()})

        def loss_fn(params, tokens, targets, positions):
            return mean(functional_call(model, params, (tokens, positions)), targets)

        step_fn = zf.make_step(loss_fn, tx)
        for step in range(MICRO * updates):
            tokens, targets, positions = of(step)
            with torch.no_grad():
                count = zf.sequence_mean(torch.ones(targets.numel()), mesh["sequence"], targets.flatten() != -100)[1]
            state, metrics = step_fn(state, tokens, targets, positions, weight=count)
            told.append(float(metrics["loss"]))
        full = {k: p.clone() for k, p in zf.full_params(tx, state).items()}
    handle.remove()
    return full, told, data


@pytest.mark.parametrize(
    ("shape", "road", "route"),
    [
        ((1, 2), "data parallel", "eager"),
        ((1, 3), "zero 1", "eager"),
        ((2, 2), "zero 3 along the sequence", "eager"),
        pytest.param((2, 2), "data parallel", "eager", marks=pytest.mark.slow),
        pytest.param((2, 1), "data parallel", "eager", marks=pytest.mark.slow),
        ((1, 2), "zero 3 along the sequence", "pure"),
    ],
)
def test_training_equals_one_process(shape, road, route):
    updates = 2
    want, want_losses = reference(update, shape[0], updates)
    start = {k: p.detach() for k, p in fresh().named_parameters()}
    for got, told, data in zf.launch(train, shape[0] * shape[1], shape, road, route, updates, timeout=limit()):
        assert told == pytest.approx(want_losses[data :: shape[0]], rel=1e-12)
        change = {k: got[k] - start[k] for k in got}
        for k in got:
            near(change[k], want[k] - start[k], 1e-10)
            assert change[k].abs().max() > 1e-6, k


def products():
    """A Hessian-vector product of a bound function over sharded parameters, through a module's attention."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sequence",))
    rank = mesh.get_local_rank()

    def product(model, tx, mesh, tokens, targets, positions):
        def loss(params):
            # With kernels that have a second derivative.
            with sdpa_kernel(SDPBackend.MATH):
                losses = losses_of(functional_call(model, params, (tokens, positions)), targets)
            return zf.sequence_mean(losses, mesh, targets.flatten() != -100)[0]

        state = zf.init(tx, {k: p.detach() for k, p in model.named_parameters()})
        vector = zf.init(tx, {k: torch.cos(p.detach()) for k, p in model.named_parameters()}).params
        stored = zf.bind(loss, tx, state)
        forward = jvp(grad(stored), (state.params,), (vector,))[1]
        reverse = grad(lambda p: sum((g * vector[k]).sum() for k, g in grad(stored)(p).items()))(state.params)
        return forward, reverse

    one = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    whole = (*batch(0, 0), torch.arange(LENGTH))
    want, _ = product(Model(repeats=False), zf.sgd(1.0), one, *whole)
    model = fresh()
    model.repeats = False
    with zf.sequence_parallel(model, mesh):
        tx = zf.chain(zf.shard(), zf.sgd(1.0))
        parts = [x.tensor_split(2, dim=-1)[rank] for x in whole]
        # What is given back is this rank's part of the mean over ranks.
        return want, *product(model, tx, mesh, *parts)


def test_a_hessian_vector_product_equals_one_process():
    ranks = zf.launch(products, 2, timeout=limit())
    for k, want in ranks[0][0].items():
        for i in (1, 2):
            near(torch.cat([rank[i][k].flatten() for rank in ranks]), want.flatten(), 1e-10)


def seen():
    """A handle is let go of, and a module without attention, or one that returns its weights, is refused."""
    mesh = init_device_mesh("cpu", (2,))
    tokens, positions = batch(0, 0)[0], torch.arange(LENGTH)
    model, alone = fresh(), fresh()(tokens, positions).detach()
    handle = zf.sequence_parallel(model, mesh)
    part = [x.tensor_split(2, dim=-1)[mesh.get_local_rank()] for x in (tokens, positions)]
    # A copy is parallel too; an error inside leaves nothing behind.
    near(copy.deepcopy(model)(*part).detach(), alone.tensor_split(2, dim=1)[mesh.get_local_rank()])
    with pytest.raises(RuntimeError):
        model(tokens.float(), positions)
    near(model(*part).detach(), alone.tensor_split(2, dim=1)[mesh.get_local_rank()])
    handle.remove()
    near(model(tokens, positions).detach(), alone)
    quiet = nn.Sequential(nn.Linear(2, 2))
    with zf.sequence_parallel(quiet, mesh), pytest.raises(RuntimeError, match="called no attention that could be seen"):
        quiet(torch.ones(1, 2))
    quiet(torch.ones(1, 2))
    many = nn.MultiheadAttention(4, 2)
    with zf.sequence_parallel(many, mesh), pytest.raises(RuntimeError, match="need_weights=False"):
        many(*torch.ones(3, 1, 1, 4))
    with pytest.raises(ValueError, match="a mesh of shape"):
        zf.sequence_parallel(many, init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))
    with pytest.raises(ValueError, match="is sent back to the ranks by heads"):
        zf.sequence_parallel(lambda q, k, v: q.transpose(1, 2), mesh)(*torch.ones(3, 1, 2, 4, 3))


def test_what_is_seen_of_a_module():
    zf.launch(seen, 2, timeout=limit())


def test_a_mean_over_nothing_weighs_nothing():
    losses = torch.tensor([float("nan"), 2.0], requires_grad=True)
    mean, tokens = zf.sequence_mean(losses, weights=torch.tensor([False, False]))
    mean.backward()
    assert float(mean.detach()) == float(tokens) == 0.0 and losses.grad.tolist() == [0.0, 0.0]
