"""The end of a micro-step of an attached model: its gradients are collected on all ranks, or given up on all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.pipeline import Pipeline
from ..core.state import State
from ..core.tree import Leaves
from ..ranks.group import Group
from ..sharded.agreement_on_rounds import check_marks, told_by_all
from ..sharded.gather_on_use import Units
from ..sharded.guarded_parameter import read
from ..sharded.rests import KEPT
from ..sharded.uncleared_gradients import Uncleared
from ..sharded.write_back import WRITTEN
from .arriving_gradients import Arrivals
from .in_backward import InBackward
from .master_weights import Copies
from .written_by_hand import Wholes

# What must be equal on all ranks at every step.
STEPS, CLOSES, DROPPED = "the number of steps", "what closes a window", "step() or zero_grad()"
NO_MARKS = {KEPT: 0, WRITTEN: 0}
MARKS = (STEPS, CLOSES, DROPPED, *NO_MARKS)
# Of what a rank tells, where marks begin.
FIRST = 2


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

    def _marks(self, boundary: bool | None, dropped: bool, more: dict[str, int] = NO_MARKS) -> dict[str, int]:
        closes = 2 if boundary is None else int(boundary)
        return {STEPS: int(self.state().micro_step), CLOSES: closes, DROPPED: int(dropped), **more}

    def collect(self, boundary: bool | None = None) -> Leaves:
        """The gradients of this micro-step, in the form the update halves take.

        Args:
            boundary: what `set_boundary` says of this step; ranks must say the same.
        """
        self.copies.carry_over()
        if self.control is None:
            return self._grads()
        units, stream = self.arrivals.units, self.arrivals.stream
        if units is not None:
            return self._at_rest(units, boundary)
        marks = self._marks(boundary, dropped=False)
        return self._in_place(marks) if stream is None else self._streamed(marks)

    def _at_rest(self, units: Units, boundary: bool | None) -> Leaves:
        """Where ranks rest at a step: what they agree on is told there, if all that step together rest together."""
        grads: Leaves = {}
        marks: dict[str, int] = {}

        def told() -> list[int]:
            nonlocal grads, marks
            grads, marks = self._grads(), self._marks(boundary, False, units.rests.marks())
            return self._numbers(grads, marks)

        assert self.control is not None
        rows = units.rests.at_step(told)
        self.arrivals.release()
        if self.arrivals.stream is None and units.rounds.protocol.control.ranks == self.control.ranks:
            return self._agreed(rows, marks, grads)
        # Others may have had more backwards: what is to be equal is told by those that share sums.
        alike = len({row[FIRST + MARKS.index(KEPT)] for row in rows}) == 1
        marks[KEPT] = 0 if alike else 1 + marks[KEPT]
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

    def _grads(self) -> Leaves:
        with torch.DisableTorchFunctionSubclass():
            params = self.arrivals.params.items()
            return {path: g for path, p in params if p.requires_grad and (g := read(p)) is not None}

    def _in_place(self, marks: dict[str, int]) -> Leaves:
        grads = self._grads()
        assert self.control is not None
        return self._agreed(told_by_all(self._numbers(grads, marks), self.control), marks, grads)

    def _numbers(self, grads: Leaves, marks: dict[str, int]) -> list[int]:
        """What this rank tells the others: how many gradients it has, what it has noticed, and marks."""
        return [len(grads), self.wholes.noticed(), *marks.values()]

    def _agreed(self, rows: list[list[int]], marks: dict[str, int], grads: Leaves) -> Leaves:
        """The gradients, if any rank has some, once all have told the same marks."""
        assert self.control is not None
        if rows.count(rows[0]) < len(rows):
            check_marks([row[FIRST:] for row in rows], list(marks), self.control)
        some, noticed, *_ = map(max, zip(*rows, strict=True))
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
