"""The eager route: an attached model is called as before, and backward is PyTorch's own."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import in_backward, uncompiled, version
from .._errors import explain
from .._ranges import PHASE, ranged
from ..core.agreement import check_weight
from ..core.arguments import check_flag
from ..core.pipeline import pipeline
from ..core.state import State
from ..core.transform import Context, Transform
from ..core.tree import make_layout, parameters_of
from ..core.update import apply
from ..module.attach_checks import (
    Owner,
    Watch,
    check_alone,
    check_free,
    check_hookable,
    check_initialised,
    check_trainable,
)
from ..module.backward_hooks import check_inner_hooks
from ..ranks.backend import as_local
from ..ranks.leases import lease
from ..ranks.together import together
from ..sharded.guarded_parameter import read, write
from . import step_hooks as _hooks
from . import torch_form
from .accumulation_window import Window
from .averaged import Averaged
from .param_groups import ParamGroups
from .resident_params import Residence, Start, as_they_are
from .state_dict import as_dict, pairs
from .whole_states import gathered, rows


def attach(model: nn.Module, tx: Transform, in_backward: bool = False) -> Optimizer:
    """Bridge a pipeline to a model that is trained by `loss.backward()`.

    The model stays what it is: it is called as before, and any backward of PyTorch's own is right, on
    any output, any number of times. Gradients are true ones: no loss scale shows in `p.grad`, in
    the gradient of an input, or in a second derivative.

    Args:
        model: its parameters become the stored ones, in `precision`'s `store_dtype`.
        tx: a transform, or a chain, with an optimizer in it.
        in_backward: update each leaf as soon as its gradient has arrived, and let the gradient go: no
            gradient tree ever exists. `step()` then only closes the step. For pipelines that treat leaves
            alone, groups of `partition` and `masked` too, and one backward for each step.

    Returns:
        An `Optimizer` to call `step()` and `zero_grad()` on; a `torch.optim.Optimizer` to whoever asks.

    What `p.grad` holds:

    ==================  =======================================================================
    after `backward()`  the sum of true gradients since it was last cleared, as in PyTorch. With
                        `shard` this rank's flat part of the mean over ranks. With `reduce_scatter` or
                        `all_reduce` before any `accumulate`, and with `in_backward`, `None`: the gradient
                        has left to be reduced, or was used
    after `step()`      the same; with `accumulate(k > 1)` it was moved into the sum, so `None`
    `zero_grad()`       `None`, or zeros with `set_to_none=False`
    ==================  =======================================================================

    Under `shard` a parameter is this rank's flat part to whatever looks at it or writes into it, and the full one
    to whatever computes with it, inside of the model and outside: `loss + model.head.weight.norm()` is right.
    torch's functions that clip gradients raise where `p.grad` is not all there, and so does what makes one number
    of a part (`p.grad.norm()`), or puts it beside a tensor that is none.

    A hook on a parameter is given what `p.grad` is to hold: under `shard` this rank's part of the mean, else the
    gradient of this rank. Where `p.grad` is `None` after backward, `p.register_post_accumulate_grad_hook` belongs
    before `attach`; later it finds `None`, and whoever reads that is warned.

    Raises:
        TypeError: `model` is no module.
        ValueError: it is attached already, has no parameters, or NaN in one, or modules of `torch.jit`;
            `in_backward` with a transform that needs the whole gradient.

    >>> import torch, zerofn as zf
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = zf.attach(model, zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(lr=1e-2)))
    >>> loss = model(torch.ones(4, 2)).square().mean()
    >>> loss.backward()
    >>> opt.step()
    >>> opt.zero_grad()
    >>> bool(opt.metrics["updated"]), int(opt.state.step)
    (True, 1)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            explain(
                f"attach({type(model).__name__}, tx)",
                "the eager route hooks a torch.nn.Module",
                "zf.attach(model, tx); for a tree of tensors, zf.init(tx, params) and zf.make_step(loss_fn, tx)",
            )
        )
    check_flag("attach", "in_backward", in_backward)
    return Optimizer(model, tx, in_backward)


