"""Models that torch's tensor parallelism has cut are attached along the other axis of the mesh."""

import contextlib
import functools

import pytest
import tensor_parallel as T
import torch
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from units_alive import UnitsAlive

import zerofn as zf

STEPS = 30
# Sums over ranks and over columns are made in another order; thirty steps of Adam in float64 carry that on.
BOUND = 1e-11


def stages(dp):
    return {
        "nothing": (),
        "all_reduce": (zf.all_reduce(dp),),
        "window, all_reduce": (zf.accumulate(2), zf.all_reduce(dp)),
        "reduce_scatter": (zf.reduce_scatter(dp),),
        "window, reduce_scatter": (zf.accumulate(2), zf.reduce_scatter(dp)),
        "reduce_scatter, window": (zf.reduce_scatter(dp), zf.accumulate(2)),
        "shard": (zf.shard(dp),),
        "shard, window": (zf.shard(dp), zf.accumulate(2)),
    }


def rest():
    return zf.clip_by_global_norm(0.05), zf.adamw(lr=1e-2)


def every_stage(size, names):
    """Of each stage parameters and norms."""
    dp, tp = T.axes(size, 2)
    out = {}
    for name in names:
        model = T.cut(tp)
        opt = zf.attach(model, zf.chain(*stages(dp)[name], *rest()))
        norms = T.train(model, opt, STEPS, dp)
        opt.detach()
        out[name] = T.wholes(model), norms
    return out


@functools.cache
def alone(windows):
    return T.alone(zf.chain(*([zf.accumulate(2)] if windows else []), *rest()), STEPS)


def check(found):
    for of_rank in found:
        for name, (got, norms) in of_rank.items():
            want, told = alone("window" in name)
            assert T.difference(got, want) < BOUND, name
            assert norms == pytest.approx(told, rel=BOUND), name


def test_over_two_ranks_of_tensor_parallelism_it_is_one_process():
    check(zf.launch(every_stage, 2, 1, ["nothing", "all_reduce", "shard"], timeout=limit()))


@pytest.mark.slow
def test_on_a_mesh_of_both_axes_every_stage_is_one_process():
    names = [name for name in stages(None) if name != "nothing"]
    check(zf.launch(every_stage, 4, 2, names, timeout=limit(120)))


def norms_by_kernel():
    """Norms of a first step that no clip asks for: the kernel of low-precision Adam finds them leaf by leaf."""
    dp, tp = T.axes(1, 2)
    found = []
    for stage in ((), (zf.shard(dp),)):
        model = T.cut(tp, torch.float32)
        opt = zf.attach(model, zf.chain(*stage, zf.low_precision_adam(lr=1e-2)))
        found += T.train(model, opt, 1, dp, torch.float32)
        opt.detach()
    return found


def test_norms_that_a_kernel_finds_count_a_leaf_that_several_ranks_hold_once():
    _, (want,) = T.alone(zf.low_precision_adam(lr=1e-2), 1, torch.float32)
    assert want > 0.1
    # Gradients are sums of some tens of fp32 products, in another order.
    assert zf.launch(norms_by_kernel, 2, timeout=limit()) == [[pytest.approx(want, rel=1e-5)] * 2] * 2


BLOCKS = 6


def deep():
    torch.manual_seed(0)
    return nn.Sequential(*(T.Block() for _ in range(BLOCKS))).to(T.BEFORE)


def called(model, how):
    """A forward and a backward; `how` is what stands around the blocks."""
    (x, _) = T.batch(0)
    for block in model:
        call = functools.partial(checkpoint, block, use_reentrant=False) if how == "checkpoint" else block
        with torch.autograd.graph.save_on_cpu() if how == "save_on_cpu" else contextlib.nullcontext():
            x = call(x)
    x.square().mean().backward()


