"""What kernels of Triton have in common: stored numbers, random bits, masters of 24 bits, the leaf of a program.

As the headers of C are for `print_c`, these functions are for `print_triton`, with the same bits. For these they have
only operations that IEEE 754 rounds in one way: sums, products, `div_rn`, `sqrt_rn`, `fma` where one is meant. bfloat16
is converted by integer arithmetic, as in C.
"""

# Triton makes constants of literals where a parameter is a `tl.constexpr`.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

# Kinds of stored numbers: `zerofn.kernels.program.KINDS`.
FLOAT32, BFLOAT16, FLOAT16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FLOAT64, INT64, BOOL, INT8 = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)


@triton.jit
def pointer(address, KIND: tl.constexpr):
    if KIND == FLOAT32:
        return address.to(tl.pointer_type(tl.float32))
    elif KIND == FLOAT16:
        return address.to(tl.pointer_type(tl.float16))
    elif KIND == FLOAT64:
        return address.to(tl.pointer_type(tl.float64))
    elif KIND == INT64:
        return address.to(tl.pointer_type(tl.int64))
    elif KIND == BOOL:
        return address.to(tl.pointer_type(tl.uint8))
    elif KIND == INT8:
        return address.to(tl.pointer_type(tl.int8))
    else:
        return address.to(tl.pointer_type(tl.uint16))


