"""The pure route under `shard`: two blocks alive at most, and the gradients of one unsharded process."""

import gc
import random
import time

import pytest
import rank_programs as P
import test_zero3 as Z
import torch
from time_limits import limit
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import zerofn as zf
import zerofn.pure.linearize  # inside: which units there are, and when they are planned
from zerofn.pure.linearize import Blocks, units_by_prefix  # inside: which units there are, and when they are planned
from zerofn.sharded.lazy_tensor import Lazy  # inside: what stands for a parameter that is not there
from zerofn.sharded.units import UnitPlans  # inside: how often units are planned

F64 = torch.float64
WIDTH, LAYERS = Z.WIDTH, Z.LAYERS
TX = zf.chain(zf.shard(), zf.sgd(0.5))


def normal(*shape, seed, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---------------------------------------------------------------- what is alive


def counted_program(how):
    """Parameters with one large weight in each block, and a function that shows every activation to `note`."""
    weights = [normal(WIDTH, WIDTH, seed=i) / 8 for i in range(LAYERS)]
    if how == "list of weights":
        return {"w": weights}, lambda p, x, note: chain(p["w"], x, note)
    if how == "dict of lists":
        params = {"blocks": [{"w": w, "b": torch.zeros(WIDTH, dtype=F64)} for w in weights]}
        return params, lambda p, x, note: chain([b["w"] for b in p["blocks"]], x, note, [b["b"] for b in p["blocks"]])
    if how == "checkpoint":
        return weights, lambda p, x, note: repeated(p, x, note)
    model = Z.Wide()
    params = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.data = torch.empty(0, dtype=F64)

    def fn(p, x, note):
        handles = [b.register_forward_hook(lambda m, a, o: note(o)) for b in model.blocks]
        y = functional_call(model, p, (x,))
        for h in handles:
            h.remove()
        return y

    return params, fn


def chain(weights, x, note, biases=None):
    for i, w in enumerate(weights):
        x = torch.tanh(x @ w if biases is None else torch.nn.functional.linear(x, w, biases[i]))
        note(x)
    return x


def repeated(weights, x, note):
    for w in weights:
        x = note(checkpoint(lambda w, x: torch.tanh(x @ w), w, x, use_reentrant=False))
    return x


def count_alive(how, whole):
    rank, _ = P.rank_and_size()
    if whole:
        zerofn.pure.linearize._with_blocks = zerofn.pure.linearize._with_autograd
    params, fn = counted_program(how)
    state = zf.init(TX, params)
    del params
    seen = {"forward": 0, "backward": 0, "gradients": 0}
    group = zf.pure.api.pipe_of(TX, state, "test").sharding.group
    passed = 0

    def note(o):
        seen["forward"] = max(seen["forward"], Z.full_weights())
        if o.requires_grad:
            o.register_hook(back)
        return o

    def back(g):
        """Gradients that autograd holds are no objects of Python's: how many blocks are behind, and not yet sent."""
        nonlocal passed
        seen["backward"] = max(seen["backward"], Z.full_weights())
        seen["gradients"] = max(seen["gradients"], passed - group.traffic.calls_by_op.get("reduce_scatter", 0))
        passed += 1

    gc.collect()
    gc.disable()
    out, pullback = zf.vjp(lambda p, x: fn(p, x, note).square().sum(), TX, state, normal(3, WIDTH, seed=50 + rank))
    after = Z.full_weights()
    results = []
    for _ in range(2):
        passed = 0
        group.traffic.reset()
        results.append(pullback(torch.ones_like(out)))
    first, again = results
    left = Z.full_weights()
    end = time.monotonic() + limit(10)
    while left and not whole and time.monotonic() < end:
        # A thread of gloo's lets its tensors go a moment after the operation is done.
        time.sleep(0.01)
        left = Z.full_weights()
    gc.enable()
    leaves = [torch.utils._pytree.tree_leaves(g[0]) for g in (first, again)]
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*leaves, strict=True))
    assert torch.equal(first[1], again[1])
    return seen, after, left


@pytest.mark.parametrize("how", ["module", "checkpoint", "dict of lists", "list of weights"])
def test_two_blocks_are_alive_at_most(how):
    for seen, after, left in zf.launch(count_alive, 2, how, False, timeout=limit()):
        # In backward a weight's gradient, as large as the weight, may still stand beside the two.
        assert 1 <= seen["forward"] <= 2 and 1 <= seen["backward"] <= 3, seen
        assert after <= 2 and left == 0
        assert seen["gradients"] <= 1


