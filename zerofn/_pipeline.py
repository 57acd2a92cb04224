"""A chain made ready for one tree of parameters: which views apply where, and which update halves follow.

The views of a chain stand between three forms of a parameter. *Stored* is what the state keeps.
*Resident* is what an eager model holds between steps: full parameters under `reduce_scatter`, which
gathers once a step, the stored ones otherwise. *Seen* is what the model computes with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ._boundary import LeafView, over
from ._compose import as_transform, complete
from ._errors import explain
from ._group import Group
from ._norms import squared_norm
from ._order import check_complete, check_pieces
from ._precision import Cast, cast_of
from ._shard import Averaging, Like, Sharding, like_after, pull_all, view_all
from ._transfers import all_reduce_
from ._tree import Layout, Leaf, Leaves, Placement
from ._types import Context, OneProcess, Prepared, Reduction, Role, Scope, Stage, Transform, TransformState


def _report_norm(state: TransformState, grads: Leaves, params: Leaves, ctx: Context) -> Prepared:
    ctx.report("grad_norm", ctx.reduction.sum(squared_norm(grads)).sqrt())
    return Prepared()


# Metrics show the norm of what the optimizer is given; a clip shows it before clipping, in its place.
# A name with a dot is one that no transform of a user's can have.
GRAD_NORM = Transform(".grad_norm", Role.GRADIENT, Scope.TREE, needs="number", prepare_fn=_report_norm)


@dataclass(frozen=True)
class Ranks:
    """Scalars over ranks: sums over those that hold different shards, maxima over all."""

    shards: Group | None
    groups: tuple[Group, ...]

    def sum(self, x: Tensor) -> Tensor:
        return x if self.shards is None else self._all(x, self.shards, "sum")

    def mean(self, x: Tensor) -> Tensor:
        return mean_over(self.groups, x)

    def max(self, x: Tensor) -> Tensor:
        # NaN compares as nothing, so some backends lose it in a maximum; infinity they do not.
        x = torch.where(torch.isnan(x), torch.full_like(x, torch.inf), x)
        for group in self.groups:
            x = self._all(x, group, "max")
        return x

    def _all(self, x: Tensor, group: Group, op: str) -> Tensor:
        return _over(x, group, op)


def _over(x: Tensor, group: Group, op: str) -> Tensor:
    out = x.to(group.device, copy=True)
    all_reduce_(out, group, op)
    return out.to(x.device)


def mean_over(groups: Sequence[Group], x: Tensor) -> Tensor:
    """The mean of a scalar over the ranks of all axes."""
    for group in groups:
        x = _over(x, group, "sum") / group.size
    return x


@dataclass(frozen=True)
class Pipeline:
    """The parts of a chain in order, resolved for a layout.

    Attributes:
        tx: the chain as it was given.
        layout: of the parameters.
        parts: its members; a guest that ends it made the optimizer.
        stages: the view halves that do something, from the model to storage.
        cut: the first of `stages` that reduces gradients of resident parameters.
        late: whether that happens after an accumulation, as an update half of its own.
    """

    tx: Transform
    layout: Layout
    parts: tuple[Transform, ...]
    stages: tuple[Stage, ...]
    cut: int
    late: bool

    @cached_property
    def cast(self) -> Cast:
        """The dtypes."""
        return cast_of(self.parts, self.layout)

    @cached_property
    def scale(self) -> str | None:
        """The name of the transform that scales the loss."""
        return next((p.name for p in self.parts if p.role is Role.SCALE), None)

    @cached_property
    def sharding(self) -> Sharding | None:
        """How leaves are cut over ranks, if they are."""
        return next((s for s in self.stages if isinstance(s, Sharding)), None)

    @cached_property
    def sharded_use(self) -> bool:
        """Whether even resident parameters are shards, gathered when they are used."""
        return any(isinstance(s, Sharding) for s in self.stages[: self.cut])

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Every group of ranks the pipeline talks in."""
        return tuple(s.group for s in self.stages if isinstance(s, Sharding | Averaging))

    @cached_property
    def weighted(self) -> bool:
        """Whether micro-batches have weights."""
        return any(_is_weighted(part) for part in self.parts)

    @cached_property
    def weighted_after(self) -> tuple[Group, ...]:
        """The groups over which gradients are averaged before an accumulation gives them weights."""
        if not self.weighted:
            return ()
        stages = self.stages[: self.cut] if self.late else self.stages
        return tuple(s.group for s in stages if isinstance(s, Sharding | Averaging))

    @cached_property
    def views(self) -> dict[str, LeafView]:
        """By path: how each leaf is seen from storage; from the resident form where the reduction is late."""
        return self._views(self.stages[: self.cut] if self.late else self.stages, self.cast.gradient)

    @cached_property
    def views_at_use(self) -> dict[str, LeafView]:
        """By path: how an attached model sees its resident parameters."""
        return self._views(self.stages[: self.cut], self.resident_grad_dtype)

    def _views(self, stages: tuple[Stage, ...], dtype: Any) -> dict[str, LeafView]:
        towards_model = stages[::-1]
        return {
            leaf.path: LeafView(leaf, tuple(s for s in towards_model if s.changes(leaf)), dtype(leaf))
            for leaf in self.layout.leaves
        }

    def resident_grad_dtype(self, leaf: Leaf) -> torch.dtype:
        """The dtype of `p.grad` in an attached model."""
        if not any(isinstance(s, Cast) for s in self.stages[self.cut :]):
            return self.cast.gradient(leaf)
        seen = self.cast.reduce_dtype or self.cast.param_dtype or self.cast.stored(leaf)
        return torch.float32 if seen == torch.float16 else seen

    @cached_property
    def updates(self) -> tuple[Transform, ...]:
        """The update halves that have something to do, in order."""
        parts = [self._late_update(p) for p in self.parts]
        kept = [p for p in parts if p is not None]
        if not any("grad_norm" in p.reports for p in kept):
            at = next(i for i, p in enumerate(kept) if p.role is Role.OPTIMIZER)
            kept.insert(at, GRAD_NORM)
        return tuple(kept)

    def _late_update(self, part: Transform) -> Transform | None:
        if part.role in (Role.SHARD, Role.CAST):
            return None
        if part.role not in (Role.SCATTER, Role.REDUCE):
            return part
        kind = Sharding if part.role is Role.SCATTER else Averaging
        stage = next((s for s in self.stages if isinstance(s, kind)), None)
        if not self.late or stage is None:
            return None

        def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
            return self.pull((stage,), grads, params), state

        return replace(part, scope=Scope.WHOLE, update_fn=update)

    def pull(self, stages: tuple[Stage, ...], grads: Leaves, stored: Leaves, scale: Tensor | None = None) -> Leaves:
        """Gradients through the transposes of stages, in a fixed order of leaves on every rank.

        Args:
            stages: from the model to storage, consecutive members of `self.stages`.
            grads: by path; a leaf may be absent on this rank.
            stored: stored parameters, for their devices.
            scale: what to divide by at the end.
        """
        leaves = [leaf for leaf in self.layout.leaves if leaf.trainable]
        whole = not any(isinstance(s, Sharding) for s in self.stages[: self._index(stages)])
        like = {leaf.path: self._like(leaf, stages, stored[leaf.path], whole) for leaf in leaves}
        for stage in stages:
            if scale is None or not stage.only_dtype:
                grads = pull_all(stage, grads, leaves, like)
            like = {leaf.path: like_after(stage, leaf, like[leaf.path]) for leaf in leaves}
        named = {leaf.path: leaf for leaf in leaves}
        dtypes = {p: self.cast.gradient(named[p]) for p in grads}
        return {p: g.to(dtypes[p]) if scale is None else over(g, scale, dtypes[p]) for p, g in grads.items()}

    def _index(self, stages: tuple[Stage, ...]) -> int:
        return self.stages.index(stages[0]) if stages else len(self.stages)

    def _like(self, leaf: Leaf, stages: tuple[Stage, ...], stored: Tensor, whole: bool) -> Like:
        """A gradient as it arrives at the first of `stages`."""
        ahead = any(isinstance(s, Cast) for s in stages)
        if ahead:
            dtype = self.cast.param_dtype or self.cast.stored(leaf)
        elif self._index(stages) == 0 and not self.late:
            dtype = self.cast.stored(leaf)
        else:
            dtype = self.cast.gradient(leaf)
        shape = tuple(leaf.shape) if whole or self.sharding is None else self.sharding.shape(leaf)
        return Like(torch.Size(shape).numel(), shape, dtype, stored.device)

    def see(
        self,
        stages: tuple[Stage, ...],
        leaves: Leaves,
        which: Sequence[Leaf] | None = None,
        into: Leaves | None = None,
    ) -> Leaves:
        """Parameters through the views of stages, given from the model to storage. Not differentiable.

        Args:
            stages: consecutive members of `self.stages`.
            leaves: stored parameters.
            which: those that are seen; all by default.
            into: where to gather them if the last view is a gather, which is then one collective.
        """
        for i, stage in reversed(list(enumerate(stages))):
            leaves = view_all(stage, leaves, self.layout.leaves if which is None else which, None if i else into)
        return leaves

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        """What is kept of a full parameter."""
        x = self.cast.store(x, leaf)
        return x if self.sharding is None else self.sharding.store(x, leaf)

    def whole(self, leaves: Leaves) -> Leaves:
        """Stored parameters gathered, in their storage dtype."""
        return leaves if self.sharding is None else view_all(self.sharding, leaves, self.layout.leaves)

    def stored_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of a leaf in the state of this rank."""
        return tuple(leaf.shape) if self.sharding is None else self.sharding.shape(leaf)

    def grad_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of the gradient that `zf.update` is given."""
        return tuple(leaf.shape) if self.late and not self.sharded_use else self.stored_shape(leaf)

    def context(self, **given: Any) -> Context:
        """What the update halves are handed."""
        return Context(self.layout, offsets=self.offsets, reduction=self.reduction, **given)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Global index of the first stored element of each leaf."""
        return {} if self.sharding is None else {leaf.path: self.sharding.span(leaf)[0] for leaf in self.layout.leaves}

    @cached_property
    def reduction(self) -> Reduction:
        """Scalars over ranks."""
        if not self.groups:
            return OneProcess()
        return Ranks(None if self.sharding is None else self.sharding.group, self.groups)

    def scale_of(self, transforms: dict[str, TransformState]) -> Tensor | None:
        """The loss scale in force."""
        return None if self.scale is None else transforms[self.scale]["scale"]

    def init_transforms(self, stored: Leaves) -> dict[str, TransformState]:
        """The first state of every transform, for stored parameters (meta tensors too)."""
        leaves = {leaf.path: stored[leaf.path] for leaf in self.layout.leaves if leaf.trainable}
        sums = {
            leaf.path: leaves[leaf.path].new_empty(self.grad_shape(leaf), dtype=self.cast.gradient(leaf))
            if (self.late or self.cast.gradient(leaf) != leaves[leaf.path].dtype)
            else leaves[leaf.path]
            for leaf in self.layout.leaves
            if leaf.trainable
        }
        # What is accumulated has the dtype, and before a late reduction the shape, of gradients.
        return {p.name: p.init_fn(sums if p.role is Role.ACCUMULATE else leaves, self.layout) for p in self.parts}


def pipeline(tx: Transform, layout: Layout, where: str) -> Pipeline:
    """Resolve a transform for a layout; an error where it cannot train."""
    tx = as_transform(tx)
    parts = complete(tx.parts if tx.role is Role.CHAIN else (tx,))
    check_complete(parts, where)
    cast = cast_of(parts, layout)
    stages: list[Stage] = []
    placed: list[Transform] = []
    for part in parts:
        stage = part.stage_fn(layout)
        if isinstance(stage, Sharding | Averaging):
            stage = None if stage.group.size == 1 else replace(stage, reduce_dtype=cast.reduce_dtype)
        if stage is not None:
            stages.append(stage)
            placed.append(part)
    reduces = (Role.SCATTER, Role.REDUCE)
    cut = next((i for i, part in enumerate(placed) if part.role in reduces), len(stages))
    ahead = parts[: next((i for i, p in enumerate(parts) if p.role in reduces), 0)]
    late = cut < len(stages) and any(p.role is Role.ACCUMULATE and not idle(p) for p in ahead)
    layout = replace(layout, placement=_placement(parts, stages, late))
    check_pieces(parts, layout.placement.size, where)
    # Of views that are no part of this library only the pure route knows, where it gathers and reduces at once.
    if where == "zf.attach" or late or any(p.role is Role.SHARD for p in placed):
        _check_views(placed, stages, where)
    return Pipeline(tx, layout, parts, tuple(stages), cut, late)


def _check_views(parts: Sequence[Transform], stages: Sequence[Stage], where: str) -> None:
    """Refuse views of others where something moves over ranks: it would pass them by."""
    foreign = [p.name for p, s in zip(parts, stages, strict=True) if not isinstance(s, Sharding | Averaging | Cast)]
    moved = [p.name for p, s in zip(parts, stages, strict=True) if isinstance(s, Sharding | Averaging)]
    if foreign and moved:
        raise ValueError(
            explain(
                f"{where} with chain({', '.join(p.name for p in parts)}) on several ranks",
                f"{', '.join(foreign)} has a view half of its own, between what is stored and what the model sees, and "
                f"what {', '.join(moved)} sends over ranks would go past it: the update would be wrong without a word",
                "that map in the model itself (torch.nn.utils.parametrize), or in loss_fn; or one process",
            )
        )


def idle(part: Transform) -> bool:
    """Whether it is `accumulate(1)`, which is the identity: a reduction to its right need not wait for it."""
    return part.role is Role.ACCUMULATE and part.config.get("every") == 1 and not part.config.get("weighted")


def _placement(parts: Sequence[Transform], stages: Sequence[Stage], late: bool) -> Placement:
    """How the state lies over ranks. Sums that wait for a late reduction are each rank's own."""
    groups = [s.group for s in stages if isinstance(s, Sharding | Averaging)]
    shards = next((s.group for s in stages if isinstance(s, Sharding)), Group())
    first = next((i for i, p in enumerate(parts) if p.role in (Role.SCATTER, Role.REDUCE)), 0)
    apart = tuple(p.name for p in parts[:first] if p.role is Role.ACCUMULATE) if late else ()
    axes = tuple(g.ranks for g in groups)
    return Placement(shards.rank, shards.size, math.prod(g.size for g in groups), axes, apart)


def _is_weighted(part: Transform) -> bool:
    """An accumulation with weights, or what holds one, such as `offload`. Others' keywords may have any name."""
    own = part.role is Role.ACCUMULATE
    return own and (bool(part.config.get("weighted")) or any(map(_is_weighted, part.parts)))