def gathered_at_once(how):
    """The most blocks that were gathered at a time; how far a step is from a plain one."""
    dp, tp = T.axes(2, 1)
    plan = {}
    for i in range(BLOCKS):
        plan |= {f"{i}.up": ColwiseParallel(), f"{i}.down": RowwiseParallel()}
    model = parallelize_module(deep(), tp, plan)
    opt = zf.attach(model, zf.chain(zf.shard(dp), zf.sgd(0.1)))
    alive = UnitsAlive(opt)
    called(model, how)
    called(plain := deep(), how)
    opt.step()
    opt.detach()
    far = 0.0
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        far = max(far, float((T.whole(p) - (q - 0.1 * q.grad).detach()).abs().max() / q.grad.abs().max()))
    return alive.most, far


@pytest.mark.parametrize("how", ["plain", "checkpoint", "save_on_cpu"])
def test_of_distributed_blocks_two_are_gathered_at_a_time(how):
    for most, far in zf.launch(gathered_at_once, 2, how, timeout=limit()):
        assert most <= 2 and far < BOUND


def said_of(x):
    return tuple(x.shape), tuple(x.size()), x.numel(), x.ndim, len(x), x.stride()


def shapes_of_shards():
    """What parameters and gradients say of their sizes under `shard`, and the same of one process."""
    dp, tp = T.axes(2, 2)
    model, plain = T.cut(tp), T.plain()
    opt = zf.attach(model, zf.chain(zf.shard(dp), zf.sgd(0.1)))
    for m in (model, plain):
        x, y = T.batch(0)
        ((m(x) - y) ** 2).mean().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        seen = [p, p.grad, p.data, p.detach(), p.grad * 2, model.state_dict()[name]]
        assert [said_of(x) for x in seen] == [said_of(q)] * len(seen), name
        assert name in repr(p) and f"shape={tuple(q.shape)}" in repr(p) and f"shape={tuple(q.shape)}" in repr(p.grad)
        assert sum(x.numel() for x in [p.grad.to_local()]) < q.numel()
    kept = {name: x.clone() for name, x in model.state_dict().items()}
    opt.step()
    opt.detach()
    return len(kept)


def test_under_shard_distributed_parameters_have_the_shapes_of_the_whole():
    assert zf.launch(shapes_of_shards, 4, timeout=limit()) == [15] * 4


def dtypes():
    """Chains with dtypes and states of their own, each with how far it may be from one process.

    A bf16 number has 2^-9, twenty steps of Adam make that about 1e-2 of the change. Where an axis cuts columns,
    stochastic rounding draws other numbers for an element: 2^-9 of a moment, and less of an fp32 parameter's change.
    """
    return {
        "seen in bf16": ((zf.precision(param_dtype=torch.bfloat16), *rest()), 4e-2),
        "scaled": ((zf.scale_loss(init_scale=2.0**20, growth_interval=3), *rest()), 1e-5),
        "moments in bf16": ((zf.clip_by_global_norm(0.5), zf.low_precision_adam(1e-2)), 2e-2),
        "average": ((*rest(), zf.ema(0.9)), 1e-5),
    }


def with_dtypes():
    dp, tp = T.axes(1, 2)
    out = {}
    for name, (chain, _) in dtypes().items():
        model = T.cut(tp, torch.float32)
        opt = zf.attach(model, zf.chain(zf.shard(dp), *chain))
        T.train(model, opt, 20, dp, dtype=torch.float32)
        opt.detach()
        out[name] = T.wholes(model)
    return out


def test_dtypes_scales_and_averages_are_those_of_one_process():
    first, second = zf.launch(with_dtypes, 2, timeout=limit(90))
    for name, (chain, bound) in dtypes().items():
        want, _ = T.alone(zf.chain(*chain), 20, dtype=torch.float32)
        assert T.difference(first[name], want, torch.float32) < bound, name
        assert all(torch.equal(x, second[name][path]) for path, x in first[name].items()), name


