"""The eager route: an attached model is called as before, and backward is PyTorch's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.compiler import uncompiled
from .._ranges import PHASE, ranged
from ..core.arguments import check_flag
from ..core.state import State
from ..core.transform import Transform
from . import not_as_torch, torch_form
from . import step_hooks as _hooks
from .attachment import Attachment
from .resident_params import Start, as_they_are


class Optimizer(torch.optim.Optimizer):
    """What `attach` returns.

    A subclass, since learning-rate schedulers and trainers ask `isinstance(opt, torch.optim.Optimizer)`;
    of the base class only the hooks on steps and state dicts are used, and its constructor does not run.

    Attributes:
        state: the `State` of the pipeline.
        metrics: those of the last `step`, as 0-d tensors of their own.
        param_groups: one for each optimizer in the pipeline. Its `lr` may be set, and `weight_decay`, `betas` and
            `momentum` where it has them: docs/frameworks.md. An optimizer without a rate shows an `lr` of 1.0.
    """

    def __init__(self, model: nn.Module, tx: Transform, in_backward: bool = False, start: Start = as_they_are):
        _hooks.prepare(self)
        self._tx = tx
        self._own = own = Attachment(model, tx, in_backward, start)
        self.metrics: dict[str, Tensor] = {}
        self.lr_scheduler: Any = None
        self._model, self._pipe, self._params, self._home = model, own.pipe, own.params, own.home
        self._groups, self._averages = own.groups, own.averages
        own.belongs_to(self)
        self.defaults = {k: x for k, x in self.param_groups[0].items() if k not in ("params", "name")}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._groups.groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups.groups = groups

    @property
    def state(self) -> State:  # type: ignore[override]
        """The pipeline's state. On one process its stored parameters are the model's own.

        To libraries that expect that of `torch.optim` it is a mapping: `opt.state[model.weight]["exp_avg"]`, of the
        shape of the weight; under `shard` a part, as `model.weight` is one.
        """
        state, seen = self._home.settled(), self._home.shown_states
        return state.keyed_by(self._params, lambda x: seen.shown(state, x))

    @state.setter
    def state(self, value: Any) -> None:
        why = "the pipeline has made its state for this model, and to assign another would leave the model's parameters"
        new = "tx = opt.tx; opt.detach(); opt = zf.attach(model, tx) for one made anew"
        raise not_as_torch.replaced("state", why, f"{new};\nopt.load_state(state) for one of this pipeline and model")

    @property
    def tx(self) -> Transform:
        """The pipeline that the model was attached with."""
        return self._tx

    @tx.setter
    def tx(self, value: Any) -> None:
        why = "the model is attached with another one, and has its state"
        raise not_as_torch.replaced("tx", why, "opt.detach(); opt = zf.attach(model, tx)")

    @property
    def global_steps(self) -> int:
        """Updates that were applied: `state.step`."""
        return int(self._home.state.step)

    @property
    def micro_steps(self) -> int:
        """Calls of `step`, those that were held or skipped too: `state.micro_step`."""
        return int(self._home.state.micro_step)

    @property
    def skipped_steps(self) -> int:
        """Micro-steps that `scale_loss` or `skip_nonfinite` has left out; 0 without them."""
        return sum(int(own["skipped_steps"]) for own in self._home.state.transforms.values() if "skipped_steps" in own)

    @property
    def overflow_leaf(self) -> str | None:
        """Path of the first leaf whose gradient overflowed in the last `step`, on any rank; `None` if none did."""
        index = int(self.metrics.get("overflow_leaf", -1))
        return None if index < 0 else self._pipe.layout.leaves[index].path

    @uncompiled
    @torch.optim.Optimizer.profile_hook_step
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, weight: Any = None, lr_kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One micro-step: hand the gradients of the parameters to the pipeline.

        Parameters change when the pipeline lets the step through: `metrics["updated"]`.

        Args:
            closure: evaluates the loss and runs backward, as in torch.optim.
            weight: of this micro-batch, for `accumulate(weighted=True)`.
            lr_kwargs: for `lr_scheduler.step`, as in DeepSpeed. Set `opt.lr_scheduler` to a torch scheduler and
                it is stepped after each update that was applied, and not otherwise.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: detached, in the middle of a backward, or the model changed since it was attached.
            ValueError: no parameter has a gradient.
        """
        self._own.check("step")
        if lr_kwargs is not None and self.lr_scheduler is None:
            raise ValueError("step(lr_kwargs=...) has no effect without a scheduler: opt.lr_scheduler = scheduler.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with ranged(PHASE, "update"):
            self.metrics = self._own.steps.make(weight)
        if self.lr_scheduler is not None and bool(self.metrics["updated"]):
            self.lr_scheduler.step(**(lr_kwargs or {}))
        return loss

    def _optimizer_step_code(self) -> None:
        """Where a profiler that records stacks reads `state` by parameter, which it cannot here."""

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this micro-step; sums that are held stay."""
        self._own.steps.clear(set_to_none)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """DeepSpeed's spelling of `loss.backward()`.

        Like DeepSpeed's, it needs no `zero_grad`: gradients that the last `step` has used are dropped first.

        Args:
            loss: a tensor of one element.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: as in DeepSpeed, whether zerofn is to divide by the number of accumulated
                micro-batches. With `False` you have divided already, and `accumulate` adds up and does not.
                One and the same for a whole window.

        Returns:
            The loss divided by the number of accumulated micro-batches; with `scale_wrt_gas=False` as it is.
        """
        self._own.check("backward", averaged=True)
        check_flag("opt.backward", "scale_wrt_gas", scale_wrt_gas)
        return self._own.steps.backward(loss, retain_graph, scale_wrt_gas)

    @property
    def is_boundary(self) -> bool:
        """Whether the next `step` closes the accumulation window."""
        return self._own.steps.window.closes()

    @is_boundary.setter
    def is_boundary(self, value: Any) -> None:
        raise not_as_torch.replaced("is_boundary", "it says what the next step does", "opt.set_boundary(True)")

    def set_boundary(self, boundary: bool | None) -> None:
        """Decide by hand whether steps close the window; `None` gives the decision back to `accumulate`."""
        self._own.steps.window.force(boundary)

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Full parameters are visible in the model: `with opt.gathered(): torch.save(model.state_dict(), f)`.

        On several ranks under `shard` every rank enters it, and one may then do inside what it likes.

        Raises:
            RuntimeError: only some ranks came, as for `zf.save`.
        """
        self._own.check("gathered", averaged=True)
        if self._home.units is not None:
            inside = "and inside of it `if rank == 0:` around what one rank does alone"
            self._own.meet("opt.gathered()", f"with opt.gathered(): on every rank, {inside}")
        with self._home.gathered() as model:
            yield model

    @contextmanager
    def averaged(self, of: str | None = None) -> Iterator[nn.Module]:
        """The model computes with averages of its parameters: `with opt.averaged(): evaluate(model)`.

        They take the place of the parameters, which are copied and put back to the bit at the end; a rank copies its
        own part. On ranks every one enters it where parameters are cut. `opt.gathered()` may be entered inside.

        Args:
            of: the name of an `ema`, or of the `masked` or `partition` that holds one; by default the only one. What is
                not averaged there stays.

        Raises:
            ValueError: there is no such average.
            RuntimeError: inside, of a step, a save or a state dict, which would take averages for parameters.

        >>> import torch, zerofn as zf
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> opt = zf.attach(model, zf.chain(zf.sgd(1.0), zf.ema(0.5)))
        >>> model(torch.ones(1, 1)).sum().backward()
        >>> opt.step()
        >>> with opt.averaged():
        ...     model(torch.ones(1, 1)).item()
        -0.5
        >>> model.weight.item()
        -1.0
        """
        self._own.check("averaged")
        with self._averages.during(self.state, of):
            yield self._model

    def detach(self) -> nn.Module:
        """Make the model a plain module again, with full parameters. The optimizer is of no use afterwards.

        Channels between ranks that were opened for this model alone are closed; gradients on their way are lost.

        Raises:
            RuntimeError: on several ranks, only some of them came, as for `zf.save`.
        """
        self._averages.refuse("opt.detach()")
        self._own.detach()
        return self._model

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Everything needed to go on, as nested dicts of tensors keyed by path, for `torch.save` or DCP.

        Of a sharded state the shards are flat distributed tensors, as `torch.distributed.checkpoint` wants
        them, for any number of ranks but one: one process has leaves in their shapes. `zf.save` knows no such limit.

        The module's buffers are not in it, as in no optimizer's: `model.state_dict()` has them, and
        `zf.save(directory, opt)` keeps them.
        """
        self._averages.refuse("opt.state_dict()")
        if self._own.steps.under_way:
            raise not_as_torch.half_a_step()
        self._own.dicts.check_told()
        asks = sys._getframe(1)
        by_torch = asks.f_globals.get("__name__") == torch_form.ASKS
        return _hooks.saved(self, lambda: self._own.dicts.in_torch_form(asks) if by_torch else self._own.dicts.ours())

    def load_state(self, state: State, param_groups: list[dict[str, Any]] | None = None) -> None:
        """Go on from a `State` of this pipeline and model: its numbers are copied into the model's parameters.

        Args:
            state: for instance of `zf.load(directory, like=opt.state)`. The module's buffers stay as they are.
            param_groups: learning rates, as `state_dict()["param_groups"]` has them; by default they stay.
                Hooks on state dicts do not run: this is none.

        Raises:
            ValueError: as `load_state_dict`.
        """
        self._load(self._own.dicts.of(state, param_groups))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Go on from a `state_dict`, of ours or in the form of `torch.optim`.

        Of the latter moments, counts and rates are taken, by number or name, whole or distributed: docs/frameworks.md.

        Raises:
            ValueError: of another pipeline or model; every missing, unexpected or misshapen entry is
                named, and nothing is changed.
        """
        self._own.dicts.check_told()
        _hooks.loaded(self, state_dict, self._load)

    def _load(self, state_dict: dict[str, Any]) -> None:
        self._own.check("load_state_dict")
        self._own.dicts.load(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: groups are written as `zf.partition`."""
        raise not_as_torch.another_group()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch.amp.GradScaler asks before a step. On one process it may scale; over ranks it would hang."""
        if self._pipe.every_group:
            raise not_as_torch.scaler_over_ranks()
        return False

    def __repr__(self) -> str:
        return f"attach({type(self._model).__name__}, {self.tx!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_as_torch.copied()
