"""Parameters of an attached model that are copies of what is stored, and what the user writes into them.

Where `precision(param_dtype=...)` follows `all_reduce` or `reduce_scatter`, the model holds full parameters in
the compute dtype and the state holds their masters. `model.load_state_dict`, `nn.init` and `p.data.clamp_()` write
into the copy, and the next update would overwrite that from the masters in silence. So what was
written is carried over: element by element, for an element that was not written is more exact in its master.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..core.pipeline import Pipeline
from ..core.tree import Leaf, Leaves
from ..sharded.guarded_parameter import Writes, writes


class Copies:
    """The copies among an attached model's parameters.

    Args:
        pipe: its pipeline.
        params: its parameters by path, in their resident form.
        stored: what is stored of each now, by path.
    """

    def __init__(self, pipe: Pipeline, params: Leaves, stored: Callable[[], Leaves]):
        self.pipe, self.params, self.stored = pipe, params, stored
        # Between the two forms, from the model to storage.
        self.later = pipe.stages[pipe.cut :]
        viewed = any(stage.wire is None and not stage.only_dtype for stage in self.later)
        dtypes = {path: x.dtype for path, x in stored().items()}
        self.leaves = [leaf for leaf in pipe.layout.leaves if viewed or params[leaf.path].dtype != dtypes[leaf.path]]
        self.note()

    def note(self) -> None:
        """They are what the masters say."""
        self.counts = {leaf.path: self._count(leaf) for leaf in self.leaves}

    def carry_over(self) -> None:
        """Store what was written since."""
        for leaf in self.leaves:
            self.carry_leaf(leaf)

    @torch.no_grad()
    def carry_leaf(self, leaf: Leaf) -> None:
        """Store what was written into one of them since, if it is one."""
        p = self.params[leaf.path]
        if self.counts.get(leaf.path) in (None, self._count(leaf)):
            return
        home = self.stored()[leaf.path]
        mine, new, told = p.detach(), p.detach(), home
        for stage in self.later:
            new = stage.store(new, leaf)
            mine = mine if stage.wire is None else stage.store(mine, leaf)
        for stage in reversed(self.later):
            told = stage.view(told, leaf) if stage.wire is None else told
        home.copy_(torch.where(mine == told.to(mine.dtype), home, new.to(home.dtype)))
        self.counts[leaf.path] = self._count(leaf)

    def _count(self, leaf: Leaf) -> list[Writes]:
        return writes([self.params[leaf.path]])
