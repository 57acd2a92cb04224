"""A chain resolved for a tree of parameters: which of its views do something there, and how leaves lie over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..ranks.group import Group
from ..ranks.process_groups import group_for
from .chain import as_transform, complete
from .chain_order import check_complete, check_pieces
from .dtypes import Dtypes
from .facts import OF_PIECES
from .layout import Layout, Placement, the_one
from .nested_sharding import behind, check_axes
from .owner_updates import run_at_owners
from .owners import place_in
from .pipeline import Pipeline
from .road import Road, groups_of
from .stations import survey
from .tensor_parallel_checks import beside, check_other_axes, check_wholes
from .transform import Transform
from .views import Ranks, View, Wire, cutting, reducing_in


def pipeline(
    tx: Transform, layout: Layout, where: str, ranks: Ranks = group_for, model: tuple[Group, ...] = ()
) -> Pipeline:
    """Resolve a transform for a layout; an error where it cannot train.

    Args:
        tx: the transform.
        layout: of the parameters.
        where: the function that asks, for messages.
        ranks: opens groups of ranks.
        model: those over which the model itself is cut.
    """
    tx = as_transform(tx)
    parts = complete(tx.members)
    check_complete(parts, where)
    views = [_settled(part.view_fn(layout, ranks), part.name, layout) for part in parts]
    factors = tuple((view.name, view.factor) for view in views if view is not None and view.factor is not None)
    views = [view if view is not None and view.of_leaves else None for view in views]
    dtypes = next((view.dtypes for view in views if view is not None and view.dtypes is not None), Dtypes())
    first = next((i for i, view in enumerate(views) if view is not None and view.resident), 0)
    held = tuple(part.name for part in parts[:first] if part.facts.holds)
    for i, view in enumerate(views):
        if view is not None and view.wire is not None:
            before = [x for x in views[:i] if x is not None]
            views[i] = None if view.wire.group.size == 1 else behind(reducing_in(view, dtypes.reduce_dtype), before)
    stages = [view for view in views if view is not None]
    check_axes(stages)
    check_other_axes(stages, model)
    check_wholes(parts, layout, where, bool(model))
    road = Road(layout, tuple(stages), dtypes, held)
    layout = replace(layout, placement=beside(_placement(road), model))
    if wires := cutting(stages):
        parts, layout = _with_owners(parts, layout, wires)
    stations = survey(layout, parts, views, dtypes, [name for name, _ in factors])
    check_pieces(parts, stations, where)
    return Pipeline(tx, the_one(layout), parts, tuple(views), dtypes, held, factors, stations, model)


def _settled(view: View | None, name: str, layout: Layout) -> View | None:
    """The view with its transform's name, and with `changes` asked once: each step asks it of every leaf."""
    if view is None:
        return None
    touched = frozenset(leaf.path for leaf in layout.leaves if view.changes(leaf))
    return replace(view, name=name, changes=lambda leaf: leaf.path in touched)


def _with_owners(
    parts: tuple[Transform, ...], layout: Layout, wires: tuple[Wire, ...]
) -> tuple[tuple[Transform, ...], Layout]:
    """The chain in which transforms that need whole leaves run at the owners of leaves, and the layout with those."""
    if {part.needs for part in parts} <= set(OF_PIECES):
        # What holds others needs as much as any of them.
        return parts, layout
    found = [run_at_owners(part, layout, wires) for part in parts]
    named = [(part.name, where, ranks) for part, there in found for where, ranks in there.items()]
    owners = tuple((name, where, tuple(ranks.items())) for name, where, ranks in named)
    return tuple(part for part, _ in found), replace(layout, placement=replace(layout.placement, owners=owners))


def _placement(road: Road) -> Placement:
    """How what is stored lies over ranks, and sums of gradients that are not yet reduced."""
    placement = _behind(road.stages, road.layout)
    if not road.late:
        return placement
    copy, copies = place_in([view.wire for view in road.after_update if view.wire is not None])
    unreduced = _behind(road.at_use, road.layout)
    later = tuple(view.name for view in road.after_update if view.renumbers)
    return replace(placement, apart=road.held, copy=copy, copies=copies, unreduced=unreduced, later=later)


def _behind(stages: Sequence[View], layout: Layout) -> Placement:
    """How leaves lie over ranks behind these stages."""
    groups, wires = groups_of(stages), cutting(stages)
    rank, size = place_in(wires)
    found = Placement(rank, size, math.prod(g.size for g in groups), tuple(g.ranks for g in groups))
    spans = {leaf: wires[-1].span(leaf) for leaf in layout.leaves} if wires else {}
    return replace(found, ranges=tuple((x.path, own) for x, own in spans.items() if own != found.span(x.shape)))
