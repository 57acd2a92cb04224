"""A dashboard of update-to-weight ratios: which layer moves too fast, and which does not move.

python examples/update_ratios.py
"""

import argparse
from pathlib import Path

import torch
from lm_base import SEQ
from lm_data import Text, read_text
from lm_model import GPT, next_byte_loss

import zerofn as zf


def layer(path):
    """`blocks.0.up.weight` belongs to `blocks.0.up`."""
    return path.rpartition(".")[0]


def ratios():
    """For each layer, the norm of the update divided by the norm of the weights."""
    return zf.watch(
        lambda old, new: {"update": (new - old).square().sum(), "weight": old.square().sum()},
        lambda update, weight: {"ratio": (update / weight).sqrt()},
        labels=layer,
    )


def train(steps, frozen="blocks.1.up", fast="blocks.0.up"):
    """One layer has a rate that is too small and another one too large, so that there is something to find."""
    torch.manual_seed(0)
    model = GPT(64, layers=2, heads=2, seq=SEQ)
    rates = {"slow": zf.adamw(1e-6), "fast": zf.adamw(3e-2), "rest": zf.adamw(3e-4)}
    label = {frozen: "slow", fast: "fast"}
    optimizer = zf.partition(rates, labels=lambda path: label.get(layer(path), "rest"))
    opt = zf.attach(model, zf.chain(zf.shard(), zf.clip_by_global_norm(1.0), optimizer, ratios()))
    text, seen = Text.split(read_text(None), SEQ), {}
    for step in range(steps):
        x, y = text.batch(0, step, 16, SEQ)
        next_byte_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        for name, value in opt.metrics.items():
            if name.startswith("watch."):
                seen.setdefault(name.removeprefix("watch.").removesuffix(".ratio"), []).append(float(value))
    return seen


def draw(seen, path):
    import matplotlib.pyplot as plt

    names = sorted(seen, reverse=True)
    figure, axes = plt.subplots(figsize=(9, 0.28 * len(names) + 1.2), layout="constrained")
    table = torch.tensor([seen[name] for name in names]).clamp(min=1e-7).log10()
    image = axes.pcolormesh(table, cmap="RdYlBu_r", vmin=-5, vmax=-1)
    axes.set_yticks([i + 0.5 for i in range(len(names))], names)
    axes.set(xlabel="step", title="update / weight, log10")
    figure.colorbar(image)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("update_ratios.png"))
    o = parser.parse_args(argv)
    seen = train(o.steps)
    for name, values in seen.items():
        usual = sorted(values)[len(values) // 2]
        told = "does not move" if usual < 1e-5 else "moves fast" if usual > 1.5e-2 else ""
        print(f"{name:24} {usual:.1e} {told}")
    draw(seen, o.out)
    return seen


if __name__ == "__main__":
    main()
