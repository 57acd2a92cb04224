"""Parameters that are other tensors than what is stored of them: refreshed, and written back.

Where `all_reduce` or `reduce_scatter` makes full parameters, these are gathered again after an update, one bucket at a
time. Where `precision(param_dtype=...)` follows one of them, the model holds full parameters in the compute dtype and
the state holds their masters. `model.load_state_dict`, `nn.init` and `p.data.clamp_()` write into the copy, and the
next update would overwrite that from the masters in silence. So what was written is stored: element by element, for
an element that was not written is more exact in its master.

What NumPy writes by way of `p.detach().numpy()` counts no version, and is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.coalesced_views import cut
from ..core.composed_view import see, store
from ..core.layout import Leaf, Leaves
from ..core.pipeline import Pipeline
from ..sharded.guarded_parameter import Writes, writes
from .current_state import CurrentState


class MasterWeights:
    """What is stored of an attached model's parameters, where these are other tensors.

    Args:
        pipe: its pipeline.
        params: its parameters by path, in their resident form.
        current: the state in force.

    Attributes:
        buckets: the leaves that `refresh` makes at once, each with its parameters; none where parameters are stored.
        leaves: those of which the parameter is a copy: in another dtype, or seen through a view that changes numbers.
        copies: their parameters by path.
    """

    def __init__(self, pipe: Pipeline, params: Leaves, current: CurrentState):
        self.pipe, self.params, self.current = pipe, params, current
        # Between the stored and the resident form.
        self.views = pipe.road.after_update
        buckets = cut(pipe.layout.leaves, {path: x.dtype for path, x in params.items()}) if self.views else []
        self.buckets = [(bucket, {leaf.path: params[leaf.path] for leaf in bucket}) for bucket in buckets]
        stored, viewed = current.state.leaves, pipe.road.renumbers_after_update
        self.leaves = [x for x in pipe.layout.leaves if viewed or params[x.path].dtype != stored[x.path].dtype]
        self.copies = {leaf.path: params[leaf.path] for leaf in self.leaves}
        self.counts = self._counts()

    @torch.no_grad()
    def refresh(self) -> None:
        """Write into the parameters what is stored of them, as the model sees it."""
        stored, road = self.current.state.leaves, self.pipe.road
        for bucket, params in self.buckets:
            # Of a parameter that stays a part it is the part that is written, and not what it is a part of.
            with torch.DisableTorchFunctionSubclass():
                plain = dict(zip(params, map(Tensor.detach, params.values()), strict=True))
            seen = road.see(self.views, {path: stored[path] for path in params}, bucket, plain)
            for path, x in seen.items():
                if x.data_ptr() != plain[path].data_ptr():
                    plain[path].copy_(x)
        self.counts = self._counts()

    def carry_over(self) -> None:
        """Store what was written into copies since; nothing of a torn state, whose copies are older than it is."""
        if self.current.torn:
            return
        if self._counts() != self.counts:
            for leaf in self.leaves:
                self.carry_leaf(leaf)

    def carry_leaf(self, leaf: Leaf) -> bool:
        """Store what was written into a parameter since, if it is a copy; whether a write was counted."""
        copy = self.copies.get(leaf.path)
        if copy is None or self.current.torn or writes([copy]) == [self.counts[leaf.path]]:
            return False
        self._carry(leaf)
        (self.counts[leaf.path],) = writes([copy])
        return True

    @torch.no_grad()
    def _carry(self, leaf: Leaf) -> None:
        """Store the elements of a copy that differ from its master."""
        master = self.current.state.leaves[leaf.path]
        new = store(self.views, self.params[leaf.path].detach(), leaf)
        copy, seen = self._both(leaf)
        master.copy_(torch.where(copy == seen, master, new.to(master.dtype)))

    def _both(self, leaf: Leaf) -> tuple[Tensor, Tensor]:
        """The rows of the copy that this rank stores, and what its master says that they are."""
        copy = self.pipe.road.own(self.params[leaf.path].detach(), leaf)
        seen = see([view for view in self.views if view.wire is None], self.current.state.leaves[leaf.path], leaf)
        return copy, seen.to(copy.dtype)

    def _counts(self) -> dict[str, Writes]:
        return dict(zip(self.copies, writes(self.copies.values()), strict=True))
