"""`opt.step()`: collect, update, store."""

from __future__ import annotations

import weakref
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import version
from .._errors import explain
from ..core.context import Context
from ..core.facts import COUNT
from ..core.layout import Leaves
from ..core.number_graphs import ATTACHED, check_numbers
from ..core.pipeline import Pipeline
from ..core.rank_agreement import equal_weight
from ..core.transform import Transform, TransformState
from ..core.tree import flatten
from ..core.update import apply
from ..kernels.recording import recorded
from ..module.attach_checks import Watch
from ..sharded.guarded_parameter import read, write
from .param_groups import ParamGroups, as_text
from .resident_params import ResidentParams
from .step_agreement import CurrentState

# ----------------------------------------------------------------------------------------------------------------------
# `AccumulationWindow` says when a step closes the accumulation window of an attached model, and whether the sum is
# divided.


class AccumulationWindow:
    """The window of all accumulations of a pipeline together.

    Args:
        pipe: the pipeline.
        current: its current state.

    Attributes:
        forced: the user's decision for the next step; `None` where `accumulate` counts.
        averaged: whether the sum is divided; `None` until `opt.backward` says so.
        every: micro-batches in a window.
        holds: whether any step is held at all.
    """

    def __init__(self, pipe: Pipeline, current: CurrentState):
        self.parts = [p for p in pipe.parts if p.facts.holds]
        self.current = current
        self.forced: bool | None = None
        self.averaged: bool | None = None
        self.every = 1
        for part in self.parts:
            self.every *= part.facts.window
        self.holds = self.every > 1

    def closes(self) -> bool:
        """Whether the next step closes it."""
        if self.forced is not None:
            return self.forced
        if not self.parts:
            return True
        own = [(p, self.current.state.transforms[p.name]) for p in self.parts]
        return all(_counted(p, state) + 1 >= p.facts.window for p, state in own if state)

    def force(self, boundary: bool | None) -> None:
        """Run `opt.set_boundary`.

        Raises:
            TypeError, ValueError: no such setting, or one without effect.
        """
        if boundary is not None and not isinstance(boundary, bool):
            raise TypeError(f"set_boundary({boundary!r}): give True, False, or None to count again.")
        if boundary is not None and not self.holds:
            raise ValueError(
                "set_boundary() has no effect without accumulate(k) in the pipeline: add zf.accumulate(4)."
            )
        self.forced = boundary

    def average(self, scale_wrt_gas: bool) -> None:
        """Take the argument of `backward(scale_wrt_gas=...)`, which must be the same for a whole window.

        Raises:
            ValueError: weights divide already, or the window has begun with the other value.
        """
        if not scale_wrt_gas and any(p.facts.weighted for p in self.parts):
            raise ValueError(
                "backward(scale_wrt_gas=False) with accumulate(weighted=True): weights divide. Leave it out."
            )
        if self.averaged is not None and self.averaged is not scale_wrt_gas:
            raise ValueError(
                explain(
                    f"opt.backward(loss, scale_wrt_gas={scale_wrt_gas}) in a window that began with {self.averaged}",
                    "the sum of the window is either divided or not",
                    "the same scale_wrt_gas until step() has closed the window",
                )
            )
        self.averaged = scale_wrt_gas


def _counted(part: Transform, state: TransformState) -> int:
    """The micro-steps in the open window of a transform."""
    if COUNT not in state:
        raise ValueError(
            explain(
                f"opt.is_boundary with {part.name}, which holds {part.facts.window} micro-steps",
                f"how many it has is read from {COUNT!r} in its state, which has {', '.join(map(repr, state))}",
                "an init_fn that returns {zerofn.extend.COUNT: counter(), ...}",
            )
        )
    return int(state[COUNT])


# ----------------------------------------------------------------------------------------------------------------------
# `Steps` runs the steps of an attached model: gradients go through the update halves into the stored parameters.


