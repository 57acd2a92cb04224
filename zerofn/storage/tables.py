"""`zf.describe` and `zf.plan`: what a rank holds, as tables."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._compat.tensors import NoNumbers, shape_only
from .._errors import explain, printable
from ..core.html import BYTES, card, kept, road
from ..core.html import table as bars
from ..core.layout import (
    AxisPlacement,
    Leaf,
    Leaves,
    Owner,
    Placement,
    check_own_memory,
    make_layout,
    not_a_parameter,
    parameters_of,
)
from ..core.passes import KERNEL, TORCH, Pass, passes_of
from ..core.pipeline import Pipeline, first_state, pipeline
from ..core.rank_agreement import bytes_of, parts_of, unreduced
from ..core.spec import Spec, Station
from ..core.state import State
from ..core.state_entries import Entry, entries
from ..core.transform import Transform
from ..core.tree import Tree, flatten, tree_map, tree_paths
from ..core.uncompiled import kept_out_of_graphs
from ..core.view import Ranks, View, Wire, cutting_wires
from ..core.wrapper_names import buffers_in, names_with_wrappers
from ..eager.optimizer import Optimizer
from ..module.attach_checks import check_initialised, dtypes_of_buffers
from ..pure.linearize import units_by_prefix
from ..ranks.backend import ranks_of
from ..ranks.group import Group
from ..sharded.schedule import gathers
from ..sharded.units import UnitPlans, split

# ----------------------------------------------------------------------------------------------------------------------
# These functions format tables: bytes, dtypes, paths that differ in numbers only, and aligned columns.


def format_bytes(size: float) -> str:
    """A size in the largest unit that gives at least 1.

    >>> [format_bytes(n) for n in (0, 1023, 1536, 5 * 1024**2, 3 * 1024**4)]
    ['0 B', '1023 B', '1.5 KiB', '5.0 MiB', '3.0 TiB']
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def path_pattern(path: str) -> str:
    """A path with a star for each number: equal for paths that differ in numbers only.

    >>> path_pattern("blocks.11.weight")
    'blocks.*.weight'
    """
    return re.sub(r"\d+", "*", path)


def merge_paths(paths: Sequence[str]) -> str:
    """Paths of one pattern as one name, with their count.

    >>> merge_paths(["blocks.0.weight"]), merge_paths(["blocks.0.weight", "blocks.11.weight"])
    ('blocks.0.weight', 'blocks.{0..11}.weight x2')
    """
    paths = [printable(path) for path in paths]
    if len(paths) == 1:
        return paths[0]
    texts = re.split(r"\d+", paths[0])
    merged = texts[0]
    for numbers, text in zip(zip(*(re.findall(r"\d+", path) for path in paths), strict=True), texts[1:], strict=True):
        values = sorted(set(map(int, numbers)))
        merged += (numbers[0] if len(values) == 1 else f"{{{values[0]}..{values[-1]}}}") + text
    return f"{merged} x{len(paths)}"


