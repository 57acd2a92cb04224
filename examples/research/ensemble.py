"""An ensemble and a sweep in one: each member has first parameters, a rate and batches of its own.

python examples/research/ensemble.py
"""

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


if __name__ == "__main__":
    rates = torch.tensor([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    losses = sweep(rates, 200)[-1]
    for rate, row in zip(rates.tolist(), losses, strict=True):
        print(f"rate {rate:7.4f}: first loss {row[0]:.3f}, mean of the last 20 {row[-20:].mean():.3f}")