class Steps:
    """Runs the micro-steps of one attached model: `opt.step`, `opt.zero_grad` and `opt.backward`.

    Args:
        home: where its parameters, gradients and state are.
        groups: the rates and numbers that were set.
        watch: finds out whether the model has changed.

    Attributes:
        window: says which steps close the accumulation window.
    """

    def __init__(self, home: ResidentParams, groups: ParamGroups, watch: Watch):
        self.pipe, self.home, self.params = home.pipe, home, home.params
        self.groups, self.watch = groups, watch
        self.window = AccumulationWindow(home.pipe, home.current)
        self._writes = 0
        # Gradients that the last step has used, with their versions: those that arrived after it differ.
        self._spent: list[tuple[str, weakref.ref[Tensor], int]] = []

    def context(self) -> Context:
        """The context of a step that runs in backward."""
        self._writes += 2
        rates, numbers = self.groups.given()
        return self.pipe.context(donate=True, lr=rates, numbers=numbers, **self._lost_graphs(numbers, in_backward=True))

    def run(self, weight: Any) -> dict[str, Tensor]:
        """Run one micro-step. Return its metrics, each a tensor of its own."""
        fully = self.home.fully_sharded
        if fully is None:
            return self._run(weight)
        fully.bring()
        done = False
        try:
            metrics = self._run(weight)
            done = True
            return metrics
        finally:
            fully.take(done)

    def _run(self, weight: Any) -> dict[str, Tensor]:
        self.watch.check()
        early = self.home.in_backward
        if early is not None and weight is not None:
            raise ValueError(
                "step(weight=...) with in_backward=True has no effect: only accumulate(weighted=True) has a use for it."
            )
        self._writes += 1
        before = self.home.current.state
        try:
            # Settings are read first: they may be refused, and collected gradients cannot be put back.
            rates, numbers = self.groups.given()
            told = partial(as_text, rates, numbers, self.watch.frozen)
            grads = self.home.micro_step.collect(self.window.forced, told)
            if self.home.current.torn:
                # Behind the exchange: if the state of some ranks alone is torn, all ranks have raised there.
                self.home.current.check("opt.step()")
            if early is None:
                metrics = self._update(grads, weight, rates, numbers)
            else:
                for path, grad in grads.items():
                    # Put there by hand: what backward has brought is gone.
                    write(self.params[path], None)
                    early.arrived(path, grad)
                metrics = early.finish()
            # The others are copies already. This one is an entry of the state, into which `load_state_dict` writes.
            metrics["step"] = metrics["step"].detach().clone()
            if bool(metrics["updated"]) or self.home.reads:
                self.home.refresh()
            if self.groups.scheduled:
                self.groups.show(metrics)
            return metrics
        except BaseException:
            if self.home.current.state is not before:
                # The model's parameters may be those of the step before.
                self.home.current.tear()
            raise
        finally:
            self._writes += 1

    def writes(self) -> int:
        """How often a write into the state has begun or ended; odd during a step. A save beside training compares it.

        A step within backward begins with the first gradient: leaves are then updated, and counters are not.
        """
        return self._writes | self.under_way

    @property
    def under_way(self) -> bool:
        """Whether a step within backward has begun and not ended."""
        step = self.home.in_backward
        return step is not None and step.under_way is not None

    def _update(self, grads: Leaves, weight: Any, rates: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Tensor]:
        """Run the update halves on the gradients that have arrived."""
        if weight is not None:
            equal_weight(self.pipe, weight)
        window = self.window
        closes, old = window.averaged is not None and window.closes(), self.home.current.state
        ctx = self.pipe.context(
            donate=True,
            recorded=recorded(),
            weight=weight,
            boundary=window.forced,
            averaged=window.averaged is not False,
            lr=rates,
            numbers=numbers,
            micro_step=old.micro_step,
            **self._lost_graphs(numbers, weight),
        )
        try:
            new, metrics = apply(self.pipe, grads, old, ctx)
            if any(map(is_not, new.leaves.values(), old.leaves.values())):
                _store(new.leaves, old.leaves, ctx)
            self.home.current.state = new
        except BaseException:
            if ctx.written:
                self.home.current.tear()
            raise
        hooks = self.home.gradient_hooks
        if hooks.taken:
            hooks.taken, self.home.micro_step.uncleared.used = {}, True
        if window.holds:
            self._forget(grads)
        held = grads.values()
        self._spent = [*zip(grads, map(weakref.ref, held), map(version, held), strict=True)]
        if closes and not bool(metrics["skipped"]):
            window.averaged = None
        return metrics

    def _lost_graphs(self, numbers: dict[str, Any], weight: Any = None, in_backward: bool = False) -> dict[str, Any]:
        """The entries of a step's context by which numbers that require grad are refused.

        Autograd records nothing in a backward, so the grad mode there does not say that they are constants.
        """
        if recorded() or not (in_backward or torch.is_grad_enabled()):
            return {}
        if numbers:
            set_there = [(f"param_groups: {key}", x) for of in numbers.values() for key, x in of.items()]
            check_numbers([(key, one) for key, x in set_there for one in flatten(x)[0]], ATTACHED)
        return self.pipe.unrecorded(ATTACHED, weight)

    def _forget(self, grads: Leaves) -> None:
        """Clear gradients that `accumulate` has added to its sum: a loop that never clears would count them twice."""
        self.home.micro_step.uncleared.clear(to_none=True)
        for path in grads:
            self.params[path].grad = None

    def clear(self, to_none: bool) -> None:
        """Run `opt.zero_grad`."""
        if not to_none and self.home.in_backward is not None:
            wrong = "opt.zero_grad(set_to_none=False) with in_backward=True"
            why = "a gradient is gone once its leaf is updated, and no zeros can stand in its place"
            raise ValueError(explain(wrong, why, "opt.zero_grad()"))
        self.home.micro_step.clear(to_none)
        if self.home.fully_sharded is not None:
            self.home.fully_sharded.clear(to_none)
            return
        with torch.DisableTorchFunctionSubclass():
            for p in self.params.values():
                grad = read(p)
                if grad is not None:
                    write(p, None if to_none else torch.zeros_like(grad))

    def backward(self, loss: Any, retain_graph: bool, scale_wrt_gas: bool) -> Tensor:
        """Run `opt.backward`."""
        _check_loss(loss)
        before = self.window.averaged
        self.window.average(scale_wrt_gas)
        self.home.micro_step.uncleared.clear(to_none=True)
        if self.home.fully_sharded is not None:
            self.home.fully_sharded.drop_spent()
        _drop(self._spent, self.params)
        self._spent = []
        try:
            loss.backward(torch.ones_like(loss), retain_graph=retain_graph)
        except BaseException:
            self.window.averaged = before
            raise
        return loss / self.window.every if scale_wrt_gas else loss


@torch.no_grad()
def _store(new: Leaves, old: Leaves, ctx: Context) -> None:
    """Copy new parameters with memory of their own into the memory of the old ones."""
    for path, x in old.items():
        if new[path] is not x:
            new[path] = ctx.into(x, new[path])


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            explain(
                f"opt.backward({got})",
                "it takes a loss of one element that requires a gradient",
                "output.backward(gradient): any backward of PyTorch's own is right here",
            )
        )


def _drop(spent: list[tuple[str, weakref.ref[Tensor], int]], params: dict[str, Any]) -> None:
    """Drop gradients that a step has used and that nobody has written since."""
    for path, used, count in spent:
        p = params[path]
        if p.grad is not None and p.grad is used() and version(p.grad) == count:
            p.grad = None