def align_columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The lines of a table: its first `left` columns are aligned to the left, the others to the right.

    >>> align_columns([("state", "bytes"), ("exp_avg", "12 B")], left=1)
    ['state    bytes', 'exp_avg   12 B']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    return ["  ".join([pad(x, n) for pad, x, n in zip(pads, row, widths, strict=True)]).rstrip() for row in rows]


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name without that of the library."""
    return str(dtype).removeprefix("torch.")


# ----------------------------------------------------------------------------------------------------------------------
# `StationsTable` shows the stations of a chain with the ZeRO stage, bytes of gradients, and bytes sent in a step.


MAX_KINDS = 6  # of leaves of one station that have a line each


class StationRow(NamedTuple):
    """The gradient of one leaf behind one transform.

    Attributes:
        transform: its name; `"model"` for the gradients of the model itself.
        path: the path of the leaf.
        dtype: of the gradient; behind the optimizer, of the new parameter.
        handed: placements of the gradient that the transform receives, one for each axis of the mesh.
        placements: those of the gradient that it returns.
        scaled_by: the transforms whose factors multiply the gradient.
        bytes: of this rank's shard of it.
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
        mesh: ranks along each axis over which gradients are reduced.
        zero: the ZeRO stage: 0 if nothing is sharded, 1 if states are sharded and full gradients are accumulated, 2 if
            both are sharded, 3 if parameters are sharded too.
        gradients: bytes of gradients that this rank has between a backward and the step, as `zf.vjp` returns them.
        sent: by collective, the bytes that this rank sends for one optimizer step of an attached model, all micro-steps
            of its window together: gradients, parameters, whole leaves to their owners. It is the difference of
            `zf.collectives.bytes_sent()` over the step. A unit of parameters under `shard` is counted twice in a
            micro-step, except the last two, which backward finds unsharded; of units whose backward needs no parameter,
            such as a first embedding, less is sent. `zf.make_step` without `shard` gathers parameters once for each
            micro-step. Scalars, such as norms, are not counted.
        world: the number of ranks.
        meant: whether gradients are reduced over ranks, or the chain says by `zf.local()` that they are not.
    """

    stations: tuple[StationRow, ...]
    mesh: tuple[int, ...]
    zero: int
    gradients: int
    sent: Mapping[str, int]
    world: int = 1
    meant: bool = True

    def __repr__(self) -> str:
        return "\n".join(_station_lines(self))

    def _repr_html_(self) -> str:
        first = next((row.path for row in self.stations), None)
        stops = [(r.transform, " ".join(c for c in _cells(r) if c != "-")) for r in self.stations if r.path == first]
        return card(f"a gradient of {first}, behind each transform", road(stops), text=repr(self))


def stations_table(pipe: Pipeline, world: int = 1, units: list[list[Leaf]] | None = None) -> StationsTable:
    """The stations of a pipeline as a table, in a world of so many ranks, where these leaves are gathered together."""
    rows = [
        StationRow(station.transform, path, spec.dtype, handed.placements, spec.placements, spec.scaled_by, spec.bytes)
        for station in pipe.stations
        for path, spec in station.gives.items()
        for handed in [station.handed[path]]
    ]
    mesh = next((spec.mesh for spec in pipe.stations[0].gives.values()), ())
    specs = pipe.road.specs[len(pipe.road.pulled)]
    dtypes = pipe.road.grad_dtypes
    gradients = sum(specs[p].numel * dtypes[p].itemsize for p in pipe.layout.trained)
    own = units_by_prefix(pipe.layout.leaves) if units is None else units
    return StationsTable(tuple(rows), mesh, _zero(pipe), gradients, _sent(pipe, own), world, not unreduced(pipe))


def _zero(pipe: Pipeline) -> int:
    if not any(spec.in_parts for spec in pipe.stations[-1].gives.values()):
        return 0
    if pipe.gathering is not None:
        return 3
    held = zip(pipe.parts, pipe.stations[1:], strict=True)
    whole = [part for part, at in held if part.facts.holds and not any(s.in_parts for s in at.gives.values())]
    return 1 if whole else 2


def _sent(pipe: Pipeline, units: list[list[Leaf]]) -> dict[str, int]:
    """Bytes by collective for one window. All transforms that accumulate gradients determine its length."""
    found: Counter[str] = Counter()
    window = left = math.prod(part.facts.window for part in pipe.parts)
    for part, view, at in zip(pipe.parts, pipe.views, pipe.stations[1:], strict=True):
        if view is not None and view.wire is not None:
            # A reduction behind an accumulation runs once for each window, unless backward makes it.
            reached = window if any(own is view for own in pipe.road.pulled) else left
            for op, size in _sent_on_use(pipe, view, units) if not view.resident else ():
                found[op] += size * window
            for op, size, times in _sent_at_step(pipe, view, at, reached) if view.resident else ():
                found[op] += size * times
        for leaf in pipe.layout.trainable:
            found["all_to_all"] += (
                _sent_for_owners(at.handed[leaf.path], at.gives[leaf.path], part.facts.optimizes, pipe, leaf) * left
            )
        left //= part.facts.window
    return {op: size for op, size in found.items() if size}


def _sent_on_use(pipe: Pipeline, view: View, units: list[list[Leaf]]) -> Iterator[tuple[str, int]]:
    """Bytes by collective of a micro-step, in which these units are gathered on use and their gradients reduced."""
    assert view.wire is not None
    plans = UnitPlans(units, pipe.road, view.wire)
    for plan, times in zip(map(plans.plan_of, units), gathers(len(units)), strict=True):
        for bucket in plan.buckets:
            yield "all_gather", times * _gathered(plans.model_wire, bucket, plan.dtypes[bucket[0].path])
        for leaves, numels, dtype in plan.grad_buckets:
            yield "reduce_scatter", _summed(view.wire, leaves, numels, dtype)


def _sent_at_step(pipe: Pipeline, view: View, at: Station, reached: int) -> Iterator[tuple[str, int, int]]:
    """Bytes by collective, and how often they are sent in a window in which `reached` gradients come to the wire."""
    wire = view.wire
    assert wire is not None
    for bucket in pipe.road.sums[view.name]:
        size = _summed(wire, bucket.leaves, bucket.numels, bucket.dtype)
        yield "reduce_scatter" if wire.cuts else "all_reduce", size, reached
    if wire.cuts:
        behind = pipe.stages[next(i for i, own in enumerate(pipe.stages) if own is view) :]
        cast = any(own.dtypes is not None for own in behind)
        for leaf in pipe.layout.leaves:
            dtype = pipe.dtypes.seen(leaf) if cast else at.gives[leaf.path].stored_dtype
            assert dtype is not None
            yield "all_gather", _gathered(wire, [leaf], dtype), 1


def _gathered(wire: Wire, leaves: Sequence[Leaf], dtype: torch.dtype) -> int:
    return bytes_of(lambda silent: silent.send_parts(parts_of(silent, leaves, dtype), leaves), wire) or 0


def _summed(wire: Wire, leaves: Sequence[Leaf], numels: Sequence[int], dtype: torch.dtype) -> int:
    fulls = [torch.empty(n, dtype=dtype, device="meta") for n in numels]
    return bytes_of(lambda silent: silent.send(silent.pack(fulls, leaves, numels, dtype, fulls[0].device)), wire) or 0


def _sent_for_owners(handed: Spec, gives: Spec, optimizes: bool, pipe: Pipeline, leaf: Leaf) -> int:
    """Bytes that this rank sends for one leaf: its shards of gradient and parameter; as the owner, the update."""
    owners = [p.rank for p in handed.placements if isinstance(p, Owner)]
    if not owners or handed.dtype is None or gives.stored_dtype is None:
        return 0
    back = gives.stored_dtype if optimizes else handed.dtype
    wires = cutting_wires(pipe.road.stages)
    found, size = 0, handed.numel
    # Along the last axis first. Who is not at the owner's place there has sent all that it had.
    for k, (wire, rank) in reversed(list(enumerate(zip(wires, owners, strict=True)))):
        if wire.group.rank != rank:
            return found + size * (handed.dtype.itemsize + gives.stored_dtype.itemsize)
        low, high = wires[k - 1].span(leaf) if k else (0, torch.Size(handed.shape or ()).numel())
        found, size = found + (high - low - size) * back.itemsize, high - low
    return found


def _cells(row: StationRow) -> tuple[str, str, str]:
    placed = ", ".join(map(repr, row.placements)) or "-"
    if row.handed != row.placements and any(isinstance(p, Owner) for p in row.handed):
        placed = f"{', '.join(map(repr, row.handed))}, back as {placed}"
    return "-" if row.dtype is None else dtype_name(row.dtype), placed, ", ".join(row.scaled_by) or "-"


def _station_lines(table: StationsTable) -> Iterator[str]:
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
    """The lines of one station: similar leaves share one."""
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


# ----------------------------------------------------------------------------------------------------------------------
# `PassesTable` shows the passes over memory of a step.


@dataclass(frozen=True, repr=False)
class PassesTable:
    """The passes over memory that a step makes on this rank: data in attributes, a table in `str`.

    Attributes:
        rows: the passes. A kernel reads each number once and writes it once, for all transforms that it joins.
        why: why they are not known; else empty.
    """

    rows: tuple[Pass, ...]
    why: str = ""

    @property
    def read(self) -> int:
        """Bytes that a step reads which updates, without torch's operations."""
        return sum([x.read for x in self.rows if not x.held])

    @property
    def written(self) -> int:
        """Bytes that a step writes which updates, without torch's operations."""
        return sum([x.written for x in self.rows if not x.held])

    def __repr__(self) -> str:
        return "\n".join(_pass_lines(self))

    def _repr_html_(self) -> str:
        rows = [
            ([", ".join(x.transforms), x.by, _per_number(x)], float(x.read + x.written))
            for x in self.rows
            if not x.held and x.by != TORCH
        ]
        lines = list(_pass_lines(self))
        shown = [bars(["passes of a step", "by", "of each number"], rows, BYTES)] if rows else []
        return card(lines[-1], *shown, text="\n".join(lines))


