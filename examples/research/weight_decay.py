"""The hypergradient of the weight decay: which one gives the least loss on data that is held out?

Ridge regression by AdamW; `zf.unroll` keeps one state in 8 (Maclaurin et al., 2015, tune so through whole runs).

python examples/research/weight_decay.py
"""

import torch
from torch.func import grad_and_value

import zerofn as zf


def data(seed=0, rows=24, features=20, dtype=torch.float32):
    """Fewer rows than it takes: without a penalty the fit follows the noise."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(features, generator=g, dtype=dtype) * 0.3
    x, held_out = (torch.randn(n, features, generator=g, dtype=dtype) for n in (rows, 400))
    noise = torch.randn(rows, generator=g, dtype=dtype)
    return (x, x @ w + noise), (held_out, held_out @ w)


def loss(p, x, y):
    return (x @ p["w"] - y).square().mean()


def step(state, x, y, decay):
    return zf.make_step(loss, zf.adamw(0.05, weight_decay=decay))(state, x, y)


def held_out_loss(decay, steps=40, every=8, seed=0, dtype=torch.float32):
    train, valid = data(seed, dtype=dtype)
    start = zf.init(zf.adamw(0.05), {"w": torch.zeros(20, dtype=dtype)})
    state, _ = zf.unroll(step, start, [train] * steps, decay, every=every)
    return loss(state.params, *valid)


def tune(steps=30):
    outer = zf.adam(0.5)
    state, found = zf.init(outer, {"log_decay": torch.tensor(-5.0)}), []
    for _ in range(steps):
        grads, value = grad_and_value(lambda p: held_out_loss(p["log_decay"].exp()))(state.params)
        state, _ = zf.update(outer, grads, state)
        found.append(value.item())
    return state.params["log_decay"].exp().item(), found


if __name__ == "__main__":
    decay, found = tune(60)
    print(f"weight decay {decay:.3f}: loss on held-out data {found[0]:.3f} -> {found[-1]:.3f}")
