"""The mixins for Trainer and Lightning over stand-ins, which do with an optimizer what those do; the real ones are run
in `tests/integrations`."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stages import STAGES, around
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf

RATE, STEPS = 1e-2, 6


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(6, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6)
    )
    model[3].weight = model[0].weight  # tied
    return model


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(0, 6, (4,), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    # Without the norm over a batch: that of half of it is another one.
    return nn.functional.cross_entropy(model[3](model[2](model[1](model[0](x)))), x)


class Trainer:
    """What `transformers.Trainer` does with an optimizer, under its names: the first rank writes."""

    def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any):
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.model, self.optimizer, self.lr_scheduler, self.rank = model, optimizer, scheduler, rank
        self.args, self.logs = SimpleNamespace(should_save=rank == 0), []

    def train(self, steps: range, saves: dict[int, str], resume: str | None = None) -> None:
        if resume is not None:
            self._load_from_checkpoint(resume)
        # As accelerate prepares it.
        self.optimizer = SimpleNamespace(optimizer=self.optimizer)
        if resume is not None:
            self._load_optimizer_and_scheduler(resume)
        for i in steps:
            loss = loss_of(self.model, batch(self.rank, i))
            loss.backward()
            norm = self._get_grad_norm(self.model)
            self.optimizer.optimizer.step()
            self.lr_scheduler.step()
            self.model.zero_grad()
            self._maybe_log_save_evaluate(loss, norm, self.model, saves.get(i + 1))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return nn.utils.clip_grad_norm_(model.parameters(), float("inf"))

    def _maybe_log_save_evaluate(self, loss: Tensor, grad_norm: Any, model: nn.Module, folder: str | None) -> None:
        self.logs.append(None if grad_norm is None else float(grad_norm))
        if folder is not None:
            self._save(folder)
            self._save_optimizer_and_scheduler(folder)

    def _save(self, output_dir: str, state_dict: Any = None) -> None:
        if self.args.should_save:
            os.makedirs(output_dir, exist_ok=True)
            torch.save(self.model.state_dict() if state_dict is None else state_dict, f"{output_dir}/model.pt")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:
            torch.save(self.optimizer.optimizer.state_dict(), f"{output_dir}/optimizer.pt")
            torch.save(self.lr_scheduler.state_dict(), f"{output_dir}/scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.model.load_state_dict(torch.load(f"{resume_from_checkpoint}/model.pt", weights_only=True), False)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.optimizer.optimizer.load_state_dict(torch.load(f"{checkpoint}/optimizer.pt", weights_only=True))
        self.lr_scheduler.load_state_dict(torch.load(f"{checkpoint}/scheduler.pt", weights_only=True))


class Mixed(zf.integrations.TrainerMixin, Trainer):
    pass


def attached(stage: str, every: int = 1) -> tuple[nn.Module, zf.Optimizer, Any]:
    model = net()
    held = zf.accumulate(every)
    middle = [] if stage == "ZeRO-1" or every == 1 else [held]
    tx = zf.chain(*around(stage, *middle, window=held), zf.clip_by_global_norm(0.1), zf.adamw(RATE))
    opt = zf.attach(model, tx)
    return model, opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda e: 1 / (1 + e) if every == 1 else 1.0)


def of(opt: zf.Optimizer, model: nn.Module) -> list[Tensor]:
    opt.detach()
    return [x.detach().clone() for x in model.state_dict().values()]


def trained(stage: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for run, steps, resume in (("straight", range(STEPS), None), ("resumed", range(2, STEPS), f"{folder}/2")):
        model, opt, schedule = attached(stage)
        trainer = Mixed(model, opt, schedule)
        saves = {2: f"{folder}/2", 6: f"{folder}/6"} if run == "straight" else {}
        trainer.train(steps, saves, resume)
        found[run], found[f"logs {run}"] = of(opt, model), trainer.logs
    # The best model: what Trainer loads into the attached one at the end.
    model, opt, _ = attached(stage)
    model.load_state_dict(torch.load(f"{folder}/6/model.pt", weights_only=True), False)
    found["best"] = of(opt, model)
    model, opt, schedule = attached(stage, 2)
    trainer = Mixed(model, opt, schedule)
    trainer.train(range(STEPS), {})
    found["windows"] = trainer.logs
    opt.detach()
    return found


def reference(every: int) -> tuple[list[Tensor], list[float]]:
    """torch.optim on the batch of both ranks, and the norms of its updates."""
    model, norms = net(), []
    opt = torch.optim.AdamW(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda e: 1 / (1 + e))
    for i in range(STEPS):
        (loss_of(model, torch.cat([batch(0, i), batch(1, i)])) / every).backward()
        if (i + 1) % every == 0:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            opt.step()
            opt.zero_grad()
            if every == 1:
                schedule.step()
    return [x.detach() for x in model.state_dict().values()], norms


FEW = [pytest.param(x, marks=pytest.mark.slow if x in ("ZeRO-1", "ZeRO-2") else ()) for x in STAGES]


@pytest.mark.parametrize("stage", FEW)
def test_a_trainer_saves_and_resumes_and_logs_norms(stage, tmp_path):
    expected, norms = reference(1)
    _, of_windows = reference(2)
    saved = [*zf.launch(trained, 2, stage, str(tmp_path), timeout=limit())]
    for found in saved:
        for run in ("resumed", "best"):
            assert all(torch.equal(a, b) for a, b in zip(found[run], found["straight"], strict=True)), run
        for a, b in zip(found["straight"], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert found["logs straight"] == pytest.approx(norms, rel=1e-4)
        assert found["logs resumed"] == pytest.approx(norms[2:], rel=1e-4)
        # None before the first update, then that of the last one.
        assert found["windows"][0] is None and found["windows"][1::2] == pytest.approx(of_windows, rel=1e-4)
        assert found["windows"][2::2] == found["windows"][1:-1:2]
    # Whole weights, tied ones too, and no file of one rank's shards.
    weights = torch.load(tmp_path / "6" / "model.pt", weights_only=True)
    assert [tuple(x.shape) for x in weights.values()] == [tuple(x.shape) for x in net().state_dict().values()]
    assert type(weights["0.weight"]) is Tensor and torch.equal(weights["0.weight"], weights["3.weight"])
    assert sorted(p.name for p in (tmp_path / "2").iterdir()) == ["model.pt", "scheduler.pt", "zerofn"]


def resumed_alone(folder: str) -> list[Tensor]:
    model, opt, schedule = attached("one process")
    Mixed(model, opt, schedule).train(range(2, 2), {}, folder)
    return of(opt, model)


def saved_at_two(stage: str, folder: str) -> list[Tensor]:
    model, opt, schedule = attached(stage)
    Mixed(model, opt, schedule).train(range(2), {2: folder})
    return of(opt, model)


def test_another_number_of_ranks_resumes(tmp_path):
    folder = str(tmp_path / "2")
    two = zf.launch(saved_at_two, 2, "ZeRO-3", folder, timeout=limit())[0]
    assert all(torch.equal(a, b) for a, b in zip(resumed_alone(folder), two, strict=True))


def test_a_trainer_without_an_optimizer_and_with_another_one(tmp_path):
    model = net()
    trainer = Mixed(model, None, None)
    trainer._save(str(tmp_path / "evaluated"))
    assert (tmp_path / "evaluated" / "model.pt").exists()
    trainer.optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match=r"TrainerMixin with AdamW[\s\S]*optimizers=\(zf.attach"):
        trainer._save_optimizer_and_scheduler(str(tmp_path))


# -- Lightning ----------------------------------------------------------------------------------------------


class Strategy:
    """What a strategy of Lightning does with a checkpoint, under its names."""

    def __init__(self, module: nn.Module, opt: Any):
        self.lightning_module, self.optimizers, self.copied = module, [opt], []
        self.is_global_zero = dist.get_rank() == 0

    def setup(self, trainer: Any) -> None:
        skipped = getattr(self.lightning_module, "_ddp_params_and_buffers_to_ignore", ())
        self.copied = [n for n, _ in self.lightning_module.named_parameters() if n not in skipped]

    def optimizer_state(self, optimizer: Any) -> dict:
        return optimizer.state_dict()

    def lightning_module_state_dict(self) -> dict:
        return self.lightning_module.state_dict()

    def save_checkpoint(self, checkpoint: dict, filepath: Any, storage_options: Any = None) -> None:
        if self.is_global_zero:
            torch.save(checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict:
        return torch.load(checkpoint_path, weights_only=True)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for opt, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            opt.load_state_dict(state)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            os.remove(filepath)

    def dump(self, filepath: str, weights_only: bool = False) -> None:
        checkpoint = {"state_dict": self.lightning_module_state_dict()}
        if not weights_only:
            checkpoint["optimizer_states"] = [self.optimizer_state(opt) for opt in self.optimizers]
        self.save_checkpoint(checkpoint, filepath)
        dist.barrier()


class MixedStrategy(zf.integrations.StrategyMixin, Strategy):
    pass


class Outer(nn.Module):
    """A module around the attached one, as a `LightningModule` is."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.other = net(), nn.Linear(2, 2)