def passes_table(pipe: Pipeline) -> PassesTable:
    """The passes of a pipeline. Functions of yours are called, so that they may raise."""
    try:
        return PassesTable(passes_of(pipe))
    except Exception as error:
        text = str(error).partition("\n")[0]
        return PassesTable((), f"a step on small tensors raised {type(error).__name__}: {text}")


def _per_number(x: Pass) -> str:
    if x.by == TORCH:
        return "-"
    return f"{x.reads:.4g} + {x.writes:.4g} B" if x.writes else f"{x.reads:.4g} B"


def _pass_lines(table: PassesTable) -> Iterator[str]:
    if table.why:
        yield f"passes of a step: not known, since {table.why}"
        return
    every = max([len(x.leaves) for x in table.rows], default=0)
    lines: list[tuple[str, ...]] = []
    for title, held in (("passes of a step", False), ("passes of a micro-step that is held", True)):
        rows = [x for x in table.rows if x.held == held]
        lines += [(title, "by", "leaves", "of each number", "read", "written")] if rows else []
        for alike in _merged(rows):
            x, names = alike[0], ", ".join(name for row in alike for name in row.transforms)
            bytes_of_it = ("-", "-") if x.by == TORCH else (format_bytes(x.read), format_bytes(x.written))
            lines.append((names, x.by, _leaves(x.leaves, every), _per_number(x), *bytes_of_it))
    yield from align_columns(lines, left=4) if lines else ()
    for what, kernel in (("is no kernel", False), ("is called in each step", True)):
        of_what = [x for x in table.rows if x.why and (x.by == KERNEL) == kernel]
        yield from dict.fromkeys([f"{', '.join(x.transforms)} {what}: {x.why}" for x in of_what])
    kernels = sum([x.by != TORCH and not x.held for x in table.rows])
    rest = ", and torch's operations" if any([x.by == TORCH for x in table.rows]) else ""
    yield f"{kernels} passes read {format_bytes(table.read)} and write {format_bytes(table.written)}{rest}"


