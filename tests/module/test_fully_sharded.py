"""Models of FSDP2's `fully_shard` are attached as they are: any chain without a reduction of its own."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from time_limits import limit
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerofn as zf

WIDTH, STEPS = 6, 3
FULL = StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """The bias of its head has one row: of that some ranks have none."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(2)]), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)


def by_fsdp2(model, mesh, **how):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def batch(rank, step, dtype=torch.float64):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=g, dtype=torch.float64).to(dtype)


def loss_of(model, rank, step):
    return model(batch(rank, step, next(model.parameters()).dtype)).square().mean()


def wholes(model):
    return {k: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for k, p in model.named_parameters()}


def labels(path):
    return "muon" if path.endswith(("up.weight", "down.weight")) else "rest"


CHAINS = {
    "adamw": lambda: (zf.adamw(1e-2, weight_decay=0.1),),
    "window and clip": lambda: (zf.accumulate(2), zf.clip_by_global_norm(0.3), zf.adamw(1e-2)),
    "sgd": lambda: (zf.sgd(1e-2, momentum=0.9),),
    "lion and ema": lambda: (zf.lion(1e-3), zf.ema(0.9)),
    "muon at owners": lambda: (zf.partition({"muon": zf.muon(1e-2), "rest": zf.adamw(1e-2)}, labels),),
    "offload": lambda: (zf.skip_nonfinite(), zf.offload(zf.adamw(1e-2))),
    "nearest": lambda: (zf.low_precision_adam(1e-2),),
    "stochastic": lambda: (zf.low_precision_adam(1e-2, rounding="stochastic"),),
}
LOW = ("nearest", "stochastic")


# ----------------------------------------------------------------------------------------------------------------------
# Every chain makes the numbers of `shard`, and of one process.


def trained(chain, rank, engine, mesh):
    """Parameters, norms of gradients and full states behind a few steps."""
    same = chain in LOW
    model = net(torch.bfloat16 if same else torch.float64)
    tx = zf.chain(*CHAINS[chain]())
    opt = zf.attach(by_fsdp2(model, mesh), tx) if engine == "FSDP2" else zf.attach(model, zf.chain(zf.shard(), tx))
    norms = []
    for step in range(STEPS):
        # Equal batches in a low precision: then the mean over ranks has no other rounding than one rank's gradient.
        loss_of(model, 0 if same else rank, step).backward()
        opt.step()
        opt.zero_grad()
        norms.append(float(opt.metrics["grad_norm"]))
    states = get_optimizer_state_dict(model, opt, options=FULL)["state"]
    if engine == "FSDP2":
        return wholes(model), norms, states
    with opt.gathered():
        return wholes(model), norms, states


def every_chain(every):
    """Of FSDP2 all, of `shard` every other one, or all."""
    mesh, rank = init_device_mesh("cpu", (torch.distributed.get_world_size(),)), torch.distributed.get_rank()
    cells = [(chain, "FSDP2") for chain in CHAINS] + [(chain, "ours") for chain in list(CHAINS)[:: 1 if every else 2]]
    return {(chain, engine): trained(chain, rank, engine, mesh) for chain, engine in cells}


def alone(chain, ranks):
    """One process, whose loss is the mean over what all ranks have."""
    same = chain in LOW
    model = net(torch.bfloat16 if same else torch.float64)
    opt = zf.attach(model, zf.chain(*CHAINS[chain]()))
    for step in range(STEPS):
        if same:
            loss_of(model, 0, step).backward()
        else:
            torch.stack([loss_of(model, rank, step) for rank in range(ranks)]).mean().backward()
        opt.step()
        opt.zero_grad()
    return wholes(model)


def leaves(tree, path=""):
    if isinstance(tree, dict):
        return {k: x for key, below in tree.items() for k, x in leaves(below, f"{path}/{key}").items()}
    return {path: tree} if isinstance(tree, torch.Tensor) else {}


