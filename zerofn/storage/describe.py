"""`describe`: what a state holds and what that costs, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._errors import explain
from ..core.html import bars
from ..core.layout import Placement
from ..core.state import State
from ..core.state_entries import Entry, entries
from ..core.wrapper_names import buffers_in
from ..eager.optimizer import Optimizer
from .formatting import align_columns, dtype_name, format_bytes, merge_paths, path_pattern
from .stations_table import StationsTable

MAX_LINES = 12  # of one slot; a tree may have 500 leaves with unlike names
MAX_PATH = 44  # characters


class Row(NamedTuple):
    """One tensor of a state.

    Attributes:
        transform: the transform that keeps it; `"params"`, or `"state"` for the state's own counters.
        slot: what it is to the transform, for instance `"exp_avg"`; `""` for a parameter.
        path: the leaf it belongs to; `""` where it belongs to none.
        global_shape: over all ranks.
        local_shape: what this rank holds.
        dtype: of the elements.
        device: where they are.
        bytes: what this rank holds.
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
    """What `describe` and `plan` return: data in `rows`, a table in `str`.

    Attributes:
        rows: a `Row` for each tensor.
        parameters: elements of all leaves over all ranks, tied ones once.
        placement: how the state lies over ranks.
        buffers: a `Row` for each buffer of a module, in the dtype that it computes in: of `describe(opt)`, and of
            `plan` of a module. They are in no state and in no sum of bytes.
        road: the stations of the chain; of `plan` only, since a state does not know its chain. Not compared.
    """

    rows: tuple[Row, ...]
    parameters: int
    placement: Placement
    buffers: tuple[Row, ...] = ()
    road: StationsTable | None = field(default=None, compare=False)

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
        return "\n".join([*_lines(self), *(() if self.road is None else ("", repr(self.road)))])

    def _repr_html_(self) -> str:
        rows = [(name, format_bytes(size), float(size)) for name, size in self.by_transform.items()]
        road = "" if self.road is None else self.road._repr_html_()
        return bars(rows, list(_lines(self))[-1]) + road


def describe(state: State | Optimizer) -> Table:
    """What a state holds: every tensor's path, shapes, dtype, device and bytes, by transform.

    In print, leaves that differ in numbers only (`blocks.0.weight` ... `blocks.11.weight`) share a line,
    and what is left of a wide tree is counted; `rows` has every tensor.

    Args:
        state: of `zf.init`, of a step, or an attached model's `opt`.

    >>> import torch, zerofn as zf
    >>> state = zf.init(zf.sgd(0.1, momentum=0.9), {"w": torch.zeros(256, 4), "b": torch.zeros(4)})
    >>> table = zf.describe(state)
    >>> table.bytes, table.by_transform["params"], table.rows[1].path
    (8264, 4112, 'w')
    """
    buffers: tuple[Row, ...] = ()
    if isinstance(state, Optimizer):
        state, buffers = state.state, rows_of_buffers(state._own.model, {})
    if not isinstance(state, State):
        right = "zf.describe(zf.init(tx, params)), or zf.describe(opt) of an attached model"
        raise TypeError(explain(f"describe({type(state).__name__})", "it is not a state", right))
    return table_of(state, buffers)


def table_of(state: State, buffers: tuple[Row, ...]) -> Table:
    rows = tuple([_row(e, e.value.dtype) for e in entries(state) if isinstance(e.value, Tensor)])
    return Table(rows, sum(leaf.numel for leaf in state.layout.leaves), state.layout.placement, buffers)


def rows_of_buffers(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> tuple[Row, ...]:
    """Rows of a module's buffers, each once, in the dtypes given by name, else in their own."""
    named = [(name, x, dtypes.get(name, x.dtype)) for name, x in buffers_in(model)]
    return tuple([_row(Entry("buffers", "", name, x, tuple(x.shape)), dtype) for name, x, dtype in named])


def _row(e: Entry, dtype: torch.dtype) -> Row:
    x, owner = e.value, e.owner or "state"
    return Row(owner, e.slot, e.path, e.shape, tuple(x.shape), dtype, str(x.device), x.numel() * dtype.itemsize)


def _sum(rows: list[Row]) -> str:
    return format_bytes(sum(row.bytes for row in rows))


def _lines(table: Table) -> Iterator[str]:
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
    """The lines of one slot: like leaves share one, and what is beyond `MAX_LINES` is counted."""
    if rows[0].slot and len(rows) > 1 and all(row.global_shape == row.local_shape == () for row in rows):
        # A counter for each leaf; the lines above have their paths.
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