def _merged(rows: Sequence[Pass]) -> list[list[Pass]]:
    """Torch's operations of several transforms on the same leaves share a line."""
    found: dict[Any, list[Pass]] = {}
    for i, x in enumerate(rows):
        found.setdefault(x.leaves if x.by == TORCH else i, []).append(x)
    return list(found.values())


def _leaves(paths: Sequence[str], every: int) -> str:
    if len(paths) == every:
        return f"all {every}"
    return merge_paths(paths) if len(set(map(path_pattern, paths))) == 1 else f"{len(paths)} leaves"


# ----------------------------------------------------------------------------------------------------------------------
# `describe` shows in a table what a state holds and what that costs.


MAX_LINES = 12  # of one slot; a tree may have 500 leaves with unlike names
MAX_PATH = 44  # characters


class Row(NamedTuple):
    """One tensor of a state.

    Attributes:
        transform: the transform that keeps it; `"params"`, or `"state"` for the state's own counters.
        slot: its name in the transform's state, for instance `"exp_avg"`; `""` for a parameter. Where a leaf has a dict
            of tensors there, their keys stand behind it: `"exp_avg/codes"`.
        path: the leaf to which it belongs; `""` if it belongs to none.
        global_shape: its full shape.
        local_shape: the shape of this rank's shard.
        dtype: of the elements.
        device: where they are.
        bytes: of this rank's shard.
    """

    transform: str
    slot: str
    path: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    bytes: int