@pytest.mark.parametrize(
    ("ranks", "every"), [(2, False), *(pytest.param(n, True, marks=pytest.mark.slow) for n in (1, 2, 3))]
)
def test_every_chain_makes_the_numbers_of_shard_and_of_one_process(ranks, every):
    found = zf.launch(every_chain, ranks, every, timeout=limit(120), threads=torch.get_num_threads())
    start = wholes(net())
    for chain in CHAINS:
        # FSDP2 sums gradients in another order than `shard`, and three ranks divide by no power of two.
        low, bound = chain in LOW, 1e-12
        if low and ranks == 3:
            continue
        want = alone(chain, ranks)
        for of_rank in found:
            params, norms, states = of_rank[chain, "FSDP2"]
            ours, our_norms, our_states = of_rank.get((chain, "ours"), (want, norms, states))
            assert params.keys() == ours.keys() == want.keys()
            for k in params:
                assert low or not torch.equal(params[k], start[k]), (chain, k)
                if low:
                    assert torch.equal(params[k], ours[k]) and torch.equal(params[k], want[k]), (chain, k)
                torch.testing.assert_close(params[k], ours[k], rtol=0, atol=bound)
                torch.testing.assert_close(params[k], want[k], rtol=0, atol=bound)
            # A metric is in fp32.
            assert norms == pytest.approx(our_norms, rel=1e-6)
            a, b = leaves(states), leaves(our_states)
            assert a.keys() == b.keys() and any("blocks.0.up.weight" in k for k in a)
            for k in a:
                assert a[k].shape == b[k].shape, (chain, k)
                torch.testing.assert_close(a[k].double(), b[k].double(), rtol=0, atol=bound)


# ----------------------------------------------------------------------------------------------------------------------
# Meshes of two axes: replicas of shards, and tensor parallelism beside FSDP2.


def replicas():
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = by_fsdp2(net(), mesh)
    opt = zf.attach(model, zf.chain(zf.clip_by_global_norm(0.3), zf.adamw(1e-2)))
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        opt.step()
        opt.zero_grad()
    return wholes(model)


