"""A learned rate for each parameter (Meta-SGD, Li et al., 2017), by the derivative through whole training runs.

python examples/research/learned_rates.py
"""

import torch
from torch.func import grad_and_value

import zerofn as zf

CURVATURE = torch.tensor([1.0, 10.0, 100.0])  # one rate for all of them is bad for each of them


def run(log_rates, start, steps=10):
    """The mean loss of a run of SGD on an ill-conditioned bowl, whose rates are `exp(log_rates)`."""

    @zf.leafwise(optimizer=True, needs="leaf")
    def sgd(grad, param):
        return param - log_rates.exp() * grad

    tx = zf.chain(sgd())
    state, step = zf.init(tx, {"w": start}), zf.make_step(lambda p: (CURVATURE * p["w"] ** 2).sum() / 2, tx)
    losses = []
    for _ in range(steps):
        state, metrics = step(state)
        losses.append(metrics["loss"])
    return torch.stack(losses).mean()


def train(steps=80, seed=0):
    g = torch.Generator().manual_seed(seed)
    outer = zf.adam(0.1)
    state, losses = zf.init(outer, {"log_rates": torch.full((3,), -5.0)}), []
    for _ in range(steps):
        start = torch.randn(3, generator=g)
        grads, loss = grad_and_value(lambda p, s=start: run(p["log_rates"], s))(state.params)
        state, _ = zf.update(outer, grads, state)
        losses.append(loss.item())
    return state.params["log_rates"].exp(), losses


if __name__ == "__main__":
    rates, losses = train()
    print("curvature", CURVATURE.tolist())
    print("learned  ", [f"{r:.4f}" for r in rates.tolist()], "(1 / curvature is the best)")
    print(f"loss of a run: first {losses[0]:.1f}, last {losses[-1]:.1f}")
