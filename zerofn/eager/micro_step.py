"""The end of a micro-step of an attached model: its gradients are collected on all ranks, or given up on all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.pipeline import Pipeline
from ..core.state import State
from ..core.tree import Leaves
from ..ranks.group import Group
from ..sharded.agreement_on_rounds import agree_on
from ..sharded.guarded_parameter import read
from ..sharded.rests import KEPT
from ..sharded.uncleared_gradients import Uncleared
from ..sharded.write_back import WRITTEN
from .arriving_gradients import Arrivals
from .in_backward import InBackward
from .master_weights import Copies
from .written_by_hand import Wholes

# What must be equal on all ranks at every step.
MARKS = ("the number of steps", "what closes a window", "step() or zero_grad()", KEPT, WRITTEN)


class MicroStep:
    """What ends the micro-steps of one attached model.

    Args:
        pipe: its pipeline.
        arrivals: its gradients.
        control: a group for what ranks tell each other; none on one process.
        copies: parameters that are copies of what is stored.
        wholes: whole parameters of which each rank stores a part.
        state: gives the state in force.
        gave_up: takes the state after a step that was given up half done.
    """

    def __init__(
        self,
        pipe: Pipeline,
        arrivals: Arrivals,
        control: Group | None,
        copies: Copies,
        wholes: Wholes,
        state: Callable[[], State],
        gave_up: Callable[[State], None],
    ):
        self.pipe, self.arrivals, self.control = pipe, arrivals, control
        self.copies, self.wholes = copies, wholes
        self.state, self.gave_up = state, gave_up
        self.uncleared = Uncleared(self._zero)

    def _zero(self, path: str) -> Tensor:
        leaf = next(leaf for leaf in self.pipe.layout.leaves if leaf.path == path)
        stored = self.state().leaves[path]
        return stored.new_zeros(self.pipe.road.stored_shape(leaf), dtype=self.pipe.dtypes.gradient(leaf))

    def _marks(self, boundary: bool | None, dropped: bool, more: dict[str, int] | None = None) -> dict[str, int]:
        closes = 2 if boundary is None else int(boundary)
        marks = dict(zip(MARKS, (int(self.state().micro_step), closes, int(dropped)), strict=False))
        return marks | (more or {KEPT: 0, WRITTEN: 0})

    def collect(self, boundary: bool | None = None) -> Leaves:
        """The gradients of this micro-step, in the form the update halves take.

        Args:
            boundary: what `set_boundary` says of this step; ranks must say the same.
        """
        self.copies.carry_over()
        units = self.arrivals.units
        marks = self._marks(boundary, dropped=False, more=None if units is None else units.rests.at_step())
        if units is not None:
            self.arrivals.release()
        return self._in_place(marks) if self.arrivals.stream is None else self._streamed(marks)

    def _streamed(self, marks: dict[str, int]) -> Leaves:
        arrivals, stream = self.arrivals, self.arrivals.stream
        assert stream is not None
        for path, p in arrivals.params.items():
            if read(p) is not None:
                # Put there by hand.
                arrivals.hand_over(path, p)
        if stream.settle(marks, self.wholes.noticed()):
            self.wholes.compare()
        grads, arrivals.reduced = arrivals.reduced, {}
        rest = self.pipe.road.behind_reduction
        return self.uncleared.take(self.pipe.road.pull(rest, grads, self.state().leaves) if rest else grads)

    def _in_place(self, marks: dict[str, int]) -> Leaves:
        with torch.DisableTorchFunctionSubclass():
            params = self.arrivals.params.items()
            grads = {path: g for path, p in params if p.requires_grad and (g := read(p)) is not None}
        if self.control is None:
            return grads
        some, noticed = agree_on((len(grads), self.wholes.noticed()), marks, self.control)
        if noticed:
            self.wholes.compare()
        return grads if some else {}

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
            arrivals.stream.discard(self._marks(None, dropped=True))
        arrivals.forget()

    def _give_up(self, step: InBackward, always: bool) -> None:
        """Use what is still on its way, or ranks that had it earlier would differ; and count no step."""
        stream = self.arrivals.stream
        step.closing = True
        try:
            self.arrivals.release()
            if stream is not None and (always or not stream.idle):
                self.copies.carry_over()
                stream.settle(self._marks(None, dropped=True))
        finally:
            step.closing = False
        if step.under_way is not None:
            self.gave_up(step.give_up())