def fitted(stage: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for run in ("straight", "resumed"):
        outer = Outer()
        opt = zf.attach(outer.net, zf.chain(*around(stage), zf.adamw(RATE)))
        strategy = MixedStrategy(outer, opt)
        strategy.setup(None)
        found["copied"] = strategy.copied
        if run == "resumed":
            strategy.load_optimizer_state_dict(strategy.load_checkpoint(f"{folder}/2.ckpt"))
        for i in range(2 if run == "resumed" else 0, STEPS):
            loss_of(outer.net, batch(dist.get_rank(), i)).backward()
            opt.step()
            opt.zero_grad()
            if run == "straight" and i == 1:
                strategy.dump(f"{folder}/2.ckpt")
        strategy.dump(f"{folder}/{run}.ckpt", weights_only=True)
        strategy.dump(f"{folder}/gone.ckpt")
        strategy.remove_checkpoint(f"{folder}/gone.ckpt")
        found[run] = of(opt, outer.net)
    return found


@pytest.mark.parametrize("stage", FEW)
def test_a_strategy_saves_and_resumes(stage, tmp_path):
    for found in zf.launch(fitted, 2, stage, str(tmp_path), timeout=limit()):
        assert all(torch.equal(a, b) for a, b in zip(found["resumed"], found["straight"], strict=True))
        # What an evaluation copies from the first rank to all are not shards of it.
        assert found["copied"] == ["other.weight", "other.bias"]
    weights = torch.load(tmp_path / "straight.ckpt", weights_only=True)["state_dict"]
    inner = [x for name, x in weights.items() if name.startswith("net.")]
    assert all(torch.equal(a, b) for a, b in zip(inner, found["straight"], strict=True))
    names = sorted(p.name for p in Path(tmp_path).iterdir())
    assert names == ["2.ckpt", "2.ckpt.zerofn", "resumed.ckpt", "straight.ckpt"]
