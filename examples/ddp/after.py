"""A small GPT by a chain: the same run, with states sharded.

torchrun --nproc-per-node 2 examples/ddp/after.py
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
from lm_data import Text, read_text
from lm_model import GPT, next_byte_loss

import zerofn as zf

STEPS, WINDOW, BATCH, SEQ, RATE = 60, 2, 8, 64, 3e-3


def main(steps=STEPS, out="ckpt"):
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    text = Text.split(read_text(None), SEQ)
    torch.manual_seed(0)
    model = GPT(64, layers=2, heads=2, seq=SEQ)
    adamw = zf.adamw(lr=lambda step: RATE * min(1.0, (step + 1) / 10), weight_decay=0.1)
    tx = zf.chain(zf.accumulate(WINDOW), zf.reduce_scatter(), zf.clip_by_global_norm(1.0), adamw)
    opt = zf.attach(model, tx)

    losses = []
    for step in range(steps):
        for micro in range(WINDOW):
            x, y = text.batch(rank, WINDOW * step + micro, BATCH, SEQ)
            loss = next_byte_loss(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
        norm = opt.metrics["grad_norm"]
        losses.append(loss.item())
        if rank == 0 and step % 10 == 0:
            print(f"step {step:3} loss {losses[-1]:.3f} norm {norm:.2f}")

    zf.save(out, opt)
    return losses, float(norm)


if __name__ == "__main__":
    main()
