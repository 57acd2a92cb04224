"""Sums of squares of the rows and of the columns of matrices, of all leaves of a list: two launches.

The first one adds up each tile along both sides, the second one the sums of tiles, in a fixed order.
"""

# Triton makes constants of literals where a parameter is a `tl.constexpr`.
# pyright: reportArgumentType=false

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import print_triton
from .program import KINDS
from .triton_functions import pointer, row_of, value

# Rows and columns of a tile, and sums of one program of the second launch.
ROWS, COLUMNS, BLOCK = 32, 64, 256


@triton.jit(do_not_specialize=["leaves"])
def tiles_kernel(starts, table, leaves, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of squares of the rows and columns of each tile: planes of row sums, and planes of column sums."""
    tile = tl.program_id(0)
    leaf = row_of(starts, leaves, tile)
    rows, columns = tl.load(table + leaf), tl.load(table + leaves + leaf)
    x = pointer(tl.load(table + 2 * leaves + leaf), KIND)
    of_rows = tl.load(table + 3 * leaves + leaf).to(tl.pointer_type(tl.float32))
    of_columns = tl.load(table + 4 * leaves + leaf).to(tl.pointer_type(tl.float32))
    across = tl.cdiv(columns, COLUMNS)
    inside = tile - tl.load(starts + leaf)
    down, right = inside // across, inside % across
    r = down * ROWS + tl.arange(0, ROWS)
    c = right * COLUMNS + tl.arange(0, COLUMNS)
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    found = value(tl.load(x + r[:, None] * columns + c[None, :], mask, other=0), KIND)
    squares = found * found
    tl.store(of_rows + right * rows + r, tl.sum(squares, 1), r < rows)
    tl.store(of_columns + down * columns + c, tl.sum(squares, 0), c < columns)


@triton.jit(do_not_specialize=["vectors"])
def planes_kernel(starts, table, vectors, BLOCK: tl.constexpr):
    """The sum of the planes of each vector."""
    chunk = tl.program_id(0)
    vector = row_of(starts, vectors, chunk)
    length, planes = tl.load(table + vector), tl.load(table + vectors + vector)
    planes_at = tl.load(table + 2 * vectors + vector).to(tl.pointer_type(tl.float32))
    sums = tl.load(table + 3 * vectors + vector).to(tl.pointer_type(tl.float32))
    at = (chunk - tl.load(starts + vector)) * BLOCK + tl.arange(0, BLOCK)
    mask = at < length
    total = tl.zeros((BLOCK,), tl.float32)
    for plane in range(0, planes):
        total += tl.load(planes_at + plane * length + at, mask, other=0.0)
    tl.store(sums + at, total, mask)


def squares_of_sides(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
    """Sums of squares of each row, (rows,), and of each column, (columns,), of matrices, in float32.

    Args:
        tensors: contiguous, with elements, of one dtype on one device; at most of 32 bits.
        shapes: rows and columns of each.
    """
    device, count = tensors[0].device, len(tensors)
    across = [-(-columns // COLUMNS) for _, columns in shapes]
    down = [-(-rows // ROWS) for rows, _ in shapes]
    lengths = [*[rows for rows, _ in shapes], *[columns for _, columns in shapes]]
    planes = [*across, *down]
    sums = torch.empty(sum(lengths), dtype=torch.float32, device=device).split(lengths)
    sizes = [n * k for n, k in zip(lengths, planes, strict=True)]
    parts = torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    tiles = [*accumulate([a * d for a, d in zip(across, down, strict=True)], initial=0)]
    chunks = [*accumulate([-(-n // BLOCK) for n in lengths], initial=0)]
    addresses = list(map(Tensor.data_ptr, parts))
    words = array("q", tiles)
    words.extend([*lengths, *map(Tensor.data_ptr, tensors), *addresses])
    middle = len(words)
    words.extend([*chunks, *lengths, *planes, *addresses, *map(Tensor.data_ptr, sums)])
    packed = print_triton.on_device(words, device)
    first, second = packed[:middle], packed[middle:]
    kind = KINDS[tensors[0].dtype]
    print_triton.launch(tiles_kernel, tiles[-1], first, first[count + 1 :], count, kind, ROWS, COLUMNS)
    print_triton.launch(planes_kernel, chunks[-1], second, second[2 * count + 1 :], 2 * count, BLOCK)
    return list(sums[:count]), list(sums[count:])
