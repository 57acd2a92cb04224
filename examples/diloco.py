"""DiLoCo: two groups of ranks that step apart, and meet once in twenty updates. Here each group is one rank.

python examples/diloco.py
"""

import argparse

import torch
from digits import read_digits
from torch.nn.functional import cross_entropy

import zerofn as zf

EVERY = 20


def pipeline(apart):
    if not apart:
        return zf.chain(zf.all_reduce(), zf.adamw(3e-3))
    outer = zf.sgd(0.7, momentum=0.9, nesterov=True)
    return zf.chain(zf.local(), zf.adamw(3e-3), zf.every(EVERY, outer, wire=torch.bfloat16))


def train(apart, steps):
    """On each rank, on its own half of the digits: how many held-out ones are right, and the bytes sent."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    images, labels = read_digits()
    mine = slice(rank, 1400, ranks)
    torch.manual_seed(0)  # the same parameters on every rank
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))
    opt = zf.attach(model, pipeline(apart))
    draws = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        rows = torch.randint(1400 // ranks, (32,), generator=draws)
        cross_entropy(model(images[mine][rows]), labels[mine][rows]).backward()
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        right = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
    return right, sum(group.traffic.bytes for group in zf.collectives.opened())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    o = parser.parse_args(argv)
    found = {}
    for apart in (False, True):
        found[apart] = right, sent = zf.launch(train, 2, apart, o.steps)[0]
        print(
            f"{'DiLoCo       ' if apart else 'data parallel'} {right:.1%} of held-out digits right, {sent:,} bytes sent"
        )
    return found


if __name__ == "__main__":
    main()
