"""MAML and hypergradients by plain `loss.backward()`: a step is a function, so autograd records it.

python examples/research/plain_autograd.py
"""

import torch
from maml import first_params, mse, tasks

import zerofn as zf


def adapted(params, rate, x, y):
    """One step of SGD on a task. With `create_graph=True` autograd records this step."""
    tx = zf.sgd(rate)
    state, step = zf.init(tx, params, create_graph=True), zf.make_step(mse, tx, create_graph=True)
    state, _ = step(state, x, y)
    return state.params


def train(steps=100, count=8, seed=0):
    """First parameters, and the rate of the inner step, both by `backward` through that step."""
    g = torch.Generator().manual_seed(seed)
    params = {name: p.requires_grad_() for name, p in first_params(seed=seed).items()}
    log_rate = torch.tensor(-4.0, requires_grad=True)
    outer = torch.optim.Adam([{"params": list(params.values()), "lr": 3e-3}, {"params": [log_rate], "lr": 3e-2}])
    losses = []
    for _ in range(steps):
        batch = list(zip(*tasks(count, 10, g), strict=True))
        loss = sum(mse(adapted(params, log_rate.exp(), x, y), x2, y2) for x, y, x2, y2 in batch) / count
        outer.zero_grad()
        loss.backward()
        outer.step()
        losses.append(loss.item())
    return params, log_rate.exp().item(), losses


if __name__ == "__main__":
    _, rate, losses = train(400)
    for i in range(0, 400, 100):
        print(f"{i:4} {sum(losses[i : i + 100]) / 100:.3f}  (mean squared error after one step on a new task)")
    print(f"the rate of the inner step: 0.018 at first, {rate:.3f} learned")