@pytest.mark.slow
def test_the_count_finds_a_whole_tree():
    for seen, after, _ in zf.launch(count_alive, 2, "module", True, timeout=limit()):
        assert min(seen["forward"], seen["backward"], after) >= LAYERS and seen["gradients"] == LAYERS - 1


def traffic():
    rank, _ = P.rank_and_size()
    params, fn = counted_program("module")
    state = zf.init(TX, params)
    group = zf.pure.api.pipe_of(TX, state, "test").sharding.group
    group.traffic.reset()
    gc.collect()
    gc.disable()
    out, pullback = zf.vjp(lambda p, x: fn(p, x, lambda o: o).sum(), TX, state, normal(3, WIDTH, seed=rank))
    pullback(torch.ones_like(out))
    del out, pullback
    left = [o for o in gc.get_objects() if type(o) in (Lazy, Blocks)]
    gc.enable()
    assert not left, "cycles keep the shards of old states"
    return group.traffic.by_op


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_sent_are_those_of_the_formula(size):
    # Parts are rounded up to rows.
    one = -(-WIDTH // size) * WIDTH * 8 * (size - 1)
    # The two blocks that forward used last are still there when backward begins.
    want = {"all_gather": (2 * LAYERS - 2) * one, "reduce_scatter": LAYERS * one}
    for found in zf.launch(traffic, size, timeout=limit()):
        assert found.keys() == want.keys()
        for op, exact in want.items():
            # Headers of 16 bytes and a flag for each gradient go with them.
            assert exact <= found[op] <= exact + 64 * size * 6 * LAYERS


def test_blocks_are_elements_of_the_outermost_list():
    w = torch.zeros(600, 600)
    tree = {
        "h.0.attn.w": w,
        "h.0.mlp.0.w": w + 1,
        "h.1.attn.w": w + 2,
        "emb": w + 3,
        "a": {"10": {"w": w + 4}, "9": {"w": w + 5, "v": w + 6}},
        "norm": torch.ones(3),
        "out": torch.ones(4),
        "list": [torch.ones(()), torch.ones(2), w + 7],
    }
    layout = zf.core.layout.make_layout(tree)[0]
    found = sorted([leaf.path for leaf in unit] for unit in units_by_prefix(layout.leaves))
    assert found == [
        ["a.10.w"],
        ["a.9.v", "a.9.w"],
        ["emb"],
        ["h.0.attn.w", "h.0.mlp.0.w"],
        ["h.1.attn.w"],
        ["list.0", "list.1"],
        ["list.2"],
        ["norm", "out"],
    ]


# ---------------------------------------------------------------- what comes out


class MatMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


def tree():
    head = normal(5, 5, seed=9)
    return {
        "blocks": [{"w": normal(5, 5, seed=i) / 2, "b": normal(5, seed=10 + i)} for i in range(4)],
        "head": head,
        "tied": [head],
        "s": torch.tensor(0.5, dtype=F64),
        "empty": torch.zeros(0, 2, dtype=F64),
        "odd": normal(7, seed=20),
    }


def layer(b, x):
    return x + torch.tanh(x @ b["w"] + b["b"])


def run_blocks(p, x, order, mm=layer):
    for k in order:
        x = mm(p["blocks"][k], x)
    return x


def other_order(p, x, rank, step):
    order = list(range(4))[rank:] + list(range(4))[:rank]
    return (run_blocks(p, x, order) @ p["head"]).square().mean() * p["s"]


def some_unused(p, x, rank, step):
    order = [(rank + step) % 4] if step % 2 else [0, 1, 0, 3]
    y = run_blocks(p, x, order)
    return y.square().mean() + (p["odd"].sum() if rank == step else 0)


def nothing_used(p, x, rank, step):
    if rank == 1:
        return x.sum()
    return (x @ p["tied"][0] @ p["head"]).square().mean() + p["empty"].sum()


def checkpointed(p, x, rank, step):
    for b in p["blocks"]:
        x = checkpoint(layer, b, x, use_reentrant=False)
    return (x @ p["head"].t()).square().mean()


def own_function(p, x, rank, step):
    for b in p["blocks"]:
        x = torch.tanh(MatMul.apply(x, b["w"]) + b["b"])
    return (x @ p["head"]).square().mean()


def reads(p, x, rank, step):
    w, b = p["blocks"][1]["w"], p["blocks"][2]["b"]
    assert w.shape == (5, 5) and w.dtype == F64 and w.requires_grad and len(b) == 5
    with torch.no_grad():
        factor = float(p["s"].detach()) + w.tolist()[0][0] + b.detach().numpy()[1]
    with torch.inference_mode():
        factor += float(nn.functional.linear(x, w, b).tanh().mean())
    views = w[0].sum() + w.t()[1:].reshape(-1)[3] * w.view(25).chunk(2)[1].exp().sum() + w.unbind(0)[2].prod()
    joined = torch.cat([w, w.T, p["head"]]).square().sum() + torch.einsum("ij,kj->ik", w, p["head"]).sum()
    wide = w.expand(2, 5, 5).sum() + w.to(torch.complex128).real.sum() + torch.stack([b, b]).std()
    total = views + joined + wide + (w > 0).sum() + (p["s"] if p["s"] > 0 else 0)
    return torch.tanh(total / 100) * x.mean() * factor


def gradient_inside(p, x, rank, step):
    loss = other_order(p, x, rank, step)
    wanted = [p["blocks"][rank]["w"], p["head"], p["s"]]
    return loss + sum(g.square().sum() for g in torch.autograd.grad(loss, wanted, create_graph=True))


def backward_inside(p, x, rank, step):
    z = x.clone().requires_grad_()
    other_order(p, z, rank, step).backward()
    return (run_blocks(p, x, [3, 1]) * z.grad).sum()


def func_inside(p, x, rank, step):
    slope = vmap(grad(lambda z: run_blocks(p, z, range(4)).sum()))(x)
    g = grad(lambda q: (run_blocks(q, x, [0, 2]) @ q["head"]).square().mean())(p)
    moved = [{k: b[k] - 0.1 * h[k] for k in b} for b, h in zip(p["blocks"], g["blocks"], strict=True)]
    return slope.square().mean() + run_blocks({"blocks": moved}, x, [0, 2]).square().mean()


def hooked(p, x, rank, step):
    p["blocks"][0]["w"].register_hook(lambda g: 3 * g)
    return run_blocks(p, x, [0, 1, 2, 0]).square().mean()


def random_program(seed):
    """Other layers in another order on every rank and in every step, in every manner."""

    def fn(p, x, rank, step):
        rng = random.Random(f"{seed} {rank} {step}")
        total = (x @ p["head"]).square().mean() if rank == 0 else 0
        for _ in range(rng.randrange(8)):
            b = p["blocks"][rng.randrange(4)]
            manner = rng.randrange(7)
            if manner < 2:
                x = layer(b, x)
            elif manner == 2:
                x = checkpoint(layer, b, x, use_reentrant=False)
            elif manner == 3:
                x = torch.tanh(MatMul.apply(x, p["tied"][0]))
            elif manner == 4:
                total = total + torch.autograd.grad(layer(b, x).sum(), b["w"], create_graph=True)[0].square().mean()
            elif manner == 5:
                x = x + vmap(grad(lambda z, b=b: torch.tanh(layer(b, z)).sum()))(x) * p["s"]
            else:
                with torch.no_grad():
                    x = x * torch.tanh(p["odd"].sum())
        return x.square().mean() + total

    fn.__name__ = f"random {seed}"
    return fn


PROGRAMS = (
    *map(random_program, range(7)),
    other_order,
    some_unused,
    nothing_used,
    checkpointed,
    own_function,
    reads,
    gradient_inside,
    backward_inside,
    func_inside,
    hooked,
)
STEPS = 3


def data(rank, step):
    return normal(4, 5, seed=100 + 10 * step + rank)


def trained(every):
    rank, _ = P.rank_and_size()
    out = {}
    for i, fn in enumerate(PROGRAMS):
        for donate in (False, True) if every else (bool(i % 2),):
            state, step_fn = zf.init(TX, tree()), zf.make_step(fn, TX, donate=donate)
            losses = []
            for step in range(STEPS):
                state, metrics = step_fn(state, data(rank, step), rank, step)
                losses.append(float(metrics["loss"]))
            out[fn.__name__, donate] = losses, torch.utils._pytree.tree_leaves(zf.full_params(TX, state))
    return out


def reference(fn, size):
    """Plain tensors, plain autograd, the mean over ranks."""
    params = tree()
    leaves, spec = torch.utils._pytree.tree_flatten(params)
    distinct = list({id(t): t for t in leaves}.values())
    losses = []
    for step in range(STEPS):
        losses.append([])
        sums = [None] * len(distinct)
        for rank in range(size):
            mine = {id(t): t.clone().requires_grad_() for t in distinct}
            loss = fn(spec.unflatten([mine[id(t)] for t in leaves]), data(rank, step), rank, step)
            losses[-1].append(float(loss.detach()))
            if loss.requires_grad:
                found = torch.autograd.grad(loss / size, list(mine.values()), allow_unused=True)
                sums = [a if b is None else b if a is None else a + b for a, b in zip(sums, found, strict=True)]
        for t, g in zip(distinct, sums, strict=True):
            if g is not None:
                t -= 0.5 * g
    return losses, leaves


@pytest.mark.parametrize(
    ("size", "every"), [(2, False), *(pytest.param(n, n > 1, marks=pytest.mark.slow) for n in (1, 3))]
)
def test_gradients_are_those_of_one_process(size, every):
    """A state is donated in every other program, or in all of them and in none."""
    ranks = zf.launch(trained, size, every, timeout=limit())
    for fn in PROGRAMS:
        losses, want = reference(fn, size)
        for rank, results in enumerate(ranks):
            for found, got in [x for (name, _), x in results.items() if name == fn.__name__]:
                torch.testing.assert_close(torch.tensor(found), torch.tensor([x[rank] for x in losses]))
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12, msg=lambda m, n=fn: f"{n}: {m}")


