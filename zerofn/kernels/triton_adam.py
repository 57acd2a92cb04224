"""The Triton kernel of low-precision Adam: one launch for all leaves of a tree, with the bits of the C kernel.

Imported only where triton is installed. With ``TRITON_INTERPRET=1`` in the environment from the start of the process,
Triton runs the kernel on the CPU, operation by operation, and needs no GPU.
"""

# Triton makes constants of literals where a parameter is a `tl.constexpr`.
# pyright: reportArgumentType=false

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._errors import explain
from . import print_triton
from .print_triton import (
    BLOCK,
    CHUNK,
    KINDS,
    on_device,
    pointer,
    rounded,
    row_of,
    sums_kernel,
    value,
)
from .rounding import block_ranges

# ----------------------------------------------------------------------------------------------------------------------
# The kernel computes the formula of `zerofn.kernels.adam` on one chunk of one leaf.
#
# For equal bits the kernel has only operations that IEEE 754 rounds in one way: sums, products, `div_rn`, `sqrt_rn`,
# and no product fused with a sum (`print_triton.CUDA_OPTIONS`). bfloat16 is converted by integer arithmetic, as in C.
#
# A number that changes from step to step is no constant of the kernel: it reads the number of the step, the seed and
# the learning rate from memory of the device.
#
# Gradients, parameters and moments are read once and written once, in accesses of 16 bytes where addresses allow it.

# The columns of the table, each with one entry for each row: see `_packed`.
_COLUMNS = 9


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _hashed(word, other):
    return _mix(word ^ other.to(tl.uint32)) + 0x9E3779B9


@triton.jit
def lane(start: tl.constexpr, seed, step, key, block, stream: tl.constexpr):
    """One of the two words of `zerofn.kernels.rounding.stream_key`."""
    low = 0xFFFFFFFF
    word = (seed & 0).to(tl.uint32) + start
    word = _hashed(word, seed & low)
    word = _hashed(word, (seed >> 32) & low)
    word = _hashed(word, step & low)
    word = _hashed(word, (step >> 32) & low)
    word = _hashed(word, key & low)
    word = _hashed(word, (key >> 32) & low)
    word = _hashed(word, block)
    return _hashed(word, (seed & 0) + stream)