@dataclass(frozen=True, repr=False)
class Table:
    """The result of `describe` and `plan`: data in `rows`, a table in `str`.

    Attributes:
        rows: a `Row` for each tensor.
        parameters: elements of all leaves over all ranks, tied ones once.
        placement: how the state lies over ranks.
        buffers: a `Row` for each buffer of a module, in the dtype in which it computes, from `describe(opt)` and from
            `plan` of a module. They are in no state and in no sum of bytes.
        road: the stations of the chain; only from `plan`, since a state does not know its chain. Not compared.
        pipe: the chain, from `plan` and from `describe(opt)`. Not compared, and not kept in a pickle.
    """

    rows: tuple[Row, ...]
    parameters: int
    placement: Placement
    buffers: tuple[Row, ...] = ()
    road: StationsTable | None = field(default=None, compare=False)
    pipe: Pipeline | None = field(default=None, compare=False)

    @cached_property
    def passes(self) -> PassesTable | None:
        """The passes over memory of a step, from `plan` and from `describe(opt)`.

        Some steps run on small tensors when this is asked for first, or printed, and call functions of yours.
        """
        return None if self.pipe is None else passes_table(self.pipe)

    def __getstate__(self) -> dict[str, Any]:
        # Functions of a chain need not be picklable.
        return {**self.__dict__, "pipe": None, "passes": self.passes}

    @property
    def bytes(self) -> int:
        """All bytes of this rank."""
        return sum(row.bytes for row in self.rows)

    @property
    def by_transform(self) -> dict[str, int]:
        """Bytes of this rank by transform, `"params"` and `"state"` among them."""
        found: dict[str, int] = {}
        for row in self.rows:
            found[row.transform] = found.get(row.transform, 0) + row.bytes
        return found

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of this rank over the parameters of all ranks."""
        return self.bytes / self.parameters if self.parameters else 0.0

    def __repr__(self) -> str:
        more = [repr(x) for x in (self.road, self.passes) if x is not None]
        return "\n".join([*_state_lines(self), *[line for text in more for line in ("", text)]])

    def _repr_html_(self) -> str:
        tensors = [
            (
                r.transform,
                [dtype_name(r.dtype), "whole" if r.local_shape == r.global_shape else "shard", r.device],
                r.bytes,
            )
            for r in (*self.rows, *self.buffers)
        ]
        more = [x._repr_html_() for x in (self.road, self.passes) if x is not None]
        lines = list(_state_lines(self))
        return card(lines[-1], kept(tensors, ["dtype", "place", "device"]), text="\n".join(lines)) + "".join(more)


def describe(state: State | Optimizer) -> Table:
    """A table of a state: every tensor's path, shapes, dtype, device and bytes, by transform.

    When printed, leaves that differ in numbers only (`blocks.0.weight` ... `blocks.11.weight`) share a line, and the
    last leaves of a wide tree are only counted. `rows` has every tensor. Of an attached model, `passes` shows which
    passes over memory a step makes, as `plan` does, and why a function of yours is no kernel.

    Args:
        state: of `zf.init`, of a step, or an attached model's `opt`.

    Raises:
        TypeError: it is none of these.

    Examples:
        >>> import torch, zerofn as zf
        >>> state = zf.init(zf.sgd(0.1, momentum=0.9), {"w": torch.zeros(256, 4), "b": torch.zeros(4)})
        >>> table = zf.describe(state)
        >>> table.bytes, table.by_transform["params"], table.rows[1].path
        (8264, 4112, 'w')
    """
    buffers: tuple[Row, ...] = ()
    pipe = None
    if isinstance(state, Optimizer):
        pipe = state._own.pipe
        state, buffers = state.state, rows_of_buffers(state._own.model, {})
    if not isinstance(state, State):
        right = "zf.describe(zf.init(tx, params)), or zf.describe(opt) of an attached model"
        raise TypeError(explain(f"describe({type(state).__name__})", "it is not a state", right))
    return replace(table_of(state, buffers), pipe=pipe)


def table_of(state: State, buffers: tuple[Row, ...]) -> Table:
    rows = tuple([_row(e, e.value.dtype) for e in entries(state) if isinstance(e.value, Tensor)])
    return Table(rows, sum(leaf.numel for leaf in state.layout.leaves), state.layout.placement, buffers)


def rows_of_buffers(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> tuple[Row, ...]:
    """Rows of a module's buffers, each once, in the dtypes given by name, else in their own."""
    named = [(name, x, dtypes.get(name, x.dtype)) for name, x in buffers_in(model)]
    return tuple([_row(Entry("buffers", "", name, x, tuple(x.shape)), dtype) for name, x, dtype in named])


def _row(e: Entry, dtype: torch.dtype) -> Row:
    x, owner = e.value, e.owner or "state"
    slot = f"{e.slot}/{e.below}" if e.below else e.slot
    return Row(owner, slot, e.path, e.shape, tuple(x.shape), dtype, str(x.device), x.numel() * dtype.itemsize)


