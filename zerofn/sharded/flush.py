"""Where this rank has nothing more to send, and others may: at the end of a call, of a backward, and at a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._compat.autograd import NO_BACKWARD, after_this_node, at_end_of_backward, graph_task, in_backward
from .._compat.compiler import uncompiled
from ..ranks.ordered_collectives import STEP
from .gathered_units import Gathered
from .unit_rounds import UnitRounds
from .write_back import WriteBack

KEPT = "how much of their gradients has come since they were last cleared"


class Rests:
    """The rests of one attached model.

    Args:
        rounds: its collectives.
        gathered: its gathered units.
        back: takes what forward has written into them.
        ended: called at the end of a backward, when it has ended on all ranks.
    """

    def __init__(self, rounds: UnitRounds, gathered: Gathered, back: WriteBack, ended: Callable[[], None]):
        self.rounds, self.gathered, self.back, self.ended = rounds, gathered, back, ended
        # Backwards since the last step that have not come to their end.
        self.waiting: set[int] = set()

    def after_call(self) -> None:
        """A call has ended: other ranks may still be in theirs."""
        if not in_backward():
            self.rounds.rest()
            self.back.check()

    @uncompiled
    def after_backward(self, *_: object) -> None:
        """Stay available at the end of the backward that is under way, if one is: other ranks' may be longer."""
        task = graph_task()
        if task == NO_BACKWARD or task in self.waiting:
            return

        def rest() -> None:
            self.waiting.discard(task)
            # The end of a nested backward is the middle of the outer one.
            if not after_this_node(self.after_backward):
                # A checkpoint repeats what forward writes.
                self.gathered.settle_all()
                self.rounds.rest()
                self.ended()
                self.back.check()

        self.waiting.add(task)
        at_end_of_backward(rest)

    def marks(self) -> dict[str, int]:
        """What must be equal on all ranks at a step, by name.

        A rank that has cleared gradients half-way through a micro-step of the others has dropped its parts of
        sums of which they have theirs.
        """
        return {KEPT: self.rounds.kept, **self.back.marks()}

    def at_step(self, told: Callable[[], Sequence[int]]) -> list[list[int]]:
        """Wait for all ranks at a step; what each tells."""
        # What is written into copies is known once they are let go.
        self.gathered.drop()
        rows = self.rounds.rest(STEP, told)
        self.waiting.clear()
        self.back.sums.clear()
        return rows

    def for_unfinished(self) -> None:
        """The rest of a backward that this rank has given up: another one may still be in it.

        One that has ended has rested, and to rest once more would be to wait for something that never comes.
        """
        if self.waiting:
            self.waiting.clear()
            self.rounds.rest()
