"""A chain made ready for one tree of parameters: which views autograd runs, and which update halves follow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ._boundary import LeafView
from ._compose import as_transform, complete
from ._norms import squared_norm
from ._order import check_complete
from ._precision import Cast, cast_of
from ._tree import Layout, Leaf, Leaves
from ._types import Context, Prepared, Role, Scope, Stage, Transform, TransformState


def _report_norm(state: TransformState, grads: Leaves, params: Leaves, ctx: Context) -> Prepared:
    ctx.report("grad_norm", ctx.reduction.sum(squared_norm(grads)).sqrt())
    return Prepared()


# Metrics show the norm of what the optimizer is given; a clip shows it before clipping, in its place.
# A name with a dot is one that no transform of a user's can have.
GRAD_NORM = Transform(".grad_norm", Role.GRADIENT, Scope.TREE, prepare_fn=_report_norm)


@dataclass(frozen=True)
class Pipeline:
    """The parts of a chain in order, resolved for a layout.

    Attributes:
        tx: the chain as it was given.
        layout: of the parameters.
        parts: its members; a guest that ends it made the optimizer.
    """

    tx: Transform
    layout: Layout
    parts: tuple[Transform, ...]

    @cached_property
    def cast(self) -> Cast:
        """The dtypes."""
        return cast_of(self.parts, self.layout)

    @cached_property
    def scale(self) -> str | None:
        """The name of the transform that scales the loss."""
        return next((p.name for p in self.parts if p.role is Role.SCALE), None)

    @cached_property
    def views(self) -> dict[str, LeafView]:
        """By path: how each leaf is seen, stages from storage towards the model."""
        stages = [s for p in reversed(self.parts) if (s := p.stage_fn(self.layout)) is not None]
        return {leaf.path: self._view(leaf, stages) for leaf in self.layout.leaves}

    def _view(self, leaf: Leaf, stages: list[Stage]) -> LeafView:
        return LeafView(leaf, tuple(s for s in stages if s.changes(leaf)), self.cast.gradient(leaf))

    @cached_property
    def updates(self) -> tuple[Transform, ...]:
        """The update halves that have something to do, in order."""
        idle = {Role.SHARD, Role.CAST}
        parts = [p for p in self.parts if p.role not in idle]
        if not any(p.factory is not None and p.factory.__name__ == "clip_by_global_norm" for p in parts):
            at = next(i for i, p in enumerate(parts) if p.role is Role.OPTIMIZER)
            parts.insert(at, GRAD_NORM)
        return tuple(parts)

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        """What is kept of a full parameter."""
        for part in self.parts:
            if (stage := part.stage_fn(self.layout)) is not None:
                x = stage.store(x, leaf)
        return x

    def whole(self, x: Tensor, leaf: Leaf) -> Tensor:
        """A stored parameter gathered, in its storage dtype."""
        for stage in self.views[leaf.path].stages:
            x = x if stage.only_dtype else stage.view(x, leaf)
        return x

    def context(self, **given: Any) -> Context:
        """What the update halves are handed."""
        return Context(self.layout, **given)

    def scale_of(self, transforms: dict[str, TransformState]) -> Tensor | None:
        """The loss scale in force."""
        return None if self.scale is None else transforms[self.scale]["scale"]

    def init_transforms(self, stored: Leaves) -> dict[str, TransformState]:
        """The first state of every transform, for stored parameters (meta tensors too)."""
        trainable = {leaf.path for leaf in self.layout.leaves if leaf.trainable}
        leaves = {p: x for p, x in stored.items() if p in trainable}
        dtypes = {leaf.path: self.cast.gradient(leaf) for leaf in self.layout.leaves}
        states = {}
        for part in self.parts:
            # What is accumulated has the dtype of gradients, which need not be that of parameters.
            like = leaves
            if part.role is Role.ACCUMULATE:
                like = {p: torch.empty_like(x, dtype=dtypes[p]) if x.dtype != dtypes[p] else x for p, x in leaves.items()}
            states[part.name] = part.init_fn(like, self.layout)
        return states


def pipeline(tx: Transform, layout: Layout, where: str) -> Pipeline:
    """Resolve a transform for a layout; an error where it cannot train."""
    tx = as_transform(tx)
    parts = complete(tx.parts if tx.role is Role.CHAIN else (tx,))
    check_complete(parts, where)
    return Pipeline(tx, layout, parts)


