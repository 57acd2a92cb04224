"""`Road`: stored parameters through the views of a chain to the model, and gradients back.

Many leaves at once, in buckets, with one collective for each; leaf by leaf and differentiable it is `LeafView`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

import torch
from torch import Tensor

from ..kernels.recording import recorded
from ..ranks.group import Group
from .coalesced_views import Like, pull_all, view_all
from .composed_view import store
from .dtypes import Dtypes, summable
from .layout import Leaf, Leaves
from .linear_map import LeafView, over, stored_by
from .spec import Spec
from .views import View, cutting_wires


def groups_of(stages: Sequence[View]) -> tuple[Group, ...]:
    """The groups of ranks over which views communicate."""
    return tuple([view.wire.group for view in stages if view.wire is not None])


@dataclass(frozen=True)
class Road:
    """The views between the model and storage.

    Attributes:
        leaves: all parameters.
        stages: the views that do something, from the model to storage.
        dtypes: of parameters and gradients.
        held: the transforms, by name, that hold gradients in front of the first view that makes resident parameters.
        specs: by path, what gradients are in front of each stage, and behind the last one.
    """

    leaves: tuple[Leaf, ...]
    stages: tuple[View, ...]
    dtypes: Dtypes
    held: tuple[str, ...]
    specs: tuple[Mapping[str, Spec], ...]

    @cached_property
    def at_use(self) -> tuple[View, ...]:
        """The views that an attached model applies to its resident parameters at each use."""
        return tuple(takewhile(lambda view: not view.resident, self.stages))

    @cached_property
    def after_update(self) -> tuple[View, ...]:
        """The views that make resident parameters once after an update; the first reduces their gradients."""
        return self.stages[len(self.at_use) :]

    @cached_property
    def behind_reduction(self) -> tuple[View, ...]:
        """The views of `after_update` whose transposes gradients pass once they are reduced."""
        return tuple([view for view in self.after_update[1:] if view.dtypes is None])

    @cached_property
    def casts_after_update(self) -> bool:
        """Whether resident parameters have the dtypes that the model sees, and not those that are stored."""
        return any([view.dtypes is not None for view in self.after_update])

    @cached_property
    def renumbers_after_update(self) -> bool:
        """Whether resident parameters are other numbers than the stored ones, beyond a cast."""
        return any([view.renumbers for view in self.after_update])

    @cached_property
    def late(self) -> bool:
        """Whether gradients are accumulated first, and reduced once a window as an update half of its own."""
        return bool(self.held and self.after_update)

    @cached_property
    def pulled(self) -> tuple[View, ...]:
        """The views whose transposes a gradient has passed when it is given to `zf.update`."""
        return self.at_use if self.late else self.stages

    @cached_property
    def cutting(self) -> tuple[Group, ...]:
        """The groups of ranks that leaves are cut over, one after the other."""
        return tuple([wire.group for wire in cutting_wires(self.stages)])

    @cached_property
    def grad_dtypes(self) -> dict[str, torch.dtype]:
        """By path: the dtype of a gradient once it is pulled back."""
        return {leaf.path: self.dtypes.gradient(leaf) for leaf in self.leaves}

    @cached_property
    def exact(self) -> bool:
        """Whether views only cast and move between ranks, so that what is seen follows from what is stored."""
        return not any([view.renumbers for view in self.stages])

    def composed(self, stages: tuple[View, ...], dtype: Callable[[Leaf], torch.dtype]) -> dict[str, LeafView]:
        """By path: the views in `stages` (from the model to storage) as one; `dtype` is that of the stored gradient."""
        return {x.path: LeafView(x, tuple([s for s in stages if s.changes(x)]), dtype(x)) for x in self.leaves}

    def resident_grad_dtype(self, leaf: Leaf) -> torch.dtype:
        """The dtype of `p.grad` in an attached model."""
        return summable(self.dtypes.summed(leaf)) if self.casts_after_update else self.dtypes.gradient(leaf)

    def stored_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of a leaf in the state of this rank."""
        return self.specs[-1][leaf.path].local_shape

    def grad_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of the gradient that `zf.update` is given."""
        return self.specs[len(self.pulled)][leaf.path].local_shape

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Index of each leaf's first stored element in the whole leaf; box by box where the model itself is cut."""
        begin = {x.path: 0 if x.within is None else x.within.before for x in self.leaves}
        if not self.cutting:
            return begin if any(begin.values()) else {}
        return {path: before + self.specs[-1][path].range[0] for path, before in begin.items()}

    def pull(self, stages: tuple[View, ...], grads: Leaves, stored: Leaves, scale: Tensor | None = None) -> Leaves:
        """Gradients through the transposes of these stages, in the order of `self.stages`; then divided by `scale`.

        Leaves in the same order on every rank; one may have no gradient here. Of `stored` only devices are used.
        """
        dtypes = self.grad_dtypes
        if stages or scale is not None:
            with torch.no_grad():
                grads = _pulled(self, stages, grads, stored, scale)
                if scale is not None:
                    return {p: over(g, scale, dtypes[p]) for p, g in grads.items()}
        return {p: g if g.dtype is dtypes[p] else g.to(dtypes[p]) for p, g in grads.items()}

    def pull_recorded(self, stages: tuple[View, ...], grads: Leaves, stored: Leaves) -> Leaves:
        """As `pull`, differentiably: leaf by leaf, and a leaf without a gradient here has zeros to send."""
        views = {p: v for p, v in self.composed(stages, self.dtypes.gradient).items() if v.leaf.trainable}
        missing = {p: stored[p].new_zeros(self.grad_shape(v.leaf)) for p, v in views.items() if grads.get(p) is None}
        return {p: v.transposed(missing[p] if p in missing else grads[p], None) for p, v in views.items()}

    def see(
        self, stages: tuple[View, ...], leaves: Leaves, which: Sequence[Leaf] | None = None, into: Leaves | None = None
    ) -> Leaves:
        """Stored parameters, or those in `which`, through the views of these stages. Not differentiable.

        If the last view is an all-gather it writes `into` tensors that are given, in one collective.
        """
        if stages:
            here = self.leaves if which is None else which
            with torch.no_grad():
                for i, stage in reversed(list(enumerate(stages))):
                    leaves = view_all(stage, leaves, here, None if i else into)
        return leaves

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        """What is stored of a full parameter; differentiable where that is recorded."""
        x = stored_by(self.stages, x, leaf) if recorded((x,)) else store(self.stages, x, leaf)
        return x.to(self.dtypes.stored(leaf))

    def kept(self, x: Tensor, leaf: Leaf) -> Tensor:
        """The resident form of a full parameter, in the dtype of `x`."""
        return store(uncast(self), x, leaf)

    def own(self, x: Tensor, leaf: Leaf) -> Tensor:
        """The shard of a resident parameter that this rank stores, in the dtype of `x`."""
        return store([stage for stage in self.after_update if stage.wire is not None], x, leaf)

    def whole(self, leaves: Leaves) -> Leaves:
        """Full parameters, in the dtype they are stored in; differentiable where that is recorded.

        A view that still `reads` a state has none that it could read: its transform's first state could not be made.
        """
        stages = tuple([stage for stage in self.stages if stage.dtypes is None and not stage.reads])
        if not recorded(leaves.values()):
            return self.see(stages, leaves)
        return {p: view(leaves[p], None) for p, view in self.composed(stages, lambda x: leaves[x.path].dtype).items()}


