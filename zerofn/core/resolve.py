"""Resolves a chain for a tree of parameters: which views do something there, and how leaves lie over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .._errors import explain, kind_of
from ..ranks.group import Group
from ..ranks.process_groups import group_for
from .chain import as_transform, complete
from .chain_order import check_complete, check_pieces
from .dtypes import Dtypes
from .facts import OF_PIECES
from .layout import Layout, Leaves, Placement, canonical
from .nested_sharding import check_axes, on_ranks
from .number_graphs import unrecorded
from .opaque_states import open_state
from .own_memory import own_prepared, own_start, own_update
from .owner_updates import run_at_owners
from .owners import place_in
from .partition import replace_innermost
from .pipeline import Pipeline
from .returned_updates import check_returned
from .road import Road, groups_of
from .signatures import check_signatures
from .state_names import check_state
from .stations import at_views, hand_to_owners, survey
from .tensor_parallel_checks import check_model_axes, check_model_parts, with_model_ranks
from .transform import Transform, TransformState, no_state, nothing_to_prepare, pass_through
from .tree import tensors_of
from .update_context import Context, Prepared, check_prepared
from .view_checks import check_cut_views, check_views, keeping_form
from .views import WIRE, IncompleteWire, Ranks, View, Wire, cutting_wires


def pipeline(
    tx: Transform, layout: Layout, where: str, ranks: Ranks = group_for, model: tuple[Group, ...] = ()
) -> Pipeline:
    """Resolve a transform for a layout.

    Args:
        tx: the transform.
        layout: of the parameters.
        where: the public function that was called, for messages.
        ranks: opens groups of ranks.
        model: the groups over which the model itself is cut.

    Raises:
        ValueError: it cannot train these parameters.
    """
    tx = as_transform(tx)
    parts = complete(tx.members)
    check_complete(parts, where)
    parts = tuple([replace_innermost(part, _guarded, layout) for part in parts])
    found = [_resolved(part, layout, ranks) for part in parts]
    check_views(found, layout)
    talking = frozenset([view.name for view in found if view is not None and view.wire is not None])
    factors = tuple([(view.name, view.factor) for view in found if view is not None and view.factor is not None])
    found = [view if view is not None and view.of_leaves else None for view in found]
    dtypes = next((view.dtypes for view in found if view is not None and view.dtypes is not None), Dtypes())
    parts = tuple([replace_innermost(part, partial(_as_wide, dtypes), layout) for part in parts])
    views, cutting = _over_ranks(found, dtypes)
    stages = tuple([view for view in views if view is not None])
    reduced = [(view.name, view.wire.group) for view in stages if view.wire is not None]
    check_axes(reduced)
    check_model_axes(reduced, model)
    check_model_parts(parts, layout, where, bool(model))
    model = tuple([group for group in model if group.size > 1])
    scaled_by = tuple([name for name, _ in factors])
    stations = survey(layout.leaves, parts, views, dtypes, scaled_by, talking)
    check_cut_views(parts, views, stations, layout)
    road = Road(layout.leaves, stages, dtypes, _held(parts, views), at_views(stations, views))
    placement = with_model_ranks(_placement(road), model)
    # A transform that contains others needs as much as any of them.
    if cutting and any([part.needs not in OF_PIECES for part in parts]):
        parts, placement = _with_owners(parts, layout, placement, cutting)
        hand_to_owners(stations, placement)
        check_pieces(parts, stations, where)
    layout = canonical(replace(layout, placement=placement))
    return Pipeline(tx, layout, parts, views, dtypes, factors, stations, road, model)


def _guarded(t: Transform, paths: Set[str], where: str) -> Transform:
    """The same transform, which harms nothing else by what it returns, nor by what it keeps; fused with others, too."""
    check_signatures(t)
    guarded, fuse = _with_own_memory(_with_check(t)), t.joins
    if fuse is None:
        return guarded

    def joins(behind: Sequence[Transform]) -> tuple[Transform, int] | None:
        found = fuse(behind)
        return found and (_with_own_memory(_with_check(found[0])), found[1])

    return replace(guarded, joins=joins)


def _with_check(t: Transform) -> Transform:
    """The same transform, whose update half raises where it returns what does not fit its leaves."""
    if t.update_fn is pass_through:
        return t
    # A group of optimizers leaves alone what it does not train.
    some = t.facts.optimizes and t.members_fn is not None

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        returned = t.update_fn(grads, state, params, carry, ctx)
        found = check_returned(t.name, t.facts, returned, grads, params, some, state)
        if ctx.looks and any([x.grad_fn is not None for x in tensors_of({"": found})]):
            raise unrecorded([f"{t.name}: what it has returned, made of a tensor from elsewhere"], ctx.unrecorded)
        return found

    return replace(t, update_fn=update)


def _as_wide(dtypes: Dtypes, t: Transform, paths: Set[str], where: str) -> Transform:
    """The same transform, whose first state is made of leaves as wide as gradients if it says so."""
    if not t.facts.starts_wide or t.init_fn is no_state:
        return t

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        wide = {
            leaf.path: torch.promote_types(leaves[leaf.path].dtype, dtypes.gradient(leaf))
            for leaf in layout.leaves
            if leaf.path in leaves
        }
        return t.init_fn({path: x.to(wide[path]) for path, x in leaves.items()}, layout)

    return replace(t, init_fn=init)


def _with_own_memory(t: Transform) -> Transform:
    """The same transform, which shares no memory with what is written behind it (`own_memory`)."""
    if not t.facts.keeps:
        return t

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        return own_start([open_state(t.name, check_state(t.name, t.init_fn(leaves, layout), leaves, layout.every))])

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        found = check_prepared(t.name, t.prepare_fn(state, grads, params, ctx))
        return own_prepared(found, state, grads, params, ctx)

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        returned = t.update_fn(grads, state, params, carry, ctx)
        return own_update(t.facts.optimizes, returned, state, grads, params, carry)

    # What does nothing is known by its functions, and is not run.
    return replace(
        t,
        init_fn=t.init_fn if t.init_fn is no_state else init,
        prepare_fn=t.prepare_fn if t.prepare_fn is nothing_to_prepare else prepare,
        update_fn=t.update_fn if t.update_fn is pass_through else update,
    )


def _resolved(part: Transform, layout: Layout, ranks: Ranks) -> View | None:
    """The view half of a transform, with its name; its functions leave alone the leaves that `changes` leaves out.

    `changes` is asked here, once: each step asks which leaves those are.
    """
    try:
        view = part.view_fn(layout, ranks)
    except IncompleteWire as error:
        wrong = f"{part.name}: over_ranks({error.kind}(...), ...)"
        why = f"a wire has {', '.join(WIRE)}; {error.kind} has no {', '.join(error.missing)}"
        right = "all of them, as zerofn.extend.Wire says; docs/writing-a-transform.md has one of each"
        raise TypeError(explain(wrong, why, right)) from None
    if view is None:
        return None
    if not isinstance(view, View):
        why = "what a transform does to leaves and gradients is a zerofn.extend.View, or None"
        right = "view_fn=lambda layout, ranks: View(view=..., pull=...)"
        raise TypeError(explain(f"{part.name}: a view_fn that gives {kind_of(view)}", why, right))
    touched = frozenset([leaf.path for leaf in layout.leaves if view.changes(leaf)])
    view = keeping_form(view, part.name)
    if len(touched) < len(layout.leaves):
        view = view.only_on(touched)
    return replace(view, name=part.name, changes=lambda leaf: leaf.path in touched)


def _over_ranks(views: Sequence[View | None], dtypes: Dtypes) -> tuple[tuple[View | None, ...], tuple[Wire, ...]]:
    """The views, and the wires that cut leaves, one after the other.

    Views over one rank become `None`. The others sum in the dtype of reductions, and cut what is left of leaves.
    """
    found: list[View | None] = []
    cutting: tuple[Wire, ...] = ()
    for view in views:
        if view is not None and view.wire is not None:
            several = view.wire.group.size > 1
            view = on_ranks(view, cutting, dtypes.reduce_dtype) if several else None
            if view is not None and view.wire is not None and view.wire.cuts:
                cutting = (*cutting, view.wire)
        found.append(view)
    return tuple(found), cutting


def _held(parts: Sequence[Transform], views: Sequence[View | None]) -> tuple[str, ...]:
    """The transforms, by name, that hold gradients in front of the first view that makes resident parameters."""
    first = next((i for i, view in enumerate(views) if view is not None and view.resident), 0)
    return tuple([part.name for part in parts[:first] if part.facts.holds])


def _with_owners(
    parts: tuple[Transform, ...], layout: Layout, placement: Placement, cutting: tuple[Wire, ...]
) -> tuple[tuple[Transform, ...], Placement]:
    """The chain whose transforms that need whole leaves run at the owners of those, and the placement with owners."""
    found = [run_at_owners(part, layout, cutting) for part in parts]
    named = [(part.name, where, ranks) for part, there in found for where, ranks in there.items()]
    owners = tuple([(name, where, tuple(ranks.items())) for name, where, ranks in named])
    return tuple([part for part, _ in found]), replace(placement, owners=owners)


def _placement(road: Road) -> Placement:
    """How what is stored lies over ranks, and sums of gradients that are not yet reduced."""
    seen_by = tuple([view.name for view in road.stages if view.renumbers])
    placement = replace(_behind(road, len(road.stages)), seen_by=seen_by)
    if not road.late:
        return placement
    copy, copies = place_in([view.wire for view in road.after_update if view.wire is not None])
    unreduced = _behind(road, len(road.at_use))
    later = tuple(view.name for view in road.after_update if view.renumbers)
    return replace(placement, apart=road.held, copy=copy, copies=copies, unreduced=unreduced, later=later)


def _behind(road: Road, stages: int) -> Placement:
    """How leaves lie over ranks behind so many stages."""
    groups = groups_of(road.stages[:stages])
    rank, size = place_in(cutting_wires(road.stages[:stages]))
    found = Placement(rank, size, math.prod([group.size for group in groups]), tuple([group.ranks for group in groups]))
    if size == 1:
        return found
    usual = {shape: found.span(shape) for shape in {leaf.shape for leaf in road.leaves}}
    spans = [(leaf, road.specs[stages][leaf.path].range) for leaf in road.leaves]
    return replace(found, ranges=tuple([(leaf.path, own) for leaf, own in spans if own != usual[leaf.shape]]))
