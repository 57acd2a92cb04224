"""The stations of a chain: what the gradient of each leaf is in front of every transform, and behind it.

Three say something of it: the transform (`through`), its view (its wire, its dtypes, its factor), and the runner
(gradients reach the first update half in the dtype of gradients, unscaled). They are put together once, when parameters
and ranks are known. Where leaves lie, in which dtype they are summed, what a rank stores and what `zf.plan` shows is
read from here.

A transform may leave unsaid what its view says. What it says otherwise is refused: a `through` that promises another
dtype or place than there will be would let wrong orders pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from .._errors import bad_leaves
from .chain_order import passed
from .dtypes import Dtypes
from .layout import Leaf, Placement
from .placements import AxisPlacement, Flat, Owner, Partial, Replicate, Shard
from .row_sharding import rows_between
from .spec import Spec, Station
from .transform import Transform
from .views import View, Wire, no_view, summed_in

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
        views: of each of them; `None` where it does nothing to leaves.
        dtypes: of parameters and gradients.
        scaled_by: the transforms by whose factors cotangents are multiplied in the model.
        talking: those whose view has a wire, over one rank too. Such a one stands before all that changes gradients,
            whether or not its `through` says so.

    Raises:
        ValueError: a transform stands where it cannot, or says what its view does not do.
    """
    wires = [view.wire for view in views if view is not None and view.wire is not None]
    leaves, alike = _one_of_each_kind(leaves, wires, dtypes)
    mesh = tuple([wire.group.size for wire in wires])
    specs = {leaf.path: _at_model(leaf, dtypes, mesh, scaled_by) for leaf in leaves}
    seen = {path: specs[of] for path, of in alike.items()}
    stations = [Station("model", seen, seen)]
    axis, cast, updated = 0, False, False
    for part, view in zip(parts, views, strict=True):
        wire, first_update = None if view is None else view.wire, not updated and not part.idle
        cast, updated = cast or first_update, updated or first_update
        handed: dict[str, Spec] = {}
        wrong: dict[str, str] = {}
        for leaf in leaves:
            before = replace(specs[leaf.path], here=part.name, axis=None if wire is None else axis)
            if first_update:
                # To the first update half it is handed cast and unscaled.
                before = replace(before, dtype=dtypes.gradient(leaf), scaled_by=())
            claimed = passed(part, before, leaf.path, part.name in talking)
            found = claimed if view is None else _behind(view, before, claimed, leaf, cast)
            wrong[leaf.path] = _contradiction(before, claimed, found, wire) or _uncast(part, view, before, found)
            # A sum over micro-batches has the digits of the dtype that it is made in.
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
    """The leaves to look at, and by path which of them a leaf is like: mostly, leaves of a model differ in names."""
    first: dict[object, Leaf] = {}
    alike: dict[str, str] = {}
    for leaf in leaves:
        kind = (leaf.shape, leaf.dtype, id(dtypes.of(leaf)), *[wire.span(leaf) for wire in wires if wire.cuts])
        alike[leaf.path] = first.setdefault(kind, leaf).path
    return list(first.values()), alike


def at_views(stations: Sequence[Station], views: Sequence[View | None]) -> tuple[Mapping[str, Spec], ...]:
    """By path, what gradients are in front of each view that does something, and behind the last one."""
    there = [station for station, view in zip(stations[1:], views, strict=True) if view is not None]
    return (*[station.handed for station in there], there[-1].gives if there else stations[0].gives)


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
    """A gradient behind a view: what its transform says, and of what that leaves unsaid what the view says.

    Args:
        view: of the transform.
        before: the gradient in front of it.
        claimed: behind it, as the transform says.
        leaf: whose gradient it is.
        cast: whether it has the dtype of gradients already; else it arrives in that of a sum.
    """
    wire = view.wire
    if view.dtypes is not None:
        return replace(claimed, dtype=view.dtypes.gradient(leaf))
    if wire is None:
        return claimed
    assert before.sum_dtype is not None
    summed = summed_in(wire, before.sum_dtype)
    there = wire.span(leaf) if wire.cuts else before.range
    found = replace(claimed, sum_dtype=summed, dtype=before.dtype if cast else summed, range=there)
    unsaid = claimed.placements == before.placements
    return found.placed(Flat() if wire.cuts else Replicate()) if unsaid else found


def _contradiction(before: Spec, claimed: Spec, found: Spec, wire: Wire | None) -> str:
    """How a transform's `through` contradicts its view; an empty string where it does not."""
    if claimed is before is found:
        return ""
    if FIXED(claimed) != FIXED(before):
        return "its `through` changes what it cannot: the leaf, the ranks, or what a rank has of it"
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
    """Where a transform without an update half, and with no view that could cast, says another dtype; else nothing.

    A wire over one rank is no view, and sums in the dtype that it says on several.
    """
    silent = part.view_fn is no_view if view is None else view.renumbers
    if not silent or not part.idle or found.dtype == before.dtype:
        return ""
    return f"its `through` says {found.dtype}, and it has no update half: gradients go on in {before.dtype}"


def _misplaced(before: Spec, found: Spec, wire: Wire) -> str:
    """How a claimed placement along the wire's axis contradicts what the wire leaves; an empty string where not."""
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
    """Write into stations which leaves transforms are handed whole, at one of the ranks that share them."""
    handed = {station.transform: station.handed for station in stations}
    for name, _, ranks in placement.owners:
        handed[name].update({path: _whole_at(handed[name][path], rank) for path, rank in ranks})


def _whole_at(spec: Spec, rank: int) -> Spec:
    placements = list(spec.placements)
    for axis in reversed(range(len(placements))):
        if isinstance(placements[axis], Shard | Flat):
            placements[axis], rank = Owner(rank % spec.mesh[axis]), rank // spec.mesh[axis]
    return replace(spec, placements=tuple(placements))
