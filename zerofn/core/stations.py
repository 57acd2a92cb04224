"""The stations of a chain: what the gradient of each leaf is in front of every transform of it, and behind.

What a transform says (`through`), what its view says of itself (its wire, its dtypes, its factor), and what the runner
does between the two (gradients reach the first update half in the dtype of gradients, unscaled) are put together once,
when parameters and ranks are known. Where leaves lie, in which dtype they are summed, what a rank stores and what
`zf.plan` shows is read from here.

A transform may leave unsaid what its view says. What it says otherwise is refused: a `through` that promises another
dtype or place than there will be would let wrong orders pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from .._errors import bad_leaves
from .chain_order import passed
from .dtypes import Dtypes
from .layout import Layout, Leaf
from .placements import AxisPlacement, Flat, Owner, Partial, Replicate, Shard
from .row_sharding import rows_between
from .spec import Spec, Station
from .transform import Transform
from .views import View, Wire, cutting, summed_in

# What is known of a leaf before any transform is asked.
FIXED = attrgetter("shape", "stored_dtype", "sum_dtype", "mesh", "range", "axis", "here")


def survey(
    layout: Layout, parts: Sequence[Transform], views: Sequence[View | None], dtypes: Dtypes, scaled_by: Sequence[str]
) -> tuple[Station, ...]:
    """The stations of a chain, first that at the model.

    Args:
        layout: of the parameters, with their owners.
        parts: the chain.
        views: of each of them; `None` where it does nothing to leaves.
        dtypes: on the road of a parameter and its gradient.
        scaled_by: the transforms by whose factors cotangents are multiplied in the model.

    Raises:
        ValueError: a transform refuses a leaf, or says what its view does not do.
    """
    wires = [None if view is None else view.wire for view in views]
    groups = [wire.group for wire in wires if wire is not None]
    cuts = cutting([view for view in views if view is not None])
    walk = _Walk(parts, views, dtypes, tuple(scaled_by), tuple([group.size for group in groups]))
    known: dict[object, list[tuple[Spec, Spec]] | _Otherwise] = {}
    found: dict[str, list[tuple[Spec, Spec]]] = {}
    wrong: dict[str, list[tuple[str, str]]] = {}
    for leaf in layout.leaves:
        # What differs between leaves of a model is mostly their names.
        kind = (leaf.shape, leaf.dtype, id(dtypes.of(leaf)), *[wire.span(leaf) for wire in cuts])
        if kind not in known:
            known[kind] = walk.of(leaf)
        way = known[kind]
        if isinstance(way, _Otherwise):
            wrong.setdefault(way.name, []).append((leaf.path, way.why))
        else:
            found[leaf.path] = way
    for name, leaves in wrong.items():
        right = "a `through` that leaves unsaid what its view says, or says the same; see zerofn.extend.Spec"
        raise ValueError(bad_leaves(f"chain(..., {name}, ...)", leaves, right))
    stations = [Station("model", {}, {}), *[Station(part.name, {}, {}) for part in parts]]
    for path, way in found.items():
        for station, (handed, given) in zip(stations, way, strict=True):
            station.handed[path], station.gives[path] = handed, given
    if layout.placement.owners:
        for name, handed, _ in stations:
            handed.update(_at_owners(layout, name, handed))
    return tuple(stations)


def at_views(stations: Sequence[Station], views: Sequence[View | None]) -> tuple[Mapping[str, Spec], ...]:
    """By path, what gradients are in front of each view that does something, and behind the last one."""
    there = [station for station, view in zip(stations[1:], views, strict=True) if view is not None]
    return (*[station.handed for station in there], there[-1].gives if there else stations[0].gives)


@dataclass(frozen=True)
class _Otherwise:
    """What a transform, of this name, says that its view does not do."""

    name: str
    why: str


@dataclass(frozen=True)
class _Walk:
    """The way of one leaf's gradient.

    Attributes:
        parts: the chain.
        views: of each of them.
        dtypes: on the road.
        scaled_by: whose factors cotangents carry.
        mesh: ranks along each axis.
    """

    parts: Sequence[Transform]
    views: Sequence[View | None]
    dtypes: Dtypes
    scaled_by: tuple[str, ...]
    mesh: tuple[int, ...]

    def of(self, leaf: Leaf) -> list[tuple[Spec, Spec]] | _Otherwise:
        """At the model and at each transform: what is handed to it, and what it gives."""
        seen = self.dtypes.seen(leaf)
        spec = Spec(
            shape=tuple(leaf.shape),
            dtype=seen,
            sum_dtype=seen,
            stored_dtype=self.dtypes.stored(leaf),
            mesh=self.mesh,
            placements=(Partial(),) * len(self.mesh),
            range=(0, leaf.numel),
            scaled_by=self.scaled_by,
        )
        found, axis, cast, entered = [(spec, spec)], 0, False, False
        for part, view in zip(self.parts, self.views, strict=True):
            wire = None if view is None else view.wire
            if not part.idle and not entered:
                # To the first update half it is handed cast and unscaled.
                spec, cast, entered = replace(spec, dtype=self.dtypes.gradient(leaf), scaled_by=()), True, True
            asked = replace(spec, here=part.name, axis=None if wire is None else axis)
            said = passed(part, asked, leaf.path)
            spec = _found(asked, said, leaf, view, cast)
            if why := _otherwise(asked, said, spec, view):
                return _Otherwise(part.name, why)
            cast = cast or (view is not None and view.only_dtype)
            axis += wire is not None
            if part.facts.holds:
                # A sum has the digits of the dtype that it is made in.
                spec = replace(spec, sum_dtype=spec.dtype)
            found.append((asked, spec))
        return found


def _found(asked: Spec, said: Spec, leaf: Leaf, view: View | None, cast: bool) -> Spec:
    """What a gradient is behind a transform: what that says, and of what it leaves unsaid what its view says.

    Args:
        asked: what it is before.
        said: what the transform says.
        leaf: whose it is.
        view: of the transform.
        cast: whether it has the dtype of gradients already; else it arrives in that of a sum.
    """
    if view is None or (view.wire is None and view.dtypes is None):
        return said
    if view.dtypes is not None:
        return replace(said, dtype=view.dtypes.gradient(leaf))
    wire = view.wire
    assert wire is not None and asked.axis is not None and asked.sum_dtype is not None
    summed = summed_in(wire, asked.sum_dtype)
    there = wire.span(leaf) if wire.cuts else asked.range
    found = replace(said, sum_dtype=summed, dtype=asked.dtype if cast else summed, range=there)
    unsaid = said.placements == asked.placements
    return found.placed(Flat() if wire.cuts else Replicate()) if unsaid else found


def _otherwise(asked: Spec, said: Spec, found: Spec, view: View | None) -> str:
    """What a transform says of a gradient that will not be so; nothing, if all is."""
    if said is asked is found:
        return ""
    if FIXED(said) != FIXED(asked):
        return "its `through` changes what it cannot: the leaf, the ranks, or what a rank has of it"
    if said.dtype not in (asked.dtype, found.dtype):
        return f"its `through` says {said.dtype}, and its view gives {found.dtype}"
    if not set(said.scaled_by) <= set(asked.scaled_by):
        return "its `through` says that it is multiplied by a factor, and its view has none"
    return _misplaced(asked, found, None if view is None else view.wire)


def _misplaced(asked: Spec, found: Spec, wire: Wire | None) -> str:
    """What is wrong about where a transform says that its gradient lies."""
    if len(found.placements) != len(asked.placements):
        return f"its `through` says {found.placements}, and there are {len(asked.mesh)} axes of ranks"
    for axis, (before, after) in enumerate(zip(asked.placements, found.placements, strict=True)):
        if axis != asked.axis and before != after:
            return f"its `through` says {after} along an axis of {asked.mesh[axis]} ranks, where it sends nothing"
    if wire is None or asked.axis is None:
        return ""
    after, has = found.placements[asked.axis], f"elements {found.range[0]} to {found.range[1]} of the leaf"
    expected = found.range if isinstance(after, Flat) and wire.cuts else _range(after, asked, wire)
    if expected == found.range and isinstance(after, Replicate) != wire.cuts:
        return ""
    where = "" if expected is None else f", elements {expected[0]} to {expected[1]} here"
    return f"its `through` says {after}{where}, and its wire leaves {has} on rank {wire.group.rank}"


def _range(placement: AxisPlacement, before: Spec, wire: Wire) -> tuple[int, int] | None:
    """Which elements this rank has where what it had is placed so; `None` where no wire places it so."""
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


def _at_owners(layout: Layout, name: str, handed: Mapping[str, Spec]) -> dict[str, Spec]:
    """By path, what a transform is handed of leaves that it is handed whole, at one rank of those that share them."""
    ranks = {path: rank for part, _, owned in layout.placement.owners if part == name for path, rank in owned}
    return {path: _whole_at(handed[path], rank) for path, rank in ranks.items()}


def _whole_at(spec: Spec, rank: int) -> Spec:
    placements = list(spec.placements)
    for axis in reversed(range(len(placements))):
        if isinstance(placements[axis], Shard | Flat):
            placements[axis], rank = Owner(rank % spec.mesh[axis]), rank // spec.mesh[axis]
    return replace(spec, placements=tuple(placements))
