"""Writes by hand into whole parameters of which each rank stores a part: they must be equal on all ranks.

Under `reduce_scatter` a model has whole parameters and each rank stores its part of them (behind `shard` along another
axis of a mesh, its part of a part). What is written on one rank alone (`if rank == 0: model.load_state_dict(...)`)
would become a mixture after the next step: the part of that rank new, those of the others old. Each rank counts its
own writes. At a step ranks tell each other whether any of them has written, and only then are values compared.
"""

from __future__ import annotations

import torch

from .._errors import bad_leaves
from ..core.layout import Leaves
from ..ranks.collectives import gather_numbers
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
    """

    def __init__(self, params: Leaves, control: Group, current: CurrentState):
        self.params, self.control, self.current = params, control, current
        self.note()

    def note(self) -> None:
        """Count writes from now on: parameters are what is stored."""
        self.counts = writes(self.params.values())

    def noticed(self) -> bool:
        """Whether this rank has written into one since, or has given out its memory (`p.data`, `p.numpy()`).

        Not where a step or a load has written half: that is refused as such.
        """
        return not self.current.torn and writes(self.params.values()) != self.counts

    def compare(self) -> None:
        """Compare the values of all ranks. All ranks call it, if any has noticed a write.

        Raises:
            RuntimeError: on every rank, where values differ; each such parameter is named.
        """
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():
            sums = [checksum(p.detach().contiguous()) for p in self.params.values()]
        by_leaf = zip(*gather_numbers(sums, self.control), strict=True)
        bad = [
            (path, "other values on other ranks, of which each rank stores a part")
            for path, found in zip(self.params, by_leaf, strict=True)
            if len(set(found)) > 1
        ]
        if bad:
            right = (
                "the write on every rank, with the same values\n"
                "         or, after a write on rank 0: for p in model.parameters(): dist.broadcast(p.data, 0)"
            )
            raise RuntimeError(bad_leaves("parameters were written on some ranks only", bad, right))
        self.note()
