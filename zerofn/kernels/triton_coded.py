"""The Triton kernel of Adam on moments that are codes: one launch for all leaves, with the bits of the C kernel.

Imported only where triton is installed. With ``TRITON_INTERPRET=1`` in the environment from the start of the process,
Triton runs the kernel on the CPU, operation by operation, and needs no GPU.
"""

# Triton makes constants of literals where a parameter is a `tl.constexpr`.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import print_triton
from .codes import Coded, Codes
from .masters import Master
from .print_triton import FLOAT32, KINDS, on_device, pointer, rounded, row_of, sums_kernel, value
from .triton_adam import draw, lane
from .triton_masters import fused, joined, split

# ----------------------------------------------------------------------------------------------------------------------
# A tile is some blocks of a leaf, (blocks, numbers of a block): codes become numbers, Adam runs on them, and numbers
# become codes, as in `native_codes.h`.
#
# Blocks have one of two kinds, with a formula each. A tile computes a formula only if one of its blocks is of the kind.
#
# In a leaf whose rows are whole blocks the blocks lie one behind the other: a program with as many of them as it can
# have reads and writes them in accesses of 16 bytes, and codes in those of 8. Others are masked.

# Numbers of a tile, and tiles of a program.
TILE, TILES = 1 << 10, 16
# The columns of the table, each with one entry for each leaf: see `run`.
_COLUMNS = 15


@triton.jit
def _number(code, scale, SIGNED: tl.constexpr, BITS: tl.constexpr, COMPANDED: tl.constexpr):
    """`Codes._numbers`."""
    last: tl.constexpr = (1 << (BITS - 1)) - 1
    end: tl.constexpr = (1 << BITS) - 1
    if COMPANDED:
        y = tl.div_rn(code, 2 * last - tl.abs(code)) if SIGNED else code * code * (1.0 / (end * end))
    else:
        y = code * (1.0 / last) if SIGNED else code * (1.0 / end)
    return y * scale


@triton.jit
def _decoded(codes, scale, BITS: tl.constexpr, COMPANDED: tl.constexpr):
    """The numbers of codes (blocks, numbers) with scales (blocks,)."""
    last: tl.constexpr = (1 << (BITS - 1)) - 1
    code, size, signed = codes.to(tl.float32), tl.abs(scale)[:, None], (scale < 0).to(tl.int32)
    found = tl.zeros_like(code)
    if tl.max(signed, 0) != 0:
        # The product with -1 gives zeros their sign. Triton computes -x as 0 - x, which does not.
        found = _number((last - code) * -1.0, size, True, BITS, COMPANDED)
    if tl.min(signed, 0) == 0:
        found = tl.where(signed[:, None] != 0, found, _number(code, size, False, BITS, COMPANDED))
    return found


@triton.jit
def _code(
    x, y, scale, noise, rare, SIGNED: tl.constexpr, RANDOM: tl.constexpr, BITS: tl.constexpr, COMPANDED: tl.constexpr
):
    """The codes of numbers `x`; `y` are their magnitudes over the scale, and `noise` are numbers between 0 and 1."""
    last: tl.constexpr = (1 << (BITS - 1)) - 1
    end: tl.constexpr = (1 << BITS) - 1
    if COMPANDED:
        at = tl.div_rn(y * (2 * last), y + 1.0) if SIGNED else tl.sqrt_rn(y) * end
    else:
        at = y * last if SIGNED else y * end
    # This rounds to the nearest whole number, ties to even: fp32 has no fractions at 1.5 * 2**23.
    code = (at + 12582912.0) - 12582912.0
    if RANDOM:
        low = tl.floor(at)
        if not COMPANDED:
            below, gap = at - low, low * 0.0 + 1.0
        elif SIGNED:
            below, gap = (y * (2 * last - low) - low) * (2 * last - 1 - low), low * 0.0 + 2.0 * last
        else:
            below, gap = y * (end * end) - low * low, low + low + 1.0
        found = low + (noise * gap < below).to(tl.float32)
        if rare != 0:
            # Subnormal numbers have larger rounding errors: here those with a code are found.
            found = tl.where(_number(code, scale, SIGNED, BITS, COMPANDED) == tl.abs(x), code, found)
        code = found
    if SIGNED:
        return tl.where(x < 0, last - code, last + code)
    else:
        # A second moment other than zero gets a code other than zero.
        return tl.maximum(code, (x > 0).to(tl.float32))


