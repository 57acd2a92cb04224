"""Weights of training rows learned from a few clean ones (Ren et al., 2018): rows with wrong labels lose theirs.

python examples/research/data_reweighting.py
"""

import torch
import torch.nn.functional as F
from torch.func import grad

import zerofn as zf


def data(rows=60, wrong=0.4, seed=0):
    """Two classes; of the training rows a part has the other class's label."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows + 20, 2, generator=g)
    y = (x @ torch.tensor([1.0, -1.0]) > 0).float()
    flipped = torch.rand(rows, generator=g) < wrong
    train = torch.where(flipped, 1 - y[:rows], y[:rows])
    return (x[:rows], train), (x[rows:], y[rows:]), flipped


def logits(p, x):
    return x @ p["w"] + p["b"]


def loss(p, x, y, weights):
    return (weights * F.binary_cross_entropy_with_logits(logits(p, x), y, reduction="none")).sum()


def clean_loss(weights, params, train, clean, rate=1.0):
    """On clean rows, after one step on the others with these weights."""
    tx = zf.sgd(rate)
    state, _ = zf.make_step(loss, tx)(zf.init(tx, params), *train, weights)
    return F.binary_cross_entropy_with_logits(logits(state.params, clean[0]), clean[1])


def train(steps=40, seed=0, reweight=True):
    train, clean, flipped = data(seed=seed)
    tx, many = zf.sgd(0.5), len(flipped)
    state, step = zf.init(tx, {"w": torch.zeros(2), "b": torch.zeros(())}), zf.make_step(loss, tx)
    total = torch.zeros(many)
    for _ in range(steps):
        weights = torch.full((many,), 1 / many)
        if reweight:
            down = -grad(clean_loss)(torch.zeros(many), state.params, train, clean)
            weights = down.clamp(min=0) / down.clamp(min=0).sum().clamp(min=1e-12)
        total += weights
        state, _ = step(state, *train, weights)
    return state.params, total / total.sum(), flipped


if __name__ == "__main__":
    _, weights, flipped = train()
    print(f"weight of the {int(flipped.sum())} rows with a wrong label: {weights[flipped].sum():.3f} of 1")
