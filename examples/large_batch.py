"""AdamW, LAMB and schedule-free AdamW on digits with a large batch: which loss after so many steps, without a search.

python examples/large_batch.py
"""

import argparse

import torch
from digits import read_digits
from torch import nn

import zerofn as zf


def chains(steps):
    """The first two optimizers must know when the run ends. The third need not."""
    return {
        "adamw": zf.adamw(lr=zf.schedules.warmup_cosine(1e-2, steps // 10, steps)),
        "lamb": zf.lamb(lr=zf.schedules.warmup_cosine(5e-2, steps // 10, steps)),
        "schedule_free_adamw": zf.schedule_free_adamw(lr=zf.schedules.warmup(2e-2, steps // 10)),
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    o = parser.parse_args(argv)
    images, labels = read_digits()
    train, held_out = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])

    found = {}
    for name, optimizer in chains(o.steps).items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
        opt = zf.attach(model, zf.chain(zf.shard(), zf.clip_by_global_norm(1.0), optimizer))
        order = torch.Generator().manual_seed(0)
        for _ in range(o.steps):
            rows = torch.randint(len(train[0]), (512,), generator=order)
            nn.functional.cross_entropy(model(train[0][rows]), train[1][rows]).backward()
            opt.step()
            opt.zero_grad()
        losses = {}
        with torch.no_grad():
            losses["last weights"] = nn.functional.cross_entropy(model(held_out[0]), held_out[1]).item()
            if name == "schedule_free_adamw":
                with opt.averaged():  # evaluate the averaged weights
                    losses["average"] = nn.functional.cross_entropy(model(held_out[0]), held_out[1]).item()
        found[name] = losses
        print(f"{name:20}", "  ".join(f"{which} {loss:.3f}" for which, loss in losses.items()))
    return found


if __name__ == "__main__":
    main()
