"""Lightning under torchrun or on one process: `fit` with torch.optim, and with stages attached."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

import zerofn as zf

STAGES: tuple[Callable[[], Any], ...] = (zf.all_reduce, zf.reduce_scatter, zf.shard)
# With the accumulation of ZeRO-1, too.
FRONTS: dict[str, list[Callable[[], Any]]] = {make.__name__: [make] for make in STAGES}
FRONTS["ZeRO-1"] = [lambda: zf.accumulate(2), zf.reduce_scatter]


class Strategy(zf.integrations.StrategyMixin, DDPStrategy):
    pass


class Module(lightning.LightningModule):
    def __init__(self, make: Callable[[nn.Module], Any], automatic: bool):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.make, self.automatic_optimization = make, automatic

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        if not self.automatic_optimization:
            opt: Any = self.optimizers()
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()
        if isinstance(self.opt, zf.Optimizer) and "grad_norm" in self.opt.metrics:
            self.log("norm", self.opt.metrics["grad_norm"])
        self.log("passed", float(self.current_epoch))
        return loss

    def configure_optimizers(self) -> Any:
        self.opt = self.make(self.net)
        return self.opt


def fit(make: Any, folder: str, automatic: bool = True, epochs: int = 2, resume: Any = None, **more: Any) -> Any:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 8)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    module = Module(make, automatic)
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=folder, **quiet, **more)
    trainer.fit(module, loader, ckpt_path=resume)
    return module, trainer


def plain(net: nn.Module) -> Any:
    return torch.optim.AdamW(net.parameters(), 1e-2, fused=True)


def params(module: Any) -> list[Tensor]:
    if isinstance(module.opt, zf.Optimizer):
        module.opt.detach()
    return [p.detach() for p in module.net.parameters()]


class Gradual(lightning.Callback):
    """Freezes the first layer in the first epoch, and the last in the second. A reference instead drops gradients."""

    def __init__(self, drops: bool):
        self.drops = drops

    def frozen(self, trainer: Any, module: Any) -> nn.Module:
        return module.net[0 if trainer.current_epoch == 0 else 2]

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if not self.drops:
            module.net.requires_grad_(True)
            self.frozen(trainer, module).requires_grad_(False)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.drops:
            for p in self.frozen(trainer, module).parameters():
                p.grad = None


def close(mine: list[Tensor], reference: list[Tensor]) -> None:
    start = [p.detach() for p in Module(plain, True).net.parameters()]
    for a, b, s in zip(mine, reference, start, strict=True):
        # The order of sums over ranks, and Adam's division of what is nearly nothing by its root.
        assert (a - b).norm() < 1e-5 * (b - s).norm(), (a - b).norm() / (b - s).norm()


def one(folder: str) -> None:
    for automatic in (True, False):
        alone = {"devices": 1, "automatic": automatic}
        attach = lambda net: zf.attach(net, zf.adamw(1e-2))  # noqa: E731
        reference, _ = fit(plain, folder, **alone)
        mine, trainer = fit(attach, folder, **alone)
        trainer.save_checkpoint(f"{folder}/two.ckpt")
        again, _ = fit(attach, folder, epochs=4, resume=f"{folder}/two.ckpt", **alone)
        straight, _ = fit(attach, folder, epochs=4, **alone)
        assert all(torch.equal(a, b) for a, b in zip(params(again), params(straight), strict=True))
        close(params(mine), params(reference))


def ranks(folder: str) -> None:
    for automatic in (True, False):
        both = {"devices": 2, "automatic": automatic, "enable_checkpointing": False}
        reference, _ = fit(plain, folder, strategy="ddp", **both)
        expected = params(reference)
        for make in STAGES:
            tx = zf.chain(make(), zf.adamw(1e-2))
            mine, _ = fit(lambda net, tx=tx: zf.attach(net, tx), folder, strategy=Strategy(), **both)
            close(params(mine), expected)


def frozen(folder: str) -> None:
    """Layers are frozen and unfrozen between epochs, at every stage."""
    both = {"devices": 2, "enable_checkpointing": False}
    expected = {}
    for every in (1, 2):
        gradual = {"callbacks": [Gradual(True)], "accumulate_grad_batches": every}
        expected[every] = params(fit(plain, folder, strategy="ddp", **gradual, **both)[0])
    for name, parts in FRONTS.items():
        tx = zf.chain(*[make() for make in parts], zf.adamw(1e-2))
        attach = lambda net, tx=tx: zf.attach(net, tx, hold_frozen=True)  # noqa: E731
        mine, _ = fit(attach, folder, strategy=Strategy(), callbacks=[Gradual(False)], **both)
        close(params(mine), expected[2 if name == "ZeRO-1" else 1])


def resumed(folder: str) -> None:
    """Saved by its callback after two epochs and fitted to the end, bit for bit, at every stage; the file is whole."""
    for name, parts in FRONTS.items():
        tx = zf.chain(*[make() for make in parts], zf.clip_by_global_norm(1.0), zf.adamw(1e-2))
        attach = lambda net, tx=tx: zf.attach(net, tx)  # noqa: E731
        # The best is that of the last epoch.
        kept = ModelCheckpoint(f"{folder}/{name}", "best", monitor="passed", mode="max", save_last=True)
        two, _ = fit(attach, folder, strategy=Strategy(), devices=2, callbacks=[kept])
        best = torch.load(kept.best_model_path, weights_only=True)["state_dict"]
        halfway = params(two)
        assert all(torch.equal(a, b) for a, b in zip(best.values(), halfway, strict=True)), name
        found = []
        for resume in (f"{folder}/{name}/last.ckpt", None):
            once, trainer = fit(
                attach, folder, epochs=4, resume=resume, strategy=Strategy(), devices=2, enable_checkpointing=False
            )
            # Of the step before the last, which ZeRO-1 holds.
            assert (float(trainer.callback_metrics["norm"]) > 0) == (name != "ZeRO-1"), name
            found.append(params(once))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), name
        assert not all(torch.equal(a, b) for a, b in zip(found[0], halfway, strict=True))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    {"one": one, "ranks": ranks, "frozen": frozen, "resumed": resumed}[sys.argv[1]](sys.argv[2])
    # One write: lines of ranks would mix.
    sys.stdout.write(f"right {sys.argv[1]}\n")
    if dist.is_initialized():
        dist.destroy_process_group()
