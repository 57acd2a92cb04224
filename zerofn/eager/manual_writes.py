"""Writes by hand into whole parameters of which each rank stores a part: they must be equal on all ranks.

Under `reduce_scatter` a model has whole parameters and each rank stores its part of them (behind `shard` along another
axis of a mesh, its part of a part). What is written on one rank alone (`if rank == 0: model.load_state_dict(...)`)
would become a mixture after the next step: the part of that rank new, those of the others old. Each rank counts its
own writes. At a step ranks tell each other whether any of them has written, and only then are values compared. Updates
within backward write into parts before a step: there they tell each other with the first gradients, and compare what
was there before the first update. What is written between that and the step is not compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._errors import bad_leaves
from ..core.layout import Leaves
from ..ranks.collectives import all_gather_into, gather_numbers
from ..ranks.group import Group
from ..sharded.guarded_parameter import writes
from ..sharded.write_back import checksum
from .current_state import CurrentState


class WholeParameters:
    """The whole parameters of an attached model that are stored in parts.

    Args:
        params: its parameters by path, in their resident form.
        control: a group for the comparison, of the ranks that have the same whole parameters.
        current: the state in force.

    Attributes:
        before: of each parameter a checksum from before the update within backward that is under way, if any rank had
            noticed a write by then.
    """

    def __init__(self, params: Leaves, control: Group, current: CurrentState):
        self.params, self.control, self.current = params, control, current
        self.note()

    def note(self) -> None:
        """Count writes from now on: parameters are what is stored."""
        self.counts = writes(self.params.values())
        self.before: list[int] = []

    def noticed(self) -> bool:
        """Whether this rank has written into one since, or has given out its memory (`p.data`, `p.numpy()`).

        Not where a step or a load has written half: that is refused as such.
        """
        return not self.current.torn and writes(self.params.values()) != self.counts

    def before_backward(self, control: Group) -> Callable[[], None]:
        """Tell the ranks of `control` whether this one has noticed a write, before leaves are updated within backward.

        Nobody waits for another rank there, which may be in a collective of the user's.

        Returns:
            To be called before the first update: keeps checksums, if any rank has noticed a write.
        """
        mine = torch.tensor([self.noticed()], dtype=torch.int64, device=control.device)
        every = mine.new_empty(control.size)
        work = all_gather_into(every, mine, control, async_op=True)

        def keep() -> None:
            work.wait()
            self.before = self._checksums() if every.any() else []

        return keep

    def _checksums(self) -> list[int]:
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():
            return [checksum(p.detach().contiguous()) for p in self.params.values()]

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
            (path, "other values on other ranks, of which each rank stores a part")
            for path, found in zip(self.params, by_leaf, strict=True)
            if len(set(found)) > 1
        ]
        if bad and self.before:
            # Each rank's part is updated already.
            self.current.tear()
        if bad:
            right = (
                "the write on every rank, with the same values\n"
                "         or, after a write on rank 0: for p in model.parameters(): dist.broadcast(p.data, 0)"
            )
            raise RuntimeError(bad_leaves("parameters were written on some ranks only", bad, right))
        self.note()
