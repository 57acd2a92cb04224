"""accelerate's loop under torchrun or on one process, with torch.optim and DistributedDataParallel, and attached."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import zerofn as zf

FULL = StateDictOptions(full_state_dict=True)
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


def whole(net: nn.Module, opt: Any) -> dict[str, Tensor]:
    states = get_optimizer_state_dict(net, opt, options=FULL)["state"]
    return {f"{path}/{k}": torch.as_tensor(x).clone() for path, own in states.items() for k, x in own.items()}


def prepared_run(tx: Any, steps: int) -> tuple[Any, nn.Module, Any, Any]:
    accelerator: Any = accelerate.Accelerator(cpu=True)
    net = model()
    opt = zf.attach(net, tx)
    prepared, wrapped = accelerator.prepare(net, opt)
    for i in range(steps):
        # Equal batches: the mean over ranks is each of them.
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(i))
        accelerator.backward(prepared(x).square().mean())
        wrapped.step()
        wrapped.zero_grad()
    return accelerator, net, opt, wrapped


def dicts(folder: str) -> None:
    """State dicts through accelerate's wrapper of the optimizer are those of the optimizer, at every stage."""
    plain = model()
    reference = torch.optim.AdamW(plain.parameters(), 1e-2)
    for i in range(2):
        plain(torch.randn(4, 4, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        reference.step()
        reference.zero_grad()
    want = whole(plain, reference)
    for stage in STAGES:
        tx = zf.chain(stage(), zf.adamw(1e-2))
        accelerator, net, opt, wrapped = prepared_run(tx, 2)
        assert wrapped is not opt and not isinstance(wrapped, zf.Optimizer)
        _, other, into, target = prepared_run(tx, 0)
        for form in (FULL, StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)):
            set_optimizer_state_dict(other, target, get_optimizer_state_dict(net, wrapped, options=form), options=form)
            assert int(into.state.step) == 2
            for name, x in whole(other, target).items():
                assert torch.allclose(x.float(), want[name].float(), rtol=1e-5, atol=1e-8), (stage.__name__, name)
            into.load_state_dict(zf.attach(model(), tx).state_dict())
        target.load_state_dict(wrapped.state_dict())
        assert all(torch.equal(x, whole(net, opt)[name]) for name, x in whole(other, into).items())
        if dist.is_initialized() and stage is zf.reduce_scatter:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()
            try:
                accelerator.load_state(folder)
            except ValueError as error:
                told = str(error)
                assert "the shard of rank 0, and this is rank 1" in told and "zf.save(directory, opt)" in told, told
            else:
                raise AssertionError("the file of one rank was loaded")
        opt.detach()
        into.detach()
        accelerator.free_memory()


def one(folder: str) -> None:
    dicts(folder)
    reference = loop(folder, None, 1.0)
    close("clipped by accelerate", loop(folder, zf.adamw(1e-2), 1.0), reference)
    clipped = zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(1e-2))
    close("clipped in the chain", loop(folder, clipped, 0.0), reference)
    close("saved and loaded", loop(folder, clipped, 0.0, resume=True), reference)


def ranks(folder: str) -> None:
    dicts(folder)
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
