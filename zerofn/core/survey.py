"""The order of a chain, checked twice: when it is built, and when leaves and ranks are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, explain, kind_of
from .facts import OF_LEAVES, OF_PIECES
from .layout import AxisPlacement, Flat, Layout, Leaf, Owner, Partial, Placement, Replicate, Shard, rows_between
from .spec import (
    NOT_REDUCED,
    OF_ITS_OWN,
    USED_UP,
    Misplaced,
    Spec,
    Station,
    changes_gradients,
    makes_parameters,
    watches_parameters,
)
from .transform import Transform, TransformState
from .tree import flatten, tree_keys
from .view import Dtypes, Factor, View, Wire, no_view, same_tensor, summed_in

# ----------------------------------------------------------------------------------------------------------------------
# These functions check the order of transforms: when a chain is built, and again when leaves and ranks are known.


def check_order(parts: Sequence[Transform]) -> None:
    """Raise a `ValueError` that names both transforms, the reason and an order that works."""
    spec = Spec()
    for part in parts:
        spec = passed(part, replace(spec, here=part.name))


def passed(part: Transform, spec: Spec, leaf: str = "", talks: bool = False) -> Spec:
    """The spec of a gradient behind a transform; a `ValueError` where the transform cannot stand there.

    Args:
        part: the transform.
        spec: of the gradient before it, with the transform's name and axis.
        leaf: the path of the leaf, if one is known.
        talks: whether its view has a wire, which reduces the gradient over ranks.
    """
    of = f" of {leaf}" if leaf else ""
    facts = part.facts
    by_facts = makes_parameters if facts.optimizes else watches_parameters if facts.watches else changes_gradients
    try:
        if talks:
            spec.refuse("local_by", NOT_REDUCED, "one of the two")
            spec.refuse("changed_by", OF_ITS_OWN)
        if not facts.optimizes and not facts.watches:
            spec.refuse("updated_by", USED_UP)
        found = (part.through or by_facts)(spec)
    except Misplaced as error:
        raise ValueError(
            explain(
                f"chain(..., {error.left}, ..., {part.name}, ...){of}",
                f"{error.left} comes before {part.name}: {error.why}",
                error.right or f"chain(..., {part.name}, ..., {error.left}, ...)",
            )
        ) from None
    except Exception as error:
        raise ValueError(_broken(part, of, f"its `through` raised {type(error).__name__}: {error}")) from error
    if not isinstance(found, Spec):
        raise TypeError(_broken(part, of, f"its `through` gives {kind_of(found)} and no Spec"))
    return found


def _broken(part: Transform, of: str, why: str) -> str:
    """The message where a `through` gives nothing that could be read."""
    right = "through=lambda spec: spec.after('changed_by'), or as_it_is, or Misplaced where it cannot stand"
    return explain(f"chain(..., {part.name}, ...){of}", why, right)


def effect(part: Transform) -> Spec:
    """The spec of a gradient behind a single transform."""
    return passed(part, Spec(here=part.name))


def check_complete(parts: Sequence[Transform], where: str) -> None:
    """Raise if a pipeline that trains has no optimizer. (A chain that is a member of another one needs none.)"""
    if not any([p.facts.optimizes for p in parts]):
        names = ", ".join(p.name for p in parts) or "nothing"
        raise ValueError(
            explain(
                f"{where} with chain({names})",
                "the chain has no optimizer, so nothing would ever change a parameter",
                f"zf.chain({'..., ' if parts else ''}zf.adamw(lr=1e-3));\n"
                "@zf.leafwise(optimizer=True) over a rule of your own, which returns the new parameter",
            )
        )


NEEDED = {"row": "whole rows", "leaf": "whole leaves", "tree": "the whole tree"}


def check_pieces(parts: Sequence[Transform], stations: Sequence[Station], where: str) -> None:
    """Refuse transforms that must see more than a shard of a leaf, where leaves are sharded."""
    found = [entry for part in parts for entry in _more_than_pieces(part, "")]
    by = [s for s in stations if any(spec.in_parts for spec in s.gives.values())] if found else []
    if not by:
        return
    cut, ranks = by[0].transform, max(spec.parts for spec in by[-1].gives.values())
    needs = ", ".join(f"{name} needs {NEEDED[t.needs]} (needs={t.needs!r})" for name, t in found)
    raise ValueError(
        explain(
            f"{where} with chain({', '.join(p.name for p in parts)}) and leaves cut over {ranks} ranks",
            f"{needs}, and under {cut} each rank has a flat shard of every leaf, whose norm, mean, order, matrix "
            "products and shape are not those of the leaf: the update would be wrong without an error",
            'zf.leafwise(needs="element") or zf.guest(transformation, needs="element") where it is made, if each '
            "element of the update comes from the same element of gradient, parameter and state alone;\n"
            f"else zf.all_reduce() in place of {cut}: data parallel, nothing is sharded. A transform that needs whole "
            "leaves and is written with zf.leafwise runs on one rank for each leaf.",
        )
    )


def _more_than_pieces(t: Transform, inside: str) -> Iterator[tuple[str, Transform]]:
    """The innermost transforms that need more than shards, each by a name that says where in the chain it is."""
    if t.needs in OF_PIECES:
        return
    name = f"{t.name} in {inside}" if inside and inside != t.name else t.name
    deeper = [entry for part in t.parts for entry in _more_than_pieces(part, inside or t.name)]
    # A transform that contains others may need more than each of them.
    yield from deeper or [(name, t)]


# ----------------------------------------------------------------------------------------------------------------------
# `survey` finds what the gradient of each leaf is before and after every transform of a chain (its `Spec`).
#
# Three sources say something of it: the transform (`through`), its view (its wire, its dtypes, its factor), and the
# executor (gradients reach the first update half unscaled, in the dtype of gradients). They are put together once,
# when parameters and ranks are known. Placements, the dtypes of sums, what a rank stores and what `zf.plan` shows are
# read from here.
#
# A transform may leave unsaid what its view says. It may not contradict its view: a `through` that promises another
# dtype or placement than there will be would let wrong orders pass.


# Fields that no transform may change.
FIXED = attrgetter("shape", "stored_dtype", "sum_dtype", "mesh", "range", "axis", "here")


def survey(
    leaves: Sequence[Leaf],
    parts: Sequence[Transform],
    views: Sequence[View | None],
    dtypes: Dtypes,
    scaled_by: tuple[str, ...],
    talking: frozenset[str],
) -> tuple[Station, ...]:
    """The stations of a chain, first that at the model.

    Args:
        leaves: the parameters.
        parts: the chain.
        views: the view of each transform; `None` if it has no effect on leaves.
        dtypes: of parameters and gradients.
        scaled_by: the transforms whose factors multiply cotangents in the model.
        talking: the transforms whose view has a wire, even over one rank. They must stand before all transforms that
            change gradients, whether or not their `through` says so.

    Raises:
        ValueError: a transform stands where it cannot, or its `through` contradicts its view.
    """
    wires = [view.wire for view in views if view is not None and view.wire is not None]
    leaves, alike = _one_of_each_kind(leaves, wires, dtypes)
    mesh = tuple([wire.group.size for wire in wires])
    specs = {leaf.path: _at_model(leaf, dtypes, mesh, scaled_by) for leaf in leaves}
    at_model = {path: specs[of] for path, of in alike.items()}
    stations = [Station("model", at_model, at_model)]
    axis, cast, updated = 0, False, False
    for part, view in zip(parts, views, strict=True):
        wire, first_update = None if view is None else view.wire, not updated and not part.idle
        cast, updated = cast or first_update, updated or first_update
        handed: dict[str, Spec] = {}
        wrong: dict[str, str] = {}
        for leaf in leaves:
            at = None if wire is None else axis
            before = replace(specs[leaf.path], here=part.name, axis=at, sent_as=None, gathered_as=None)
            if first_update:
                # The first update half gets gradients that are already cast and unscaled.
                before = replace(before, dtype=dtypes.gradient(leaf), scaled_by=())
            claimed = passed(part, before, leaf.path, part.name in talking)
            found = claimed if view is None else _behind(view, before, claimed, leaf, cast)
            wrong[leaf.path] = _contradiction(before, claimed, found, wire) or _uncast(part, view, before, found)
            # A sum over micro-batches has the precision of the dtype in which it is made, so it is reduced in that one.
            specs[leaf.path] = replace(found, sum_dtype=found.dtype) if part.facts.holds else found
            handed[leaf.path] = before
        if any(wrong.values()):
            bad = [(path, wrong[of]) for path, of in alike.items() if wrong[of]]
            right = "a `through` that leaves unsaid what its view says, or says the same; see zerofn.extend.Spec"
            raise ValueError(bad_leaves(f"chain(..., {part.name}, ...)", bad, right))
        stations.append(Station(part.name, {}, {}))
        for path, of in alike.items():
            stations[-1].handed[path], stations[-1].gives[path] = handed[of], specs[of]
        axis += wire is not None
        cast = cast or (view is not None and view.dtypes is not None)
    return tuple(stations)


def _one_of_each_kind(
    leaves: Sequence[Leaf], wires: Sequence[Wire], dtypes: Dtypes
) -> tuple[list[Leaf], dict[str, str]]:
    """One leaf per (shape, dtype, range): survey it once, reuse the result for equal leaves."""
    first: dict[object, Leaf] = {}
    alike: dict[str, str] = {}
    for leaf in leaves:
        kind = (leaf.shape, leaf.dtype, id(dtypes.of(leaf)), *[wire.span(leaf) for wire in wires if wire.cuts])
        alike[leaf.path] = first.setdefault(kind, leaf).path
    return list(first.values()), alike


def at_views(stations: Sequence[Station], views: Sequence[View | None]) -> tuple[Mapping[str, Spec], ...]:
    """By path, the `Spec` of the gradient in front of each view that has an effect, and behind the last one."""
    behind = [station for station, view in zip(stations[1:], views, strict=True) if view is not None]
    return (*[station.handed for station in behind], behind[-1].gives if behind else stations[0].gives)


def _at_model(leaf: Leaf, dtypes: Dtypes, mesh: tuple[int, ...], scaled_by: tuple[str, ...]) -> Spec:
    """A gradient as it leaves the model."""
    seen = dtypes.seen(leaf)
    return Spec(
        shape=tuple(leaf.shape),
        dtype=seen,
        sum_dtype=seen,
        stored_dtype=dtypes.stored(leaf),
        mesh=mesh,
        placements=(Partial(),) * len(mesh),
        range=(0, leaf.numel),
        scaled_by=scaled_by,
    )


def _behind(view: View, before: Spec, claimed: Spec, leaf: Leaf, cast: bool) -> Spec:
    """The `Spec` behind a view: fields that the transform's `through` sets, and the others from the view.

    Args:
        view: of the transform.
        before: the gradient in front of it.
        claimed: the gradient behind it, by the transform's `through`.
        leaf: the leaf of the gradient.
        cast: whether it has the dtype of gradients already; otherwise it arrives in the dtype of a sum.
    """
    wire = view.wire
    if view.dtypes is not None:
        return replace(claimed, dtype=view.dtypes.gradient(leaf))
    if wire is None:
        return claimed
    assert before.sum_dtype is not None
    summed = summed_in(wire, before.sum_dtype)
    span = wire.span(leaf) if wire.cuts else before.range
    found = replace(claimed, sum_dtype=summed, dtype=before.dtype if cast else summed, range=span)
    unsaid = claimed.placements == before.placements
    return found.placed(Flat() if wire.cuts else Replicate()) if unsaid else found


def _contradiction(before: Spec, claimed: Spec, found: Spec, wire: Wire | None) -> str:
    """How a transform's `through` contradicts its view; an empty string if it does not."""
    if claimed is before is found:
        return ""
    if FIXED(claimed) != FIXED(before):
        return "its `through` changes a field that it may not: the leaf, the ranks, or the range of a rank"
    if claimed.dtype not in (before.dtype, found.dtype):
        return f"its `through` says {claimed.dtype}, and its view gives {found.dtype}"
    if not set(claimed.scaled_by) <= set(before.scaled_by):
        return "its `through` says that it is multiplied by a factor, and its view has none"
    if len(found.placements) != len(before.placements):
        return f"its `through` says {found.placements}, and there are {len(before.mesh)} axes of ranks"
    for axis, (was, after) in enumerate(zip(before.placements, found.placements, strict=True)):
        if axis != before.axis and was != after:
            return f"its `through` says {after} along an axis of {before.mesh[axis]} ranks, where it sends nothing"
    return "" if wire is None else _misplaced(before, found, wire)


