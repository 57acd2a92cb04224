"""The end of a micro-step of an attached model: its gradients are collected on all ranks, or given up on all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.layout import Leaves
from ..core.pipeline import Pipeline
from ..core.state import State
from ..sharded.gather_on_use import Units
from ..sharded.guarded_parameter import read
from ..sharded.uncleared_gradients import Uncleared
from .gradient_hooks import Arrivals
from .in_backward import InBackward
from .master_weights import Copies
from .step_agreement import Agreement


class MicroStep:
    """What ends the micro-steps of one attached model.

    Args:
        pipe: its pipeline.
        arrivals: its gradients.
        agreement: what ranks tell each other at a step.
        copies: parameters that are copies of what is stored.
        state: gives the state in force.
        gave_up: takes the state after a step that was given up half done.
    """

    def __init__(
        self,
        pipe: Pipeline,
        arrivals: Arrivals,
        agreement: Agreement,
        copies: Copies,
        state: Callable[[], State],
        gave_up: Callable[[State], None],
    ):
        self.pipe, self.arrivals, self.agreement, self.copies = pipe, arrivals, agreement, copies
        self.state, self.gave_up = state, gave_up
        self.uncleared = Uncleared(self._zero)

    def _zero(self, path: str) -> Tensor:
        leaf = next(leaf for leaf in self.pipe.layout.leaves if leaf.path == path)
        stored = self.state().leaves[path]
        return stored.new_zeros(self.pipe.road.stored_shape(leaf), dtype=self.pipe.dtypes.gradient(leaf))

    def collect(self, boundary: bool | None, given: Callable[[], str]) -> Leaves:
        """The gradients of this micro-step, in the form the update halves take.

        Args:
            boundary: what `set_boundary` says of this step; ranks must say the same.
            given: tells what `opt.param_groups` sets; ranks must set the same.
        """
        self.copies.carry_over()
        if self.agreement.control is None:
            return self._grads()
        if self.arrivals.units is not None:
            return self._at_rest(self.arrivals.units, boundary, given())
        return self._agreed(self.agreement.marks(boundary, given=given()))

    def _at_rest(self, units: Units, boundary: bool | None, given: str) -> Leaves:
        """Where ranks rest at a step: what they agree on is told there, if all that step together rest together."""
        agreement, control = self.agreement, self.agreement.control
        grads: Leaves = {}
        marks: dict[str, int] = {}

        def told() -> list[int]:
            nonlocal grads, marks
            grads, marks = self._grads(), agreement.marks(boundary, more=units.rests.marks(), given=given)
            return agreement.numbers(grads, marks)

        rows = units.rests.at_step(told)
        self.arrivals.release()
        resting = units.rounds.protocol.control.ranks
        if self.arrivals.stream is None and control is not None and resting == control.ranks:
            return agreement.found(rows, marks, grads)
        return self._agreed(agreement.shared(rows, marks))

    def _agreed(self, marks: dict[str, int]) -> Leaves:
        """What has arrived, once ranks have told each other by a message of its own."""
        return self.agreement.ask(marks, self._grads()) if self.arrivals.stream is None else self._streamed(marks)

    def _streamed(self, marks: dict[str, int]) -> Leaves:
        arrivals, stream = self.arrivals, self.arrivals.stream
        assert stream is not None
        for path, p in arrivals.params.items():
            if read(p) is not None:
                # Put there by hand.
                arrivals.hand_over(path, p)
        wholes = self.agreement.wholes
        if stream.settle(marks, wholes.noticed()):
            wholes.compare()
        grads, arrivals.reduced = arrivals.reduced, {}
        rest = self.pipe.road.behind_reduction
        return self.uncleared.take(self.pipe.road.pull(rest, grads, self.state().leaves) if rest else grads)

    def _grads(self) -> Leaves:
        with torch.DisableTorchFunctionSubclass():
            params = self.arrivals.params.items()
            return {path: g for path, p in params if p.requires_grad and (g := read(p)) is not None}

    def clear(self, to_none: bool = True) -> None:
        """Forget the gradients of this micro-step.

        Where they are used as they arrive that is too late: the step is given up half done (`eager.in_backward`).
        """
        self.uncleared.clear(to_none, self.arrivals.reduced)
        self.give_up_backward()
        self.forget(always=False)

    def cleared(self, to_none: bool = True) -> None:
        """The user has cleared gradients by hand, or by `model.zero_grad()`."""
        if self.arrivals.units is not None:
            self.arrivals.units.rounds.kept = 0
        self.uncleared.clear(to_none)

    def give_up_backward(self) -> None:
        """Take no part in a backward of this rank that did not come to its end."""
        units = self.arrivals.units
        if units is not None:
            units.rests.for_unfinished()
            units.rounds.kept = 0

    def forget(self, always: bool) -> None:
        """Forget the gradients of this micro-step.

        Args:
            always: settle what is on its way also where nothing is here, for something may be elsewhere.
        """
        arrivals = self.arrivals
        if arrivals.in_backward is not None:
            self._give_up(arrivals.in_backward, always)
            return
        if arrivals.stream is not None and (always or not arrivals.stream.idle):
            arrivals.stream.discard(self.agreement.marks(None, dropped=True))
        arrivals.forget()

    def _give_up(self, step: InBackward, always: bool) -> None:
        """Use what is still on its way, or ranks that had it earlier would differ; and count no step."""
        stream = self.arrivals.stream
        step.closing = True
        try:
            self.arrivals.release()
            if stream is not None and (always or not stream.idle):
                self.copies.carry_over()
                stream.settle(self.agreement.marks(None, dropped=True))
        finally:
            step.closing = False
        if step.under_way is not None:
            self.gave_up(step.give_up())
