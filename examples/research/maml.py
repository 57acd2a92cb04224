"""MAML on sinusoids (Finn et al., 2017): first parameters from which one step of SGD fits a new task.

python examples/research/maml.py
"""

import torch
from torch.func import grad_and_value, vmap

import zerofn as zf

INNER = zf.sgd(0.02)


def net(p, x):
    return torch.tanh(torch.tanh(x @ p["w0"] + p["b0"]) @ p["w1"] + p["b1"]) @ p["w2"]


def first_params(width=24, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    shapes = {"w0": (1, width), "b0": (width,), "w1": (width, width), "b1": (width,), "w2": (width, 1)}
    scales = {"w0": 1.0, "b0": 1.0, "w1": width**-0.5, "b1": 0.1, "w2": width**-0.5}
    return {k: torch.randn(s, generator=g, dtype=dtype) * scales[k] for k, s in shapes.items()}


def tasks(count, rows, g, dtype=torch.float32):
    """Sinusoids of any amplitude and phase: (x, y) to learn from and (x, y) to be judged by."""
    amplitude = 0.5 + 2 * torch.rand(count, 1, 1, generator=g, dtype=dtype)
    phase = 3.14 * torch.rand(count, 1, 1, generator=g, dtype=dtype)
    x = 8 * torch.rand(count, 2 * rows, 1, generator=g, dtype=dtype) - 4
    y = amplitude * torch.sin(x + phase)
    return x[:, :rows], y[:, :rows], x[:, rows:], y[:, rows:]


def mse(p, x, y):
    return (net(p, x) - y).square().mean()


def adapted(params, x, y, steps=1):
    """Parameters after a few steps on one task: what the outer loss differentiates through."""
    state, step = zf.init(INNER, params), zf.make_step(mse, INNER)
    for _ in range(steps):
        state, _ = step(state, x, y)
    return state.params


def meta_loss(params, batch):
    """Over a batch of tasks at once."""
    return vmap(lambda x, y, x2, y2: mse(adapted(params, x, y), x2, y2))(*batch).mean()


def train(steps=150, count=16, rows=10, seed=0):
    g = torch.Generator().manual_seed(seed)
    outer = zf.adamw(3e-3)
    state, losses = zf.init(outer, first_params()), []
    for _ in range(steps):
        grads, loss = grad_and_value(meta_loss)(state.params, tasks(count, rows, g))
        state, _ = zf.update(outer, grads, state)
        losses.append(loss.item())
    return state.params, losses


if __name__ == "__main__":
    _, losses = train(steps=600)
    for i in range(0, 600, 100):
        print(f"{i:4} {sum(losses[i : i + 100]) / 100:.3f}  (mean squared error after one step on a new task)")
