"""LoRA on two ranks: a GPT that has read English learns code, by adapters of one in thirty parameters.

python examples/lora.py
"""

import argparse

import torch
from lm_base import SEQ, base, code, validate
from lm_model import next_byte_loss
from torch import nn

import zerofn as zf


class LoRA(nn.Module):
    """A frozen layer plus a product of two thin matrices, which is zero at first."""

    def __init__(self, layer, rank=4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.a.T @ self.b.T


def adapted(steps):
    model = base(steps).requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.down = LoRA(block.qkv), LoRA(block.down)
    return model


def train(base_steps, steps):
    """On each rank. Parameters and states are sharded; what is frozen has no state."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, text = adapted(base_steps), code()
    before = validate(model, text)
    opt = zf.attach(model, zf.chain(zf.shard(), zf.clip_by_global_norm(1.0), zf.adamw(lr=1e-2)))
    for step in range(steps):
        x, y = text.batch(0, step, 16, SEQ)
        next_byte_loss(model(x[rank::ranks]), y[rank::ranks]).backward()
        opt.step()
        opt.zero_grad()
    with opt.gathered():
        after = validate(model, text)
        trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return before, after, trained


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=int, default=200, help="steps on English")
    parser.add_argument("--steps", type=int, default=200, help="steps on code")
    parser.add_argument("--ranks", type=int, default=2)
    o = parser.parse_args(argv)
    before, after, adapters = zf.launch(train, o.ranks, o.base, o.steps)[0]
    numbers = sum(p.numel() for p in adapters.values())
    print(f"loss on code {before:.2f} before, {after:.2f} after; {numbers} numbers were trained")
    return before, after, adapters


if __name__ == "__main__":
    main()
