"""Parameters of an attached model that are copies of what is stored, and what the user writes into them.

Where `precision(param_dtype=...)` follows `all_reduce` or `reduce_scatter`, the model holds full parameters in
the compute dtype and the state holds their masters. `model.load_state_dict`, `nn.init` and `p.data.clamp_()` write
into the copy, and the next update would overwrite that from the masters in silence. So what was
written is carried over: element by element, for an element that was not written is more exact in its master.

What NumPy writes by way of `p.detach().numpy()` is counted by nobody, and is looked for as `Sampling` says.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._errors import bad_leaves
from ..core.layout import Leaf, Leaves
from ..core.pipeline import Pipeline
from ..sharded.guarded_parameter import Writes, writes
from ..sharded.write_back import Sampling, same


class Copies:
    """The copies among an attached model's parameters.

    Args:
        pipe: its pipeline.
        params: its parameters by path, in their resident form.
        stored: what is stored of each now, by path.
        together: whether all are updated at once. Where each is in backward, copies are behind what is stored until the
            step, so that a write which nobody counts cannot be told, and is lost.
    """

    def __init__(self, pipe: Pipeline, params: Leaves, stored: Callable[[], Leaves], together: bool):
        self.pipe, self.params, self.stored, self.together = pipe, params, stored, together
        # Between the two forms, from the model to storage.
        self.later = pipe.road.after_update
        viewed = pipe.road.renumbers_after_update
        dtypes = {path: x.dtype for path, x in stored().items()}
        self.leaves = [leaf for leaf in pipe.layout.leaves if viewed or params[leaf.path].dtype != dtypes[leaf.path]]
        self.sampling = Sampling()
        self.copies = {leaf.path: params[leaf.path] for leaf in self.leaves}
        self.note()

    def note(self) -> None:
        """They are what the masters say."""
        self.counts = self._counts()

    def carry_over(self) -> None:
        """Store what was written since.

        Raises:
            RuntimeError: something was written without being counted, after steps that were not compared.
        """
        if not self.leaves:
            return
        compares, late = self.sampling.next()
        carried: set[str] = set()
        if self._counts() != self.counts:
            carried.update(leaf.path for leaf in self.leaves if self.carry_leaf(leaf))
        if not compares or not self.together:
            return
        found = [leaf for leaf in self.leaves if leaf.path not in carried and self._written(leaf)]
        for leaf in found:
            self._carry(leaf)
        if found and late:
            why = "written by NumPy or DLPack, which nobody counts, and in no step before that was compared"
            right = "with torch.no_grad(): p.copy_(new), which is counted"
            raise RuntimeError(
                bad_leaves("parameters that are copies were written", [(x.path, why) for x in found], right)
            )
        self.sampling.found |= bool(found)

    def carry_leaf(self, leaf: Leaf) -> bool:
        """Store what was written into one of them since, if it is one; whether a write was counted."""
        copy = self.copies.get(leaf.path)
        if copy is None or writes([copy]) == [self.counts[leaf.path]]:
            return False
        self._carry(leaf)
        (self.counts[leaf.path],) = writes([copy])
        return True

    @torch.no_grad()
    def _written(self, leaf: Leaf) -> bool:
        """Whether the copy is another than the master says."""
        return not same(*self._both(leaf))

    @torch.no_grad()
    def _carry(self, leaf: Leaf) -> None:
        """Store what differs."""
        home, new = self.stored()[leaf.path], self.params[leaf.path].detach()
        for stage in self.later:
            new = stage.store(new, leaf)
        copy, told = self._both(leaf)
        home.copy_(torch.where(copy == told, home, new.to(home.dtype)))

    def _both(self, leaf: Leaf) -> tuple[Tensor, Tensor]:
        """The rows of the copy that this rank stores, and what its master says that they are."""
        copy, told = self.pipe.road.own(self.params[leaf.path].detach(), leaf), self.stored()[leaf.path]
        for stage in reversed(self.later):
            told = stage.view(told, leaf) if stage.wire is None else told
        return copy, told.to(copy.dtype)

    def _counts(self) -> dict[str, Writes]:
        return dict(zip(self.copies, writes(self.copies.values()), strict=True))
