"""Stochastic rounding, with random bits from a counter instead of a generator.

A parameter kept in bfloat16 has 8 significant bits, so rounding to nearest loses an update smaller than half their
spacing. Stochastic rounding rounds up with a probability equal to the discarded fraction. Then the expectation of the
stored value is the value itself, and small updates survive on average.

The random bits are a pure function of seed, optimizer step, leaf and *global* element index. A generator with a state
would make the result depend on the order in which elements are visited: on the number of ranks, the bucket size and the
chunk size. Here an element gets the same draw however it is stored.

Two rounds of a mixer do not decorrelate all counters: for some that differ by little, the bits agree a hundredth too
often. So neighbours do not get neighbouring counters: element i gets ``i * STRIDE``, which for all close i and j is as
far from ``j * STRIDE`` as can be. A third round would cost time; this is free, since in a loop over lines of elements
the multiples are constants.

Sources: Weyl's sequences, here by the golden ratio (Knuth, "The Art of Computer Programming", volume 3, section 6.4);
lowbias32, a 32-bit mixer found by search for low bias (Chris Wellons,
https://nullprogram.com/blog/2018/07/31/); counter-based random numbers (Salmon et al., "Parallel Random Numbers: As
Easy as 1, 2, 3", SC 2011); stochastic rounding in training (Gupta et al., "Deep Learning with Limited Numerical
Precision", ICML 2015).
"""

from __future__ import annotations

import functools
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from .._compat.functorch import reinterpret, while_traced
from .._errors import explain

_MASK32 = 0xFFFFFFFF
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B
_GOLDEN = 0x9E3779B9
# Formats of draws. A run keeps the format that it began with, in its state, also after a load. In the first format
# neighbours have neighbouring counters, and draws of elements 32 or 15360 apart have a correlation of 0.01.
FIRST_FORMAT, FORMAT = 1, 2
FORMAT_ENTRY = "rounding_format"  # in the state
# 2**32 divided by the golden ratio, to the next odd number.
_STRIDES = {FIRST_FORMAT: 1, FORMAT: _GOLDEN}
# Two words of the binary expansion of pi: any two different numbers would do.
_LANES = (0x243F6A88, 0x85A308D3)


@while_traced
def leaf_key(path: str) -> int:
    """A stable 63-bit key of a leaf's path: the same in every process, unlike Python's salted ``hash``.

    63 bits, so that the key fits an int64 tensor.

    Examples:
        >>> leaf_key("layers.0.weight")
        2236915355251466630
    """
    return _hash(path)


@functools.cache  # every step asks for the keys
def _hash(path: str) -> int:
    return int.from_bytes(blake2b(path.encode(), digest_size=8).digest(), "little") >> 1


def as_int32(word: Any) -> Any:
    """The int32 with the low 32 bits of ``word``, an int or an int64 tensor; torch refuses larger constants.

    Examples:
        >>> as_int32(0xFFFFFFFF), as_int32(5), as_int32(torch.tensor(2**32 - 2))
        (-1, 5, tensor(-2, dtype=torch.int32))
    """
    word = word & _MASK32
    word = word - ((word >> 31) << 32)
    return word.to(torch.int32) if isinstance(word, Tensor) else word


def _mix(x: Any) -> Any:
    # lowbias32 of a Python int or an int64 tensor. Tensor products wrap mod 2**64, which keeps the low bits right.
    x = x ^ (x >> 16)
    x = (x * _MULTIPLIER_1) & _MASK32
    x = x ^ (x >> 15)
    x = (x * _MULTIPLIER_2) & _MASK32
    return x ^ (x >> 16)


def stride_of(form: int | Tensor) -> Any:
    """The difference between the counters of neighbouring elements: an int, or an int64 tensor of the shape of `form`.

    Examples:
        >>> stride_of(1), hex(stride_of(2)), stride_of(torch.tensor([1, 2])).tolist()
        (1, '0x9e3779b9', [1, 2654435769])
    """
    if isinstance(form, Tensor):
        return torch.where(form == FIRST_FORMAT, *_STRIDES.values())
    return _STRIDES[form]


