"""The end of a micro-step of an attached model: gradients are collected, or dropped, on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.layout import Leaves
from ..sharded.guarded_parameter import read
from ..sharded.uncleared_gradients import UnclearedGradients
from .gradient_hooks import GradientHooks
from .in_backward import InBackward
from .master_weights import MasterWeights
from .step_agreement import StepAgreement


class MicroStep:
    """Ends the micro-steps of one attached model.

    Args:
        hooks: what its gradients come by.
        agreement: what ranks tell each other at a step.
        masters: what is stored of parameters that are copies.
        refresh: makes parameters anew from the state, after a step that was given up half done.

    Attributes:
        uncleared: what `p.grad` would keep between steps, where gradients have left.
    """

    def __init__(
        self, hooks: GradientHooks, agreement: StepAgreement, masters: MasterWeights, refresh: Callable[[], None]
    ):
        self.pipe, self.hooks, self.agreement, self.masters = hooks.pipe, hooks, agreement, masters
        self.current, self.refresh = masters.current, refresh
        self.trainable = {leaf.path: hooks.params[leaf.path] for leaf in hooks.pipe.layout.trainable}
        self.uncleared = UnclearedGradients(self._zero)

    def _zero(self, path: str) -> Tensor:
        dtype, shape = self.hooks.forms[path]
        return self.current.state.leaves[path].new_zeros(shape, dtype=dtype)

    def collect(self, boundary: bool | None, given: Callable[[], str]) -> Leaves:
        """The gradients of this micro-step, in the form the update halves take.

        Args:
            boundary: what `set_boundary` says of this step; ranks must say the same.
            given: tells what `opt.param_groups` sets; ranks must set the same.
        """
        if self.masters.leaves:
            self.masters.carry_over()
        agreement, units = self.agreement, self.hooks.units
        if agreement.control is None:
            return self._grads()
        steps, text, torn = int(self.current.state.micro_step), given(), self.current.torn
        if units is None:
            return self._agreed(agreement.marks(steps, boundary, text, torn=torn))
        grads: Leaves = {}
        marks: dict[str, int] = {}

        def told() -> list[int]:
            # Called again after each collective that this rank joins meanwhile, which may bring gradients.
            nonlocal grads, marks
            grads, marks = self._grads(), agreement.marks(steps, boundary, text, torn=torn, more=units.rests.marks())
            return agreement.numbers(grads, marks)

        rows = units.rests.at_step(told)
        self.hooks.release()
        if self.hooks.stream is None and units.rounds.protocol.control.ranks == agreement.control.ranks:
            # All ranks that step together were in that exchange.
            return agreement.checked(rows, marks, grads)
        return self._agreed(agreement.shared(rows, marks))

    def _agreed(self, marks: dict[str, int]) -> Leaves:
        """The gradients, once ranks have compared marks in a message of its own."""
        hooks, stream = self.hooks, self.hooks.stream
        if stream is None:
            return self.agreement.exchange(marks, self._grads())
        for path, p in hooks.params.items():
            if read(p) is not None:
                # Put there by hand.
                hooks.hand_over(path, p)
        wholes = self.agreement.wholes
        # An update within backward is a write too: there they were asked about before the first one.
        noticed = stream.settle(marks, wholes is not None and hooks.in_backward is None and wholes.noticed())
        if wholes is not None and (noticed or wholes.before):
            wholes.compare()
        rest, grads = self.pipe.road.behind_reduction, hooks.reduced
        grads = self.pipe.road.pull(rest, grads, self.current.state.leaves) if rest else grads
        if hooks.taken:
            # By a step that has raised; what has arrived since is added, as in torch.
            old = hooks.taken
            grads = {**old, **{path: old[path] + g if path in old else g for path, g in grads.items()}}
        hooks.taken, hooks.reduced = grads, {}
        grads = self.uncleared.take(grads)
        # They have come in the order of backward and of buckets, and a transform may pair lists by position.
        return {path: grads[path] for path in self.trainable if path in grads}

    def _grads(self) -> Leaves:
        """What this rank has in `p.grad`."""
        grads: Leaves = {}
        with torch.DisableTorchFunctionSubclass():
            for path, p in self.trainable.items():
                grad = read(p)
                if grad is not None:
                    grads[path] = grad
        return grads

    def clear(self, to_none: bool = True) -> None:
        """Forget the gradients of this micro-step.

        With `in_backward=True` some are used already: the step is given up half done (`eager.in_backward`).
        """
        self.uncleared.clear(to_none, self.hooks.reduced)
        self.give_up_backward()
        self.forget(always=False)

    def cleared(self, to_none: bool = True) -> None:
        """The user has cleared gradients by hand, or by `model.zero_grad()`."""
        if self.hooks.units is not None:
            self.hooks.units.rounds.kept = 0
        self.uncleared.clear(to_none)

    def give_up_backward(self) -> None:
        """End this rank's part in a backward that an exception has stopped; other ranks may still be in it."""
        units = self.hooks.units
        if units is not None:
            units.rests.after_failed_backward()
            units.rounds.kept = 0

    def forget(self, always: bool) -> None:
        """Forget the gradients of this micro-step.

        Args:
            always: wait for reductions also where this rank has begun none, since another rank may have.
        """
        hooks = self.hooks
        if hooks.in_backward is not None:
            self._give_up(hooks.in_backward, always)
            return
        if hooks.stream is not None and (always or not hooks.stream.idle):
            hooks.stream.discard(self._dropped())
        hooks.forget()

    def _dropped(self) -> dict[str, int]:
        """The marks of a micro-step that is given up."""
        return self.agreement.marks(int(self.current.state.micro_step), None, dropped=True)

    def _give_up(self, step: InBackward, always: bool) -> None:
        """End a step in backward without counting it.

        Gradients still on their way are used: other ranks may have used theirs already.
        """
        stream = self.hooks.stream
        step.closing = True
        try:
            self.hooks.release()
            if stream is not None and (always or not stream.idle):
                self.masters.carry_over()
                stream.broken = False
                stream.settle(self._dropped())
        finally:
            step.closing = False
        if step.under_way is not None:
            step.give_up()
            self.refresh()
