"""Bits for each layer of a trained network, chosen by the curvature of its loss, beside as many in every layer.

At a minimum, rounding the n weights of a layer costs `trace / 2n * |errors|^2` of loss to second order, where errors
are small and point nowhere in particular; trace is that of the loss's Hessian by these weights (Dong et al., 2020,
HAWQ-V2). The bits chosen make the sum over layers least. With few bits errors are not small, and rounding costs many
times what this says.

python examples/research/bits_by_curvature.py
"""

import itertools
from statistics import median

import torch
from torch.nn import functional as F

import zerofn as zf

WIDTH, CLASSES = 32, 4
LAYERS = tuple(f"layer{i}" for i in range(5))
FEWEST, MOST = 2, 8


def data(seed, rows=1024):
    """Labels by a network of one layer, with noise; inputs of which the first are 30 times as large as the last."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=g) * torch.logspace(0, -1.5, WIDTH)
    first, last = torch.randn(WIDTH, 16, generator=g), torch.randn(16, CLASSES, generator=g)
    return x, (torch.tanh(x @ first) @ last + 0.5 * torch.randn(rows, CLASSES, generator=g)).argmax(1)


def first_params(seed):
    g = torch.Generator().manual_seed(seed)
    rows = {**dict.fromkeys(LAYERS, WIDTH), "head": CLASSES}
    return {
        k: {"weight": torch.randn(n, WIDTH, generator=g) / WIDTH**0.5, "bias": torch.zeros(n)} for k, n in rows.items()
    }


def loss(params, x, y):
    for k in LAYERS:
        x = F.gelu(x @ params[k]["weight"].T + params[k]["bias"])
    return F.cross_entropy(x @ params["head"]["weight"].T + params["head"]["bias"], y)


def train(seed, steps):
    """A network near a minimum, and the trace of the Hessian by the weights of each layer."""
    batch, tx = data(seed), zf.adamw(lr=zf.schedules.cosine(5e-3, steps), weight_decay=0.3)
    state, step = zf.init(tx, first_params(seed)), zf.make_step(loss, tx, donate=True)
    for _ in range(steps):
        state, _ = step(state, *batch)
    blocks = [f"{k}.weight" for k in LAYERS]
    traces = zf.curvature.trace(loss, tx, state, *batch, blocks=blocks, samples=16, seed=seed)
    return zf.full_params(tx, state), {k: traces[f"{k}.weight"].value.item() for k in LAYERS}


def rounded(weight, bits):
    """The nearest of `2 ** bits` values that lie evenly from the smallest weight to the largest."""
    low, spacing = weight.min(), (weight.max() - weight.min()) / (2**bits - 1)
    return ((weight - low) / spacing).round() * spacing + low


def cost(weight, trace, bits):
    """What rounding this layer adds to the loss, to second order."""
    return trace / (2 * weight.numel()) * (rounded(weight, bits) - weight).square().sum().item()


def choose(params, traces, mean_bits):
    """Bits of each layer that make the costs least, no more than `mean_bits` in the mean: layers are equally large."""
    costs = [{b: cost(params[k]["weight"], traces[k], b) for b in range(FEWEST, MOST + 1)} for k in LAYERS]
    affordable = (
        bits
        for bits in itertools.product(range(FEWEST, MOST + 1), repeat=len(LAYERS))
        if sum(bits) <= mean_bits * len(LAYERS)
    )
    return min(affordable, key=lambda bits: sum(c[b] for c, b in zip(costs, bits, strict=True)))


def added(params, traces, bits, batch):
    """By how much these bits raise the loss, and by how much they should to second order."""
    small = {k: {**params[k], "weight": rounded(params[k]["weight"], b)} for k, b in zip(LAYERS, bits, strict=True)}
    expected = sum(cost(params[k]["weight"], traces[k], b) for k, b in zip(LAYERS, bits, strict=True))
    return (loss({**params, **small}, *batch) - loss(params, *batch)).item(), expected


def compare(seeds=10, steps=400, mean_bits=(3, 4, 5, 6, 7)):
    """By mean number of bits, for each seed: the bits chosen, and what equal ones and these add, and should add."""
    found = {mean: [] for mean in mean_bits}
    for seed in range(seeds):
        params, traces = train(seed, steps)
        for mean, rows in found.items():
            bits = choose(params, traces, mean)
            ways = (mean,) * len(LAYERS), bits
            rows.append((bits, *(added(params, traces, way, data(seed)) for way in ways)))
    return found


if __name__ == "__main__":
    for mean, rows in compare().items():
        equal, chosen = zip(*((a, b) for _, a, b in rows), strict=True)
        wins = sum(b[0] < a[0] for a, b in zip(equal, chosen, strict=True))
        print(f"{mean} bits in the mean, such as {rows[0][0]}: better than equal bits for {wins} of {len(rows)} seeds")
        for name, way in (("equal", equal), ("by curvature", chosen)):
            real, expected = (median(x) for x in zip(*way, strict=True))
            print(f"    {name:12} adds {real:.1e} to the loss (median; to second order {expected:.1e})")
