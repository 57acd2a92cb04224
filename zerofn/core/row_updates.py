"""Transforms that need whole rows, where leaves are cut by rows: each rank updates its rows.

Shards are flat; such a transform is handed this rank's rows of the leaf, of shape `(rows, ...)`, maybe none. What it
keeps of a leaf is stored flat, as all shards are, so its state must have the leaf's shape. A leaf whose state has
another (a number for each row, a tree) goes to an owner, and so does a leaf that is not cut by rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from .layout import Layout, Leaf, Leaves
from .nested_sharding import spans_by_rank
from .row_sharding import rows_between
from .start_forms import form_of_start
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
        if all(rows_between(leaf.shape, *span) is not None for span in spans_by_rank(cutting, leaf)):
            mine = rows_between(leaf.shape, *cutting[-1].span(leaf))
            assert mine is not None
            found[leaf.path] = mine
    return found


def states_have_leaf_shapes(t: Transform, leaves: Sequence[Leaf], layout: Layout) -> bool:
    """Whether every state of a leaf has the leaf's shape."""
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    state = form_of_start(t, {leaf.path: (leaf.shape, leaf.dtype) for leaf in leaves}, layout)
    kept = zip(tree_keys(state), flatten(state)[0], strict=True)
    # The first key is the name of an entry, which may be that of a leaf.
    of_leaves = [(keys, x) for keys, x in kept if set(keys[1:]) & shapes.keys()]
    return all(isinstance(x, Tensor) and shapes.get(keys[-1]) == x.shape for keys, x in of_leaves)


def on_rows(t: Transform, rows: Rows) -> Transform:
    """The same transform, handed rows of these leaves in place of flat shards."""
    flat: Rows = dict.fromkeys(rows, (-1,))

    def init(pieces: Leaves, layout: Layout) -> TransformState:
        return _reshaped_state(t.init_fn(_reshaped(pieces, rows), layout), flat)

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        there = _reshaped_state(state, rows)
        out, new = t.update_fn(_reshaped(grads, rows), there, _reshaped(params, rows), carry, ctx)
        return None if out is None else _reshaped(out, flat), _reshaped_state(new, flat)

    return replace(t, needs="element", init_fn=init, update_fn=update)


def _reshaped(tensors: Leaves, shapes: Rows) -> Leaves:
    return {path: x.reshape(shapes[path]) if path in shapes else x for path, x in tensors.items()}


def _reshaped_state(state: TransformState, shapes: Rows) -> TransformState:
    """A state whose tensors of leaves have these shapes; what is not by path below a name stays as it is."""
    values, spec = flatten(state)
    named = zip(tree_keys(state), values, strict=True)
    return unflatten(spec, [x.reshape(shapes[k[-1]]) if k[-1] in shapes and k[1:] else x for k, x in named])
