"""A small GPT by DistributedDataParallel: clip, warmup and decay, evaluation, a checkpoint of the first rank.

torchrun --nproc-per-node 2 examples/ddp/before.py
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent))
from lm_data import Text, read_text
from lm_model import GPT, next_byte_loss

STEPS, WINDOW, BATCH, SEQ, RATE = 60, 2, 8, 64, 3e-3


def main(steps=STEPS, out="ckpt.pt"):
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    text = Text.split(read_text(None), SEQ)
    torch.manual_seed(0)
    model = GPT(64, layers=2, heads=2, seq=SEQ)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    losses = []
    for step in range(steps):
        for micro in range(WINDOW):
            x, y = text.batch(rank, WINDOW * step + micro, BATCH, SEQ)
            ddp.require_backward_grad_sync = micro == WINDOW - 1
            loss = next_byte_loss(ddp(x), y)
            (loss / WINDOW).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rate.step()
        losses.append(loss.item())
        if rank == 0 and step % 10 == 0:
            print(f"step {step:3} loss {losses[-1]:.3f} norm {norm:.2f}")

    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out)
    return losses, float(norm)


if __name__ == "__main__":
    main()
