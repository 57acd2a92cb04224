"""What ranks compare at a step of an attached model: counts, boundaries, settings, and who has gradients."""

from __future__ import annotations

from zlib import crc32

from ..core.layout import Leaves
from ..ranks.collectives import gather_numbers
from ..ranks.group import Group
from ..sharded.flush import KEPT
from ..sharded.round_agreement import check_marks
from ..sharded.write_back import WRITTEN
from .manual_writes import WholeParameters

# Names of the numbers that must be equal on all ranks at every step.
STEPS, CLOSES, DROPPED = "the number of steps", "what closes a window", "step() or zero_grad()"
SET = "what opt.param_groups sets and which leaves are frozen"
SET_ALIKE = "Set and freeze the same on every rank: a scheduler that reads a loss is to read its mean over ranks."
TORN = (
    "whether a step or a load has raised while it was writing into the state; "
    "Load one and the same on every rank: zf.load(directory, like=opt)."
)
NO_MORE = {KEPT: 0, WRITTEN: 0}
MARKS = (STEPS, TORN, CLOSES, DROPPED, SET, *NO_MORE)
# Where marks begin among the numbers that a rank sends.
FIRST = 2


class StepAgreement:
    """Compares numbers of the ranks of one attached model at a step.

    Args:
        control: the group of all ranks that step together; none on one process.
        wholes: whole parameters of which each rank stores a part, where they are to be compared.
    """

    def __init__(self, control: Group | None, wholes: WholeParameters | None):
        self.control, self.wholes = control, wholes

    def marks(
        self,
        steps: int,
        boundary: bool | None,
        given: str = "",
        dropped: bool = False,
        torn: bool = False,
        more: dict[str, int] = NO_MORE,
    ) -> dict[str, int]:
        """The numbers that must be equal on all ranks, by name.

        Args:
            steps: micro-steps before this one.
            boundary: what `set_boundary` says.
            given: what `opt.param_groups` sets, as text.
            dropped: whether the step is given up.
            torn: whether the state is. A load may have raised on some ranks alone, whose counts are as the others'.
            more: what `Rests.marks` tells, where parameters are gathered on use.
        """
        closes = 2 if boundary is None else int(boundary)
        has = f"{SET}, here {given}, of which these are digests; {SET_ALIKE}" if given else SET
        ours = {STEPS: steps, TORN: int(torn), CLOSES: closes, DROPPED: int(dropped), has: crc32(given.encode())}
        return {**ours, **more}

    def numbers(self, grads: Leaves, marks: dict[str, int]) -> list[int]:
        """What this rank sends: how many gradients it has, whether whole parameters were written, and marks."""
        noticed = self.wholes is not None and self.wholes.noticed()
        return [len(grads), noticed, *marks.values()]

    def shared(self, rows: list[list[int]], marks: dict[str, int]) -> dict[str, int]:
        """Marks to compare among all ranks, from the rows of those that gather together and share sums of gradients."""
        alike = len({row[FIRST + MARKS.index(KEPT)] for row in rows}) == 1
        return {**marks, KEPT: 0 if alike else 1 + marks[KEPT]}

    def exchange(self, marks: dict[str, int], grads: Leaves) -> Leaves:
        """Send this rank's numbers in an all-gather of their own; as `checked`."""
        assert self.control is not None
        return self.checked(gather_numbers(self.numbers(grads, marks), self.control), marks, grads)

    def checked(self, rows: list[list[int]], marks: dict[str, int], grads: Leaves) -> Leaves:
        """The gradients of a step, once marks are equal on all ranks; none if no rank has any.

        Args:
            rows: what each rank has sent.
            marks: of this rank.
            grads: of this rank.

        Raises:
            RuntimeError: on every rank, if a mark differs, or what was written by hand into whole parameters.
        """
        assert self.control is not None
        if rows.count(rows[0]) < len(rows):
            check_marks([row[FIRST:] for row in rows], list(marks), self.control)
        some, noticed, *_ = map(max, zip(*rows, strict=True))
        if noticed and self.wholes is not None:
            self.wholes.compare()
        return grads if some else {}