# ---------------------------------------------------------------- dtypes, scales, meshes: the eager route, bitwise


class Casts(nn.Module):
    """Blocks with 16-bit trouble: a large and a small one, and a norm outside of them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.GELU(), nn.Linear(7, 7)) for _ in range(3)])
        self.norm = nn.LayerNorm(7)
        self.fixed = nn.Parameter(torch.linspace(0.5, 1.5, 7), requires_grad=False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) * self.fixed
        return self.norm(x)


def pipelines(size):
    bf16, fp16 = torch.bfloat16, torch.float16
    found = {
        "plain": lambda: zf.chain(zf.shard(), zf.accumulate(2), zf.clip_by_global_norm(0.1), zf.adamw(0.01)),
        "bf16 compute": lambda: zf.chain(zf.shard(), zf.precision(param_dtype=bf16), zf.adamw(0.01)),
        "fp16 compute": lambda: zf.chain(
            zf.shard(),
            zf.precision(param_dtype=fp16, output_dtype=torch.float32),
            zf.scale_loss(1024.0),
            zf.adamw(0.01),
        ),
        "bf16 states": lambda: zf.chain(
            zf.shard(),
            zf.precision(store_dtype=bf16, grad_dtype=torch.float32, reduce_dtype=torch.float32),
            zf.low_precision_adam(0.01),
        ),
    }
    if size == 4:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        both = zf.shard(mesh["shard"]), zf.all_reduce(mesh["replicate"])
        late = both[0], zf.accumulate(2), both[1]
        cast = zf.precision(param_dtype=fp16, output_dtype=torch.float32), zf.scale_loss(1024.0)
        found = {
            "hybrid": lambda: zf.chain(*both, zf.adamw(0.01)),
            "hybrid, fp16": lambda: zf.chain(*both, *cast, zf.adamw(0.01)),
            "hybrid, late": lambda: zf.chain(*late, zf.adamw(0.01)),
        }
    return found


def both_routes(size):
    rank, _ = P.rank_and_size()
    out = {}
    for name, tx in pipelines(size).items():
        torch.manual_seed(0)
        model = Casts()
        shadow = P.fresh(model)
        opt = zf.attach(model, tx())
        # A state of an attached model, so that it has a frozen leaf.
        torch.manual_seed(0)
        other = zf.attach(Casts(), tx())
        state, dtype = other.state, other._own.home.pipe.dtypes.param_dtype or other._own.home.pipe.dtypes.store_dtype
        step_fn = zf.make_step(
            lambda p, x, y, net=shadow: (functional_call(net, p, (x,)).float() - y).square().mean(), tx()
        )
        for step in range(4):
            x, y = (normal(8, 7, seed=100 * step + 10 * rank + k, dtype=torch.float32) for k in (0, 1))
            (model(x).float() - y).square().mean().backward()
            opt.step()
            opt.zero_grad()
            state, _metrics = step_fn(state, x.to(dtype or x.dtype), y)
        ours, theirs = zf.full_params(tx(), state), zf.full_params(tx(), opt.state)
        moved = max(
            float((a - b.detach()).abs().max()) for a, b in zip(ours.values(), shadow.parameters(), strict=True)
        )
        out[name] = {n: torch.equal(ours[n], theirs[n]) for n in ours}, moved
    return out


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_both_routes_give_the_same_bits(size):
    for results in zf.launch(both_routes, size, size, timeout=limit()):
        for name, (same, moved) in results.items():
            assert all(same.values()) and len(same) == 15 and moved > 1e-3, (name, same, moved)


# ---------------------------------------------------------------- mistakes


def mistakes():
    rank, _ = P.rank_and_size()
    state = zf.init(TX, tree())
    kept, found = [], {}

    def attempt(name, fn, pull=True):
        try:
            out, pullback = zf.vjp(fn, TX, state)
            if pull:
                pullback(torch.ones_like(out))
        except (RuntimeError, ValueError, ZeroDivisionError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    def raises(p):
        # Another place on each rank.
        for k, b in enumerate(p["blocks"]):
            b["w"].sum()
            if k == 2 * rank:
                raise ZeroDivisionError("mine")

    def write(p):
        p["blocks"][0]["w"][0].mul_(2)

    def write_elsewhere(p):
        with torch.no_grad():
            torch.add(p["s"], 1, out=p["s"])

    def reentrant(p):
        return checkpoint(lambda x: x @ p["head"], p["odd"][:5] * 2, use_reentrant=True).sum()

    attempt("raises", raises)
    attempt("write", write)
    attempt("write elsewhere", write_elsewhere)
    attempt("address", lambda p: p["head"].data_ptr())
    attempt("reentrant", reentrant)
    attempt("sparse", lambda p: nn.functional.embedding(torch.tensor([0, 2]), p["head"], sparse=True).sum())
    attempt("kept", lambda p: kept.append(p["head"]) or p["s"] * 2)
    try:
        kept[0].sum()
    except RuntimeError as error:
        found["kept"] = str(error)
    # What is left of all that disturbs nothing.
    out, pullback = zf.vjp(lambda p: (p["head"], {"t": p["head"].t(), "s": p["s"] * 2}), TX, state)
    assert torch.equal(out[0], tree()["head"]) and torch.equal(out[1]["t"], out[0].t()) and type(out[0]) is torch.Tensor
    grads, *_ = pullback((torch.ones(5, 5, dtype=F64), {"t": torch.ones(5, 5, dtype=F64), "s": out[1]["s"] * 0 + 3}))
    assert torch.equal(grads["head"], torch.full_like(grads["head"], 2)) and grads["s"].tolist() in ([6.0], [])
    step = zf.make_step(lambda p: ((p["head"] ** 2).sum(), {"seen": p["head"]}), TX, donate=True)
    out, pullback = zf.vjp(lambda p: (p["head"] ** 2).sum(), TX, state)
    _new, metrics = step(state)
    assert torch.equal(metrics["aux"]["seen"], tree()["head"]) and type(metrics["aux"]["seen"]) is torch.Tensor
    try:
        pullback(torch.ones_like(out))
    except RuntimeError as error:
        found["donated"] = str(error)
    return found


def test_mistakes_are_told():
    told = {
        "raises": "ZeroDivisionError: mine",
        "write": "w = params['w'].clone() in a function of parameters",
        "write elsewhere": "w = params['w'].clone() in a function of parameters",
        "address": "kernel(params['w'].clone())",
        "reentrant": "write: use_reentrant=False",
        "sparse": "head: a gradient of layout torch.sparse_coo",
        "kept": "after the function that got it has returned",
        "donated": "call pullback before a step with donate=True",
    }
    for found in zf.launch(mistakes, 2, timeout=limit()):
        assert found.keys() == told.keys()
        for name, part in told.items():
            assert part in found[name], (name, found[name])


def plans_made(steps):
    """How often what is sent for blocks is found, and the parameters."""
    made, init = [], UnitPlans.__init__

    def counted(self, *given):
        made.append(given)
        init(self, *given)

    UnitPlans.__init__ = counted
    step, state = zf.make_step(lambda p: (p["head"] ** 2).sum() + p["s"] ** 2, TX), zf.init(TX, tree())
    for _ in range(steps):
        state, _ = step(state)
    return len(made), zf.full_params(TX, state)["head"]


def test_what_is_sent_is_found_once_for_all_steps():
    for made, head in zf.launch(plans_made, 2, 3, timeout=limit()):
        # Each step of `sgd(0.5)` on a square takes away as much as there is: nothing is left after the first.
        assert made == 1 and torch.equal(head, torch.zeros_like(head))


def compiled():
    block = torch.compile(layer, backend="aot_eager")
    out = []
    for mm in (layer, block):
        state = zf.init(TX, tree())
        step = zf.make_step(lambda p, x, mm=mm: run_blocks(p, x, range(4), mm).square().mean(), TX)
        for i in range(2):
            state, _metrics = step(state, data(0, i))
        out.append(torch.utils._pytree.tree_leaves(zf.full_params(TX, state)))
    return out


def test_compiled_blocks():
    for plain, fast in zf.launch(compiled, 2, timeout=limit()):
        for a, b in zip(plain, fast, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
