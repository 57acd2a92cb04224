"""Training runs drawn at random, by zerofn, by hand in plain float64 and by torchopt: what law 12 compares."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from stages import around
from torch import Tensor
from torch.func import vjp
from torch.utils._pytree import tree_leaves

import zerofn as zf

F64 = torch.float64
BETAS, EPS = (0.9, 0.99), 1e-3
W = torch.tensor([0.3, -0.7, 1.1], dtype=F64)
B = torch.tensor([0.2, -0.4], dtype=F64)


class Inputs(NamedTuple):
    """What a training run is differentiated by."""

    rate: Tensor
    decay: Tensor  # weight decay
    w: Tensor  # first parameters
    x: Tensor  # (micro-steps, rows, 3)
    weight: Tensor  # of a term of the loss


class Recipe(NamedTuple):
    """A pipeline and a number of micro-steps."""

    optimizer: str
    every: int
    clip: float | None
    limit: float | None
    masked: bool  # the limit is that of `w` alone
    average: bool
    scale: bool
    schedule: bool
    steps: int


def loss(p, x, weight):
    y = torch.tanh(x @ p["w"]) + p["b"].sum() * 0.1
    return (y - 0.5).square().mean() + weight * (p["w"] ** 2).sum() + (p["b"] ** 3).sum()


def pipeline(r: Recipe, given: Inputs, stage="one process"):
    # Where the step is a tensor, in a batch, Python's number to the power of it would be one in float32.
    lr = (lambda step: given.rate * 0.8 ** torch.as_tensor(step, dtype=F64)) if r.schedule else given.rate
    made = {
        "sgd": lambda: zf.sgd(lr, momentum=0.8, dampening=0.1, weight_decay=given.decay),
        "nesterov": lambda: zf.sgd(lr, momentum=0.8, weight_decay=given.decay, nesterov=True),
        "adam": lambda: zf.adam(lr, BETAS, EPS, given.decay),
        "adamw": lambda: zf.adamw(lr, BETAS, EPS, given.decay),
    }[r.optimizer]()
    scale = [zf.scale_loss(256.0)] if r.scale else []
    parts = around(stage, *scale, zf.accumulate(r.every))
    if r.limit:
        limit = zf.clip_by_value(r.limit)
        parts += [zf.masked(limit, lambda path: path == "w") if r.masked else limit]
    parts += [zf.clip_by_global_norm(r.clip)] if r.clip else []
    parts += [made] + ([zf.ema(0.7)] if r.average else [])
    return zf.chain(*parts)


def measured(p):
    return (p["w"] * torch.tensor([1.0, -2.0, 0.5], dtype=F64)).sum().sin() + p["b"].prod()


def trained(r: Recipe, given: Inputs, create_graph=None, stage="one process"):
    """By zerofn."""
    tx = pipeline(r, given, stage)
    state = zf.init(tx, {"w": given.w, "b": B}, create_graph=bool(create_graph))
    step = zf.make_step(loss, tx, create_graph=create_graph)
    for x in given.x:
        state, _ = step(state, x, given.weight)
    out = measured(zf.full_params(tx, state))
    return out + (measured(zf.full_params(tx, state, of="ema")) if r.average else 0)


def by_hand(r: Recipe, given: Inputs):
    """The same in plain float64."""
    p = {"w": given.w, "b": B}
    average, sums, t = dict(p), None, 0
    slots = {k: [torch.zeros_like(x), torch.zeros_like(x)] for k, x in p.items()}
    for i, x in enumerate(given.x):
        at, back = vjp(lambda p, x=x: loss(p, x, given.weight), p)
        (g,) = back(torch.ones_like(at))
        sums = g if i % r.every == 0 else {k: sums[k] + g[k] for k in p}
        if i % r.every < r.every - 1:
            continue
        g = {k: s / r.every for k, s in sums.items()}
        if r.limit:
            g = {k: s.clamp(-r.limit, r.limit) if k == "w" or not r.masked else s for k, s in g.items()}
        if r.clip:
            norm = torch.cat([s.flatten() for s in g.values()]).pow(2).sum() ** 0.5
            g = {k: s * torch.minimum(torch.ones((), dtype=F64), r.clip / (norm + 1e-6)) for k, s in g.items()}
        rate, t = given.rate * (0.8**t if r.schedule else 1), t + 1
        for k in p:
            p = {**p, k: update(r.optimizer, p[k], g[k], slots[k], rate, given.decay, t)}
        average = {k: 0.7 * average[k] + 0.3 * p[k] for k in p}
    return measured(p) + (measured(average) if r.average else 0)


def update(kind, p, g, slots, rate, decay, t):
    if kind in ("adam", "adamw"):
        if kind == "adam":
            g = g + decay * p
        else:
            p = p - rate * decay * p
        slots[0] = BETAS[0] * slots[0] + (1 - BETAS[0]) * g
        slots[1] = BETAS[1] * slots[1] + (1 - BETAS[1]) * g**2
        return p - rate * (slots[0] / (1 - BETAS[0] ** t)) / ((slots[1] / (1 - BETAS[1] ** t)) ** 0.5 + EPS)
    g = g + decay * p
    slots[0] = g if t == 1 else 0.8 * slots[0] + (1 if kind == "nesterov" else 0.9) * g
    return p - rate * (g + 0.8 * slots[0] if kind == "nesterov" else slots[0])


def by_torchopt(torchopt, optimizer: str, given: Inputs):
    """The same by torchopt, as far as it is a function: to its clips the norm of a gradient is a constant."""
    decay, keep = float(given.decay), {"moment_requires_grad": True}  # its decay can be no tensor
    made = {
        "sgd": lambda: torchopt.sgd(given.rate, 0.8, 0.1, decay, **keep),
        "nesterov": lambda: torchopt.sgd(given.rate, 0.8, 0.0, decay, True, **keep),
        "adam": lambda: torchopt.adam(given.rate, BETAS, EPS, decay, **keep),
        "adamw": lambda: torchopt.adamw(given.rate, BETAS, EPS, decay, **keep),
    }[optimizer]()
    p = {"w": given.w, "b": B.clone().requires_grad_()}
    state = made.init(p)
    for x in given.x:
        g = torch.autograd.grad(loss(p, x, given.weight), list(p.values()), create_graph=True)
        updates, state = made.update(dict(zip(p, g, strict=True)), state, params=p, inplace=False)
        p = torchopt.apply_updates(p, updates, inplace=False)
    return measured(p)


optimizers = st.sampled_from(["sgd", "nesterov", "adam", "adamw"])
recipes = st.builds(
    Recipe,
    optimizers,
    st.sampled_from([1, 2]),
    st.sampled_from([None, 0.3, 9.0]),
    st.sampled_from([None, 0.2]),
    *[st.booleans()] * 4,
    st.integers(1, 5),
)


def inputs(steps: int, seed: int, rows: int = 6) -> Inputs:
    x = torch.randn(steps, rows, 3, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return Inputs(*(torch.tensor(v, dtype=F64) for v in (0.05, 0.1)), W, x, torch.tensor(0.3, dtype=F64))


def agree(got, want, tolerance=1e-10):
    """Of both trees: double precision, of sums in other orders, over up to 5 steps and two derivatives."""
    got, want = (torch.cat([x.flatten() for x in tree_leaves(t)]) for t in (got, want))
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