def faces():
    """What a user finds in an attached model, and when it is detached."""
    dp, tp = T.axes(1, 2)
    model = T.cut(tp)
    old = dict(model.named_parameters())
    before = {name: T.whole(p) for name, p in old.items()}
    opt = zf.attach(model, zf.chain(zf.all_reduce(dp), *rest()))
    w, bias = model.blocks[0].up.weight, model.blocks[0].down.bias
    out = {"shape": tuple(w.shape), "norm": w.norm().full_tensor().item(), "bias": bias.norm().full_tensor().item()}
    out["norms expected"] = [float(before[f"blocks.0.{n}"].norm()) for n in ("up.weight", "down.bias")]
    state = model.state_dict()
    out["state"] = all(torch.equal(T.whole(state[name]), x) for name, x in before.items())
    out["kinds"] = sorted(name for name, x in state.items() if isinstance(x, DTensor))
    # A penalty from outside of the model has the derivative that it has in one process.
    (w**2).sum().full_tensor().backward()
    out["penalty"] = bool(torch.equal(T.whole(w.grad), 2 * before["blocks.0.up.weight"]))
    (grad,) = torch.autograd.grad((w**2).sum().full_tensor(), w)
    out["grad"] = bool(torch.equal(T.whole(grad), 2 * before["blocks.0.up.weight"]))
    opt.zero_grad()
    given = []
    handle = w.register_hook(lambda g: given.append(type(g)) or g * 0)
    x, y = T.batch(0)
    ((model(x) - y) ** 2).mean().backward()
    handle.remove()
    out["hook"] = given == [DTensor] and float(T.whole(w.grad).abs().max()) == 0.0
    with torch.no_grad():
        w.mul_(2.0)
    out["written"] = bool(torch.equal(w.full_tensor(), 2 * before["blocks.0.up.weight"]))
    model.load_state_dict({name: state[name] * 0 + 1 for name in state})
    out["loaded"] = all(bool((T.whole(p.detach()) == 1).all()) for p in model.parameters())
    messages = []
    for wrong in (
        lambda: w.mul_(2.0),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: (old["blocks.0.up.weight"] ** 2).sum().full_tensor().backward(),
        lambda: opt.state_dict(),
        lambda: zf.full_params(opt.tx, opt.state),
    ):
        try:
            wrong()
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
    opt.detach()
    now = dict(model.named_parameters())
    out["same objects"] = all(now[name] is p for name, p in old.items())
    out["values"] = all(bool((T.whole(p) == 1).all()) for p in now.values())
    return out, messages


def test_parameters_stay_distributed_to_whoever_looks_at_them():
    for found, messages in zf.launch(faces, 2, timeout=limit()):
        assert found["shape"] == (8, T.WIDTH)
        assert [found["norm"], found["bias"]] == pytest.approx(found["norms expected"], rel=1e-12)
        names = ("up.weight", "up.bias", "down.weight", "down.bias")
        assert found["kinds"] == sorted(["gain", *(f"blocks.{i}.{n}" for i in range(2) for n in names)])
        for what in ("state", "penalty", "grad", "hook", "written", "loaded", "same objects", "values"):
            assert found[what], what
        written, clipped, stale, state, pure = messages
        assert "requires a gradient" in written
        # Torch's own words: `gain` is a plain parameter beside DTensors.
        assert "got mixed torch.Tensor and DTensor" in clipped
        assert "model.get_parameter(path)" in stale
        assert "zf.save(directory, opt)" in state
        assert "zf.full_params" in pure and "opt.step()" in pure