def _sum(rows: list[Row]) -> str:
    return format_bytes(sum(row.bytes for row in rows))


def _state_lines(table: Table) -> Iterator[str]:
    head = ("path", "global shape", "local shape", "dtype", "device", "bytes")
    sections: list[tuple[str, list[tuple[str, ...]]]] = []
    for owner, rows in groupby(table.rows, key=lambda r: r.transform):
        rows = list(rows)
        cells = [line for _, group in groupby(rows, key=lambda r: r.slot) for line in _slot(list(group))]
        sections.append((f"{owner}: {_sum(rows)}", cells))
    if table.buffers:
        own = list(table.buffers)
        sections.append((f"buffers of the model, beside the state: {_sum(own)}", _slot(own)))
    lines = iter(align_columns([head, *(line for _, cells in sections for line in cells)], left=5))
    yield f"  {next(lines)}"
    for title, cells in sections:
        yield title
        yield from (f"  {line}" for line in islice(lines, len(cells)))
    p = table.placement
    cost = f"{table.parameters:,} parameters, {table.bytes_per_parameter:.2f} bytes per parameter"
    where = f", shard {p.rank} of {p.size}" if p.size > 1 else ""
    yield f"total{where}: {format_bytes(table.bytes)}, {cost}"


def _slot(rows: list[Row]) -> list[tuple[str, ...]]:
    """The lines of one slot: similar leaves share one, and leaves beyond `MAX_LINES` are counted."""
    if rows[0].slot and len(rows) > 1 and all(row.global_shape == row.local_shape == () for row in rows):
        # Each leaf has a counter. The lines above have the paths.
        row = rows[0]
        return [(_name(row.slot, f"x{len(rows)}"), "-", "-", dtype_name(row.dtype), row.device, _sum(rows))]
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        alike = (path_pattern(row.path), row.global_shape, row.local_shape, row.dtype, row.device)
        groups.setdefault(alike, []).append(row)
    shown = list(groups.values())
    rest = [row for group in shown[MAX_LINES - 1 :] for row in group] if len(shown) > MAX_LINES else []
    lines = [_line(group) for group in (shown[: MAX_LINES - 1] if rest else shown)]
    if rest:
        lines.append((_name(rest[0].slot, f"... {len(rest)} more"), "", "", "", "", _sum(rest)))
    return lines


def _line(group: list[Row]) -> tuple[str, ...]:
    row, path = group[0], merge_paths([row.path for row in group])
    shapes = _shape(row.global_shape), _shape(row.local_shape)
    return _name(row.slot, path), *shapes, dtype_name(row.dtype), row.device, _sum(group)


def _name(slot: str, path: str) -> str:
    if len(path) > MAX_PATH:
        path = f"{path[: MAX_PATH // 2 - 2]}...{path[-(MAX_PATH // 2) + 1 :]}"
    return f"{slot} {path}".strip()


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "-"


# ----------------------------------------------------------------------------------------------------------------------
# `plan` makes tables of a state, of gradients and of bytes sent, before anything is allocated.


