"""A model with every awkward kind of leaf, and what it is trained by: zerofn on ranks, plain torch in one process.

A *program* is what a rank does between two optimizer steps: `program(model, rank, step, talk)` runs forwards and
backwards as it likes; `program.prepare(model, step)`, if there is one, is run before it on every rank. The
reference lets one plain float64 model run the programs of all ranks one after the other, so its gradients are the
sum over ranks; the mean over ranks is that over their number.
"""

import copy
import os
from dataclasses import replace

import torch
import torch.nn.functional as F
from stages import around
from torch import nn
from torch.func import functional_call
from units_alive import UnitsAlive

import zerofn as zf

# Of ZeRO, by its numbers.
STAGES = (0, 1, 2, 3)


def hold():
    """An accumulation that closes its window at every step: gradients wait for it, as they do not for accumulate(1)."""
    every = zf.accumulate(2)

    def prepare(state, grads, params, ctx):
        return every.prepare_fn(state, grads, params, replace(ctx, boundary=True))

    return replace(every, prepare_fn=prepare)


def pipe_of(stage, optimizer, middle=()):
    """The pipeline of a ZeRO stage, with `middle` after what makes it; every step closes a window."""
    return zf.chain(*around(stage, *middle, window=hold()), optimizer)


def rank_and_size():
    """This process among the launched ones."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class AwkwardLeaves(nn.Module):
    """Uneven, tiny, empty, 0-d, frozen, tied and unused leaves; a block called twice; branches that ranks choose."""

    def __init__(self, d=6, layers=3):
        super().__init__()
        self.inp = nn.Linear(5, d)
        self.blocks = nn.ModuleList([Block(d) for _ in range(layers)])
        self.again = self.blocks[0]
        self.tied = nn.Linear(5, d, bias=False)
        self.tied.weight = self.inp.weight
        self.branch = nn.ModuleDict({"a": Block(d), "b": nn.Linear(d, d)})
        self.one = nn.Parameter(torch.tensor([0.3]))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.9))
        self.frozen = nn.Parameter(torch.full((d,), 0.1), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, which=None):
        h = self.inp(x)
        for block in self.blocks:
            h = block(h)
        h = self.again(h)
        if which:
            h = h + self.branch[which](h)
        h = h * self.scalar + self.one + self.frozen + self.empty.sum()
        # The weight of another module, read outside of that module's forward.
        return torch.tanh(h @ self.tied.weight)


ALWAYS_USED = ("inp.", "blocks.", "one", "scalar")


def make(dtype=torch.float64, cls=AwkwardLeaves, **kw):
    torch.manual_seed(3)
    return cls(**kw).to(dtype)


def batch(rank, step, dtype=torch.float64, rows=4):
    """Other data on every rank and in every step."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(rows, 5, generator=g), torch.randn(rows, 5, generator=g)
    return x.to(dtype), y.to(dtype)


def branch_of(mode, rank, step):
    if mode == "diff":
        return "ab"[rank % 2]
    if mode == "some":
        return "a" if rank == 0 and step % 2 == 0 else None
    return mode


def simple(mode, dtype=torch.float64):
    """One forward, one backward; `mode` says which branch a rank takes."""

    def program(model, rank, step, talk):
        x, y = batch(rank, step, dtype)
        loss = ((model(x, branch_of(mode, rank, step)) - y) ** 2).mean()
        loss.backward()

    return program


def quiet():
    """The user's collectives, in the reference."""


def talk():
    """A collective on the user's own group, which must not mix with ours."""
    import torch.distributed as dist

    if dist.is_initialized():
        _, size = rank_and_size()
        t = torch.ones(())
        dist.all_reduce(t)
        assert float(t) == size


def _nothing(model, step):
    """What most programs do before a step on all ranks alike."""


