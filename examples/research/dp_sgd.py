"""DP-SGD (Abadi et al., 2016): the gradient of each sample is clipped, their sum gets noise, on any number of ranks.

Each rank clips the gradients of its own samples: those of the loss on whole parameters, before anything is reduced. The
pullback of `zf.vjp` averages what each rank has; noise is drawn alike on all of them, so its mean is the noise.

python examples/research/dp_sgd.py
"""

import torch
from torch.func import grad, vmap

import zerofn as zf
from zerofn.testing import clone


def clipped_mean(params, loss, x, y, max_norm):
    """The mean over samples of gradients none of which is longer than `max_norm`."""
    each = vmap(grad(loss), (None, 0, 0))(params, x, y)
    norms = torch.stack([g.reshape(len(x), -1).square().sum(1) for g in each.values()]).sum(0).sqrt()
    factors = (max_norm / norms.clamp(min=1e-12)).clamp(max=1.0)
    return {k: torch.einsum("i...,i->...", g, factors) / len(x) for k, g in each.items()}, norms


def loss(p, x, y):
    """Of one sample."""
    return (x @ p["w"] + p["b"] - y).square()


def train(x, y, steps=60, max_norm=1.0, noise=0.0, seed=0, ranks=1):
    """On this rank's samples; parameters are the same on all ranks at every step."""
    tx, g = zf.chain(zf.all_reduce(), zf.sgd(0.2)), torch.Generator().manual_seed(seed)
    state = zf.init(tx, {"w": torch.zeros(x.shape[1]), "b": torch.zeros(())})
    longest = 0.0
    for _ in range(steps):
        params = clone(zf.full_params(tx, state))
        _, pull = zf.vjp(lambda p: p, tx, state)
        grads, norms = clipped_mean(params, loss, x, y, max_norm)
        longest = max(longest, norms.max().item())
        drawn = {
            k: v + noise * max_norm / (len(x) * ranks) * torch.randn(v.shape, generator=g) for k, v in grads.items()
        }
        (reduced,) = pull(drawn)  # a cotangent of parameters: its mean over ranks
        state, _ = zf.update(tx, reduced, state)
    return zf.full_params(tx, state), longest


def data(rows=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=g)
    return x, x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3


if __name__ == "__main__":
    for noise in (0.0, 0.5, 2.0):
        params, _ = train(*data(), steps=200, noise=noise)
        print(f"noise {noise}: w = {[f'{v:.2f}' for v in params['w'].tolist()]}")