def uncast(road: Road) -> list[View]:
    """The views between resident parameters and what the model sees of them, but for casts."""
    return [stage for stage in road.at_use if stage.dtypes is None]


def _pulled(road: Road, stages: tuple[View, ...], grads: Leaves, stored: Leaves, scale: Tensor | None) -> Leaves:
    leaves = [leaf for leaf in road.leaves if leaf.trainable]
    for at, stage in enumerate(road.stages):
        # By identity: the compiler knows no equality of records of functions.
        if any([stage is x for x in stages]) and (scale is None or stage.dtypes is None):
            # Sizes and dtypes of gradients matter to the buffers of wires alone.
            like = {} if stage.wire is None else _arriving(road.specs[at], leaves, stored)
            grads = pull_all(stage, grads, leaves, like)
    return grads


def _arriving(specs: Mapping[str, Spec], leaves: Sequence[Leaf], stored: Leaves) -> dict[str, Like]:
    """By path: the form in which a gradient arrives at a stage, in the dtype in which it is summed there."""
    found: dict[str, Like] = {}
    for leaf in leaves:
        spec = specs[leaf.path]
        assert spec.sum_dtype is not None
        found[leaf.path] = Like(spec.numel, spec.local_shape, spec.sum_dtype, stored[leaf.path].device)
    return found