def eager(tx, program, steps, model, each=None):
    """Train an attached model; what its parameters were before and are after, by name, with metrics."""
    rank, _ = rank_and_size()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt = zf.attach(model, tx)
    alive = UnitsAlive(opt)
    object.__setattr__(model, "opt_for_test", opt)
    norms = []
    for i in range(steps):
        getattr(program, "prepare", _nothing)(model, i)
        program(model, rank, i, talk)
        if not getattr(program, "quiet", False):
            talk()
        opt.step()
        opt.zero_grad()
        norms.append(float(opt.metrics["grad_norm"]) if "grad_norm" in opt.metrics else None)
    opt.detach()
    after = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"before": before, "after": after, "norms": norms, "most": alive.most}


def pure(tx, mode, steps, model, dtype=torch.float64):
    """The same training by `make_step`, for programs of one forward and one backward."""
    rank, _ = rank_and_size()
    named = dict(model.named_parameters())
    frozen = {n for n, p in named.items() if not p.requires_grad}
    params = {n: p.detach() for n, p in named.items() if n not in frozen}
    fixed = {n: named[n].detach() for n in frozen}

    def loss_fn(params, x, y, which):
        d = params["one"].dtype
        fixed_now = {n: t.to(d) for n, t in fixed.items()}
        out = functional_call(model, {**params, **fixed_now}, (x.to(d), which))
        return ((out - y) ** 2).mean()

    state = zf.init(tx, params)
    step = zf.make_step(loss_fn, tx)
    norms = []
    for i in range(steps):
        state, metrics = step(state, *batch(rank, i, dtype), branch_of(mode, rank, i))
        norms.append(float(metrics["grad_norm"]) if "grad_norm" in metrics else None)
    after = {n: x.clone() for n, x in zf.full_params(tx, state).items()}
    return {"before": params, "after": after, "norms": norms}


def reference(size, optimizer, program, steps, model, every=1, clip=None):
    """Plain torch in one process: the programs of all ranks, one mean gradient, `torch.optim`."""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt = optimizer([p for p in model.parameters() if p.requires_grad])
    norms = []
    for i in range(steps):
        getattr(program, "prepare", _nothing)(model, i)
        for rank in range(size):
            program(model, rank, i, quiet)
        if (i + 1) % every:
            continue
        grads = [p for p in model.parameters() if p.grad is not None]
        for p in grads:
            p.grad /= size * every
        norms.append(float(torch.nn.utils.clip_grad_norm_(grads, float("inf") if clip is None else clip)))
        for n, p in model.named_parameters():
            if isinstance(model, AwkwardLeaves) and n.startswith(ALWAYS_USED) and p.numel():
                assert p.grad is not None and p.grad.abs().max() > 0, f"the program does not train {n}"
        opt.step()
        opt.zero_grad()
    after = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"before": before, "after": after, "norms": norms}


def differences(got, want):
    """Largest error of the change over the largest change, and the leaf where it is."""
    worst, where = 0.0, ""
    change = max(
        float((want["after"][n] - want["before"][n]).abs().max()) for n in want["after"] if want["after"][n].numel()
    )
    assert change > 1e-4, "the reference did not train"
    for n, x in want["after"].items():
        if n not in got["after"] or not x.numel():
            continue
        assert got["after"][n].shape == x.shape, (n, got["after"][n].shape, x.shape)
        moved = got["after"][n].double() - got["before"][n].double()
        error = float((moved - (x - want["before"][n]).double()).abs().max()) / change
        if not error <= worst:
            worst, where = error, n
    return worst, where


def fresh(model):
    return copy.deepcopy(model)


def functional(x, w):
    return F.linear(x, w)


def uneven_rounds(model, rank, step, talk):
    """Nodes differ in how often they run backward, and ranks in what they use."""
    for part in range(1 + rank // 2):
        x, y = batch(rank, 10 * step + part)
        ((model(x, "ab"[(rank + part) % 2]) - y) ** 2).mean().backward()


uneven_rounds.quiet = True
