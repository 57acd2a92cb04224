"""A rank without anything to send takes part until all are done: after a call, after a backward, and at a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._compat.autograd import NO_BACKWARD, after_this_node, at_end_of_backward, graph_task, in_backward
from .._compat.compiler import uncompiled
from ..ranks.ordered_collectives import STEP
from .gathered_units import GatheredUnits
from .unit_rounds import UnitRounds
from .write_back import WriteBack

KEPT = "how much of their gradients has come since they were last cleared"


class Rests:
    """Where one attached model rests: takes part in other ranks' collectives until every rank rests.

    Args:
        rounds: its collectives.
        gathered: its gathered units.
        write_back: stores what forward writes into gathered copies.
    """

    def __init__(self, rounds: UnitRounds, gathered: GatheredUnits, write_back: WriteBack):
        self.rounds, self.gathered, self.write_back = rounds, gathered, write_back

    def after_call(self) -> None:
        """Rest after a call of the model: other ranks may still be in theirs."""
        if not in_backward():
            self.rounds.rest()
            self.write_back.check()

    @uncompiled
    def after_backward(self, *_: object) -> None:
        """Rest at the end of the backward that is under way, if one is: other ranks' may be longer."""
        task = graph_task()
        if task == NO_BACKWARD or task in self.rounds.unfinished:
            return

        def rest() -> None:
            self.rounds.unfinished.discard(task)
            # The end of a nested backward is the middle of the outer one.
            if not after_this_node(self.after_backward):
                # A checkpoint repeats forward, and what forward writes.
                self.gathered.settle_all()
                self.rounds.rest()
                if self.rounds.late and not self.rounds.unfinished:
                    self.rounds.accept_late()
                self.write_back.check()

        self.rounds.unfinished.add(task)
        at_end_of_backward(rest)

    def marks(self) -> dict[str, int]:
        """What must be equal on all ranks at a step, by name.

        A rank that cleared gradients in the middle of the others' micro-step has dropped its parts of sums of which
        they have theirs.
        """
        return {KEPT: self.rounds.kept, **self.write_back.marks()}

    def at_step(self, told: Callable[[], Sequence[int]]) -> list[list[int]]:
        """Rest until all ranks are at a step; the numbers that each rank tells."""
        # What forward has written into a copy is looked for when the copy is freed.
        self.gathered.drop()
        self.rounds.unfinished.clear()
        if self.rounds.late:
            self.rounds.accept_late()
        rows = self.rounds.rest(STEP, told)
        self.write_back.sums.clear()
        return rows

    def after_failed_backward(self) -> None:
        """Rest for a backward that raised on this rank: the others may still be in theirs.

        One that ended has rested; a second rest would wait for ranks that never come to it.
        """
        if self.rounds.unfinished:
            self.rounds.unfinished.clear()
            self.rounds.rest()