class Optimizer(torch.optim.Optimizer):
    """What `attach` returns.

    A subclass, since learning-rate schedulers and trainers ask `isinstance(opt, torch.optim.Optimizer)`;
    of the base class only the hooks on steps and state dicts are used, and its constructor does not run.

    Attributes:
        state: the `State` of the pipeline.
        metrics: those of the last `step`, as 0-d tensors of their own.
        param_groups: one for each optimizer in the pipeline. Its `lr` may be set; learning-rate schedulers do. So may
            `weight_decay` and `betas` where the optimizer has them, from the next step on; what was set is saved. One
            of your own has it as a keyword-only argument `lr`; without one it shows 1.0, and to set it is an error.
    """

    def __init__(self, model: nn.Module, tx: Transform, in_backward: bool = False, start: Start = as_they_are):
        check_hookable(model)
        _hooks.prepare(self)
        named = parameters_of(model)
        check_free(named)
        check_initialised(named, "attach")
        layout, params = make_layout(named, lambda path: named[path].requires_grad)
        check_trainable(layout)
        # Not by way of `self`: an optimizer that is dropped is gone at once, and its hooks with it.
        myself = weakref.ref(self)
        with lease() as channels:
            pipe = pipeline(tx, layout, "zf.attach")
            check_alone(model, bool(pipe.groups))
            if pipe.scale is not None:
                check_inner_hooks(model)
            context = self._context if in_backward else None
            self._home = Residence(model, pipe, params, context, lambda: _check(myself()), start)
        if self._home.control is not None:
            # The last that is undone.
            self._home.undo.insert(0, functools.partial(channels.close, self._home.control.ranks))
        self.tx = tx
        self._model = model
        self._pipe = pipe
        self._params = params
        self.metrics: dict[str, Tensor] = {}
        home = self._home
        self._averages = Averaged(home.refresh)
        self._window = Window(pipe, lambda: home.state)
        # What the last step has used up, to be told from gradients that arrived after it.
        self._spent: list[tuple[Tensor, weakref.ref[Tensor], int]] = []
        self.lr_scheduler: Any = None
        self._attached = True
        self._watch = Watch(model, layout, params)
        for p in params.values():
            p._zerofn_owner = Owner(self, self._home.leave, bool(pipe.groups))  # type: ignore[attr-defined]
        self._groups = ParamGroups(pipe, params)
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

        To libraries that expect that of `torch.optim` it is a mapping: `opt.state[model.weight]["exp_avg"]`.
        """
        self._home.copies.carry_over()
        if self._home.in_backward is not None:
            self._home.in_backward.settle()
        return self._home.state.keyed_by(self._params)

    @property
    def _state(self) -> State:
        return self._home.state

    @property
    def global_steps(self) -> int:
        """Updates that were applied: `state.step`."""
        return int(self._state.step)

    @property
    def micro_steps(self) -> int:
        """Calls of `step`, those that were held or skipped too: `state.micro_step`."""
        return int(self._state.micro_step)

    @property
    def skipped_steps(self) -> int:
        """Micro-steps in which a gradient overflowed; 0 without `scale_loss`."""
        name = self._pipe.scale
        return 0 if name is None else int(self._state.transforms[name]["skipped_steps"])

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
        self._check_usable("step")
        self._averages.refuse("opt.step()")
        if lr_kwargs is not None and self.lr_scheduler is None:
            raise ValueError("step(lr_kwargs=...) has no effect without a scheduler: opt.lr_scheduler = scheduler.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with ranged(PHASE, "update"):
            self._watch.check()
            if self._home.in_backward is not None:
                self._refuse_override(weight)
                self._home.micro_step.collect(self._window.forced)
                self._home.state, metrics = self._home.in_backward.finish()
            else:
                metrics = self._update(weight)
            # Some are entries of the state, into which `load_state_dict` writes.
            self.metrics = {name: x.detach().clone() for name, x in metrics.items()}
            if bool(self.metrics["updated"]):
                self._home.refresh()
            self._groups.show(self.metrics)
        if self.lr_scheduler is not None and bool(self.metrics["updated"]):
            self.lr_scheduler.step(**(lr_kwargs or {}))
        return loss

    def _optimizer_step_code(self) -> None:
        """Where a profiler that records stacks reads `state` by parameter, which it cannot here."""

    def _update(self, weight: Any) -> dict[str, Tensor]:
        """Run the update halves on the gradients that have arrived."""
        rates, numbers = self._groups.rates(), self._groups.numbers()
        grads = self._home.micro_step.collect(self._window.forced)
        check_weight(self._pipe, weight)
        window, closes = self._window, self.is_boundary
        averaged = window.averaged is not False
        given = dict(weight=weight, boundary=window.forced, lr=rates, numbers=numbers, averaged=averaged)
        ctx = self._pipe.context(donate=True, **given)
        old = self._state
        new, metrics = apply(self._pipe, grads, old, ctx)
        with torch.no_grad():
            for path, x in new.leaves.items():
                if x is not old.leaves[path]:
                    old.leaves[path].copy_(x)
                    new.leaves[path] = old.leaves[path]
        self._home.state = new
        if window.holds:
            self._home.micro_step.uncleared.clear(to_none=True)
            # The sum has it now. Left in place it would be counted again by a loop that, as
            # DeepSpeed's do, never clears gradients.
            for path in grads:
                self._params[path].grad = None
        with torch.DisableTorchFunctionSubclass():
            left = [(x, read(x)) for x in self._params.values()]
        self._spent = [(x, weakref.ref(g), version(g)) for x, g in left if g is not None]
        if closes and not bool(metrics["skipped"]):
            window.averaged = None
        return metrics

    def _context(self) -> Context:
        return self._pipe.context(donate=True, lr=self._groups.rates(), numbers=self._groups.numbers())

    def _refuse_override(self, weight: Any) -> None:
        if weight is not None:
            raise ValueError(
                "step(weight=...) with in_backward=True has no effect: only accumulate(weighted=True) has a use for it."
            )

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this micro-step; sums that are held stay."""
        if not set_to_none and self._home.in_backward is not None:
            raise ValueError(
                explain(
                    "opt.zero_grad(set_to_none=False) with in_backward=True",
                    "a gradient is gone once its leaf is updated, and no zeros can stand in its place",
                    "opt.zero_grad()",
                )
            )
        self._home.micro_step.clear(set_to_none)
        with torch.DisableTorchFunctionSubclass():
            for p in self._params.values():
                grad = read(p)
                if grad is not None:
                    write(p, None if set_to_none else torch.zeros_like(grad))

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
        self._check_usable("backward")
        check_flag("opt.backward", "scale_wrt_gas", scale_wrt_gas)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                explain(
                    f"opt.backward({got})",
                    "it takes a loss of one element that requires a gradient",
                    "output.backward(gradient): any backward of PyTorch's own is right here",
                )
            )
        self._window.average(scale_wrt_gas)
        self._home.micro_step.uncleared.clear(to_none=True)
        for p, spent, count in self._spent:
            if p.grad is not None and p.grad is spent() and version(p.grad) == count:
                p.grad = None
        self._spent = []
        loss.backward(torch.ones_like(loss), retain_graph=retain_graph)
        return loss / self._window.every if scale_wrt_gas else loss

    @property
    def is_boundary(self) -> bool:
        """Whether the next `step` closes the accumulation window."""
        return self._window.closes()

    def set_boundary(self, boundary: bool | None) -> None:
        """Decide by hand whether steps close the window; `None` gives the decision back to `accumulate`."""
        self._window.force(boundary)

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Full parameters are visible in the model: `with opt.gathered(): torch.save(model.state_dict(), f)`.

        On several ranks under `shard` every rank enters it, and one may then do inside what it likes.

        Raises:
            RuntimeError: only some ranks came, as for `zf.save`.
        """
        self._check_usable("gathered")
        if self._home.units is not None:
            inside = "and inside of it `if rank == 0:` around what one rank does alone"
            self._together("opt.gathered()", f"with opt.gathered(): on every rank, {inside}")
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
        self._check_usable("averaged")
        self._averages.refuse("opt.averaged()")
        with self._averages.during(self.state, of):
            yield self._model

    def detach(self) -> nn.Module:
        """Make the model a plain module again, with full parameters. The optimizer is of no use afterwards.

        Channels between ranks that were opened for this model alone are closed; gradients on their way are lost.

        Raises:
            RuntimeError: on several ranks, only some of them came, as for `zf.save`.
        """
        self._averages.refuse("opt.detach()")
        if self._attached:
            self._home.micro_step.give_up_backward()
            self._together("opt.detach()", "opt.detach() on every rank")
            self._home.leave()
            for p in self._params.values():
                del p._zerofn_owner  # type: ignore[attr-defined]
            self._attached = False
        return self._model

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Everything needed to go on, as nested dicts of tensors keyed by path, for `torch.save` or DCP.

        Of a sharded state the shards are flat distributed tensors, as `torch.distributed.checkpoint` wants
        them, for any number of ranks but one: one process has leaves in their shapes. `zf.save` knows no such limit.

        The module's buffers are not in it, as in no optimizer's: `model.state_dict()` has them, and
        `zf.save(directory, opt)` keeps them.
        """
        self._averages.refuse("opt.state_dict()")
        asks = sys._getframe(1)
        by_torch = asks.f_globals.get("__name__") == torch_form.ASKS
        return _hooks.saved(self, lambda: self._as_torch(asks) if by_torch else self._as_dict())

    def _as_dict(self) -> dict[str, Any]:
        return as_dict(self._pipe, self.state, self._groups.told())

    def _as_torch(self, asks: FrameType) -> dict[str, Any]:
        form, cutting = torch_form.asked_for(asks), self._pipe.road.cutting
        if form is torch_form.Form.PARTS:
            return torch_form.in_torch_form(self._as_dict(), self._groups, self._paths())
        state = (gathered if form is torch_form.Form.FULL else rows)(self.state, cutting)
        own = {"transforms": state.transforms, "step": state.step, "micro_step": state.micro_step}
        return torch_form.in_torch_form(own, self._groups, self._paths(), form)

    def _paths(self) -> dict[int, str]:
        return {id(p): path for path, p in self._params.items()}

    def load_state(self, state: State, param_groups: list[dict[str, Any]] | None = None) -> None:
        """Go on from a `State` of this pipeline and model: its numbers are copied into the model's parameters.

        Args:
            state: for instance of `zf.load(directory, like=opt.state)`. The module's buffers stay as they are.
            param_groups: learning rates, as `state_dict()["param_groups"]` has them; by default they stay.
                Hooks on state dicts do not run: this is none.

        Raises:
            ValueError: as `load_state_dict`.
        """
        groups = self._groups.told() if param_groups is None else param_groups
        self._load(as_dict(self._pipe, state, groups))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Go on from a `state_dict`, of ours or in the form of `torch.optim`.

        One of `torch.optim.AdamW`, or of `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`, has the
        moments, counts and rates, by number or by name, whole or distributed; parameters are in the model's own, and
        betas and decay stay those of the chain.

        Raises:
            ValueError: of another pipeline or model; every missing, unexpected or misshapen entry is
                named, and nothing is changed.
        """
        _hooks.loaded(self, state_dict, self._load)

    @torch.no_grad()
    def _load(self, state_dict: dict[str, Any]) -> None:
        self._check_usable("load_state_dict")
        self._averages.refuse("opt.load_state_dict(...)")
        if torch_form.is_torch_form(state_dict):
            cutting = self._pipe.road.cutting
            for mine, theirs in torch_form.pairs_of(self.state, self._groups, self._paths(), state_dict, cutting):
                mine.copy_(theirs)
            return self._groups.load(torch_form.groups_of(self._groups, state_dict["param_groups"]))
        for mine, theirs in pairs(self._as_dict(), state_dict):
            if isinstance(mine, Tensor):
                as_local(mine).copy_(as_local(theirs))
        self._home.refresh()
        self._groups.load(state_dict["param_groups"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: groups are written as `zf.partition`."""
        raise NotImplementedError(
            explain(
                "opt.add_param_group(...)",
                "the state is made once, for the model as it was attached",
                "zf.partition({'a': zf.adamw(1e-3), 'b': zf.adamw(1e-4)}, lambda path: ...) before zf.attach",
            )
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch.amp.GradScaler asks before a step. On one process it may scale; over ranks it would hang."""
        if self._pipe.groups:
            raise RuntimeError(
                explain(
                    "torch.amp.GradScaler with a pipeline over ranks",
                    "each rank looks for overflow in what it has alone, and some would skip a step that others make",
                    'zf.scale_loss("dynamic") in the chain, and loss.backward() and opt.step() without a scaler',
                )
            )
        return False

    def __repr__(self) -> str:
        return f"attach({type(self._model).__name__}, {self.tx!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            explain(
                "a copy or a pickle of what zf.attach returned",
                "it is bound to its model by hooks, and a copy would be bound to nothing",
                "opt.state_dict() to keep it; for a second model, another = zf.attach(other_model, opt.tx)",
            )
        )

    def _together(self, call: str, right: str) -> None:
        """Wait for the other ranks, which make the same call."""
        if self._home.control is not None:
            together(call, self._home.control.ranks, right)

    def _check_usable(self, what: str) -> None:
        if not self._attached:
            raise RuntimeError(
                f"opt.{what}() after opt.detach(): the model is plain. Attach it anew: opt = zf.attach(model, tx)."
            )
        if in_backward():
            raise RuntimeError(
                explain(
                    f"opt.{what}() in the middle of a backward",
                    "gradients are still arriving, so some parameters would be updated with half of theirs",
                    "call it after loss.backward() has returned",
                )
            )


def _check(opt: Optimizer | None) -> None:
    if opt is not None and opt._attached:
        opt._watch.check()
