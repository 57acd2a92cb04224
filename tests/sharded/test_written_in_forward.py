"""What a model writes into its own parameters in forward, under `shard`: stored, or refused by path.

The reference is plain torch in one process on the batches of all ranks in one, so that it writes as often as a rank.
"""

import copy
import re

import pytest
import rank_programs as P
import torch
import torch.distributed as dist
import torch.nn.functional as F
from time_limits import limit
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import zerofn as zf

WIDTH, ROWS, STEPS = 6, 4, 3
MOMENTUM = 0.9


def rows(step, rank):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)


def mean_over_ranks(x):
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


# -- a momentum encoder -------------------------------------------------------------------


def mul_add(qs, ks):
    with torch.no_grad():
        for q, k in zip(qs, ks, strict=True):
            k.mul_(MOMENTUM).add_(q, alpha=1 - MOMENTUM)


@torch.no_grad()
def lerped(qs, ks):
    for q, k in zip(qs, ks, strict=True):
        k.lerp_(q, 1 - MOMENTUM)


@torch.no_grad()
def by_foreach(qs, ks):
    qs, ks = list(qs), list(ks)
    torch._foreach_mul_(ks, MOMENTUM)
    torch._foreach_add_(ks, qs, alpha=1 - MOMENTUM)


def encoder(layers):
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU()) for _ in range(layers)))


class Moco(nn.Module):
    """Two encoders, of which forward lets the second follow the first."""

    def __init__(self, follow, layers=3):
        super().__init__()
        self.q = encoder(layers) if layers else nn.Linear(WIDTH, WIDTH)
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        for p in self.k.parameters():
            p.data.mul_(0.5)
        self.follow = follow

    def forward(self, x):
        a = self.q(x)
        self.follow(self.q.parameters(), self.k.parameters())
        with torch.no_grad():
            b = self.k(x)
        return (a * b).sum(-1) + a.square().sum(-1)


class MocoBefore(Moco):
    def forward(self, x):
        self.follow(self.q.parameters(), self.k.parameters())
        return (self.q(x) * self.k(x)).sum(-1)


# -- other writes --------------------------------------------------------------------------------------------


class One(nn.Module):
    """A weight between two layers that forward writes into."""

    def __init__(self, write, frozen=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.w = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).sin(), requires_grad=not frozen)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(WIDTH, 1)
        self.write = write

    def forward(self, x):
        h = torch.tanh(self.first(x))
        self.write(self)
        return self.last(h @ self.w * self.gain).squeeze(-1)