def known_formats() -> tuple[int, ...]:
    """The formats of random draws that this version knows.

    Examples:
        >>> known_formats()
        (1, 2)
    """
    return tuple(_STRIDES)


def stream_key(
    seed: int, step: int | Tensor, key: int | Tensor, *, block: int | Tensor = 0, stream: int = 0
) -> tuple[Any, Any]:
    """Hash everything but the position inside a block of 2**32 elements to two 32-bit words ``(k0, k1)``.

    Every argument is *hashed* in. To xor the raw step into the element index would be cheaper, but makes the draws of
    one element visibly correlated over steps.

    Args:
        seed, key, step: integers, of which the low 64 bits count; the last two also as int64 tensors.
        block: global element index divided by 2**32, so that a longer leaf does not repeat.
        stream: 0 for parameters and second moments, 1 for first moments.

    Returns:
        ``(k0, k1)``: ints, or int64 tensors of the arguments' common shape if one of them is a tensor.

    Examples:
        >>> stream_key(0, 1, leaf_key("w")) == stream_key(0, torch.tensor(1), leaf_key("w"))
        True
    """
    if isinstance(step, Tensor):
        step = step.to(torch.int64)
    words: tuple[Any, ...] = (seed, seed >> 32, step, step >> 32, key, key >> 32, block, stream)
    lanes = []
    for start in _LANES:
        lane: Any = start
        for word in words:
            # The constant keeps runs of zero words from being a fixed point of the mixer.
            lane = (_mix(lane ^ (word & _MASK32)) + _GOLDEN) & _MASK32
        lanes.append(lane)
    return lanes[0], lanes[1]


def draw(counter: Tensor, k1: int | Tensor) -> Tensor:
    """32 random bits for each element of ``counter``, which is overwritten and returned.

    Args:
        counter: int32: the element index times the stride plus ``k0`` of `stream_key`, wrapping.
        k1: an int that fits int32, or an int32 tensor that broadcasts. It enters between the two multiplications: with
            ``k0`` alone, the draws of any two leaves or steps would be the same sequence at different positions, and
            large leaves would overlap.
    """

    # int32 shifts are arithmetic, hence the masks.
    x = counter
    x ^= (x >> 16) & 0xFFFF
    x *= _MULTIPLIER_1
    x += k1
    x ^= (x >> 15) & 0x1FFFF
    x *= as_int32(_MULTIPLIER_2)
    x ^= (x >> 16) & 0xFFFF
    return x


def random_bits(
    numel: int,
    *,
    seed: int,
    step: int | Tensor,
    key: int,
    offset: int = 0,
    stream: int = 0,
    form: int | Tensor = FORMAT,
    device: torch.device | str | None = None,
) -> Tensor:
    """32 random bits for each of the elements ``offset .. offset + numel`` of a leaf, as int32 of shape ``(numel,)``.

    Args:
        numel: how many elements.
        seed, step, key, stream: as in `stream_key`.
        offset: the global index of the first element. So the bits do not depend on how the leaf is split over ranks.
        form: the format of the draws.
        device: the device of the bits.

    Examples:
        >>> whole = random_bits(10, seed=0, step=1, key=leaf_key("w"))
        >>> shard = random_bits(4, seed=0, step=1, key=leaf_key("w"), offset=6)
        >>> torch.equal(whole[6:], shard)
        True
    """
    stride = stride_of(form)
    parts = []
    for start, stop in block_ranges(offset, numel):
        k0, k1 = stream_key(seed, step, key, block=start >> 32, stream=stream)
        counter = torch.arange(stop - start, dtype=torch.int32, device=device)
        # A new counter and no write in place: under vmap the key is batched if the step is, and the range is not.
        parts.append(draw(counter * as_int32(stride) + as_int32((start & _MASK32) * stride + k0), as_int32(k1)))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32, device=device)


