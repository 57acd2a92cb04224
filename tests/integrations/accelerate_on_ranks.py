"""accelerate's loop under torchrun or on one process, with torch.optim and DistributedDataParallel, and attached."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofn as zf

STAGES: tuple[Any, ...] = (zf.all_reduce, zf.reduce_scatter, zf.shard)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loop(folder: str, tx: Any, clip: float, resume: bool = False) -> list[Tensor]:
    """Ten batches, of which two make a step; with `resume` the state is saved after six and loaded again."""
    accelerator: Any = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = model()
    opt = torch.optim.AdamW(net.parameters(), 1e-2, fused=True) if tx is None else zf.attach(net, tx)
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 4)
    prepared, wrapped, loader = accelerator.prepare(net, opt, loader)
    batches = list(loader)[:10]
    for i, (a, b) in enumerate(batches):
        if resume and i == 6:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()  # The main process alone writes the model.
            with torch.no_grad():
                for p in net.parameters():
                    p.zero_()
            accelerator.load_state(folder)
        with accelerator.accumulate(prepared):
            accelerator.backward((prepared(a) - b).square().mean())
            if accelerator.sync_gradients and clip:
                accelerator.clip_grad_norm_(prepared.parameters(), clip)
            wrapped.step()
            wrapped.zero_grad()
    if tx is not None:
        assert isinstance(opt, zf.Optimizer)
        opt.detach()
    accelerator.free_memory()
    return [p.detach().clone() for p in net.parameters()]


def close(name: str, mine: list[Tensor], reference: list[Tensor]) -> None:
    for a, b, s in zip(mine, reference, [p.detach() for p in model().parameters()], strict=True):
        # The order of sums over ranks, and Adam's division of what is nearly nothing by its root.
        assert (a - b).norm() < 1e-5 * (b - s).norm(), f"{name}: {((a - b).norm() / (b - s).norm()).item()}"


def one(folder: str) -> None:
    reference = loop(folder, None, 1.0)
    close("clipped by accelerate", loop(folder, zf.adamw(1e-2), 1.0), reference)
    clipped = zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(1e-2))
    close("clipped in the chain", loop(folder, clipped, 0.0), reference)
    close("saved and loaded", loop(folder, clipped, 0.0, resume=True), reference)


def ranks(folder: str) -> None:
    reference = loop(folder, None, 1.0)
    for stage in STAGES:
        clipped = zf.chain(stage(), zf.clip_by_global_norm(1.0), zf.adamw(1e-2))
        close(stage.__name__, loop(folder, clipped, 0.0), reference)
    clipped = zf.chain(zf.all_reduce(), zf.clip_by_global_norm(1.0), zf.adamw(1e-2))
    close("saved and loaded", loop(folder, clipped, 0.0, resume=True), reference)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"one": one, "ranks": ranks}[sys.argv[1]](sys.argv[2])
    # One write: lines of ranks would mix.
    sys.stdout.write(f"right {sys.argv[1]}\n")
    if dist.is_initialized():
        dist.destroy_process_group()
