"""Ranks compare numbers at a step of an attached model, and the full parameters of which each stores a shard."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import torch

from .._compat.tensors import writes
from .._errors import bad_leaves
from ..core.layout import Leaves
from ..core.rank_agreement import fingerprint
from ..ranks.collectives import all_gather_into, gather_numbers
from ..ranks.group import Group
from ..sharded.forward_writes import LIMIT, WRITTEN
from ..sharded.reducer import check_marks
from ..sharded.schedule import KEPT
from .current_state import CurrentState

# ----------------------------------------------------------------------------------------------------------------------
# `WholeParameters` checks that writes by hand into full parameters, of which each rank stores a shard, are equal on
# all ranks.
#
# Under `reduce_scatter` a model has full parameters and each rank stores its shard of them (behind `shard` along
# another axis of a mesh, a shard of a shard). A write on one rank alone (`if rank == 0: model.load_state_dict(...)`)
# would become a mixture after the next step: that rank's shard new, the others' old. Each rank counts its own writes.
# At a step ranks exchange whether any of them has written, and only then compare values. Updates within backward write
# into shards before a step. There ranks exchange it with the first gradients, and compare the values from before the
# first update. What is written between that and the step is not compared.


LOOKED_UP = "an embedding with max_norm, which writes into the rows that it looks up, and ranks have looked up others"


class WholeParameters:
    """The full parameters of an attached model that are stored in shards.

    Args:
        params: its parameters by path, in their resident form.
        control: a group for the comparison, of the ranks that have the same full parameters.
        current: the current state.
        limited: the paths of weights of embeddings with `max_norm`, which write into the rows that they look up.

    Attributes:
        before: a checksum of each parameter from before the current update within backward, if any rank had noticed a
            write by then.
    """

    def __init__(self, params: Leaves, control: Group, current: CurrentState, limited: frozenset[str] = frozenset()):
        self.params, self.control, self.current, self.limited = params, control, current, limited
        self.note()

    def note(self) -> None:
        """Count writes from now on: now the parameters equal the stored values."""
        self.counts = writes(self.params.values())
        self.before: list[int] = []

    def noticed(self) -> bool:
        """Whether user code on this rank has since written into one, or taken its memory (`p.data`, `p.numpy()`).

        A half-finished write of a step or a load does not count: it is refused as a torn state.
        """
        return not self.current.torn and writes(self.params.values()) != self.counts

    def before_backward(self, control: Group) -> Callable[[], None]:
        """Tell the ranks of `control` whether this one has noticed a write, before leaves are updated within backward.

        No rank waits for another one there, because that may be in a collective of the user's.

        Returns:
            A function to call before the first update: it keeps checksums, if any rank has noticed a write.
        """
        mine = torch.tensor([self.noticed()], dtype=torch.int64, device=control.device)
        every = mine.new_empty(control.size)
        work = all_gather_into(every, mine, control, async_op=True, numbers=True)

        def keep() -> None:
            work.wait()
            self.before = self._checksums() if every.any() else []

        return keep

    def _checksums(self) -> list[int]:
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():
            return [fingerprint(p) for p in self.params.values()]

    def agree(self) -> None:
        """Compare the values of all ranks, if any has noticed a write. All ranks call it; see `compare`."""
        if any(map(any, gather_numbers([self.noticed()], self.control))):
            self.compare()

    def compare(self) -> None:
        """Compare the values of all ranks. All ranks call it, if any has noticed a write.

        Raises:
            RuntimeError: on every rank, where values differ; each such parameter is named.
        """
        by_leaf = zip(*gather_numbers(self.before or self._checksums(), self.control), strict=True)
        bad = [
            (
                path,
                LOOKED_UP if path in self.limited else "other values on other ranks, of which each rank stores a part",
            )
            for path, found in zip(self.params, by_leaf, strict=True)
            if len(set(found)) > 1
        ]
        if bad and self.before:
            # The update within backward has already changed each rank's shard.
            self.current.tear()
        if bad:
            right = (
                "the write on every rank, with the same values\n"
                "         or, after a write on rank 0: for p in model.parameters(): dist.broadcast(p.data, 0)"
            )
            if not self.limited.isdisjoint(path for path, _ in bad):
                right += f"\n         {LIMIT}"
            raise RuntimeError(bad_leaves("parameters were written on some ranks only", bad, right))
        self.note()


# ----------------------------------------------------------------------------------------------------------------------
# At a step of an attached model ranks compare counts, boundaries, settings, and which leaves have gradients.


# Names of the numbers that must be equal on all ranks at every step.
STEPS, CLOSES, DROPPED = "the number of steps", "what closes a window", "step(), zero_grad() or p.grad.clone()"
SET = "what opt.param_groups sets and which leaves are frozen"
SET_ALIKE = "Set and freeze the same on every rank: a scheduler that reads a loss is to read its mean over ranks."
TORN = (
    "whether a step or a load has raised while it was writing into the state; "
    "Load one and the same on every rank: zf.load(directory, like=opt)."
)
NO_MORE = {KEPT: 0, WRITTEN: 0}
MARKS = (STEPS, TORN, CLOSES, DROPPED, SET, *NO_MORE)
# The index at which marks begin among the numbers that a rank sends.
FIRST = 2


class StepAgreement:
    """Compares numbers of the ranks of one attached model at a step.

    Args:
        control: the group of all ranks that step together; none on one process.
        wholes: the full parameters of which each rank stores a shard, if they are to be compared.
    """

    def __init__(self, control: Group | None, wholes: WholeParameters | None):
        self.control, self.wholes = control, wholes

    def marks(
        self,
        steps: int,
        boundary: bool | None,
        given: str = "",
        dropped: int = False,
        torn: bool = False,
        more: dict[str, int] = NO_MORE,
    ) -> dict[str, int]:
        """The numbers that must be equal on all ranks, by name.

        Args:
            steps: micro-steps before this one.
            boundary: the argument of `set_boundary`.
            given: the settings of `opt.param_groups` that differ from the pipeline's, as text.
            dropped: whether the step is given up; above 1 it is not, and says whose gradient is copied.
            torn: whether the state is torn. A load may have raised on some ranks alone, with equal counts on all.
            more: the result of `Schedule.marks`, where parameters are gathered on use.
        """
        closes = 2 if boundary is None else int(boundary)
        has = f"{SET}. On this rank: {given or 'as in the pipeline'}. Checksums of these settings; {SET_ALIKE}"
        ours = {STEPS: steps, TORN: int(torn), CLOSES: closes, DROPPED: int(dropped), has: crc32(given.encode())}
        return ours | more

    def numbers(self, grads: Leaves, marks: dict[str, int]) -> list[int]:
        """The numbers that this rank sends: its count of gradients, whether full parameters were written, and marks."""
        noticed = self.wholes is not None and self.wholes.noticed()
        return [len(grads), noticed, *marks.values()]

    def shared(self, rows: list[list[int]], marks: dict[str, int]) -> dict[str, int]:
        """Marks to compare over all ranks, from the rows of ranks that gather together and share sums of gradients."""
        alike = len({row[FIRST + MARKS.index(KEPT)] for row in rows}) == 1
        return {**marks, KEPT: 0 if alike else 1 + marks[KEPT]}

    def checked(self, rows: list[list[int]], marks: dict[str, int], grads: Leaves) -> Leaves:
        """The gradients of a step, once marks are equal on all ranks; none if no rank has any.

        Args:
            rows: the numbers that each rank has sent.
            marks: of this rank.
            grads: of this rank.

        Raises:
            RuntimeError: on every rank, if a mark differs, or if writes by hand into full parameters differ.
        """
        assert self.control is not None
        if rows.count(rows[0]) < len(rows):
            check_marks([row[FIRST:] for row in rows], list(marks), self.control)
        else:
            rows = rows[:1]
        some, noticed, *_ = map(max, zip(*rows, strict=True))
        if noticed and self.wholes is not None:
            self.wholes.compare()
        return grads if some else {}