def block_ranges(offset: int, numel: int, limit: int = 1 << 31):
    """Cut ``[offset, offset + numel)`` where a new block of 2**32 elements begins, and after ``limit`` elements.

    Examples:
        >>> list(block_ranges(2**32 - 3, 10, limit=6))
        [(4294967293, 4294967296), (4294967296, 4294967302), (4294967302, 4294967303)]
    """
    start, end = offset, offset + numel
    while start < end:
        stop = min(end, start + limit, ((start >> 32) + 1) << 32)
        yield start, stop
        start = stop


def stochastic_round(x: Tensor, dtype: torch.dtype, *, bits: Tensor) -> Tensor:
    """Round float32 ``x`` to bfloat16 or float16, up with a probability equal to the discarded fraction.

    Args:
        x: float32, any shape.
        dtype: `torch.bfloat16` or `torch.float16`.
        bits: int32, of a shape that broadcasts to that of ``x``. The low 16 bits of each element (the low 13 for
            float16) are used, and must be uniform. The high 16 can serve another tensor, as ``bits >> 16``.

    Returns:
        A tensor of ``dtype`` and the shape of ``x``. Its expectation is exactly ``x`` for bfloat16 and for normal
        float16. Below float16's normal range (2**-14) only 13 of the discarded bits count. There the absolute
        difference between the expectation and ``x`` is at most 2**-38.

    Raises:
        ValueError: ``x`` is not float32, or ``dtype`` is neither bfloat16 nor float16.

    Examples:
        >>> x = torch.full((4096,), 1.0 + 2**-10)                  # an eighth of the spacing above 1
        >>> y = stochastic_round(x, torch.bfloat16, bits=random_bits(4096, seed=0, step=1, key=0))
        >>> sorted(set(y.tolist())), abs(y.float().mean().item() - x[0].item()) < 2e-4
        ([1.0, 1.0078125], True)

    Notes:
        Infinities stay, NaN stays NaN whatever its payload, zeros keep their sign, subnormals are rounded like other
        numbers, and values that fit exactly are kept. A finite value at or above the largest finite one is rounded *to
        nearest*, so that noise never makes it infinite if rounding to nearest does not. The price is a bias there,
        instead of a diverged parameter.
    """
    if x.dtype != torch.float32:
        why, right = "x is float32, whose low bits are rounded away", f"stochastic_round(x.float(), {dtype}, bits=bits)"
        raise ValueError(explain(f"stochastic_round(x) with x in {x.dtype}", why, right))
    if dtype == torch.bfloat16:
        return _round_bits(x, bits, dropped=16, largest=0x7F7F0000).to(torch.bfloat16)
    if dtype == torch.float16:
        # Adding 2**-14 moves the last bit of a float16 subnormal to where a normal number has it.
        small = x.abs() < 2.0**-14
        shifted = _round_bits(torch.where(small, x.abs() + 2.0**-14, x), bits, dropped=13, largest=0x477FE000)
        return torch.where(small, torch.copysign(shifted - 2.0**-14, x), shifted).to(torch.float16)
    why = "a float32 value is rounded to torch.bfloat16 or torch.float16"
    raise ValueError(explain(f"stochastic_round(dtype={dtype})", why, f"x.to({dtype})"))


def _round_bits(x: Tensor, bits: Tensor, *, dropped: int, largest: int) -> Tensor:
    """Add noise below the kept bits of the magnitude, and cut. ``largest`` has the bits of the last finite value."""
    low = (1 << dropped) - 1
    pattern = reinterpret(x, torch.int32)
    to_nearest = ((pattern >> dropped) & 1) + (low >> 1)
    noise = torch.where((pattern & 0x7FFFFFFF) >= largest, to_nearest, bits & low)
    # A carry out of the mantissa increments the exponent, as rounding up should.
    cut = reinterpret((pattern + noise) & ~low, torch.float32)
    return torch.where(x.isnan(), x, cut)
