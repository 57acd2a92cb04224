"""An ensemble and a sweep in one: each member has first parameters, a rate and batches of its own.

python examples/research/ensemble.py
"""

from itertools import pairwise
from time import perf_counter

import torch
from torch.func import vmap

import zerofn as zf


def loss(p, x, y):
    return (torch.tanh(x @ p["w0"]) @ p["w1"] - y).square().mean()


def first(g):
    return {"w0": torch.randn(3, 16, generator=g) * 0.5, "w1": torch.randn(16, generator=g) * 0.2}


def member(params, rate, xs, y_of, steps=None):
    """One run, written for one member."""
    tx = zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(rate))
    state, step, losses = zf.init(tx, params), zf.make_step(loss, tx), []
    for x in xs[:steps]:
        state, metrics = step(state, x, y_of(x))
        losses.append(metrics["loss"])
    return state.params, torch.stack(losses)


def truth(x):
    return torch.sin(2 * x[..., 0]) * x[..., 1]


def sweep(rates, steps=60, seed=0):
    """All members at once: the losses are of shape (members, steps)."""
    g = torch.Generator().manual_seed(seed)
    starts = [first(g) for _ in rates]
    together = {k: torch.stack([s[k] for s in starts]) for k in starts[0]}
    xs = torch.randn(steps, 32, 3, generator=g)
    params, losses = vmap(lambda p, r: member(p, r, xs, truth))(together, rates)
    return starts, xs, params, losses


@zf.leafwise(optimizer=True, needs="leaf")
def descend(direction, param, *, rates):
    """Each row of `param` is a member, and has its own learning rate."""
    return param - rates.view(-1, *[1] * (param.ndim - 1)) * direction


def compiled_sweep(rates, steps=60, seed=0, backend="inductor"):
    """The same as one compiled step. Losses of members are added up, so each has the gradient of its own."""
    g = torch.Generator().manual_seed(seed)
    starts = [first(g) for _ in rates]
    together = {k: torch.stack([s[k] for s in starts]) for k in starts[0]}

    def losses_of(params, x, y):
        losses = vmap(loss, in_dims=(0, None, None))(params, x, y)
        return losses.sum(), losses

    tx = zf.chain(zf.scale_by_adam(), descend(rates=rates))
    step = zf.make_step(losses_of, tx, donate=True)
    if backend is not None:
        step = torch.compile(step, fullgraph=True, backend=backend)
    state, losses, times = zf.init(tx, together), [], []
    xs = torch.randn(steps, 32, 3, generator=g)
    for x in xs:
        times.append(perf_counter())
        state, metrics = step(state, x, truth(x))
        losses.append(metrics["aux"])
    usual = sorted(b - a for a, b in pairwise(times))[(steps - 1) // 2]
    return starts, xs, state.params, torch.stack(losses, 1), usual


if __name__ == "__main__":
    rates = torch.tensor([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    losses = sweep(rates, 200)[-1]
    for rate, row in zip(rates.tolist(), losses, strict=True):
        print(f"rate {rate:7.4f}: first loss {row[0]:.3f}, mean of the last 20 {row[-20:].mean():.3f}")
    rates = torch.logspace(-4, 0, 64)
    for backend in (None, "inductor"):
        usual = compiled_sweep(rates, 200, backend=backend)[-1]
        print(f"64 members, compiled by {backend}: {usual * 1e3:.2f} ms a step")
