"""The stations of a chain as a table, with the ZeRO stage, bytes of gradients and bytes sent for a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.html import road
from ..core.layout import Leaf
from ..core.pipeline import Pipeline
from ..core.placements import AxisPlacement, Owner
from ..core.rank_agreement import unreduced
from ..core.spec import Spec, Station
from ..core.views import View
from .formatting import align_columns, dtype_name, format_bytes, merge_paths, path_pattern

MAX_KINDS = 6  # of leaves of one station that have a line each


class StationRow(NamedTuple):
    """The gradient of one leaf behind one transform.

    Attributes:
        transform: its name; `"model"` for where gradients come from.
        path: the leaf.
        dtype: of the gradient; behind the optimizer, of the new parameter.
        handed: placements of the gradient that the transform receives, one for each axis of the mesh.
        placements: those of the gradient that it returns.
        scaled_by: the transforms by whose factors it is multiplied.
        bytes: of this rank's part of it.
    """

    transform: str
    path: str
    dtype: torch.dtype | None
    handed: tuple[AxisPlacement, ...]
    placements: tuple[AxisPlacement, ...]
    scaled_by: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, repr=False)
class StationsTable:
    """The stations of a chain for a tree of parameters: data in attributes, a table in `str`.

    Attributes:
        stations: a row for each transform and leaf, from the model on.
        mesh: ranks along each axis that gradients are reduced over.
        zero: the ZeRO stage: 0 where nothing is cut, 1 where gradients are summed up whole and states are cut, 2 where
            both are cut, 3 where parameters are as well.
        gradients: bytes of gradients that this rank holds between a backward and the step, as `zf.vjp` gives them.
        sent: by collective, the bytes that this rank sends for one optimizer step of an attached model, all micro-steps
            of its window together: gradients, parameters, whole leaves to their owners. Parameters under `shard`
            are gathered twice in a micro-step, less what need not be given back between. Without padding, a number for
            each leaf that tells whether it was used, and numbers of the tree.
        world: ranks there are.
        meant: whether gradients are reduced over ranks, or the chain says by `zf.local()` that they are not to be.
    """

    stations: tuple[StationRow, ...]
    mesh: tuple[int, ...]
    zero: int
    gradients: int
    sent: Mapping[str, int]
    world: int = 1
    meant: bool = True

    def __repr__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        first = next((row.path for row in self.stations), None)
        stops = [(r.transform, " ".join(_cells(r))) for r in self.stations if r.path == first]
        return road(stops)


def stations_table(pipe: Pipeline, world: int = 1) -> StationsTable:
    """The stations of a pipeline as a table, in a world of so many ranks."""
    rows = [
        StationRow(station.transform, path, spec.dtype, handed.placements, spec.placements, spec.scaled_by, spec.bytes)
        for station in pipe.stations
        for path, spec in station.gives.items()
        for handed in [station.handed[path]]
    ]
    mesh = next((spec.mesh for spec in pipe.stations[0].gives.values()), ())
    there = pipe.road.specs[len(pipe.road.pulled)]
    dtypes = pipe.road.grad_dtypes
    gradients = sum(there[p].numel * dtypes[p].itemsize for p in pipe.layout.trained)
    return StationsTable(tuple(rows), mesh, _zero(pipe), gradients, _sent(pipe), world, not unreduced(pipe))


def _zero(pipe: Pipeline) -> int:
    if not any(spec.in_parts for spec in pipe.stations[-1].gives.values()):
        return 0
    if pipe.gathering is not None:
        return 3
    held = zip(pipe.parts, pipe.stations[1:], strict=True)
    whole = [part for part, at in held if part.facts.holds and not any(s.in_parts for s in at.gives.values())]
    return 1 if whole else 2


def _sent(pipe: Pipeline) -> dict[str, int]:
    """Bytes by collective for one window, which is as long as all transforms that hold gradients make it."""
    found: dict[str, int] = {}
    window = left = math.prod(part.facts.window for part in pipe.parts)
    for part, view, at in zip(pipe.parts, pipe.views, pipe.stations[1:], strict=True):
        if view is not None and view.wire is not None:
            # A reduction behind an accumulation sees one gradient of a window, unless it is made in each backward.
            reached = window if any(own is view for own in pipe.road.pulled) else left
            for leaf in pipe.layout.leaves:
                for op, size in _sent_by_wire(pipe, view, at, leaf, window, reached):
                    found[op] = found.get(op, 0) + size
        for leaf in pipe.layout.trainable:
            if size := _sent_for_owners(at.handed[leaf.path], at.gives[leaf.path], part.facts.optimizes, pipe):
                found["all_to_all"] = found.get("all_to_all", 0) + size * left
        left //= part.facts.window
    return found


def _sent_by_wire(
    pipe: Pipeline, view: View, at: Station, leaf: Leaf, window: int, reached: int
) -> Iterator[tuple[str, int]]:
    """Bytes of one leaf by collective, of a window of micro-steps in which `reached` gradients come to the wire."""
    assert view.wire is not None
    size, before, after = view.wire.group.size, at.handed[leaf.path], at.gives[leaf.path]
    assert after.sum_dtype is not None and after.stored_dtype is not None
    ring = before.numel * (size - 1) / size
    if leaf.trainable:
        times = (1 if view.wire.cuts else 2) * reached
        yield "reduce_scatter" if view.wire.cuts else "all_reduce", round(ring * after.sum_dtype.itemsize * times)
    if view.wire.cuts:
        behind = pipe.stages[next(i for i, own in enumerate(pipe.stages) if own is view) :]
        cast = any(own.dtypes is not None for own in behind)
        dtype = pipe.dtypes.seen(leaf) if cast else after.stored_dtype
        yield "all_gather", round(ring * dtype.itemsize * (1 if view.resident else 2 * window))


def _sent_for_owners(handed: Spec, gives: Spec, optimizes: bool, pipe: Pipeline) -> int:
    """Bytes that this rank sends for one leaf: its pieces of gradient and parameter; as the owner, the update."""
    owners = [p.rank for p in handed.placements if isinstance(p, Owner)]
    if not owners or handed.dtype is None or gives.stored_dtype is None:
        return 0
    mine = owners == [group.rank for group in pipe.road.cutting]
    whole = torch.Size(handed.shape or ()).numel()
    back = gives.stored_dtype if optimizes else handed.dtype
    piece = handed.numel * (handed.dtype.itemsize + gives.stored_dtype.itemsize)
    return (whole - handed.numel) * back.itemsize if mine else piece


def _cells(row: StationRow) -> tuple[str, str, str]:
    placed = ", ".join(map(repr, row.placements)) or "-"
    if row.handed != row.placements and any(isinstance(p, Owner) for p in row.handed):
        placed = f"{', '.join(map(repr, row.handed))}, back as {placed}"
    return "-" if row.dtype is None else dtype_name(row.dtype), placed, ", ".join(row.scaled_by) or "-"


def _lines(table: StationsTable) -> Iterator[str]:
    by_station: dict[str, list[StationRow]] = {}
    for row in table.stations:
        by_station.setdefault(row.transform, []).append(row)
    lines: list[tuple[str, ...]] = [("gradients behind", "leaves", "dtype", "placements", "scaled by", "bytes")]
    for name, rows in by_station.items():
        lines += [(name if i == 0 else "", *cells) for i, cells in enumerate(_kinds(rows))]
    yield from align_columns(lines, left=5)
    axes = " x ".join(map(str, table.mesh))
    where = f"ZeRO-{table.zero} on {axes} ranks" if axes else "one process"
    if table.world > 1 and not axes:
        where = f"nothing is reduced, so each of {table.world} ranks trains a model of its own"
        where += "" if table.meant else " (zf.all_reduce() first in the chain: one model; zf.local(): it is meant)"
    sent = ", ".join(f"{op} {format_bytes(n)}" for op, n in table.sent.items())
    yield f"{where}: {format_bytes(table.gradients)} of gradients until a step" + (
        f"; sent for one: {sent}" if sent else ""
    )


def _kinds(rows: list[StationRow]) -> Iterator[tuple[str, ...]]:
    """The lines of one station: like leaves share one."""
    groups: dict[tuple[str, ...], list[StationRow]] = {}
    for row in rows:
        groups.setdefault(_cells(row), []).append(row)
    kinds = sorted(groups.items(), key=lambda item: -len(item[1]))
    if len(kinds) > MAX_KINDS:
        kinds, rest = kinds[: MAX_KINDS - 1], [row for _, group in kinds[MAX_KINDS - 1 :] for row in group]
        kinds.append((("...", "...", "..."), rest))
    for cells, group in kinds:
        paths = [row.path for row in group]
        named = merge_paths(paths) if len(set(map(path_pattern, paths))) == 1 else f"{len(paths)} leaves"
        yield named if len(kinds) > 1 else f"all {len(paths)}", *cells, format_bytes(sum(row.bytes for row in group))
