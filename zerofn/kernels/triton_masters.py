"""The Triton kernel of Adam on masters of 24 bits: one launch for all leaves, with the bits of the C kernel.

Imported only where triton is installed. With ``TRITON_INTERPRET=1`` in the environment from the start of the process,
Triton runs the kernel on the CPU, operation by operation, and needs no GPU.
"""

# Triton makes constants of literals where a parameter is a `tl.constexpr`.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import print_triton
from .masters import Master
from .print_triton import BFLOAT16, BLOCK, CHUNK, FLOAT32, KINDS, on_device, pointer, row_of, sums_kernel, value

# ----------------------------------------------------------------------------------------------------------------------
# Masters and Adam, as in `native_masters.h` and `fused_adam.formula`.


@triton.jit
def joined(p, residual):
    """`zerofn.kernels.masters.master_of`, of a bf16 number as uint16."""
    pattern = p.to(tl.uint32) << 16
    size = pattern & 0x7FFFFFFF
    more = residual.to(tl.int32).to(tl.uint32, bitcast=True) << 8
    # A zero, an infinity or a NaN has no residual.
    more = tl.where((size > 0) & (size < 0x7F800000), more, 0)
    return (pattern + more).to(tl.float32, bitcast=True)


@triton.jit
def split(x):
    """The bf16 number, as uint16, and the residual of a master."""
    pattern = x.to(tl.uint32, bitcast=True)
    first = (pattern + 0x7F + ((pattern >> 8) & 1)).to(tl.int32, bitcast=True) >> 8
    first = tl.where((pattern & 0x7FFFFFFF) > 0x7F800000, 0x7FC000, first)
    top = (first + 0x80) >> 8
    return top.to(tl.uint16), (first - (top << 8)).to(tl.int8)


@triton.jit
def fused(p, g, m, v, beta2, weight, one_minus_beta2, rate, eps, keep, decay, spread, decoupled):
    """Adam as torch's kernel on a CPU rounds it: that kernel fuses these products with their sums, and no others."""
    d = tl.where(decoupled != 0, g, tl.fma(p, decay, g))
    p = tl.where(decoupled != 0, p * keep, p)
    near = weight < 0.5
    m = tl.fma(tl.where(near, weight, weight - 1.0), d - m, tl.where(near, m, d))
    v = tl.fma(one_minus_beta2 * d, d, v * beta2)
    return p + tl.div_rn(rate * m, tl.div_rn(tl.sqrt_rn(v), spread) + eps), m, v