@triton.jit
def draw(counter, k1):
    """`zerofn.kernels.rounding.draw`."""
    x = counter
    x ^= x >> 16
    x *= 0x7FEB352D
    x += k1
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _block(
    p_at,
    g_at,
    m_at,
    v_at,
    c_at,
    first,
    begin,
    numel,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    rate,
    eps,
    keep,
    decay,
    stride,
    p_k0,
    p_k1,
    m_k0,
    m_k1,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    KAHAN: tl.constexpr,
    RANDOM_P: tl.constexpr,
    RANDOM_M: tl.constexpr,
    RANDOM_V: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the `BLOCK` elements from `begin` of a chunk of `numel`; returns the squares of their gradients.

    `first` is the index in its leaf of the chunk's first element, modulo 2**32.
    """
    at = begin + tl.arange(0, BLOCK)
    mask = at < numel if MASKED else None
    p = value(tl.load(p_at + at, mask), P)
    g = value(tl.load(g_at + at, mask), G)
    m = value(tl.load(m_at + at, mask), M)
    v = value(tl.load(v_at + at, mask), V)
    counter = (first + at.to(tl.uint32)) * stride
    bits = counter
    other = counter
    if RANDOM_P or RANDOM_V:
        bits = draw(counter + p_k0, p_k1)
    if RANDOM_M:
        other = draw(counter + m_k0, m_k1)
    m = (g - m) * one_minus_beta1 + m
    v = v * beta2 + (g * one_minus_beta2) * g
    step = tl.div_rn(m * rate, tl.sqrt_rn(v) + eps)
    if KAHAN:
        c = value(tl.load(c_at + at, mask), P)
        # Infinite parameters stay infinite: inf * 0 and inf - inf must not happen, in this step or the next.
        finite = (p.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        drop = tl.where(finite, (p + c) * decay, 0.0) + step - c
        new = rounded(p - drop, bits, P, False)
        kept = value(new, P)
        finite = (kept.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        lost = tl.where(finite, (p - kept) - drop, 0.0)
        tl.store(c_at + at, rounded(lost, bits, P, False), mask)
    else:
        new = rounded(p * keep - step, bits, P, RANDOM_P)
    tl.store(p_at + at, new, mask)
    tl.store(m_at + at, rounded(m, other, M, RANDOM_M), mask)
    tl.store(v_at + at, rounded(v, bits >> 16, V, RANDOM_V), mask)
    return tl.where(at < numel, g * g, 0.0) if MASKED else g * g


_UNALIGNED = ["step_at", "seed_at", "stride_at", "comes_at", "numbers"]


@triton.jit(do_not_specialize=["rows", "each"], do_not_specialize_on_alignment=_UNALIGNED)
def adam_kernel(
    starts,
    table,
    rows,
    step_at,
    seed_at,
    stride_at,
    comes_at,
    numbers,
    each,
    squares,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    KAHAN: tl.constexpr,
    RANDOM_P: tl.constexpr,
    RANDOM_M: tl.constexpr,
    RANDOM_V: tl.constexpr,
    SQUARES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one chunk of a row.

    Args:
        starts: for each row the number of chunks in the rows before it.
        table: `_COLUMNS` columns of int64 with one entry for each row: addresses of parameter, gradient, first and
            second moment and compensation; elements; key; index of the first element in the leaf; number of the leaf.
        rows: how many.
        step_at, seed_at, stride_at: where the number of the update, the seed, and what counters of neighbours differ by
            are, each an int64.
        comes_at: where a byte is that is 0 if nothing is to be written.
        numbers: the seven float32 of `zerofn.kernels.adam.Scalars`.
        each: of how many leaves each has a step and seven numbers of its own, (7, leaves); 0 where all have the same.
        squares: one float32 for each chunk, the sum of the squares of its gradients; written if `SQUARES`.
    """
    chunk = tl.program_id(0)
    row = row_of(starts, rows, chunk)
    begin = (chunk - tl.load(starts + row)) * CHUNK
    table += row
    p, g = tl.load(table), tl.load(table + rows)
    m, v, c = tl.load(table + 2 * rows), tl.load(table + 3 * rows), tl.load(table + 4 * rows)
    numel, key, offset = tl.load(table + 5 * rows), tl.load(table + 6 * rows), tl.load(table + 7 * rows)
    place = tl.where(each != 0, tl.load(table + 8 * rows), 0)
    step, seed, stride = tl.load(step_at + place), tl.load(seed_at), tl.load(stride_at).to(tl.uint32)
    numbers += place
    width = tl.maximum(each, 1)
    # In a step that is skipped all leaves count as empty.
    numel = tl.where(tl.load(comes_at) != 0, numel, 0)
    block, first = (offset >> 32) & 0xFFFFFFFF, (offset & 0xFFFFFFFF).to(tl.uint32)
    p_k0, p_k1 = stride, stride
    m_k0, m_k1 = stride, stride
    if RANDOM_P or RANDOM_V:
        p_k0, p_k1 = lane(0x243F6A88, seed, step, key, block, 0), lane(0x85A308D3, seed, step, key, block, 0)
    if RANDOM_M:
        m_k0, m_k1 = lane(0x243F6A88, seed, step, key, block, 1), lane(0x85A308D3, seed, step, key, block, 1)
    aligned = ((p | g | m | v | c) & 15) == 0
    p_at, g_at, m_at, v_at = pointer(p, P), pointer(g, G), pointer(m, M), pointer(v, V)
    c_at = pointer(c, P)
    # These are read before the loop, where each would be read again after every store.
    beta2, one_minus_beta1 = tl.load(numbers), tl.load(numbers + width)
    one_minus_beta2, rate = tl.load(numbers + 2 * width), tl.load(numbers + 3 * width)
    eps, keep, decay = tl.load(numbers + 4 * width), tl.load(numbers + 5 * width), tl.load(numbers + 6 * width)
    total = tl.zeros((BLOCK,), tl.float32)
    # Triton 3.6 makes accesses of 16 bytes only if it knows the address of the chunk to be a multiple of 16: an aligned
    # leaf and an aligned 64-bit index do not tell it. Indices within a chunk are of 32 bits.
    p_at, g_at, m_at, v_at, c_at = p_at + begin, g_at + begin, m_at + begin, v_at + begin, c_at + begin
    first += begin.to(tl.uint32)
    if aligned and begin + CHUNK <= numel:
        p_at, g_at = tl.multiple_of(p_at, 16), tl.multiple_of(g_at, 16)
        m_at, v_at = tl.multiple_of(m_at, 16), tl.multiple_of(v_at, 16)
        c_at = tl.multiple_of(c_at, 16)
        for i in range(0, CHUNK, BLOCK):
            total += _block(
                p_at, g_at, m_at, v_at, c_at, first, i, CHUNK,
                beta2, one_minus_beta1, one_minus_beta2, rate, eps, keep, decay, stride, p_k0, p_k1, m_k0, m_k1,
                P, G, M, V, KAHAN, RANDOM_P, RANDOM_M, RANDOM_V, False, BLOCK,
            )  # fmt: skip
    else:
        rest = tl.minimum(numel - begin, CHUNK).to(tl.int32)
        for i in range(0, rest, BLOCK):
            total += _block(
                p_at, g_at, m_at, v_at, c_at, first, i, rest,
                beta2, one_minus_beta1, one_minus_beta2, rate, eps, keep, decay, stride, p_k0, p_k1, m_k0, m_k1,
                P, G, M, V, KAHAN, RANDOM_P, RANDOM_M, RANDOM_V, True, BLOCK,
            )  # fmt: skip
    if SQUARES:
        tl.store(squares + chunk, tl.sum(total, 0))


# ----------------------------------------------------------------------------------------------------------------------
# `run` writes the table, and launches the kernel once.


class Numbers(NamedTuple):
    """Values that change from step to step: numbers of the host, or tensors of the device, which the host never reads.

    Attributes:
        step: the number of this update, an int or an int64 tensor of one element; or of one for each leaf, with
            scalars of the shape `(7, leaves)`.
        seed: the low 64 bits count; an int or an int64 tensor of one element.
        stride: what counters of neighbouring elements differ by, an int or an int64 tensor of one element.
        scalars: the seven numbers of `zerofn.kernels.adam.Scalars`, floats or one float32 tensor.
        comes: a bool tensor of one element; nothing is written if it is false.
    """

    step: Any
    seed: Any
    stride: Any
    scalars: Any
    comes: Tensor | None = None


class Roundings(NamedTuple):
    """How parameters and moments are stored: with compensation, or each at random or to nearest."""

    kahan: bool
    param: bool
    exp_avg: bool
    exp_avg_sq: bool


def run(
    columns: Sequence[Sequence[Tensor]],
    keys: Sequence[int],
    offsets: Sequence[int],
    numbers: Numbers,
    roundings: Roundings,
    norms: bool = False,
) -> list[Tensor]:
    """Update leaves in place, in one launch.

    Args:
        columns: parameters, gradients, first and second moments and, for Kahan's rounding, compensations. All tensors
            of a column have one dtype, all are contiguous and on one device. All but gradients are written; autograd
            does not notice, so the caller must tell it.
        keys: `leaf_key` of each leaf.
        offsets: the index in its leaf of the first element of each.
        numbers: of this step.
        roundings: of parameters and moments.
        norms: whether to return the norm of each gradient, 0-d and on the device; of leaves that cross a multiple of
            2**32 elements none is computed, and the list is empty.
    """
    _check_devices(columns)
    rows = list(_rows(columns, keys, offsets))
    lengths = rows[5]
    chunks = [*accumulate((-(-n // CHUNK) for n in lengths), initial=0)]
    count, total = len(lengths), chunks[-1]
    if not total:
        return [torch.zeros((), device=x.device) for x in columns[1]] if norms else []
    device = columns[0][0].device
    packed = _packed(numbers, chunks, rows, device)
    at = _Places(count)
    step, seed, stride = (
        x if isinstance(x, Tensor) else packed[i : i + 1]
        for i, x in enumerate((numbers.step, numbers.seed, numbers.stride))
    )
    scalars = numbers.scalars if isinstance(numbers.scalars, Tensor) else packed[4:8].view(torch.float32)
    comes, each = packed[3:4] if numbers.comes is None else numbers.comes, scalars.shape[1] if scalars.ndim == 2 else 0
    norms = norms and count == len(columns[0])
    squares = torch.empty(total if norms else 1, dtype=torch.float32, device=device)
    starts = packed[at.starts : at.table]
    kinds = [KINDS[column[0].dtype] for column in columns[:4]]
    print_triton.launch(
        adam_kernel, total, starts, packed[at.table :], count, step, seed, stride, comes.view(torch.uint8), scalars,
        each, squares, *kinds, *roundings, norms, CHUNK, BLOCK,
    )  # fmt: skip
    if not norms:
        return []
    found = torch.empty(count, dtype=torch.float32, device=device)
    print_triton.launch(sums_kernel, count, starts, squares, found, total, True, BLOCK)
    return list(found.unbind())


class _Places:
    """Where in the packed numbers the starts of rows and the table are; both at multiples of 16 bytes."""

    def __init__(self, rows: int):
        self.starts = 8
        self.table = self.starts + (rows + 2) // 2 * 2


def _packed(numbers: Numbers, chunks: list[int], rows: list[Sequence[int]], device: torch.device) -> Tensor:
    """All that the kernel reads besides leaves, in one tensor: one copy for each step.

    It is: step, seed, stride, 1 (the step comes); eight float32; the starts of rows, to an even number; the columns
    of the table.
    """
    words = array("q", bytes(8 * _Places(len(rows[0])).table))
    for i, x in enumerate((numbers.step, numbers.seed, numbers.stride)):
        words[i] = 0 if isinstance(x, Tensor) else _signed(x)
    words[3] = 1
    if not isinstance(numbers.scalars, Tensor):
        words[4:8] = array("q", array("f", [*numbers.scalars, 0.0]).tobytes())
    words[8 : 8 + len(chunks)] = array("q", chunks)
    for column in rows:
        words.extend(column)
    return on_device(words, device)


def _signed(x: int) -> int:
    """The int64 with the low 64 bits of `x`."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _rows(columns: Sequence[Sequence[Tensor]], keys: Sequence[int], offsets: Sequence[int]) -> Iterator[Sequence[int]]:
    """The columns of the table: one row for each leaf, or more where a leaf crosses a multiple of 2**32 elements."""
    lengths = list(map(Tensor.numel, columns[0]))
    addresses = [list(map(Tensor.data_ptr, column)) for column in columns]
    if all((start >> 32) == ((start + max(n, 1) - 1) >> 32) for start, n in zip(offsets, lengths, strict=True)):
        yield from addresses
        if len(columns) < 5:
            yield [0] * len(lengths)
        yield from (lengths, keys, offsets, range(len(lengths)))
        return
    sizes = [column[0].element_size() for column in columns]
    found: list[list[int]] = []
    for i, (offset, n) in enumerate(zip(offsets, lengths, strict=True)):
        for start, stop in block_ranges(offset, n):
            row = [column[i] + (start - offset) * size for column, size in zip(addresses, sizes, strict=True)]
            found.append([*row, *[0] * (5 - len(row)), stop - start, keys[i], start, i])
    yield from map(list, zip(*found, strict=True))


def _check_devices(columns: Sequence[Sequence[Tensor]]) -> None:
    """Refuse leaves on several devices: a kernel that read another device's memory would end the process."""
    places = [list(map(Tensor.get_device, column)) for column in columns]
    if len(set().union(*places)) == 1:
        return
    i, row = next((i, row) for i, row in enumerate(zip(*places, strict=True)) if {*row} != {places[0][0]})
    wrong = f"adam_: parameter, gradient and moments of entry {i} are on devices {list(row)}, entry 0 on {places[0][0]}"
    raise ValueError(explain(wrong, "one launch updates leaves of one device", "tensors on one device"))