@triton.jit
def value(stored, KIND: tl.constexpr):
    """Stored numbers as they are computed: those of up to 32 bits as float32."""
    if KIND == BFLOAT16:
        return (stored.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == BOOL:
        return stored != 0
    elif KIND == FLOAT16 or KIND == FLOAT32:  # noqa: SIM109
        return stored.to(tl.float32)
    else:
        return stored


@triton.jit
def rounded(x, bits, KIND: tl.constexpr, RANDOM: tl.constexpr):
    """Float32 numbers as they are stored: rounded to nearest, or by the low 16 bits of `bits`; NaN stays NaN.

    Numbers of other kinds are stored as they are.
    """
    if KIND == BFLOAT16:
        return _bfloat16(x, bits, RANDOM)
    elif KIND == FLOAT16:
        return _float16(x, bits, RANDOM)
    elif KIND == BOOL:
        return x.to(tl.uint8)
    else:
        return x


@triton.jit
def _bfloat16(x, bits, RANDOM: tl.constexpr):
    pattern = x.to(tl.uint32, bitcast=True)
    size = pattern & 0x7FFFFFFF
    noise = ((pattern >> 16) & 1) + 0x7FFF
    if RANDOM:
        # The largest finite number and infinities are rounded to nearest: noise must not make a number infinite.
        noise = tl.where(size >= 0x7F7F0000, noise, bits & 0xFFFF)
    return tl.where(size > 0x7F800000, 0x7FC0, (pattern + noise) >> 16).to(tl.uint16)


@triton.jit
def _float16(x, bits, RANDOM: tl.constexpr):
    if RANDOM:
        pattern = x.to(tl.uint32, bitcast=True)
        size = pattern & 0x7FFFFFFF
        # A number below the normal ones of float16 is lifted by the smallest of these, whose last bit it then has.
        lift = 6.103515625e-05
        small = size < 0x38800000
        lifted = tl.where(small, (size.to(tl.float32, bitcast=True) + lift).to(tl.uint32, bitcast=True), size)
        cut = (lifted + tl.where(lifted >= 0x477FE000, 0x1000, bits & 0x1FFF)) & 0xFFFFE000
        cut = tl.where(small, (cut.to(tl.float32, bitcast=True) - lift).to(tl.uint32, bitcast=True), cut)
        cut = tl.where(size >= 0x7F800000, size, cut) | (pattern & 0x80000000)
        x = cut.to(tl.float32, bitcast=True)
    return x.to(tl.float16)


@triton.jit
def row_of(starts, rows, chunk):
    """The row of a chunk: the last one that starts at it or before."""
    row, end = 0, rows
    while end - row > 1:
        middle = (row + end) // 2
        before = tl.load(starts + middle) <= chunk
        row, end = tl.where(before, middle, row), tl.where(before, end, middle)
    return row


# ----------------------------------------------------------------------------------------------------------------------
# Random bits from a counter: `zerofn.kernels.rounding`.


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
    """One of the two words of `stream_key`."""
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
def stream_key(seed, step, key, block, stream: tl.constexpr):
    return (
        lane(0x243F6A88, seed, step, key, block & 0xFFFFFFFF, stream),
        lane(0x85A308D3, seed, step, key, block & 0xFFFFFFFF, stream),
    )


@triton.jit
def draw(counter, k1):
    x = counter
    x ^= x >> 16
    x *= 0x7FEB352D
    x += k1
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


# ----------------------------------------------------------------------------------------------------------------------
# Masters of 24 bits: `native_masters.h`. Numbers of bf16 are in float32.


@triton.jit
def joined(p, more):
    """The master of a bf16 number and its residual."""
    pattern = p.to(tl.uint32, bitcast=True)
    size = pattern & 0x7FFFFFFF
    # A zero, an infinity or a NaN has no residual.
    bits = tl.where((size > 0) & (size < 0x7F800000), more.to(tl.int32) << 8, 0)
    return (pattern + bits.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _first_bits(x):
    """A number rounded to its first 24 bits, int32."""
    pattern = x.to(tl.uint32, bitcast=True)
    first = (pattern + 0x7F + ((pattern >> 8) & 1)).to(tl.int32, bitcast=True) >> 8
    return tl.where((pattern & 0x7FFFFFFF) > 0x7F800000, 0x7FC000, first)


@triton.jit
def upper_half(x):
    """The bf16 number of a master."""
    return (((_first_bits(x) + 0x80) >> 8) << 16).to(tl.float32, bitcast=True)


@triton.jit
def residual(x):
    """The residual of a master, int8."""
    first = _first_bits(x)
    return (first - (((first + 0x80) >> 8) << 8)).to(tl.int8)


# ----------------------------------------------------------------------------------------------------------------------
# Codes: `native_codes.h`. A tile is some blocks of a leaf, (blocks, numbers of a block).
#
# Blocks have one of two kinds, with a formula each. A tile computes a formula only if one of its blocks is of the kind.


@triton.jit
def narrowed(x, NARROW: tl.constexpr):
    return value(_bfloat16(x, x, False), BFLOAT16) if NARROW else x


@triton.jit
def _number(code, scale, SIGNED: tl.constexpr, BITS: tl.constexpr, COMPANDED: tl.constexpr, NARROW: tl.constexpr):
    """`Codes._numbers`."""
    last: tl.constexpr = (1 << (BITS - 1)) - 1
    end: tl.constexpr = (1 << BITS) - 1
    if COMPANDED:
        y = tl.div_rn(code, 2 * last - tl.abs(code)) if SIGNED else code * code * (1.0 / (end * end))
    else:
        y = code * (1.0 / last) if SIGNED else code * (1.0 / end)
    return narrowed(y * scale, NARROW)


@triton.jit
def decoded(codes, scale, BITS: tl.constexpr, COMPANDED: tl.constexpr, NARROW: tl.constexpr):
    """The numbers of codes (blocks, numbers) with scales (blocks,)."""
    last: tl.constexpr = (1 << (BITS - 1)) - 1
    code, size, signed = codes.to(tl.float32), tl.abs(scale)[:, None], (scale < 0).to(tl.int32)
    found = tl.zeros_like(code)
    if tl.max(signed, 0) != 0:
        # The product with -1 gives zeros their sign. Triton computes -x as 0 - x, which does not.
        found = _number((last - code) * -1.0, size, True, BITS, COMPANDED, NARROW)
    if tl.min(signed, 0) == 0:
        found = tl.where(signed[:, None] != 0, found, _number(code, size, False, BITS, COMPANDED, NARROW))
    return found


@triton.jit
def _code(
    x, y, scale, noise, rare, SIGNED: tl.constexpr, RANDOM: tl.constexpr,
    BITS: tl.constexpr, COMPANDED: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
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
            # Numbers of 16 bits and subnormal numbers have larger rounding errors: here those with a code are found.
            found = tl.where(_number(code, scale, SIGNED, BITS, COMPANDED, NARROW) == tl.abs(x), code, found)
        code = found
    if SIGNED:
        return tl.where(x < 0, last - code, last + code)
    else:
        # A second moment other than zero gets a code other than zero.
        return tl.maximum(code, (x > 0).to(tl.float32))


@triton.jit
def coded(x, counter, k1, RANDOM: tl.constexpr, BITS: tl.constexpr, COMPANDED: tl.constexpr, NARROW: tl.constexpr):
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
    rare = 1 if NARROW else tl.max((there & (lift != 1.0)).to(tl.int32), 0)
    noise = y
    if RANDOM:
        noise = (((draw(counter, k1) >> 16) & 0xFFF0) | 8).to(tl.int32).to(tl.float32) * 1.52587890625e-05
    code = tl.zeros_like(y)
    if tl.max(signed, 0) != 0:
        code = _code(x, y, scale[:, None], noise, rare, True, RANDOM, BITS, COMPANDED, NARROW)
    if tl.min(signed, 0) == 0:
        other = _code(x, y, scale[:, None], noise, rare, False, RANDOM, BITS, COMPANDED, NARROW)
        code = tl.where(signed[:, None] != 0, code, other)
    code = tl.where(there[:, None], code, 0.0).to(tl.int32)
    stored = tl.where(finite, most, 0x7FC00000) | (signed << 31)
    return code, stored.to(tl.float32, bitcast=True)


@triton.jit
def unpacked(codes, BITS: tl.constexpr, B: tl.constexpr, N: tl.constexpr):
    """Codes (B, N) of bytes; of 4 bits two are in a byte, the first one below."""
    if BITS == 4:
        return tl.reshape(tl.join(codes & 15, codes >> 4), (B, N))
    else:
        return codes


@triton.jit
def packed(codes, BITS: tl.constexpr, B: tl.constexpr, N: tl.constexpr):
    if BITS == 4:
        first, second = tl.split(tl.reshape(codes, (B, N // 2, 2)))
        codes = first | (second << 4)
    return codes.to(tl.uint8)