def refusals():
    """By what was wrong: the message."""
    dp, tp = T.axes(1, 2)
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    out = {}

    def attempt(name, model, tx=None, **how):
        before = dict(model.named_parameters())
        try:
            zf.attach(model, tx or zf.chain(zf.all_reduce(dp), *rest()), **how)
        except ValueError as error:
            out[name] = str(error)
        assert all(p is before[path] for path, p in model.named_parameters())
        assert all(T.whole(p).isfinite().all() for p in model.parameters())

    def with_weight(x):
        model = T.cut(tp)
        model.blocks[1].up.weight = nn.Parameter(x)
        return model

    local = torch.ones(8, T.WIDTH, dtype=torch.float64)
    attempt("partial", with_weight(DTensor.from_local(local, tp, [Partial()])))
    attempt("two axes", with_weight(distribute_tensor(local, both, [Replicate(), Shard(0)])))
    hooked = T.cut(tp)
    hooked.blocks[1].up.weight.register_hook(lambda g: g)
    attempt("hooks", hooked)
    attempt("over its own ranks", T.cut(tp), zf.chain(zf.shard(), *rest()))
    attempt("muon", T.cut(tp), zf.chain(zf.all_reduce(dp), zf.muon(lr=0.1)))
    attempt("in backward", T.cut(tp), zf.chain(zf.all_reduce(dp), zf.adamw(lr=0.1)), in_backward=True)
    try:
        zf.init(zf.adamw(lr=0.1), dict(T.cut(tp).named_parameters()))
    except TypeError as error:
        out["pure"] = str(error)
    return out


def test_what_cannot_be_attached_is_refused_by_path_and_the_model_is_as_it_was():
    for found in zf.launch(refusals, 2, timeout=limit()):
        for name, why, right in (
            ("partial", "is a sum that is not made yet", "p.redistribute(placements=[Replicate()])"),
            ("two axes", "lies over 2 axes of a mesh (dp, tp)", "parallelize_module(model, mesh['tp'], plan)"),
            ("hooks", "has hooks", "after zf.attach"),
            ("in backward", "a DTensor", "zf.attach(model, tx)"),
            ("muon", "needs='leaf'", "zf.partition"),
        ):
            assert "blocks.1.up.weight" in found[name], name
            assert why in found[name] and right in found[name], found[name]
        assert "ranks [0, 1] have different parts" in found["over its own ranks"]
        assert "zf.shard(mesh['dp'])" in found["over its own ranks"]
        assert "a DTensor" in found["pure"] and "zf.attach(model, tx)" in found["pure"]


def other_meshes():
    """Of ranks that are not in the mesh of a parameter, and of parameters over two meshes."""
    dp, tp = T.axes(2, 2)
    model = T.cut(tp)
    model.head.weight = nn.Parameter(distribute_tensor(torch.ones(3, T.WIDTH, dtype=torch.float64), dp, [Shard(0)]))
    try:
        zf.attach(model, zf.chain(*rest()))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_parameters_over_two_meshes_are_refused():
    for rank, message in enumerate(zf.launch(other_meshes, 4, timeout=limit())):
        assert "head.weight" in message and "lies over ranks" in message, rank


def gradients_of_both_kinds():
    """Classes and shapes of what `torch.autograd.grad` gives of plain parameters and DTensors together."""
    dp, tp = T.axes(2, 2)
    model = T.cut(tp)
    opt = zf.attach(model, zf.chain(zf.shard(dp), zf.sgd(0.1)))
    x, y = T.batch(0, dp.get_local_rank(), 2)
    assert type(torch.neg(input=model.blocks[0].up.bias)) is DTensor
    found, params = [], [model.blocks[0].norm.weight, model.blocks[0].up.weight]
    for order in (params, params[::-1]):
        gradients = torch.autograd.grad(((model(x) - y) ** 2).mean(), order)
        found.append([(type(g).__name__, tuple(g.shape)) for g in gradients])
    opt.detach()
    return found


def test_gradients_of_plain_parameters_and_dtensors_together_are_parts_of_both():
    norm, up = ("Face", (6,)), ("Opaque", (8, 6))
    assert zf.launch(gradients_of_both_kinds, 4, timeout=limit()) == [[[norm, up], [up, norm]]] * 4