@triton.jit
def _block(
    p_at, r_at, g_at, m_at, v_at, begin, numel,
    beta2, weight, one_minus_beta2, rate, eps, keep, decay, spread, decoupled,
    G: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the `BLOCK` elements from `begin` of a chunk of `numel`; returns the squares of their gradients."""
    at = begin + tl.arange(0, BLOCK)
    mask = at < numel if MASKED else None
    p = joined(tl.load(p_at + at, mask), tl.load(r_at + at, mask))
    g, m, v = value(tl.load(g_at + at, mask), G), tl.load(m_at + at, mask), tl.load(v_at + at, mask)
    p, m, v = fused(p, g, m, v, beta2, weight, one_minus_beta2, rate, eps, keep, decay, spread, decoupled)
    top, residual = split(p)
    tl.store(p_at + at, top, mask)
    tl.store(r_at + at, residual, mask)
    tl.store(m_at + at, m, mask)
    tl.store(v_at + at, v, mask)
    return tl.where(at < numel, g * g, 0.0) if MASKED else g * g


@triton.jit(do_not_specialize=["rows", "decoupled"], do_not_specialize_on_alignment=["numbers"])
def masters_kernel(
    starts,
    table,
    rows,
    numbers,
    decoupled,
    squares,
    G: tl.constexpr,
    SQUARES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one chunk of a leaf.

    Args:
        starts: for each leaf the number of chunks in the leaves before it.
        table: six columns of int64 with one entry for each leaf: addresses of parameter, residual, gradient, first and
            second moment; elements.
        rows: leaves.
        numbers: the eight float32 of `fused_adam.scalars`, in the order of `fused`.
        decoupled: whether the weight decay is decoupled from the gradient.
        squares: one float32 for each chunk, the sum of the squares of its gradients; written if `SQUARES`.
        G: the kind of gradients.
    """
    chunk = tl.program_id(0)
    row = row_of(starts, rows, chunk)
    begin = (chunk - tl.load(starts + row)) * CHUNK
    table += row
    p, r, g = tl.load(table), tl.load(table + rows), tl.load(table + 2 * rows)
    m, v, numel = tl.load(table + 3 * rows), tl.load(table + 4 * rows), tl.load(table + 5 * rows)
    # Read once: in the loop a read of the device's memory would be repeated after each store.
    beta2, weight, one_minus_beta2 = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    rate, eps, keep = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
    decay, spread = tl.load(numbers + 6), tl.load(numbers + 7)
    p_at, g_at = pointer(p, BFLOAT16) + begin, pointer(g, G) + begin
    r_at = r.to(tl.pointer_type(tl.int8)) + begin
    m_at, v_at = pointer(m, FLOAT32) + begin, pointer(v, FLOAT32) + begin
    total = tl.zeros((BLOCK,), tl.float32)
    if ((p | r | g | m | v) & 15) == 0 and begin + CHUNK <= numel:
        # Triton makes accesses of 16 bytes only if it is told of these addresses.
        p_at, g_at, r_at = tl.multiple_of(p_at, 16), tl.multiple_of(g_at, 16), tl.multiple_of(r_at, 16)
        m_at, v_at = tl.multiple_of(m_at, 16), tl.multiple_of(v_at, 16)
        for i in range(0, CHUNK, BLOCK):
            total += _block(
                p_at, r_at, g_at, m_at, v_at, i, CHUNK,
                beta2, weight, one_minus_beta2, rate, eps, keep, decay, spread, decoupled, G, False, BLOCK,
            )  # fmt: skip
    else:
        rest = tl.minimum(numel - begin, CHUNK).to(tl.int32)
        for i in range(0, rest, BLOCK):
            total += _block(
                p_at, r_at, g_at, m_at, v_at, i, rest,
                beta2, weight, one_minus_beta2, rate, eps, keep, decay, spread, decoupled, G, True, BLOCK,
            )  # fmt: skip
    if SQUARES:
        tl.store(squares + chunk, tl.sum(total, 0))


def run(
    params: Sequence[Master],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    scalars: Sequence[float],
    decoupled: bool,
    norms: bool,
) -> list[Tensor]:
    """Update leaves in place, in one launch.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: of each leaf, contiguous and on one device; gradients have one dtype.
            Autograd does not notice what is written.
        scalars: the eight numbers of `fused`.
        decoupled: whether the weight decay is decoupled from the gradient.
        norms: whether to return the norm of each gradient, 0-d and on the device.
    """
    device, count = grads[0].device, len(grads)
    lengths = list(map(Tensor.numel, grads))
    chunks = [*accumulate((-(-n // CHUNK) for n in lengths), initial=0)]
    # Numbers, starts and columns, each from a multiple of 16 bytes on.
    words = array("q", array("f", scalars).tobytes())
    words.extend(chunks)
    words.extend([0] * (len(words) % 2))
    table_at = len(words)
    for column in ([x.p for x in params], [x.residual for x in params], grads, exp_avgs, exp_avg_sqs):
        words.extend(map(Tensor.data_ptr, column))
    words.extend(lengths)
    packed = on_device(words, device)
    squares = torch.empty(chunks[-1] if norms else 1, dtype=torch.float32, device=device)
    starts = packed[4:table_at]
    print_triton.launch(
        masters_kernel, chunks[-1], starts, packed[table_at:], count, packed[:4].view(torch.float32), int(decoupled),
        squares, KINDS[grads[0].dtype], norms, CHUNK, BLOCK,
    )  # fmt: skip
    if not norms:
        return []
    found = torch.empty(count, dtype=torch.float32, device=device)
    print_triton.launch(sums_kernel, count, starts, squares, found, chunks[-1], True, BLOCK)
    return list(found.unbind())
