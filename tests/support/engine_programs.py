"""Programs that people write, for any engine that shards a model: what a model is called with between two steps.

`PROGRAMS[name](engine, rank)` returns tensors by name. `engine.attach(model)` returns what has `step()`, `zero_grad()`
and `full()`, the full parameters by name. `Averaged` is the reference: plain models, whose gradients are averaged over
ranks by hand.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import zerofn as zf

WORDS, WIDTH, LENGTH = 11, 8, 6
RATE = 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def feed(self, x):
        return self.down(F.gelu(self.up(self.norm2(x))))

    def forward(self, x):
        x = x + self.out(torch.tanh(self.mix(self.norm(x))).cumsum(-2) / 4)
        return x + self.feed(x)


class Net(nn.Module):
    """`call(block, h)` runs a block; programs replace it."""

    def __init__(self, tied=False):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def call(self, i, block, h):
        return block(h)

    def forward(self, ids=None, h=None, features=False):
        h = self.words(ids) + self.places(torch.arange(ids.shape[1])) if h is None else h
        for i, block in enumerate(self.blocks):
            h = self.call(i, block, h)
        h = self.norm(h)
        return h if features else self.head(h)


def net(kind=Net, seed=0, **how):
    torch.manual_seed(seed)
    return kind(**how).double()


def batch(rank, step=0):
    g = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(WORDS, (2, LENGTH + 1), generator=g)
    return ids[:, :-1], ids[:, 1:]


def features(rank, step=0):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, LENGTH, WIDTH, generator=g, dtype=torch.float64)


def cross_entropy(out, target):
    return F.cross_entropy(out.flatten(0, -2), target.flatten())


def usual(model, rank, step):
    x, y = batch(rank, step)
    return cross_entropy(model(x), y)


def in_full(x):
    return x.full_tensor() if isinstance(x, DTensor) or hasattr(x, "full_tensor") else x


# ----------------------------------------------------------------------------------------------------------------------
# Engines. `mean` is what other ranks' gradients make of one that `torch.autograd.grad` returns.


class Mean(torch.autograd.Function):
    """Each rank has the same function of the mean, and gradients are averaged once more behind it."""

    @staticmethod
    def forward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g / dist.get_world_size()

    @staticmethod
    def backward(ctx, g):
        return g


class Averaged:
    """Plain models. `step()` averages gradients over ranks, and is plain SGD."""

    name = "averaged"
    mean = staticmethod(Mean.apply)

    def attach(self, model):
        self.model = model
        return self

    def average(self):
        for p in self.model.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    @torch.no_grad()
    def step(self):
        self.average()
        for p in self.model.parameters():
            if p.requires_grad:
                p -= RATE * p.grad

    def zero_grad(self):
        self.model.zero_grad()

    def full(self):
        return {k: p.detach().clone() for k, p in self.model.named_parameters()}


class Ours:
    name = "shard"
    mean = staticmethod(lambda g: g)

    def attach(self, model):
        self.model = model
        self.opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(RATE)))
        self.step, self.zero_grad = self.opt.step, self.opt.zero_grad
        return self

    def full(self):
        with self.opt.gathered():
            return {k: p.detach().clone() for k, p in self.model.named_parameters()}


class Fsdp2:
    name = "FSDP2"
    mean = staticmethod(lambda g: g)

    def attach(self, model):
        self.model, mesh = model, init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.set_reduce_scatter_unused_params(True)
        self.opt = zf.attach(model, zf.sgd(RATE))
        self.step, self.zero_grad = self.opt.step, self.opt.zero_grad
        return self

    def full(self):
        return {k: in_full(p).detach().clone() for k, p in self.model.named_parameters()}


# ----------------------------------------------------------------------------------------------------------------------
# Programs.


PROGRAMS = {}


def program(fn):
    PROGRAMS[fn.__name__.replace("_", " ")] = fn
    return fn


def stepped(engine, model, backward, steps=2):
    """Full parameters after steps, before each of which `backward(model, step)` has run."""
    opt = engine.attach(model)
    for step in range(steps):
        backward(model, step)
        opt.step()
        opt.zero_grad()
    return opt.full()


def trained(engine, model, rank, loss=usual):
    return stepped(engine, model, lambda model, step: loss(model, rank, step).backward())


@program
def tied_weights(engine, rank):
    return trained(engine, net(tied=True), rank)


@program
def tied_across_blocks(engine, rank):
    model = net()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return trained(engine, model, rank)


@program
def frozen_parameters(engine, rank):
    model = net()
    for path, p in model.named_parameters():
        p.requires_grad_("up" not in path and "words" not in path and "blocks.1" not in path)
    return trained(engine, model, rank)


@program
def a_leaf_unused_on_one_rank(engine, rank):
    class Some(Block):
        def forward(self, x):
            return super().forward(x) if rank == 0 else x + self.down(F.gelu(self.up(x)))

    model = net()
    model.blocks[1].__class__ = Some
    return trained(engine, model, rank)


@program
def a_block_skipped_on_one_rank(engine, rank):
    class Skips(Net):
        def call(self, i, block, h):
            return h if (i, rank) == (1, 1) else block(h)

    return trained(engine, net(Skips), rank)


@program
def several_forwards_then_backward(engine, rank):
    def loss(model, rank, step):
        x, y = batch(rank, step)
        first, second = model(x), model(x.flip(0))
        return cross_entropy(first, y) + 0.5 * cross_entropy(second, y)

    return trained(engine, net(), rank, loss)


@program
def retain_graph(engine, rank):
    def backward(model, step):
        loss = usual(model, rank, step)
        loss.backward(retain_graph=True)
        (2 * loss).backward()

    return stepped(engine, net(), backward)


@program
def backward_with_a_gradient(engine, rank):
    def backward(model, step):
        out = model(batch(rank, step)[0])
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out) / 50)

    return stepped(engine, net(), backward)


@program
def gradients_by_inputs(engine, rank):
    opt = engine.attach(net())
    h = features(rank).requires_grad_()
    (g,) = torch.autograd.grad(opt.model(h=h).square().mean(), h)
    return {"by inputs": g}


@program
def gradients_by_parameters(engine, rank):
    opt = engine.attach(net())
    params = list(opt.model.parameters())
    grads = torch.autograd.grad(usual(opt.model, rank, 0), params)
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    opt.step()
    return opt.full()


@program
def a_penalty_on_gradients_of_parameters(engine, rank):
    def backward(model, step):
        loss = usual(model, rank, step)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + 0.1 * sum(engine.mean(g).square().sum() for g in grads)).backward()

    return stepped(engine, net(), backward)


@program
def a_gradient_penalty(engine, rank):
    def loss(model, rank, step):
        h = features(rank, step).requires_grad_()
        out = model(h=h).square().mean()
        (g,) = torch.autograd.grad(out, h, create_graph=True)
        return out + 100 * g.square().sum()

    return trained(engine, net(), rank, loss)


def of_blocks(reentrant):
    class Net2(Net):
        def call(self, i, block, h):
            return checkpoint(block, h, use_reentrant=reentrant)

    return lambda engine, rank: trained(engine, net(Net2), rank)


def inside_blocks(reentrant):
    class Block2(Block):
        def feed(self, x):
            return checkpoint(super().feed, x, use_reentrant=reentrant)

    def go(engine, rank):
        model = net()
        for block in model.blocks:
            block.__class__ = Block2
        return trained(engine, model, rank)

    return go


for reentrant in (False, True):
    kind = "reentrant" if reentrant else "plain"
    PROGRAMS[f"{kind} checkpoints of blocks"] = of_blocks(reentrant)
    PROGRAMS[f"{kind} checkpoints inside blocks"] = inside_blocks(reentrant)


@program
def a_tied_head_in_the_loss(engine, rank):
    def loss(model, rank, step):
        x, y = batch(rank, step)
        return cross_entropy(model(x, features=True) @ model.words.weight.T, y)

    return trained(engine, net(tied=True), rank, loss)


@program
def a_weight_penalty_in_the_loss(engine, rank):
    def loss(model, rank, step):
        return usual(model, rank, step) + 0.01 * sum(p.square().sum() for p in model.parameters())

    return trained(engine, net(), rank, loss)


@program
def an_evaluation_on_one_rank(engine, rank):
    opt = engine.attach(net())
    found = {}
    for step in range(2):
        usual(opt.model, rank, step).backward()
        opt.step()
        opt.zero_grad()
        if (rank, step) == (0, 0):
            with torch.no_grad():
                found["evaluated"] = opt.model(batch(7)[0])
    return {**found, **opt.full()}


@program
def an_exception_in_forward(engine, rank):
    class Fails(Block):
        fails = False

        def forward(self, x):
            x = super().forward(x)
            if self.fails:
                raise ValueError("the user's")
            return x

    model = net()
    model.blocks[1].__class__ = Fails
    opt = engine.attach(model)
    for step in range(3):
        model.blocks[1].fails = step == 1
        try:
            usual(model, rank, step).backward()
            opt.step()
        except ValueError:
            assert step == 1
        opt.zero_grad()
    return opt.full()


def fails_in_backward(reset):
    class Fails(torch.autograd.Function):
        fails = False

        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            if Fails.fails:
                raise ValueError("the user's")
            return g

    class Block2(Block):
        def feed(self, x):
            return self.down(F.gelu(Fails.apply(self.up(self.norm2(x)))))

    def go(engine, rank):
        model = net()
        model.blocks[1].__class__ = Block2
        opt = engine.attach(model)
        for step in range(3):
            Fails.fails = step == 1
            try:
                usual(model, rank, step).backward()
                opt.step()
            except ValueError:
                assert step == 1
            opt.zero_grad()
            if reset and hasattr(model, "reset_iter_state"):
                model.reset_iter_state()
        return opt.full()

    return go


PROGRAMS["an exception in backward"] = fails_in_backward(reset=False)
PROGRAMS["an exception in backward, then reset_iter_state"] = fails_in_backward(reset=True)


@program
def uneven_leaves(engine, rank):
    return trained(engine, odd(scale=False), rank, odd_loss)


@program
def a_number_as_a_parameter(engine, rank):
    return trained(engine, odd(scale=True), rank, odd_loss)


class Odd(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7)) for _ in range(2)])
        self.row, self.head = nn.Parameter(torch.ones(1, 7)), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.ones(())) if scale else 1.0

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.head(x * self.row)


def odd(scale):
    torch.manual_seed(0)
    return Odd(scale).double()


def odd_loss(model, rank, step):
    g = torch.Generator().manual_seed(2 * step + rank)
    return model(torch.randn(3, 7, generator=g, dtype=torch.float64)).square().mean()


@program
def a_checkpoint_of_dcp(engine, rank):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    first = net()
    trained(engine, first, rank)
    dcp.save({"model": get_model_state_dict(first)}, checkpoint_id=os.path.join(folder[0], "saved"))
    second = net(seed=1)
    opt = type(engine)().attach(second)
    saved = {"model": get_model_state_dict(second)}
    dcp.load(saved, checkpoint_id=os.path.join(folder[0], "saved"))
    set_model_state_dict(second, saved["model"])
    usual(second, rank, 5).backward()
    opt.step()
    return opt.full()


@program
def clip_grad_norm(engine, rank):
    opt, norms = engine.attach(net()), []
    for step in range(2):
        usual(opt.model, rank, step).backward()
        if isinstance(engine, Averaged):
            engine.average()
        norms.append(float(in_full(nn.utils.clip_grad_norm_(opt.model.parameters(), 0.1))))
        opt.step()
        opt.zero_grad()
    return {"norms": torch.tensor(norms, dtype=torch.float64), **opt.full()}


@program
def averages_by_hand(engine, rank):
    opt = engine.attach(net())
    means = {k: p.detach().clone() for k, p in opt.model.named_parameters()}
    for step in range(3):
        usual(opt.model, rank, step).backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for k, p in opt.model.named_parameters():
                means[k].lerp_(p, 0.1)
    return {k: torch.as_tensor(in_full(x)).clone() for k, x in means.items()}


@program
def compiled_blocks(engine, rank):
    model = net()
    if not isinstance(engine, Averaged):
        model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")
    return {k.replace("_orig_mod.", ""): x for k, x in trained(engine, model, rank).items()}


@program
def jvp_of_the_model(engine, rank):
    opt = engine.attach(net())
    return {"tangent": torch.func.jvp(lambda h: opt.model(h=h), (features(rank),), (features(rank, 1),))[1]}


@program
def vmap_of_gradients_by_inputs(engine, rank):
    opt = engine.attach(net())
    grad = torch.func.grad(lambda h: opt.model(h=h[None]).square().mean())
    return {"by inputs": torch.func.vmap(grad)(features(rank))}


@program
def a_block_called_twice(engine, rank):
    class Again(Net):
        def forward(self, ids):
            return super().forward(h=self.blocks[0](self.words(ids)))

    return trained(engine, net(Again), rank)


@program
def two_backwards_then_a_step(engine, rank):
    def backward(model, step):
        for i in range(2):
            usual(model, rank, 2 * step + i).backward()

    return stepped(engine, net(), backward)


@program
def words_generated_between_steps(engine, rank):
    opt, found = engine.attach(net()), {}
    for step in range(2):
        usual(opt.model, rank, step).backward()
        opt.step()
        opt.zero_grad()
        ids = batch(rank, step)[0]
        with torch.inference_mode():
            for _ in range(4):
                ids = torch.cat([ids, opt.model(ids[:, -LENGTH:])[:, -1:].argmax(-1)], 1)
        found[f"words {step}"] = ids.double()
    return found | opt.full()


@program
def an_evaluation_before_backward(engine, rank):
    def loss(model, rank, step):
        found = usual(model, rank, step)
        with torch.no_grad():
            model(batch(rank, 9)[0])
        return found

    return trained(engine, net(), rank, loss)


@program
def inference_mode_first(engine, rank):
    opt = engine.attach(net())
    with torch.inference_mode():
        opt.model(batch(rank)[0])
    usual(opt.model, rank, 0).backward()
    opt.step()
    return opt.full()


@program
def an_output_written_in_place(engine, rank):
    class Halves(Net):
        def call(self, i, block, h):
            return block(h).mul_(0.5)

    return trained(engine, net(Halves), rank)


@program
def a_dict_with_a_view_written_in_place(engine, rank):
    class Gives(Block):
        def forward(self, x):
            return {"h": super().forward(x)[:, :]}

    class Takes(Net):
        def call(self, i, block, h):
            h = block(h)["h"]
            h *= 0.5
            return h

    model = net(Takes)
    for block in model.blocks:
        block.__class__ = Gives
    return trained(engine, model, rank)


@program
def a_write_into_a_parameter_in_forward(engine, rank):
    class Decays(Block):
        def forward(self, x):
            with torch.no_grad():
                self.down.weight.mul_(0.9)
            return super().forward(x)

    model = net()
    model.blocks[1].__class__ = Decays
    return trained(engine, model, rank)


@program
def recurrent_blocks(engine, rank):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2)])
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)[0]
            return self.head(x)

    def loss(model, rank, step):
        return model(features(rank, step)).square().mean()

    return trained(engine, net(Recurrent), rank, loss)


@program
def a_module_called_from_outside(engine, rank):
    def loss(model, rank, step):
        ones = torch.ones(2, WIDTH, dtype=torch.float64)
        return usual(model, rank, step) + 0.1 * model.blocks[1].up(ones).square().mean()

    return trained(engine, net(), rank, loss)


@program
def hooks_on_parameters(engine, rank):
    opt = engine.attach(net())
    for p in opt.model.parameters():
        p.register_hook(lambda g: 0.5 * g)
    usual(opt.model, rank, 0).backward()
    opt.step()
    return opt.full()


@program
def functional_call_with_full_parameters(engine, rank):
    opt = engine.attach(net())
    other = {k: 0.5 * p.detach() for k, p in net(seed=3).named_parameters()}
    with torch.no_grad():
        return {"out": torch.func.functional_call(opt.model, other, (batch(rank)[0],))}


@program
def an_optimizer_of_torch(engine, rank):
    opt = engine.attach(net())
    other = torch.optim.AdamW(opt.model.parameters(), lr=1e-2)
    for step in range(2):
        usual(opt.model, rank, step).backward()
        if isinstance(engine, Averaged):
            engine.average()
        other.step()
        other.zero_grad()
    return opt.full()