@triton.jit
def _coded(x, counter, k1, RANDOM: tl.constexpr, BITS: tl.constexpr, COMPANDED: tl.constexpr):
    """`Codes.encode` of blocks (blocks, numbers): codes, int32, and scales (blocks,)."""
    pattern = x.to(tl.uint32, bitcast=True)
    most = tl.max((pattern & 0x7FFFFFFF).to(tl.int32), 1)
    signed = tl.max((pattern >> 31).to(tl.int32), 1)
    finite = most < 0x7F800000
    scale = most.to(tl.float32, bitcast=True)
    # `lift` moves scales to where a reciprocal is finite: that of a subnormal number is infinite.
    lift = tl.where(scale < 5.421010862427522e-20, 18446744073709551616.0, 1.0)
    lift = tl.where(scale > 18446744073709551616.0, 5.421010862427522e-20, lift)
    there = finite & (scale > 0)
    reciprocal = tl.div_rn(1.0, tl.where(there, scale * lift, 1.0))
    y = tl.abs(x) * lift[:, None] * reciprocal[:, None]
    rare = tl.max((there & (lift != 1.0)).to(tl.int32), 0)
    noise = y
    if RANDOM:
        noise = (((draw(counter, k1) >> 16) & 0xFFF0) | 8).to(tl.int32).to(tl.float32) * 1.52587890625e-05
    code = tl.zeros_like(y)
    if tl.max(signed, 0) != 0:
        code = _code(x, y, scale[:, None], noise, rare, True, RANDOM, BITS, COMPANDED)
    if tl.min(signed, 0) == 0:
        other = _code(x, y, scale[:, None], noise, rare, False, RANDOM, BITS, COMPANDED)
        code = tl.where(signed[:, None] != 0, code, other)
    code = tl.where(there[:, None], code, 0.0).to(tl.int32)
    stored = tl.where(finite, most, 0x7FC00000) | (signed << 31)
    return code, stored.to(tl.float32, bitcast=True)


