"""Parameters that are other tensors than what is stored of them: refreshed, and written back.

Where `all_reduce` or `reduce_scatter` makes full parameters, these are gathered again after an update, one bucket at a
time. Where `precision(param_dtype=...)` follows one of them, the model holds full parameters in the compute dtype and
the state holds their masters. `model.load_state_dict`, `nn.init` and `p.data.clamp_()` write into the copy, and the
next update would overwrite that from the masters in silence. So what was written is stored: element by element, for
an element that was not written is more exact in its master.

What NumPy writes by way of `p.detach().numpy()` is counted by nobody, and is looked for as `Sampling` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._errors import bad_leaves
from ..core.coalesced_views import cut
from ..core.composed_view import see, store
from ..core.layout import Leaf, Leaves
from ..core.pipeline import Pipeline
from ..sharded.guarded_parameter import Writes, writes
from ..sharded.write_back import Sampling, same
from .current_state import CurrentState


class MasterWeights:
    """What is stored of an attached model's parameters, where these are other tensors.

    Args:
        pipe: its pipeline.
        params: its parameters by path, in their resident form.
        current: the state in force.
        together: whether all are updated at once. Where each is in backward, copies are behind their masters until the
            step, so that a write which nobody counts cannot be told, and is lost.

    Attributes:
        buckets: the leaves that `refresh` makes at once, each with its parameters; none where parameters are stored.
        leaves: those of which the parameter is a copy: in another dtype, or seen through a view that changes numbers.
        copies: their parameters by path.
    """

    def __init__(self, pipe: Pipeline, params: Leaves, current: CurrentState, together: bool):
        self.pipe, self.params, self.current, self.together = pipe, params, current, together
        # Between the stored and the resident form.
        self.views = pipe.road.after_update
        buckets = cut(pipe.layout.leaves, {path: x.dtype for path, x in params.items()}) if self.views else []
        self.buckets = [(bucket, {leaf.path: params[leaf.path] for leaf in bucket}) for bucket in buckets]
        stored, viewed = current.state.leaves, pipe.road.renumbers_after_update
        self.leaves = [x for x in pipe.layout.leaves if viewed or params[x.path].dtype != stored[x.path].dtype]
        self.sampling = Sampling()
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
        """Store what was written into copies since; nothing of a torn state, whose copies are older than it is.

        Raises:
            RuntimeError: something was written without being counted, after steps in which copies were not compared.
        """
        if self.current.torn:
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
        """Store what was written into a parameter since, if it is a copy; whether a write was counted."""
        copy = self.copies.get(leaf.path)
        if copy is None or self.current.torn or writes([copy]) == [self.counts[leaf.path]]:
            return False
        self._carry(leaf)
        (self.counts[leaf.path],) = writes([copy])
        return True

    @torch.no_grad()
    def _written(self, leaf: Leaf) -> bool:
        """Whether the copy is another than its master says."""
        return not same(*self._both(leaf))

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
