"""A small network as an optimizer, trained through the runs that it drives (Andrychowicz et al., 2016).

It sees the gradient and two running means of it, element by element, and says the update. Such an optimizer is a
transform like any other: it shards, saves and composes.

python examples/research/learned_optimizer.py
"""

import torch
from torch.func import grad_and_value

import zerofn as zf


def first_rule(hidden=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {"w0": torch.randn(3, hidden, generator=g) * 0.5, "b0": torch.zeros(hidden), "w1": torch.zeros(hidden, 1)}


def learned(rule):
    """The optimizer whose update is the network `rule` of features of each element."""

    def slots(x):
        return torch.stack([torch.zeros_like(x), torch.zeros_like(x)])

    @zf.leafwise(init=slots, optimizer=True, needs="leaf")
    def update(grad, param, state):
        short, long = 0.5 * state[0] + 0.5 * grad, 0.9 * state[1] + 0.1 * grad
        seen = torch.stack([grad, short, long], -1)
        seen = seen / (1e-3 + seen.abs().amax(-1, keepdim=True).detach())
        said = torch.tanh(seen @ rule["w0"] + rule["b0"]) @ rule["w1"]
        return param - 0.1 * (seen[..., 2] + said[..., 0]), torch.stack([short, long])

    return zf.chain(update())


def run(rule, start, curvature, steps=12):
    """The mean loss of a run on a bowl."""
    tx = learned(rule)
    state, step = zf.init(tx, {"w": start}), zf.make_step(lambda p: (curvature * p["w"] ** 2).mean(), tx)
    losses = []
    for _ in range(steps):
        state, metrics = step(state)
        losses.append(metrics["loss"])
    return torch.stack(losses).mean()


def train(steps=40, seed=0):
    g = torch.Generator().manual_seed(seed)
    outer = zf.chain(zf.clip_by_global_norm(1.0), zf.adam(0.03))
    state, losses = zf.init(outer, first_rule()), []
    for _ in range(steps):
        start, curvature = torch.randn(6, generator=g), 0.5 + torch.rand(6, generator=g)
        grads, loss = grad_and_value(run)(state.params, start, curvature)
        state, _ = zf.update(outer, grads, state)
        losses.append(loss.item())
    return state.params, losses


if __name__ == "__main__":
    _, losses = train(200)
    print(f"loss of a run: first 20 {sum(losses[:20]) / 20:.3f}, last 20 {sum(losses[-20:]) / 20:.3f}")