class TwoCopies(nn.Module):
    """A parameter that is written into after its block was freed, and one of the same block from another gather."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        w = self.blocks[0].weight
        for block in self.blocks[1:]:
            x = torch.tanh(block(x))
        b = self.blocks[0].bias
        with torch.no_grad():
            w.mul_(0.9)
            b.add_(0.1)
        return self.blocks[0](torch.tanh(self.blocks[1](x))).sum(-1)


class Checkpointed(One):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@torch.no_grad()
def clamp(m):
    m.w.clamp_(-0.5, 0.5)
    m.gain.clamp_(max=1.25)


@torch.no_grad()
def one_row(m):
    m.w[0] = 0.25
    m.w.T[1] *= 0.5


@torch.no_grad()
def unit_norm(m):
    m.w.div_(m.w.norm(dim=0, keepdim=True))


def frozen_in_grad_mode(m):
    m.w.mul_(0.9)


@torch.no_grad()
def twice(m):
    m.w.mul_(0.5)
    m.w.add_(m.w @ m.w)


@torch.no_grad()
def a_submodule(m):
    m.first.weight.clamp_(-0.1, 0.1)
    F.linear(torch.zeros(WIDTH, dtype=m.w.dtype), m.last.weight)
    m.last.weight.clamp_(-0.1, 0.1)


class Book(nn.Module):
    """A codebook that follows the mean of what is near, as a parameter."""

    def __init__(self, ema):
        super().__init__()
        self.enc, self.dec = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.code = nn.Embedding(5, WIDTH)
        self.code.weight.requires_grad_(False)
        self.counts = nn.Parameter(torch.ones(5), requires_grad=False)
        self.ema = ema

    def forward(self, x):
        z = self.enc(x)
        near = torch.cdist(z.detach(), self.code.weight).argmin(1)
        found = self.code(near)
        if self.training:
            one = F.one_hot(near, 5).to(x.dtype)
            self.ema(self, mean_over_ranks(one.mean(0)), mean_over_ranks(one.T @ z.detach() / len(x)))
        return self.dec(z + (found - z).detach()).squeeze(-1) + (z - found.detach()).square().sum(-1)


def ema_in_place(m, count, total):
    with torch.no_grad():
        m.counts.lerp_(count, 0.1)
        m.code.weight.lerp_(total / (count[:, None] + 0.1), 0.1)


class Normed(nn.Module):
    """Norms of weights: buffers are written in forward, parameters are not."""

    def __init__(self, norm):
        super().__init__()
        self.a, self.b = norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))).squeeze(-1)


def with_a_hook(m):
    def keep_small(module, args):
        with torch.no_grad():
            module.weight.clamp_(-0.2, 0.2)

    m.first.register_forward_pre_hook(keep_small)
    return m


RIGHT = {
    "mul_add": lambda: Moco(mul_add),
    "loose": lambda: Moco(mul_add, layers=0),
    "before": lambda: MocoBefore(lerped),
    **{f.__name__: lambda f=f: One(f) for f in (clamp, one_row, unit_norm, twice)},
    "frozen": lambda: One(frozen_in_grad_mode, frozen=True),
    "checkpointed": lambda: Checkpointed(clamp),
    "ema": lambda: Book(ema_in_place),
    "hook": lambda: with_a_hook(One(lambda m: None)),
    "spectral_norm": lambda: Normed(parametrizations.spectral_norm),
    "old spectral_norm": lambda: Normed(nn.utils.spectral_norm),
}


def build(make):
    torch.manual_seed(1)
    return make().double()


def values(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def evaluated(model, step):
    """An evaluation, which writes as well."""
    model.eval()
    with torch.no_grad():
        out = model(rows(step, 7))
    model.train()
    return out.sum().item()


def reference(make, ranks):
    model = build(make)
    before, outs = values(model), []
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.5)
    for step in range(STEPS):
        loss = model(torch.cat([rows(step, r) for r in range(ranks)])).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        outs.append(evaluated(model, step))
    after = values(model)
    return {n: after[n] - before[n] for n in after}, outs


def trained(make, scaled):
    rank, _ = P.rank_and_size()
    model = build(make)
    before, outs = values(model), []
    middle = (zf.scale_loss(256.0),) if scaled else ()
    opt = zf.attach(model, zf.chain(zf.shard(), *middle, zf.sgd(lr=0.05, momentum=0.5)))
    for step in range(STEPS):
        loss = model(rows(step, rank)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        outs.append(evaluated(model, step))
    opt.detach()
    after = values(model)
    return {n: after[n] - before[n] for n in after}, outs


SCALED = ("clamp", "mul_add")


def trained_all(cases):
    found = {}
    for name, scaled in (*((n, False) for n in cases), *((n, True) for n in SCALED if n in cases)):
        try:
            found[name, scaled] = trained(cases[name], scaled)
        except Exception as error:
            found[name, scaled] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_what_forward_writes_is_stored(ranks):
    want = {name: reference(make, ranks) for name, make in RIGHT.items()}
    bad = []
    cases = RIGHT
    everywhere = zf.launch(trained_all, ranks, cases, timeout=limit()) if ranks > 1 else [trained_all(cases)]
    for rank, found in enumerate(everywhere):
        for (name, scaled), result in found.items():
            if isinstance(result, str):
                bad.append((rank, name, scaled, result))
                continue
            changes, outs = result
            for path, change in want[name][0].items():
                if (err := float((changes[path] - change).abs().max())) > 1e-11 * float(change.abs().max()):
                    bad.append((rank, name, scaled, path, err))
            if outs != pytest.approx(want[name][1], rel=1e-10):
                bad.append((rank, name, scaled, outs))
    assert not bad, "\n".join(map(str, bad))


# -- what cannot be stored -------------------------------------------------------------------------------------


def new_parameter(m):
    m.w = nn.Parameter(m.w.detach().clamp(-0.5, 0.5))


PLAIN, SCALED_PIPE = {}, None
# What is written, in which pipeline, and what is said of which parameter.
FREED = r"parameters in its forward(.|\n)* {}: written after its block was freed(.|\n)*w.copy_\(new\)"
REPLACED = r"the model changed after it was attached(.|\n)* w: added, removed or replaced"
REFUSED = {
    "all blocks at once": (lambda: MocoBefore(by_foreach, layers=5), PLAIN, FREED.format("k.0.0.weight")),
    "after other blocks": (TwoCopies, PLAIN, FREED.format("blocks.0.weight")),
    "new parameter": (lambda: One(new_parameter), PLAIN, REPLACED),
    "new parameter, scaled": (lambda: One(new_parameter), SCALED_PIPE, REPLACED),
}


def pipe(kind):
    parts = [zf.scale_loss(256.0)] if kind is None else [zf.precision(**kind)] if kind else []
    return zf.chain(zf.shard(), *parts, zf.sgd(lr=0.05))


def refused(cases):
    """What is said, and whether the model trains after that as if nothing had been written."""
    rank, _ = P.rank_and_size()
    said = {}
    for name, (make, kind, _) in cases.items():
        torch.manual_seed(1)
        model = make().float()
        opt = zf.attach(model, pipe(kind))
        before = {n: x.clone() for n, x in zf.full_params(opt.tx, opt.state).items()}
        try:
            model(rows(0, rank).float()).float().square().mean().backward()
            opt.step()
        except RuntimeError as error:
            said[name] = str(error)
        after = zf.full_params(opt.tx, opt.state)
        # What was written into a block before it was freed is stored, and the next step is refused.
        if name not in ("all blocks at once", "after other blocks"):
            assert all(torch.equal(x, after[n]) for n, x in before.items()), name
    return said


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_be_stored_is_refused_by_path(ranks):
    cases = {n: case for n, case in REFUSED.items() if ranks > 1 or case[1] != PLAIN}
    for said in zf.launch(refused, ranks, cases, timeout=limit()) if ranks > 1 else [refused(cases)]:
        for name, (*_, pattern) in cases.items():
            assert re.search(pattern, said.get(name, "")), f"{name}: {said.get(name)}"


def own_statistics():
    """Each rank writes what it finds in its own rows."""
    rank, _ = P.rank_and_size()
    model = build(lambda: One(lambda m: None))
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(lr=0.05)))
    for step in range(2):
        x = rows(step, rank)

        @torch.no_grad()
        def write(m, x=x, step=step):
            m.w.lerp_(x.T @ x, 0.1 if step else 0.0)

        model.write = write
        model(x).square().mean().backward()
        try:
            opt.step()
        except RuntimeError as error:
            return step, str(error)
        opt.zero_grad()
    return None


def test_ranks_that_write_different_numbers_are_told():
    for step, said in zf.launch(own_statistics, 2, timeout=limit()):
        assert step == 1
        assert re.search(
            r"ranks disagree on what the model wrote in forward into its parameters w \(.*\). Average what", said
        ), said