def beside_tensor_parallelism():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = net()
    plan = {}
    for i in range(2):
        plan |= {f"blocks.{i}.up": ColwiseParallel(), f"blocks.{i}.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    by_fsdp2(model, mesh["dp"])
    opt = zf.attach(model, zf.chain(zf.clip_by_global_norm(0.3), zf.adamw(1e-2)))
    for step in range(STEPS):
        loss_of(model, mesh["dp"].get_local_rank(), step).backward()
        opt.step()
        opt.zero_grad()
    return wholes(model)


@pytest.mark.parametrize(("program", "batches"), [(replicas, 4), (beside_tensor_parallelism, 2)])
def test_meshes_of_two_axes(program, batches):
    model = net()
    opt = zf.attach(model, zf.chain(zf.clip_by_global_norm(0.3), zf.adamw(1e-2)))
    for step in range(STEPS):
        torch.stack([loss_of(model, rank, step) for rank in range(batches)]).mean().backward()
        opt.step()
        opt.zero_grad()
    for found in zf.launch(program, 4, timeout=limit(120)):
        for k, want in wholes(model).items():
            torch.testing.assert_close(found[k], want, rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# What people do with the model and the optimizer between steps.


def sharded(*members, **how):
    model = by_fsdp2(net(), init_device_mesh("cpu", (torch.distributed.get_world_size(),)), **how)
    return model, zf.attach(model, zf.chain(*members))


def beside_torch():
    """zerofn's adamw and torch's on the same FSDP2 model, in the same steps."""
    rank = torch.distributed.get_rank()
    out = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        for ours in (True, False):
            torch.manual_seed(0)
            model = by_fsdp2(Net(), init_device_mesh("cpu", (2,)), mp_policy=policy)
            if ours:
                opt = zf.attach(model, zf.adamw(1e-2, weight_decay=0.1))
            else:
                opt = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
            for step in range(STEPS):
                loss_of(model, rank, step).backward()
                opt.step()
                opt.zero_grad()
            out.append(wholes(model))
    return out


def faces():
    """What parameters, gradients and states are, and what has been written through them."""
    rank = torch.distributed.get_rank()
    model, opt = sharded(zf.adamw(1e-2))
    loss_of(model, rank, 0).backward()
    p = model.blocks[0].up.weight
    assert isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p in opt.state
    opt.step()
    m = opt.state[p]["exp_avg"]
    assert isinstance(m, DTensor) and m.placements == (Shard(0),) and m.shape == p.shape
    torch.testing.assert_close(m.full_tensor(), 0.1 * p.grad.full_tensor(), rtol=1e-12, atol=0)
    assert opt.param_groups[0]["params"][0] is next(model.parameters())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).full_tensor()
    assert float(norm) == pytest.approx(float(opt.metrics["grad_norm"]), rel=1e-12)
    # A write by hand is what the next step begins with, and a state that is written is what it uses.
    with torch.no_grad():
        p.zero_()
        m.zero_()
    p.grad.zero_()
    opt.param_groups[0]["lr"] = 0.5
    opt.step()
    assert not p.full_tensor().any()
    return True


def frozen():
    """A leaf that is frozen between steps keeps its value; all others go on."""
    rank = torch.distributed.get_rank()
    model, opt = sharded(zf.adamw(1e-2))
    for step in range(3):
        model.blocks[0].up.weight.requires_grad_(step != 1)
        before = wholes(model)
        loss_of(model, rank, step).backward()
        opt.step()
        opt.zero_grad()
        moved = {k for k, x in wholes(model).items() if not torch.equal(x, before[k])}
        assert ("blocks.0.up.weight" in moved) == (step != 1) and "blocks.1.up.weight" in moved
    return True


def in_between():
    """An evaluation before a step keeps full parameters of the root: they are not used after it."""
    rank = torch.distributed.get_rank()
    out = []
    for look in (False, True):
        model, opt = sharded(zf.sgd(0.1), zf.ema(0.5))
        for step in range(3):
            loss_of(model, rank, step).backward()
            if look:
                with torch.no_grad():
                    loss_of(model, rank, 9)
            opt.step()
            opt.zero_grad()
            with opt.averaged():
                seen = float(loss_of(model, rank, 7).detach())
        out.append((wholes(model), seen))
    for k, x in out[0][0].items():
        assert torch.equal(x, out[1][0][k])
    return out[0][1]


def deepspeed_spelling():
    """`opt.backward` needs no zero_grad; `zero_grad(set_to_none=False)` leaves zeros."""
    rank = torch.distributed.get_rank()
    out = []
    for ours in (True, False):
        model, opt = sharded(zf.sgd(0.1))
        for step in range(3):
            if ours:
                opt.backward(loss_of(model, rank, step))
            else:
                loss_of(model, rank, step).backward()
            opt.step()
            if not ours:
                opt.zero_grad(set_to_none=False)
                assert all(p.grad is not None and not p.grad.full_tensor().any() for p in model.parameters())
        out.append(wholes(model))
    for k, x in out[0].items():
        assert torch.equal(x, out[1][k])
    return True


def goes_on(directory):
    """A checkpoint of either engine goes on in the other, and a state dict in torch's optimizer."""
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def steps(model, opt, which):
        for step in which:
            loss_of(model, rank, step).backward()
            opt.step()
            opt.zero_grad()

    def fresh(engine):
        torch.manual_seed(3)
        model = Net().double()
        if engine == "FSDP2":
            model = by_fsdp2(model, mesh)
            return model, zf.attach(model, zf.adamw(1e-2))
        return model, zf.attach(model, zf.chain(zf.shard(), zf.adamw(1e-2)))

    def full(engine, model, opt):
        if engine == "FSDP2":
            return wholes(model)
        with opt.gathered():
            return wholes(model)

    found = {}
    for engine in ("FSDP2", "ours"):
        model, opt = fresh(engine)
        steps(model, opt, range(2))
        zf.save(f"{directory}/{engine}", opt)
        state = copy.deepcopy(opt.state_dict())
        steps(model, opt, range(2, 4))
        found[engine] = full(engine, model, opt)
        for other in ("FSDP2", "ours"):
            for how in ("checkpoint", "state dict")[: 1 + (other != engine)]:
                model, opt = fresh(other)
                if how == "checkpoint":
                    zf.load(f"{directory}/{engine}", like=opt)
                else:
                    opt.load_state_dict(state)
                steps(model, opt, range(2, 4))
                found[engine, other, how] = full(other, model, opt)
    return found


def detached():
    """A detached model is FSDP2's again, with its gradients, for torch's optimizers or another attach."""
    rank = torch.distributed.get_rank()
    model, opt = sharded(zf.sgd(0.1))
    loss_of(model, rank, 0).backward()
    opt.step()
    opt.detach()
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    other = torch.optim.SGD(model.parameters(), 0.1)
    other.zero_grad()
    loss_of(model, rank, 1).backward()
    other.step()
    again = zf.attach(model, zf.sgd(0.1))
    again.zero_grad()
    loss_of(model, rank, 2).backward()
    again.step()
    return wholes(model)


def test_a_step_of_adamw_has_the_bits_of_torch_over_the_same_model():
    for fp32, theirs, mixed, their_mixed in zf.launch(beside_torch, 2, timeout=limit(120)):
        for k in fp32:
            # Equal but for the order of the operations in a formula: torch's is written for each tensor, ours is C.
            torch.testing.assert_close(fp32[k], theirs[k], rtol=0, atol=1e-6)
            torch.testing.assert_close(mixed[k], their_mixed[k], rtol=0, atol=1e-6)


@pytest.mark.parametrize("program", [faces, frozen, deepspeed_spelling])
def test_between_steps(program):
    assert zf.launch(program, 2, timeout=limit(120)) == [True, True]


def test_full_parameters_that_fsdp2_keeps_are_dropped_by_a_step_and_by_averages():
    model = net()
    opt = zf.attach(model, zf.chain(zf.sgd(0.1), zf.ema(0.5)))
    for step in range(3):
        torch.stack([loss_of(model, rank, step) for rank in range(2)]).mean().backward()
        opt.step()
        opt.zero_grad()
    with opt.averaged():
        want = [float(loss_of(model, rank, 7).detach()) for rank in range(2)]
    assert zf.launch(in_between, 2, timeout=limit(120)) == pytest.approx(want, rel=1e-12)


def test_checkpoints_go_on_in_either_engine(tmp_path):
    for found in zf.launch(goes_on, 2, str(tmp_path), timeout=limit(120)):
        for key, params in found.items():
            for k, x in params.items():
                torch.testing.assert_close(x, found["FSDP2"][k], rtol=0, atol=1e-12, msg=str(key))


def test_a_detached_model_is_fsdp2s_again():
    model = net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        torch.stack([loss_of(model, rank, step) for rank in range(2)]).mean().backward()
        opt.step()
        opt.zero_grad()
    for found in zf.launch(detached, 2, timeout=limit(120)):
        for k, want in wholes(model).items():
            torch.testing.assert_close(found[k], want, rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# What is refused, by name.


def attached(*members, tx=None, **how):
    def go(mesh):
        return zf.attach(by_fsdp2(net(), mesh), tx or zf.chain(*members, zf.adamw(1e-2)), **how)

    return go


def of_blocks_alone(mesh):
    model = net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return zf.attach(model, zf.adamw(1e-2))


def by_columns(mesh):
    model = nn.Sequential(nn.Linear(6, 6))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim > 1 else None)
    return zf.attach(model, zf.adamw(1e-2))


def on_meta(mesh):
    with torch.device("meta"):
        model = Net()
    return zf.attach(by_fsdp2(model, mesh), zf.adamw(1e-2))


def materialized(mesh):
    with torch.device("meta"):
        model = Net()
    return zf.materialize(by_fsdp2(model, mesh), zf.adamw(1e-2))


def gathered(mesh):
    with attached()(mesh).gathered():
        pass


def moved(mesh):
    model = by_fsdp2(net(), mesh)
    opt = zf.attach(model, zf.adamw(1e-2))
    model.float()
    loss_of(model, 0, 0).backward()
    opt.step()


def writing_forward(how, steps=3, first=1, of="blocks.0.norm", optimizer=None, **fsdp2):
    """A forward that writes into a parameter, from the step `first` on."""

    def go(mesh):
        model = by_fsdp2(net(), mesh, **fsdp2)
        opt = zf.attach(model, zf.adamw(1e-2)) if optimizer is None else optimizer(model.parameters(), 1e-2)
        for step in range(steps):
            if step == first:
                model.get_submodule(of).register_forward_pre_hook(lambda m, x: how(m.weight))
            loss_of(model, 0, step).backward()
            opt.step()
            opt.zero_grad()
        return wholes(model)

    return go


def writing_through_data(mesh):
    """FSDP2 loses it as under torch.optim; no version counts it, so no step can tell."""

    def write(w):
        w.data.mul_(0.9)

    for of in ("blocks.0.norm", "head"):
        found = writing_forward(write, of=of)(mesh)
        want = writing_forward(write, of=of, optimizer=torch.optim.AdamW)(mesh)
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def decays(w):
    with torch.no_grad():
        w.mul_(0.9)


def decays_in_inference_mode(w):
    with torch.inference_mode():
        w.mul_(0.9)


def after_attach(change, *members):
    """A model that is changed by torch after `zf.attach`, and a step of it."""

    def go(mesh):
        model = net()
        opt = zf.attach(model, zf.chain(*members, zf.adamw(1e-2)))
        change(model, mesh)
        loss_of(model, 0, 0).backward()
        opt.step()

    return go


def by_tensor_parallelism(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


LATE = "blocks.0.up.weight: made a DTensor by fully_shard.*write: fully_shard .* first.*without shard, reduce_scatter"


REFUSED = {
    "shard": (attached(zf.shard()), ValueError, "shard in the chain.*reduces gradients already.*without shard"),
    "all_reduce": (attached(zf.all_reduce()), ValueError, "all_reduce in the chain"),
    "reduce_scatter": (attached(zf.reduce_scatter()), ValueError, "reduce_scatter in the chain"),
    "precision": (attached(zf.precision(param_dtype=torch.bfloat16)), ValueError, "precision.*MixedPrecisionPolicy"),
    "scale_loss": (attached(zf.scale_loss()), ValueError, "scale_loss in the chain.*before fully_shard"),
    "in_backward": (attached(in_backward=True), ValueError, "in_backward=True.*step"),
    "blocks alone": (of_blocks_alone, ValueError, "head.weight.*fully_shard leaves out"),
    "columns": (by_columns, ValueError, "0.weight.*not sharded by rows"),
    "meta": (on_meta, ValueError, "blocks.0.up.weight.*meta.*to_empty"),
    "materialize": (materialized, ValueError, "materialize.*to_empty"),
    "gathered": (gathered, RuntimeError, "gathered.*full_tensor"),
    "moved": (moved, RuntimeError, "blocks.0.up.weight.*other memory.*before zf.attach"),
    "a write in forward": (writing_forward(decays), RuntimeError, "blocks.0.norm.weight: written in forward.*buffer"),
    "a write in the first forward, outside of blocks": (
        writing_forward(decays, first=0, of="head"),
        RuntimeError,
        "head.weight: written in forward.*buffer",
    ),
    "a write into what FSDP2 keeps": (
        writing_forward(decays, of="blocks.1.up", reshard_after_forward=False),
        RuntimeError,
        "blocks.1.up.weight: written in forward.*buffer",
    ),
    "a write in inference mode": (
        writing_forward(decays_in_inference_mode),
        RuntimeError,
        "blocks.0.norm.weight: written in forward.*buffer",
    ),
    "a write through .data": (writing_through_data, None, ""),
    "no write in forward": (writing_forward(lambda w: None), None, ""),
    "after attach: shard": (
        after_attach(by_fsdp2, zf.shard()),
        RuntimeError,
        "fully_shard.* after zf.attach.*shard has sharded the parameter blocks.0.norm.weight.*first, then zf.attach",
    ),
    "after attach: all_reduce": (after_attach(by_fsdp2, zf.all_reduce()), RuntimeError, LATE),
    "after attach: reduce_scatter": (after_attach(by_fsdp2, zf.reduce_scatter()), RuntimeError, LATE),
    "after attach: local": (after_attach(by_fsdp2, zf.local()), RuntimeError, LATE),
    "after attach: tensor parallelism": (after_attach(by_tensor_parallelism, zf.all_reduce()), RuntimeError, LATE),
}


def refusals():
    """What each program raises: the class, and the message on one line."""
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, (program, _, _) in REFUSED.items():
        try:
            program(mesh)
            found[name] = "nothing", ""
        except Exception as error:
            found[name] = type(error).__name__, " ".join(str(error).split())
    return found


def test_what_fsdp2_does_itself_is_refused_by_name():
    for found in zf.launch(refusals, 2, timeout=limit(120)):
        for name, (_, kind, words) in REFUSED.items():
            raised, message = found[name]
            assert raised == ("nothing" if kind is None else kind.__name__), (name, raised, message)
            assert re.search(words, message), (name, message)