@kept_out_of_graphs("it makes a table and no numbers", "zf.plan(tx, params), outside of what is compiled")
def plan(tx: Transform, params: Tree | nn.Module, world_size: int = 1, rank: int = 0) -> Table:
    """The table of a state before anything is allocated, exactly as `describe` will show it, and its `road`.

    The road, printed below the table, shows after each transform the dtype of gradients, their placement along each
    mesh axis, and the loss scales that they contain. It also shows the ZeRO stage, the bytes of gradients that this
    rank keeps until a step, and the bytes that this rank sends in a step. For a transform of your own it shows what its
    `through` and its view say.

    `passes`, printed below the road, shows which passes over memory a step makes, which transforms each of them joins,
    and the bytes that it reads and writes; and what torch's operations compute instead of a kernel, with the line of a
    function of yours that was the reason. They are found when they are asked for, by some steps on small tensors of as
    many dimensions: functions of yours are called. What a transform decides by the size of a dimension it decides there
    by the small one. Meta tensors are on a CPU there.

    Args:
        tx: the pipeline.
        params: a tree of tensors as for `zf.init`, or a module as for `zf.attach`. They may be meta tensors:
            `with torch.device("meta"): model = Model()`.
        world_size: the number of ranks.
        rank: the rank whose shards are shown. No rank has larger shards than the first rank.

    Raises:
        ValueError: there is no such rank or world, or a transform's first state depends on the parameters' numbers.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.accumulate(4), zf.adamw(lr=1e-3))
        >>> table = zf.plan(tx, {"w": torch.empty(1_000_000, 1000, device="meta")}, world_size=1)
        >>> sharded = zf.chain(zf.shard(), zf.sgd(0.1))
        >>> zf.plan(sharded, {"w": torch.empty(6, 2)}, world_size=2).road.stations[1].placements
        (Shard(0),)
        >>> round(table.bytes_per_parameter), table.by_transform["accumulate"]
        (16, 4000000009)
        >>> [(x.transforms, x.reads, x.writes) for x in table.passes.rows if x.by == "one kernel" and not x.held]
        [(('accumulate', 'adamw'), 20, 16)]
    """
    for name, value, low, high in (("world_size", world_size, 1, 1 << 30), ("rank", rank, 0, world_size)):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
            why = f"{name} is an int, at least {low}" + (f", below {world_size}" if name == "rank" else "")
            raise ValueError(explain(f"plan({name}={value!r})", why, "zf.plan(tx, params, world_size=8)"))
    trainable, model, wrapped = {}, None, None
    if isinstance(params, nn.Module):
        model = params
        # An OrderedDict keeps the order of the module, as in `attach`. optree sorts the keys of a plain dict.
        params, wrapped = parameters_of(params), names_with_wrappers(params)
        check_initialised(params, "plan")
        trainable = {path: p.requires_grad for path, p in params.items()}
    tensors = zip(tree_paths(params), flatten(params)[0], strict=True)
    once = {id(x): (path, x) for path, x in tensors if isinstance(x, Tensor) and not not_a_parameter(x)}
    check_own_memory("zf.plan(tx, params)", dict(once.values()))
    with shape_only() as fake:
        # Tied leaves are recognised by identity, so each tensor gets one stand-in.
        known: dict[int, Tensor] = {}
        # A nested tensor cannot be made without memory. It stays, and is refused with other leaves that do not fit.
        plain = lambda x: isinstance(x, Tensor) and not x.is_nested  # noqa: E731
        stand_ins = tree_map(lambda x: known.setdefault(id(x), fake(x)) if plain(x) else x, params)
        layout, leaves = make_layout(stand_ins, lambda path: trainable.get(path, True), wrapped=wrapped)
        pipe = pipeline(tx, layout, "zf.plan", _ranks_of(world_size, rank))
        stored = _stored(pipe, leaves)
        buffers = () if model is None else rows_of_buffers(model, dtypes_of_buffers(model, pipe.dtypes))
        try:
            state = first_state(pipe, stored)
        except NoNumbers as error:
            why = f"the first state of a transform depends on values ({error}), and a plan has shapes and dtypes only"
            raise ValueError(explain("zf.plan(tx, params)", why, "zf.describe(zf.init(tx, params))")) from error
    units = None
    if model is not None:
        units = split(model, layout.leaves, {leaf.path: params[leaf.path] for leaf in layout.leaves})[0]
    return replace(table_of(state, buffers), road=stations_table(pipe, world_size, units), pipe=pipe)


def _stored(pipe: Pipeline, leaves: Leaves) -> Leaves:
    """This rank's shard of each leaf in the stored dtype, by the last station; a full leaf keeps its strides."""
    found: Leaves = {}
    for path, spec in pipe.stations[-1].gives.items():
        x = leaves[path]
        found[path] = (x.new_empty(spec.local_shape) if spec.in_parts else x).to(spec.stored_dtype)
    return found


def _ranks_of(world_size: int, rank: int) -> Ranks:
    """The process groups that a rank of such a world would open, as sizes and ranks alone."""

    def group(function: str, mesh: Any) -> Group:
        size = world_size if mesh is None else mesh.size()
        if world_size % size:
            right = f"zf.plan(tx, params, world_size={size})"
            why = f"{function} has a mesh of {size} ranks, which must divide the world"
            raise ValueError(explain(f"plan(world_size={world_size})", why, right))
        # Along an outer axis of a mesh, neighbours are as many ranks apart as the inner axes have ranks.
        row = range(size) if mesh is None else ranks_of(mesh)
        apart = row[1] - row[0] if size > 1 else 1
        return Group(rank // apart % size, size)

    return group