def _uncast(part: Transform, view: View | None, before: Spec, found: Spec) -> str:
    """The message if a transform claims another dtype, and has neither an update half nor a view that casts.

    It is empty for a wire over one rank, which has no view and claims the dtype in which it sums on several.
    """
    silent = part.view_fn is no_view if view is None else view.renumbers
    if not silent or not part.idle or found.dtype == before.dtype:
        return ""
    return f"its `through` says {found.dtype}, and it has no update half: gradients go on in {before.dtype}"


def _misplaced(before: Spec, found: Spec, wire: Wire) -> str:
    """How a claimed placement along the wire's axis contradicts the wire's result; an empty string if it does not."""
    assert before.axis is not None
    after = found.placements[before.axis]
    expected = found.range if isinstance(after, Flat) and wire.cuts else _range(after, before, wire)
    if expected == found.range and isinstance(after, Replicate) != wire.cuts:
        return ""
    where = "" if expected is None else f", elements {expected[0]} to {expected[1]} here"
    has = f"elements {found.range[0]} to {found.range[1]} of the leaf"
    return f"its `through` says {after}{where}, and its wire leaves {has} on rank {wire.group.rank}"


def _range(placement: AxisPlacement, before: Spec, wire: Wire) -> tuple[int, int] | None:
    """This rank's range, if what it had before is placed so along the axis; `None` where no wire places it so."""
    low, high = before.range
    rank, size = wire.group.rank, wire.group.size
    if isinstance(placement, Replicate):
        return before.range
    if isinstance(placement, Owner):
        return before.range if placement.rank == rank else (low, low)
    rows = None if before.shape is None else rows_between(before.shape, low, high)
    if not isinstance(placement, Shard) or placement.dim != 0 or not rows:
        return None
    row = (high - low) // rows[0] if rows[0] else 0
    each = -(-rows[0] // size)
    return low + min(rank * each, rows[0]) * row, low + min((rank + 1) * each, rows[0]) * row


def hand_to_owners(stations: Sequence[Station], placement: Placement) -> None:
    """Write into stations which leaves a transform gets in full at their owner."""
    handed = {station.transform: station.handed for station in stations}
    for name, _, ranks in placement.owners:
        handed[name].update({path: _whole_at(handed[name][path], rank) for path, rank in ranks})


def _whole_at(spec: Spec, rank: int) -> Spec:
    placements = list(spec.placements)
    for axis in reversed(range(len(placements))):
        if isinstance(placements[axis], Shard | Flat):
            placements[axis], rank = Owner(rank % spec.mesh[axis]), rank // spec.mesh[axis]
    return replace(spec, placements=tuple(placements))


# ----------------------------------------------------------------------------------------------------------------------
# These functions validate views: dtypes, wires, shapes, and views that need whole leaves where a rank has a shard.


def check_views(views: Sequence[View | None], layout: Layout) -> None:
    """Raise a `ValueError` if views contradict each other, or a wire does not send all leaves.

    Args:
        views: of the chain, also those over one rank: a chain that is refused on several ranks is refused on one.
        layout: the layout of the parameters.
    """
    present = [view for view in views if view is not None]
    _check_dtypes([view.name for view in present if view.dtypes is not None])
    asked = next(((view.name, view.dtypes.reduce_dtype) for view in present if view.dtypes is not None), None)
    for view in present:
        if view.wire is not None and asked is not None:
            _check_sums(view.name, view.wire.reduce_dtype, *asked)
        if view.wire is not None and view.wire.group.size > 1:
            _check_all_touched(view, layout)
            _check_spans(view, view.wire, layout)


def _check_dtypes(names: Sequence[str]) -> None:
    if len(names) < 2:
        return
    wrong = f"chain({', '.join(f'..., {name}' for name in names)}, ...), each with View(dtypes=...)"
    why = f"parameters have one set of dtypes: {names[0]} would set them, and {names[1]} would be ignored"
    raise ValueError(explain(wrong, why, "one of them, as zf.precision(param_dtype=..., store_dtype=...)"))


def _check_sums(name: str, own: torch.dtype | None, caster: str, asked: torch.dtype | None) -> None:
    """Refuse a wire that sums in a dtype of its own where another one is asked for."""
    if asked is not None and own not in (None, asked):
        why = f"the wire of {name} sums in {own}, so the other dtype would have no effect"
        right = f"{caster}(...) without reduce_dtype, or a wire that sums in any dtype"
        raise ValueError(explain(f"chain({name}(...), {caster}(reduce_dtype={asked}), ...)", why, right))


def _check_all_touched(view: View, layout: Layout) -> None:
    left = [(leaf.path, "`changes` leaves it out") for leaf in layout.leaves if not view.changes(leaf)]
    if left:
        what = f"{view.name}: a view with a wire carries all leaves over ranks"
        raise ValueError(bad_leaves(what, left, "over_ranks(wire, resident=...), without View(changes=...)"))


def _check_spans(view: View, wire: Wire, layout: Layout) -> None:
    """Check this rank's spans; `rank_agreement.py` compares those of all ranks."""
    bad = []
    for leaf in layout.leaves:
        own: Any = wire.span(leaf)
        if not _is_range(own, leaf.numel):
            bad.append((leaf.path, f"{own!r}, and the leaf has elements 0 to {leaf.numel}"))
    if bad:
        right = "a span (low, high) of ints, 0 <= low <= high <= leaf.numel: this rank's flat range of the leaf"
        raise ValueError(bad_leaves(f"{view.name}: the `span` of its wire is no range of the leaf", bad, right))


def _is_range(x: Any, numel: int) -> bool:
    if not isinstance(x, tuple) or len(x) != 2 or not all(isinstance(n, int) for n in x):
        return False
    return 0 <= x[0] <= x[1] <= numel


def check_reading(
    parts: Sequence[Transform],
    views: Sequence[View | None],
    stations: Sequence[Station],
    layout: Layout,
    states: Mapping[str, TransformState],
) -> None:
    """Raise a `ValueError` if a view in front of the sharding reads state that is sharded, or that owners have."""
    for i, (part, view) in enumerate(zip(parts, views, strict=True)):
        if view is not None and view.renumbers and view.reads:
            _check_read(part, view, stations[i + 1], stations[-1], layout, states[part.name])


def keeping_form(view: View, name: str) -> View:
    """The same view, whose functions raise if they return another shape or dtype than their argument has.

    This is checked at each call, because not every function can be called beforehand. A view that casts would give the
    model weights that are rounded.
    """

    def kept(function: str) -> Any:
        fn = getattr(view, function)
        if fn is same_tensor:
            return fn

        def checked(x: Tensor, leaf: Leaf, *state: Any) -> Tensor:
            found = fn(x, leaf, *state)
            if form := _other_form(found, x):
                raise ValueError(_misformed(name, [(leaf.path, f"`{function}` gives {form}")]))
            return found

        return checked

    return replace(view, view=kept("view"), pull=kept("pull"), store=kept("store")) if view.renumbers else view


def _misformed(name: str, bad: Sequence[tuple[str, str]]) -> str:
    right = "functions that give a tensor of the shape and dtype they are given, as (x * scale).to(x.dtype); "
    right += "zf.precision(param_dtype=...), which casts; View(changes=...) for what has no state"
    return bad_leaves(f"{name}: its view does not fit its leaves", bad, right)


def _other_form(found: Any, x: Tensor) -> str | None:
    """How a view's result differs from `x` in shape or dtype; `None` if it does not."""
    if not isinstance(found, Tensor):
        return f"{kind_of(found)} of a tensor of shape {tuple(x.shape)}"
    if found.shape != x.shape:
        return f"shape {tuple(found.shape)} of a tensor of shape {tuple(x.shape)}"
    return f"{found.dtype} of a tensor of {x.dtype}" if found.dtype != x.dtype else None


def _check_read(
    part: Transform, view: View, here: Station, last: Station, layout: Layout, state: TransformState
) -> None:
    """Refuse a view in front of the sharding that reads sharded state, or state that only owners have."""
    owned = {path for name, _, ranks in layout.placement.owners if name == part.name for path, _ in ranks}
    bad: dict[str, str] = {}
    kept = list(zip(tree_keys(state), flatten(state)[0], strict=True))
    for leaf in layout.leaves:
        if not view.changes(leaf):
            continue
        mine = [x for keys, x in kept if leaf.path in keys and isinstance(x, Tensor)]
        piece = last.gives[leaf.path]
        if leaf.path in owned and mine:
            bad[leaf.path] = (
                "its state is at one rank alone, the owner of the leaf, since the transform needs all of it"
            )
        elif piece.in_parts and not here.handed[leaf.path].in_parts and _cut(mine, piece.local_shape):
            bad[leaf.path] = f"the view sees the leaf, {tuple(leaf.shape)}, and its state is of a flat piece of it"
    if bad:
        what = f"{part.name}: a view in front of what cuts leaves over ranks, that reads a state which is cut"
        right = f"chain(shard(), {part.name}, ...): behind it view and state have the same piece, if it says "
        right += 'needs="element"; or a state of 0-d tensors, which every rank has'
        raise ValueError(bad_leaves(what, bad.items(), right))


def _cut(kept: Sequence[Tensor], shape: tuple[int, ...]) -> bool:
    return any(tuple(x.shape) == shape for x in kept)


def check_factor(name: str, factor: Factor, state: TransformState) -> None:
    """Raise a `ValueError` if the factor of a view is not one number of its state."""
    right = "factor=lambda state: state['scale'], a 0-d tensor in float32 that the transform's init_fn makes"
    try:
        found: Any = factor(state)
    except KeyError as error:
        why = f"its state has no {error}: it has {', '.join(map(repr, state)) or 'nothing'}"
        raise ValueError(explain(f"{name}: View(factor=...) that reads {error}", why, right)) from error
    if not isinstance(found, Tensor) or found.ndim or not found.is_floating_point():
        what = f"a tensor of shape {tuple(found.shape)}, {found.dtype}" if isinstance(found, Tensor) else repr(found)
        wrong, why = f"{name}: View(factor=...) that gives {what}", "cotangents are multiplied by one number"
        raise ValueError(explain(wrong, why, right))


def check_cut_views(
    parts: Sequence[Transform], views: Sequence[View | None], stations: Sequence[Station], layout: Layout
) -> None:
    """Raise a `ValueError` if a view needs more of a leaf than a rank has behind the sharding.

    Args:
        parts: the chain, with the `needs` of each transform.
        views: of each of them.
        stations: of the chain, the first at the model.
        layout: the layout of the parameters.
    """
    cut = ""
    for part, view, station in zip(parts, views, stations[1:], strict=True):
        if view is None:
            continue
        if view.wire is None and (why := _reason(part, view)):
            touched = [(leaf.path, station.handed[leaf.path]) for leaf in layout.leaves if view.changes(leaf)]
            if bad := [(path, why) for path, spec in touched if _has_too_little(part.needs, spec)]:
                what = f"chain(..., {cut}, ..., {part.name}, ...): a view behind what cuts leaves over ranks"
                right = f"chain({part.name}, {cut}, ...), where it has whole leaves"
                right += '; needs="element", if each element of what it gives comes from the same element'
                raise ValueError(bad_leaves(what, bad, right))
        cut = cut or (part.name if view.wire is not None and view.wire.cuts else "")


def _reason(part: Transform, view: View) -> str:
    """Why a view cannot run on flat shards of leaves; an empty string if it can.

    An update half reduces a number of the tree over ranks, and keeps it in the state. A view that does not read the
    state, or whose transform has no update half, would compute the number from this rank's shard alone.
    """
    if part.needs in OF_LEAVES:
        return f"{part.name} needs {NEEDED[part.needs]} (needs={part.needs!r}), and has a flat shard of it"
    if part.needs == "number" and view.of_leaves and part.idle and not view.reads:
        return f"{part.name} needs a number (needs='number') and reads no state: it computes it from a flat shard"
    return ""


def _has_too_little(needs: str, spec: Spec) -> bool:
    """Whether a rank has less of a leaf than a view needs. A row of one dimension is an element."""
    return spec.in_parts and not (needs == "row" and spec.shape is not None and len(spec.shape) == 1)
