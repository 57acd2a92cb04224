"""Transforms that need whole leaves, where leaves are cut over ranks: each leaf is updated at its owner.

Its state is at the owner alone. On other ranks that state has the same shape and no memory (one element, expanded), so
that the structure of a state is the same on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import is_shape_only
from .._errors import bad_leaves
from .facts import OF_LEAVES, Scope
from .layout import Layout, Leaves
from .leaf_entries import of_leaves, overlaid, places
from .owner_derivatives import hung_on, nothing_of_all
from .owners import OwnerExchange, OwnerFailed, owner_exchange
from .partition import replace_innermost
from .row_updates import Rows, local_rows, on_rows, states_have_leaf_shapes
from .start_forms import form_of_start
from .state_names import check_at_owners
from .transform import Transform, TransformState, no_state
from .tree import flatten, tree_keys, tree_map
from .update_context import Context
from .views import Wire


def _may_be_owned(t: Transform) -> bool:
    """Whether it needs whole leaves and no more, and has no transformation of another library inside."""
    return t.needs in OF_LEAVES and not t.facts.adds and all(p.needs != "tree" and not p.facts.adds for p in _inside(t))


def _inside(t: Transform) -> list[Transform]:
    return [x for part in t.parts for x in (part, *_inside(part))]


def run_at_owners(t: Transform, layout: Layout, cutting: Sequence[Wire]) -> tuple[Transform, dict[str, dict[str, int]]]:
    """The same transform, in which what needs whole leaves is run at their owners.

    Of a `partition` only leaves of members that need whole ones travel, and of a member that needs rows only leaves
    that are not cut by rows. Returned are also the owners by path, for each place in the state of `t` that is of whole
    leaves.
    """
    ranks: dict[str, dict[str, int]] = {}

    def owned(part: Transform, paths: Set[str], where: str) -> Transform:
        leaves = tuple(leaf for leaf in layout.trainable if leaf.path in paths)
        if not _may_be_owned(part):
            return part
        if part.idle and part.init_fn is no_state:
            # A view alone: nothing would travel but what comes back as it was.
            return replace(part, needs="element")
        rows: Rows = local_rows(cutting, leaves) if part.needs == "row" else {}
        if rows and states_have_leaf_shapes(part, leaves, layout):
            part, leaves = on_rows(part, rows), tuple(leaf for leaf in leaves if leaf.path not in rows)
        if not leaves:
            return replace(part, needs="element")
        at = owner_exchange(cutting, leaves)
        ranks[where] = at.rank_of
        return _at_owners(part, at, layout.every)

    return replace_innermost(t, owned, layout), ranks


def _at_owners(part: Transform, at: OwnerExchange, paths: Set[str]) -> Transform:
    """The same transform, run on leaves of the exchange at their owners, and on this rank's part of the others.

    Args:
        part: the transform.
        at: which rank owns which leaf.
        paths: of all leaves.
    """
    owned = {leaf.path for leaf in at.leaves}

    def init(pieces: Leaves, layout: Layout) -> TransformState:
        here = {path: x for path, x in pieces.items() if path not in owned}
        shapes = {**{path: x.shape for path, x in here.items()}, **{x.path: x.shape for x in at.leaves}}
        forms = {path: (shapes[path], x.dtype) for path, x in pieces.items()}
        if all(x.is_meta or is_shape_only(x) for x in pieces.values()):
            return part.init_fn({p: pieces[p].new_empty(shape) for p, (shape, _) in forms.items()}, layout)
        received: list[Tensor] = []
        wholes = at.to_owners(pieces, received)
        failure: Exception | None = None
        everywhere: TransformState = {}
        own: TransformState = {}
        try:
            # The form of the state of leaves that other ranks own.
            everywhere = form_of_start(part, forms, layout)
            check_at_owners(part.name, everywhere, pieces)
            own = part.init_fn(_ordered({**here, **wholes}, pieces), layout)
            _check_forms(part.name, everywhere, own)
        except Exception as error:
            # Each owner makes others, so it may fail here alone, and the others would go on to what they send next.
            failure = error
        at.agree(failure)
        device = next(iter(pieces.values())).device
        made = overlaid(tree_map(lambda x: _expanded(x, device), everywhere), own)
        return hung_on(nothing_of_all(received), made)

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        given = {path: params[path] for path in grads if path in owned}
        theirs = {path: g for path, g in grads.items() if path in owned}
        here = {path: g for path, g in grads.items() if path not in owned}
        received: list[Tensor] = []
        wholes = _ordered({**{path: params[path] for path in here}, **at.to_owners(given, received)}, grads)
        all_of = _ordered({**here, **at.to_owners(theirs, received)}, grads)
        own = of_leaves(state, places(state, paths), all_of)
        nothing = nothing_of_all((received, state, carry)) if ctx.recorded else None
        like, first = given if part.facts.optimizes else theirs, next(iter(params.values()))
        try:
            out, new = part.update_fn(all_of, own, wholes, carry, replace(ctx, offsets={}))
        except Exception as error:
            # Each owner runs it on other leaves, so it may fail here alone, and the others wait for what comes of it.
            with contextlib.suppress(OwnerFailed):
                at.to_pieces(error, like, first, nothing)
            raise
        kept = hung_on(nothing, overlaid(state, new))
        if out is None:
            return None, kept
        pieces = at.to_pieces(out, like, first, nothing)
        return {path: pieces[path] if path in owned else out[path] for path in grads}, kept

    return replace(part, scope=Scope.WHOLE, needs="element", init_fn=init, update_fn=update)


def _ordered(found: Leaves, like: Leaves) -> Leaves:
    """Leaves in the order of `like`: those that travel come by dtype, behind those that do not."""
    return {path: found[path] for path in like if path in found}


def _expanded(x: Any, device: torch.device) -> Any:
    if not isinstance(x, Tensor) or not x.is_meta:
        return x
    return torch.zeros((), dtype=x.dtype, device=device).expand(x.shape)


def _check_forms(name: str, everywhere: TransformState, own: TransformState) -> None:
    """Refuse first states whose shapes other ranks could not know."""
    here = dict(zip(tree_keys(own), flatten(own)[0], strict=True))
    wrong = [
        ("/".join(keys), f"of shape {tuple(here[keys].shape)} here, and {tuple(x.shape)} for other numbers")
        for keys, x in zip(tree_keys(everywhere), flatten(everywhere)[0], strict=True)
        if isinstance(x, Tensor) and isinstance(y := here.get(keys), Tensor) and x.shape != y.shape
    ]
    if wrong:
        what = f"{name}: a first state whose shape follows from the numbers of a leaf, which its owner alone has"
        raise ValueError(bad_leaves(what, wrong, "a shape that follows from the shape of the leaf: a mask for indices"))
