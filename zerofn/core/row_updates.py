"""Transforms that need whole rows, where leaves are cut by rows: each rank updates its rows.

Shards are flat; such a transform is handed this rank's rows of the leaf, of shape `(rows, ...)`, maybe none. What it
keeps of a leaf is stored flat, as all shards are, so its state must have the leaf's shape. A leaf whose state has
another (a number for each row, a tree) goes to an owner, and so does a leaf that is not cut by rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .layout import Layout, Leaf, Leaves
from .nested_sharding import spans_of_all
from .row_sharding import rows_between
from .transform import Transform, TransformState
from .tree import flatten, tree_keys, unflatten
from .update_context import Context
from .views import Wire

# By path: the shape of this rank's rows of a leaf.
Rows = dict[str, tuple[int, ...]]


def local_rows(cutting: Sequence[Wire], leaves: Sequence[Leaf]) -> Rows:
    """The shape of this rank's rows, of each leaf of which every rank has whole rows."""
    found: Rows = {}
    for leaf in leaves:
        if all(rows_between(leaf.shape, *span) is not None for span in spans_of_all(cutting, leaf)):
            mine = rows_between(leaf.shape, *cutting[-1].span(leaf))
            assert mine is not None
            found[leaf.path] = mine
    return found


def keeps_leaves_alone(t: Transform, leaves: Sequence[Leaf], layout: Layout) -> bool:
    """Whether every state of a leaf has the leaf's shape."""
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    metas = {leaf.path: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in leaves}
    state = t.init_fn(metas, layout)
    kept = zip(tree_keys(state), flatten(state)[0], strict=True)
    # The first key is the name of an entry, which may be that of a leaf.
    of_leaves = [(keys, x) for keys, x in kept if set(keys[1:]) & shapes.keys()]
    return all(isinstance(x, Tensor) and shapes.get(keys[-1]) == x.shape for keys, x in of_leaves)


def on_rows(t: Transform, rows: Rows) -> Transform:
    """The same transform, handed rows of these leaves in place of flat shards."""

    def init(pieces: Leaves, layout: Layout) -> TransformState:
        return _each(t.init_fn(_shaped(pieces, rows), layout), _flat, rows)

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        there = _each(state, _as_rows, rows)
        out, new = t.update_fn(_shaped(grads, rows), there, _shaped(params, rows), carry, ctx)
        new = _each(new, _flat, rows)
        return None if out is None else {p: _flat(x, rows[p]) if p in rows else x for p, x in out.items()}, new

    return replace(t, needs="element", init_fn=init, update_fn=update)


def _shaped(tensors: Leaves, rows: Mapping[str, tuple[int, ...]]) -> Leaves:
    return {path: _as_rows(x, rows[path]) if path in rows else x for path, x in tensors.items()}


def _as_rows(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.reshape(shape)


def _flat(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.reshape(-1)


def _each(state: TransformState, fn: Any, rows: Mapping[str, tuple[int, ...]]) -> TransformState:
    """A state with `fn(tensor, shape)` in the place of each tensor that is kept of a leaf."""
    values, spec = flatten(state)
    named = zip(tree_keys(state), values, strict=True)
    return unflatten(spec, [fn(x, rows[keys[-1]]) if keys[-1] in rows and keys[1:] else x for keys, x in named])