@triton.jit
def _load(at, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(at, mask, other=0)
    else:
        return tl.load(at)


@triton.jit
def _store(at, x, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(at, x, mask)
    else:
        tl.store(at, x)


@triton.jit
def _codes_at(at, mask, MASKED: tl.constexpr, BITS: tl.constexpr, B: tl.constexpr, N: tl.constexpr):
    """Codes (B, N); of 4 bits two are in a byte, the first one below."""
    codes = _load(at, mask, MASKED)
    if BITS == 4:
        return tl.reshape(tl.join(codes & 15, codes >> 4), (B, N))
    else:
        return codes


@triton.jit
def _put(at, codes, mask, MASKED: tl.constexpr, BITS: tl.constexpr, B: tl.constexpr, N: tl.constexpr):
    if BITS == 4:
        first, second = tl.split(tl.reshape(codes, (B, N // 2, 2)))
        codes = first | (second << 4)
    _store(at, codes.to(tl.uint8), mask, MASKED)


@triton.jit
def _tile(
    p_at, r_at, g_at, m_at, v_at, m_scales, v_scales, low, blocks, row, block, first,
    beta2, weight, one_minus_beta2, rate, eps, keep, decay, spread, decoupled, stride,
    p_k0, p_k1, m_k0, m_k1, v_k0, v_k1,
    P: tl.constexpr, G: tl.constexpr, FUSED: tl.constexpr, MASTERS: tl.constexpr,
    RANDOM_P: tl.constexpr, RANDOM: tl.constexpr,
    BITS: tl.constexpr, COMPANDED: tl.constexpr, MASKED: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Update `B` blocks from number `low` on; returns the squares of their gradients.

    `first` is the index in its leaf of the first element at the pointers, modulo 2**32. Without a mask all rows are
    whole blocks of `N`.
    """
    b = low + tl.arange(0, B)
    numbers, pairs = tl.arange(0, N)[None, :], tl.arange(0, N * BITS // 8)[None, :]
    if MASKED:
        in_row = (row + block - 1) // block
        r = b // in_row
        start = (b - r * in_row) * block
        some = b < blocks
        n = tl.where(some, tl.minimum(row - start, block), 0)[:, None]
        at = (r * row + start)[:, None] + numbers
        codes_at = (r * ((row * BITS + 7) // 8) + start * BITS // 8)[:, None] + pairs
        mask, in_codes = numbers < n, pairs * (8 // BITS) < n
    else:
        at, codes_at = b[:, None] * N + numbers, b[:, None] * (N * BITS // 8) + pairs
        some, mask, in_codes = None, None, None
    g = value(_load(g_at + at, mask, MASKED), G)
    if MASTERS:
        p = joined(_load(p_at + at, mask, MASKED), _load(r_at + at, mask, MASKED))
    else:
        p = value(_load(p_at + at, mask, MASKED), P)
    m_codes = _codes_at(m_at + codes_at, in_codes, MASKED, BITS, B, N)
    v_codes = _codes_at(v_at + codes_at, in_codes, MASKED, BITS, B, N)
    m = _decoded(m_codes, _load(m_scales + b, some, MASKED), BITS, COMPANDED)
    v = _decoded(v_codes, _load(v_scales + b, some, MASKED), BITS, COMPANDED)
    counter = (first + at.to(tl.uint32)) * stride
    if FUSED:
        p, m, v = fused(p, g, m, v, beta2, weight, one_minus_beta2, rate, eps, keep, decay, spread, decoupled)
    else:
        m = (g - m) * weight + m
        v = v * beta2 + (g * one_minus_beta2) * g
        p = p * keep - tl.div_rn(m * rate, tl.sqrt_rn(v) + eps)
    if MASTERS:
        new, residual = split(p)
        _store(r_at + at, residual, mask, MASKED)
    else:
        bits = counter
        if RANDOM_P:
            bits = draw(counter + p_k0, p_k1)
        new = rounded(p, bits, P, RANDOM_P)
    _store(p_at + at, new, mask, MASKED)
    if MASKED:
        m, v = tl.where(mask, m, 0.0), tl.where(mask, v, 0.0)
    m_codes, m_scale = _coded(m, counter + m_k0, m_k1, RANDOM, BITS, COMPANDED)
    v_codes, v_scale = _coded(v, counter + v_k0, v_k1, RANDOM, BITS, COMPANDED)
    if MASKED:
        # Places behind the last number of a row get the code 0.
        m_codes, v_codes = tl.where(mask, m_codes, 0), tl.where(mask, v_codes, 0)
    _put(m_at + codes_at, m_codes, in_codes, MASKED, BITS, B, N)
    _put(v_at + codes_at, v_codes, in_codes, MASKED, BITS, B, N)
    _store(m_scales + b, m_scale, some, MASKED)
    _store(v_scales + b, v_scale, some, MASKED)
    return g * g


@triton.jit(
    do_not_specialize=["rows", "block"], do_not_specialize_on_alignment=["words", "numbers", "starts", "squares"]
)
def coded_adam_kernel(
    starts,
    table,
    words,
    numbers,
    rows,
    block,
    squares,
    P: tl.constexpr,
    G: tl.constexpr,
    FUSED: tl.constexpr,
    MASTERS: tl.constexpr,
    RANDOM_P: tl.constexpr,
    RANDOM: tl.constexpr,
    BITS: tl.constexpr,
    COMPANDED: tl.constexpr,
    SQUARES: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
    TILES: tl.constexpr,
):
    """Update some blocks of a leaf.

    Args:
        starts: for each leaf the number of programs of the leaves before it.
        table: `_COLUMNS` columns of int64 with one entry for each leaf: addresses of parameter, gradient, codes of
            both moments and scales of both; blocks; numbers of a row; keys of parameter and moments; index of the first
            element in the leaf; for each moment the number of its rounding; address of residuals, if parameters are
            masters of 24 bits.
        words: seeds of parameters and of codes, number of the update, what counters of neighbours differ by, and
            whether the weight decay is decoupled; each an int64.
        numbers: eight float32: `given` of `coded_adam._launch`.
        rows: leaves.
        block: numbers that share a scale, at most `N`.
        squares: one float32 for each program, the sum of the squares of its gradients; written if `SQUARES`.
        P, G: kinds of parameters and gradients.
        FUSED: whether the arithmetic is that of torch's fused kernel, or that of `zerofn.kernels.adam`.
        MASTERS: whether parameters are masters of 24 bits: `P` is bf16, and the arithmetic that of torch.
        RANDOM_P, RANDOM: whether parameters and codes are rounded at random.
        B, N: blocks of a tile, and room of a block.
    """
    chunk = tl.program_id(0)
    leaf = row_of(starts, rows, chunk)
    low = (chunk - tl.load(starts + leaf)) * (B * TILES)
    table += leaf
    p, g = tl.load(table), tl.load(table + rows)
    m, v = tl.load(table + 2 * rows), tl.load(table + 3 * rows)
    m_scales, v_scales = tl.load(table + 4 * rows), tl.load(table + 5 * rows)
    blocks, row = tl.load(table + 6 * rows), tl.load(table + 7 * rows)
    p_key, m_key, v_key = tl.load(table + 8 * rows), tl.load(table + 9 * rows), tl.load(table + 10 * rows)
    offset, m_step, v_step = tl.load(table + 11 * rows), tl.load(table + 12 * rows), tl.load(table + 13 * rows)
    r = tl.load(table + 14 * rows)
    seed, codes_seed, step = tl.load(words), tl.load(words + 1), tl.load(words + 2)
    stride, decoupled = tl.load(words + 3).to(tl.uint32), tl.load(words + 4)
    beta2, weight, one_minus_beta2 = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    rate, eps, keep = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
    decay, spread = tl.load(numbers + 6), tl.load(numbers + 7)
    top, first = (offset >> 32) & 0xFFFFFFFF, (offset & 0xFFFFFFFF).to(tl.uint32)
    p_k0, p_k1, m_k0, m_k1, v_k0, v_k1 = stride, stride, stride, stride, stride, stride
    if RANDOM_P:
        p_k0, p_k1 = lane(0x243F6A88, seed, step, p_key, top, 0), lane(0x85A308D3, seed, step, p_key, top, 0)
    if RANDOM:
        m_k0 = lane(0x243F6A88, codes_seed, m_step, m_key, top, 0)
        m_k1 = lane(0x85A308D3, codes_seed, m_step, m_key, top, 0)
        v_k0 = lane(0x243F6A88, codes_seed, v_step, v_key, top, 0)
        v_k1 = lane(0x85A308D3, codes_seed, v_step, v_key, top, 0)
    total = tl.zeros((B, N), tl.float32)
    p_at, g_at = pointer(p, P), pointer(g, G)
    r_at = r.to(tl.pointer_type(tl.int8))
    m_at, v_at = m.to(tl.pointer_type(tl.uint8)), v.to(tl.pointer_type(tl.uint8))
    m_scales_at, v_scales_at = pointer(m_scales, FLOAT32), pointer(v_scales, FLOAT32)
    whole = ((p | r | g | m | v | m_scales | v_scales) & 15) == 0
    if whole and block == N and row % N == 0 and low + B * TILES <= blocks:
        # Triton learns that the addresses of the program's first numbers are multiples of 16. Indices have 32 bits.
        begin = low * N
        p_at, g_at = tl.multiple_of(p_at + begin, 16), tl.multiple_of(g_at + begin, 16)
        r_at = tl.multiple_of(r_at + begin, 16)
        m_at, v_at = tl.multiple_of(m_at + begin * BITS // 8, 16), tl.multiple_of(v_at + begin * BITS // 8, 16)
        m_scales_at = tl.multiple_of(m_scales_at + low, 16)
        v_scales_at = tl.multiple_of(v_scales_at + low, 16)
        first += begin.to(tl.uint32)
        for i in range(0, TILES):
            total += _tile(
                p_at, r_at, g_at, m_at, v_at, m_scales_at, v_scales_at, i * B, blocks, row, block, first,
                beta2, weight, one_minus_beta2, rate, eps, keep, decay, spread, decoupled, stride,
                p_k0, p_k1, m_k0, m_k1, v_k0, v_k1,
                P, G, FUSED, MASTERS, RANDOM_P, RANDOM, BITS, COMPANDED, False, B, N,
            )  # fmt: skip
    else:
        tiles = tl.minimum(tl.cdiv(blocks - low, B), TILES).to(tl.int32)
        for i in range(0, tiles):
            total += _tile(
                p_at, r_at, g_at, m_at, v_at, m_scales_at, v_scales_at, low + i * B, blocks, row, block, first,
                beta2, weight, one_minus_beta2, rate, eps, keep, decay, spread, decoupled, stride,
                p_k0, p_k1, m_k0, m_k1, v_k0, v_k1,
                P, G, FUSED, MASTERS, RANDOM_P, RANDOM, BITS, COMPANDED, True, B, N,
            )  # fmt: skip
    if SQUARES:
        tl.store(squares + chunk, tl.sum(tl.sum(total, 1), 0))


class Numbers(NamedTuple):
    """Values that change from step to step.

    Attributes:
        step: the number of this update.
        seed: of parameters.
        codes_seed: of codes.
        stride: what counters of neighbouring elements differ by.
        decoupled: whether the weight decay is decoupled from the gradient.
        scalars: the eight numbers of `coded_adam.CodedAdam.run`.
    """

    step: int
    seed: int
    codes_seed: int
    stride: int
    decoupled: bool
    scalars: Sequence[float]


def tile(how: Codes) -> tuple[int, int]:
    """Blocks of a tile, and the room of each."""
    room = 1 << (how.block - 1).bit_length()
    return max(1, TILE // room), room


def run(
    params: Sequence[Tensor] | Sequence[Master],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Coded],
    exp_avg_sqs: Sequence[Coded],
    keys: Sequence[Sequence[int]],
    offsets: Sequence[int],
    steps: Sequence[Sequence[int]],
    numbers: Numbers,
    fused_arithmetic: bool,
    random_params: bool,
    norms: bool,
) -> list[Tensor]:
    """Update leaves in place, in one launch.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: of each leaf; all of a list have one dtype, are coded in one way, are
            contiguous and on one device, and no leaf is empty. Parameters may be masters of 24 bits. Autograd does not
            notice what is written.
        keys: `leaf_key` of each parameter, of its first and of its second moment.
        offsets: the index in its leaf of the first element of each.
        steps: for each first and second moment the number of its rounding.
        numbers: of this step.
        fused_arithmetic: whether it is that of torch's fused kernel.
        random_params: whether parameters are rounded at random.
        norms: whether to return the norm of each gradient, 0-d and on the device.
    """
    how, random = exp_avgs[0].how, exp_avgs[0].draws is not None
    residuals = [x.residual for x in params if isinstance(x, Master)]
    params = [x.p if isinstance(x, Master) else x for x in params]
    (at_once, room), device, count = tile(how), params[0].device, len(params)
    moments = exp_avgs, exp_avg_sqs
    rows = [p.numel() // len(p) for p in params]
    blocks = [len(p) * -(-row // how.block) for p, row in zip(params, rows, strict=True)]
    programs = [*accumulate((-(-n // (at_once * TILES)) for n in blocks), initial=0)]
    lists = params, grads, *([x.codes for x in one] for one in moments), *([x.scales for x in one] for one in moments)
    # The numbers come first, then starts and columns, each at a multiple of 16 bytes.
    words = array("q", map(_signed, (numbers.seed, numbers.codes_seed, numbers.step, numbers.stride)))
    words.extend((int(numbers.decoupled), 0))
    words.frombytes(array("f", numbers.scalars).tobytes())
    starts_at = len(words)
    words.extend(programs)
    words.extend([0] * (len(words) % 2))
    table_at = len(words)
    columns = *(map(Tensor.data_ptr, xs) for xs in lists), blocks, rows, *keys, offsets, *steps
    columns = *columns, [*map(Tensor.data_ptr, residuals)] or [0] * count
    assert len(columns) == _COLUMNS
    for column in columns:
        words.extend(map(_signed, column))
    packed = on_device(words, device)
    squares = torch.empty(programs[-1] if norms else 1, dtype=torch.float32, device=device)
    starts = packed[starts_at:table_at]
    print_triton.launch(
        coded_adam_kernel, programs[-1], starts, packed[table_at:], packed, packed[6:starts_at].view(torch.float32),
        count, how.block, squares, KINDS[params[0].dtype], KINDS[grads[0].dtype], fused_arithmetic,
        bool(residuals), random_params, random,
        how.bits, how.code == "companded", norms, at_once, room, TILES,
    )  # fmt: skip
    if not norms:
        return []
    found = torch.empty(count, dtype=torch.float32, device=device)
    print_triton.launch(sums_kernel, count, starts, squares, found, programs[-1], True, print_triton.BLOCK)
    return list(found.unbind())


def _signed(x: int) -> int:
    """The int64 with the low 64 bits of `x`."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)
