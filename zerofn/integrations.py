"""Mixins for Hugging Face's Trainer and Lightning, which save, resume and log training over ranks.

Both frameworks write a checkpoint on the first rank only. If leaves are sharded, the first rank has only its shards of
the optimizer's state and, under `shard`, of the model. So the mixins write the state with `zf.save`, in which every
rank writes its shards, beside the framework's own files. They write the model's weights unsharded. This module imports
neither `transformers` nor `lightning`: put the mixin before their class.

    class Trainer(zf.integrations.TrainerMixin, transformers.Trainer):
        pass

    class Strategy(zf.integrations.StrategyMixin, lightning.pytorch.strategies.DDPStrategy):
        pass
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
from torch import Tensor, nn

from ._compat.tensors import IGNORED_BY_DDP
from ._errors import explain
from .eager.optimizer import Optimizer
from .storage.loading import load
from .storage.saving import save

# The directory of `zf.save` inside Trainer's checkpoint, and the suffix of that beside Lightning's checkpoint.
STATE = "zerofn"
SCHEDULER = "scheduler.pt"


class TrainerMixin:
    """For `class Trainer(zf.integrations.TrainerMixin, transformers.Trainer)`: checkpoints with every rank's shards.

    With an optimizer of `zf.attach`, on any number of ranks and at every ZeRO stage:

    * `checkpoint-N/zerofn` contains what `zf.save(directory, opt)` writes, instead of `optimizer.pt`; the weights
      beside it are unsharded. A run on another number of ranks or at another stage can resume from it.
    * `train(resume_from_checkpoint=...)` goes on bit for bit, and `load_best_model_at_end` loads the best weights.
    * `grad_norm` in the logs is the norm of the mean gradient over ranks in the last update, before any clip. To clip,
        put `zf.clip_by_global_norm` into the chain, and pass `max_grad_norm=0.0` to the Trainer.

    Attributes:
        optimizer: of `zf.attach`, or accelerate's wrapper of it.
    """

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    _norm_of_update: Tensor | None = None

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> Any:
        opt = _attached(self.optimizer, "TrainerMixin")
        if opt is not None:
            metrics = opt.metrics
            if "grad_norm" in metrics and bool(metrics["updated"]):
                self._norm_of_update = metrics["grad_norm"]
            # While a window is open this is the norm of the last update; `None` before the first, or with in_backward.
            grad_norm = self._norm_of_update
        return super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)  # type: ignore[misc]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None and _attached(self.optimizer, "TrainerMixin") is not None:
            # The step reports the norm. Here gradients may be sharded, or already used.
            return None
        return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        opt = _attached(self.optimizer, "TrainerMixin")
        if opt is not None and state_dict is None:
            # Every rank calls this, even one that writes nothing, so all ranks join the all-gathers.
            state_dict = _full_state_dict(self.model, opt, self.args.should_save)
        super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        opt = _attached(self.optimizer, "TrainerMixin")
        if opt is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        save(os.path.join(output_dir, STATE), opt)
        if self.args.should_save and self.lr_scheduler is not None:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if _attached(self.optimizer, "TrainerMixin") is None or not _has_state(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        # Otherwise the weights come with the state, in their stored dtype.

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        opt = _attached(self.optimizer, "TrainerMixin")
        if opt is None or checkpoint is None or not _has_state(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        load(os.path.join(checkpoint, STATE), like=opt)
        scheduler = os.path.join(checkpoint, SCHEDULER)
        if self.lr_scheduler is not None and os.path.isfile(scheduler):
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))


class StrategyMixin:
    """For `class Strategy(zf.integrations.StrategyMixin, DDPStrategy)`: Lightning checkpoints with every rank's shards.

    `configure_optimizers` returns what `zf.attach` returns.

    * The module is not wrapped: the pipeline reduces gradients over ranks.
    * A checkpoint `name.ckpt` has unsharded weights, from the first rank, and no state of the optimizer. The directory
      `name.ckpt.zerofn` beside it has what `zf.save(directory, opt)` writes, for each optimizer. Move both together.
    * `fit(ckpt_path=...)` goes on bit for bit on as many ranks, and on another number of ranks up to
      the order of sums; `ckpt_path="best"` loads the weights.
    """

    optimizers: Any
    lightning_module: Any
    is_global_zero: Any
    _loaded_from: str | None = None

    def setup(self, trainer: Any) -> None:
        """As the strategy does. Before evaluation it broadcasts the first rank's parameters, except attached ones."""
        model = self.lightning_module
        before = getattr(model, IGNORED_BY_DDP, None)
        names = [n for n, p in model.named_parameters(remove_duplicate=False) if "_zerofn_owner" in vars(p)]
        setattr(model, IGNORED_BY_DDP, frozenset([*(before or ()), *names]))
        try:
            super().setup(trainer)  # type: ignore[misc]
        finally:
            delattr(model, IGNORED_BY_DDP)
            if before is not None:
                setattr(model, IGNORED_BY_DDP, before)

    def configure_ddp(self) -> None:
        """Leave the module unwrapped."""

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty for an attached optimizer: `save_checkpoint` saves it."""
        if isinstance(_inner(optimizer), Optimizer):
            return {}
        return super().optimizer_state(optimizer)  # type: ignore[misc]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Unsharded weights, on the first rank."""
        found = super().lightning_module_state_dict()  # type: ignore[misc]
        for opt in self._attached():
            found = _full_state_dict(self.lightning_module, opt, self.is_global_zero, found)
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the file, and beside it the state, of which every rank writes its shards."""
        if "optimizer_states" in checkpoint:
            for i, opt in enumerate(self._attached()):
                save(os.path.join(_beside(filepath), str(i)), opt)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)  # type: ignore[misc]

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read the file. What is beside it is loaded once there is an optimizer."""
        self._loaded_from = os.fspath(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the states of attached optimizers, and the stored parameters."""
        attached = self._attached()
        if not attached or self._loaded_from is None or any(checkpoint["optimizer_states"]):
            # There is no attached optimizer, or the file was written without this mixin.
            super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
            return
        for i, opt in enumerate(attached):
            load(os.path.join(_beside(self._loaded_from), str(i)), like=opt)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove the file, and the directory beside it."""
        super().remove_checkpoint(filepath)  # type: ignore[misc]
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def _attached(self) -> list[Optimizer]:
        return [opt for opt in map(_inner, self.optimizers) if isinstance(opt, Optimizer)]


def _has_state(checkpoint: str) -> bool:
    return os.path.isdir(os.path.join(checkpoint, STATE))


def _beside(filepath: Any) -> str:
    # For a link such as `last.ckpt`, the directory beside the file it points to.
    return f"{os.path.realpath(filepath)}.{STATE}"


def _inner(optimizer: Any) -> Any:
    """The optimizer that accelerate or Lightning has wrapped."""
    if isinstance(optimizer, Optimizer) or optimizer is None:
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    return optimizer if inner is None else inner


def _attached(optimizer: Any, mixin: str) -> Optimizer | None:
    """The attached optimizer; `None` if there is no optimizer yet.

    Raises:
        TypeError: it is another optimizer.
    """
    found = _inner(optimizer)
    if found is None or isinstance(found, Optimizer):
        return found
    raise TypeError(
        explain(
            f"zf.integrations.{mixin} with {type(found).__name__}",
            "it saves and loads what zf.attach returns; another optimizer's state is written by the first rank only",
            "Trainer(model, args, ..., optimizers=(zf.attach(model, tx), None))",
        )
    )


def _full_state_dict(model: nn.Module, opt: Optimizer, keep: bool, found: Any = None) -> dict[str, Any]:
    """The model's state dict with unsharded parameters, gathered one by one; kept where `keep`. All ranks call it."""
    found = model.state_dict() if found is None else found
    if opt._own.home.units is None:
        return found
    mine = {id(p) for p in opt._own.params.values()}
    fulls: dict[int, Tensor] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) not in mine or name not in found:
            continue
        if id(p) not in fulls:
            full = p.full_tensor().detach()  # type: ignore[attr-defined]
            fulls[id(p)] = full.cpu() if keep else found[name]
        # A tied parameter is one tensor at all of its places.
        found[name] = fulls[id(p)]
    return found
