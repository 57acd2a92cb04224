"""Numbers as codes of 8 or 4 bits: one scale for each block of a row.

A block is cut from a row of the leaf (its first dimension), from the row's beginning on, and its last block may be
shorter. So whoever has whole rows has whole blocks, and the codes do not depend on how rows lie over ranks.

The scale is the largest magnitude of its block, in the dtype of the numbers. `x / scale` lies in [-1, 1]. It is
*companded*: mapped so that small magnitudes, of which a moment has most, get more codes than large ones.

    a block with a negative number    f(y) = 2 y / (1 + |y|)    2^bits - 1 codes, from -1 to 1
    a block without one               f(y) = sqrt(y)            2^bits codes, from 0 to 1

The second one is for second moments. There a number other than zero never becomes zero: an optimizer would divide by
it. A negative scale says that the block has a negative number, so no transform needs to say which of its tensors are
second moments. In such a block a zero comes back as -0.0.

Or `x / scale` becomes an entry of a table, the *dynamic* map, which has about as many entries in each power of ten as
in all below it (`dynamic_map`).

Sources: blocks with a scale of their own and more codes for small numbers (Dettmers et al., "8-bit Optimizers via
Block-wise Quantization", ICLR 2022); no zero among the codes of second moments (Li et al., "Memory Efficient Optimizers
with 4-bit States", NeurIPS 2023); the two functions (FlashOptim, 2026); the dynamic map (Dettmers et al.). Other than
there, rounding is stochastic, by bits from a counter (`rounding.py`): to nearest, a second moment that changes by a
thousandth would stay.

Gradients that are sent have codes that are evenly spaced and signed in every block (`Codes(signed=True)`), and are
rounded by random bits that follow from the numbers of the block (`BlockDraws`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._compat.functorch import reinterpret
from .._compat.tensors import is_shape_only
from . import native
from .formulas import exact_root
from .recording import concrete, number, where
from .rounding import FORMAT, as_int32, draw, random_bits, stream_key, stride_of

# The largest number of float8_e4m3fn.
LARGEST = 448.0
# How numbers from -1 to 1 become codes, in the order of `ZF_MAP` in `native_codes.h`.
MAPS = ("linear", "companded", "dynamic")
# Elements that are coded at once, so that temporary tensors stay in a CPU's cache.
AT_ONCE = 1 << 17
# Elements of the largest block that a printed kernel has room for.
MOST = 1024


@dataclass(frozen=True)
class Draws:
    """Random bits for the elements of a leaf.

    Attributes:
        seed: an int of 64 bits.
        step: the number of an update, a 0-d int64 tensor.
        key: the key of the leaf, from `leaf_key`.
        offset: the index, in the full leaf, of the first element that this rank has.
    """

    seed: int
    step: Tensor
    key: int
    offset: int = 0

    def bits(self, low: int, high: int, device: torch.device) -> Tensor:
        """The random bits of a range of elements, int32."""
        how: Any = dict(seed=self.seed, step=number(self.step), key=self.key, device=device)
        return random_bits(high - low, offset=self.offset + low, **how)

    def of_one_key(self, numel: int) -> bool:
        """Whether the first `numel` elements of this leaf on this rank draw with one random key.

        The key changes after every 2**32 elements of the full leaf.
        """
        return concrete(self.step) and self.offset >> 32 == (self.offset + numel - 1) >> 32


@dataclass(frozen=True)
class BlockDraws:
    """Random bits for numbers that have no step and no place: they follow from the numbers of the block, and a seed.

    So the codes of a block are a function of the block alone. If one bit of one number in a block changes, all numbers
    of the block get other random bits. Blocks that are equal, bit for bit, are rounded equally.

    Attributes:
        seed: an int of 64 bits.
    """

    seed: int

    def bits(self, blocks: Tensor) -> Tensor:
        """The random bits for numbers in fp32, int32 of the same shape (rows, blocks, numbers)."""
        k0, k1 = stream_key(self.seed, 0, 0)
        total = reinterpret(blocks, torch.int32).sum(-1, keepdim=True)
        counter = draw(as_int32(total), as_int32(k0))
        places = torch.arange(blocks.shape[-1], dtype=torch.int32, device=blocks.device) * as_int32(stride_of(FORMAT))
        return draw(counter + places, as_int32(k1))


@dataclass(frozen=True)
class Codes:
    """How to encode numbers as codes of 8 or 4 bits, and to decode them.

    Attributes:
        bits: the bits of a code, 8 or 4. Two codes of 4 bits share a byte.
        block: how many numbers of a row share a scale.
        code: `"companded"`, by two functions, or `"dynamic"`, by `dynamic_map`: small magnitudes get more codes than
            large ones; or `"linear"`: codes are evenly spaced.
        signed: whether a block without a negative number gets codes for both signs, as a block with negative numbers
            always does. With `signed=True` every number may be rounded to zero, and stochastic rounding is right on
            average for every number. With `signed=False` a positive number in a block without a negative number is
            never rounded to zero.

    Examples:
        >>> codes, scales = Codes(8, 4).encode(torch.tensor([[-0.5, 0.25, 0.0, 1.0, 3.0]]))
        >>> codes, scales
        (tensor([[ 42, 178, 127, 254, 255]], dtype=torch.uint8), tensor([[-1.,  3.]]))
        >>> Codes(8, 4).decode(codes, scales, (1, 5))
        tensor([[-0.5030,  0.2512, -0.0000,  1.0000,  3.0000]])
    """

    bits: int = 8
    block: int = 128
    code: str = "companded"
    signed: bool = False

    def nbytes(self, numel: int, itemsize: int = 4) -> int:
        """Bytes of the codes of a row, and of its scales.

        >>> Codes().nbytes(128), Codes(4).nbytes(129)
        (132, 73)
        """
        return -(-numel * self.bits // 8) + -(-numel // self.block) * itemsize

    def shrinks(self, x: Tensor) -> bool:
        """Whether codes and scales of a tensor take fewer bytes than the tensor.

        Examples:
            >>> [Codes().shrinks(torch.zeros(shape)) for shape in ((), (512,), (512, 1), (512, 2))]
            [False, False, False, True]
        """
        row = prod(x.shape[1:])
        return self.nbytes(row, x.itemsize) < row * x.itemsize

    def encode(self, x: Tensor, draws: Draws | BlockDraws | None = None) -> tuple[Tensor, Tensor]:
        """The codes of a tensor with at least one dimension, and their scales.

        A block with an infinity or a NaN gets the scale NaN, and is NaN when it is decoded.

        Args:
            x: of a floating-point dtype.
            draws: the random bits of stochastic rounding, which rounds each number up or down at random, right on
                average. By default each number is rounded to the nearest code. A number that a code represents
                exactly always gets this code.

        Returns:
            `(codes, scales)`. Codes are uint8: 8-bit codes have the shape of `x`, and 4-bit codes, two in a byte, have
            the shape `(x.shape[0], bytes in a row)`. Scales have the dtype of `x` and the shape
            `(x.shape[0], blocks in a row)`.
        """
        row = prod(x.shape[1:])
        rows = x.reshape(x.shape[0], row)
        if (kernel := self._kernel(x)) is not None and (not isinstance(draws, Draws) or draws.of_one_key(x.numel())):
            codes, scales = _encode(kernel, rows.contiguous(), self, draws)
            return codes.reshape(x.shape) if self.bits == 8 else codes, scales
        return self.encode_by_torch(x, draws)

    def encode_by_torch(self, x: Tensor, draws: Draws | BlockDraws | None = None) -> tuple[Tensor, Tensor]:
        """`encode` by torch's operations: the reference, with which kernels are compared."""
        row = prod(x.shape[1:])
        rows = x.reshape(x.shape[0], row)
        each = max(1, AT_ONCE // max(row, 1)) if x.is_cpu and concrete(x) else max(1, len(rows))
        # Not `split`, which torch 2.11 cannot do of no rows at all in the mode that computes shapes alone.
        slices = [slice(low, low + each) for low in range(0, max(1, len(rows)), each)]
        parts = [self._encoded(rows[at], self._bits(draws, rows[at], at.start * row)) for at in slices]
        codes, scales = (torch.cat(column) if len(parts) > 1 else column[0] for column in zip(*parts, strict=True))
        return codes.reshape(x.shape).contiguous() if self.bits == 8 else _paired(codes), scales

    def decode(self, codes: Tensor, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """The numbers of codes, in the dtype of the scales.

        Args:
            codes, scales: as `encode` returns them.
            shape: of the numbers.
        """
        row = prod(shape[1:])
        if scales.dtype == torch.float32 and (kernel := self._kernel(scales, shape)) is not None:
            return _decode(kernel, codes.contiguous(), scales.contiguous(), self, row).reshape(tuple(shape))
        return self.decode_by_torch(codes, scales, shape)

    def decode_by_torch(self, codes: Tensor, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """`decode` by torch's operations."""
        row = prod(shape[1:])
        codes = codes.reshape(shape[0], row) if self.bits == 8 else _apart(codes, row)
        each = max(1, AT_ONCE // max(row, 1)) if codes.is_cpu and concrete(codes) else max(1, len(codes))
        slices = [slice(low, low + each) for low in range(0, max(1, len(codes)), each)]
        parts = [self._decoded(codes[at], scales[at]) for at in slices]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).reshape(tuple(shape)).contiguous()

    def encode_each(self, xs: Sequence[Tensor], draws: Sequence[Draws | None]) -> list[tuple[Tensor, Tensor]]:
        """Encode each tensor. On a GPU one call encodes all tensors whose rows have the same length."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for places in _alike([x.shape for x in xs], xs):
            several = [draws[i] for i in places]
            if len(places) == 1 or any(
                d and not d.of_one_key(xs[i].numel()) for i, d in zip(places, several, strict=True)
            ):
                found |= {i: self.encode(xs[i], draws[i]) for i in places}
                continue
            rows = torch.cat([xs[i].reshape(len(xs[i]), -1) for i in places])
            bits = None
            if several[0] is not None:
                bits = _drawn(several, [xs[i].numel() for i in places], rows.device)
                bits = self._blocks(bits.view(rows.shape))
            codes, scales = self._encoded(rows, bits)
            codes = codes.contiguous() if self.bits == 8 else _paired(codes)
            counts = [len(xs[i]) for i in places]
            for i, x, y in zip(places, codes.split(counts), scales.split(counts), strict=True):
                found[i] = x.reshape(xs[i].shape) if self.bits == 8 else x, y
        return [found[i] for i in range(len(xs))]

    def decode_each(
        self, codes: Sequence[Tensor], scales: Sequence[Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Decode each pair of codes and scales. On a GPU one call decodes all pairs whose rows have the same length."""
        found: dict[int, Tensor] = {}
        for places in _alike(shapes, scales):
            if len(places) == 1:
                found |= {i: self.decode(codes[i], scales[i], shapes[i]) for i in places}
                continue
            row = prod(shapes[places[0]][1:])
            every = torch.cat([codes[i].reshape(len(codes[i]), -1) for i in places])
            every = every if self.bits == 8 else _apart(every, row)
            numbers = self._decoded(every, torch.cat([scales[i] for i in places])).contiguous()
            for i, x in zip(places, numbers.split([shapes[i][0] for i in places]), strict=True):
                found[i] = x.view(tuple(shapes[i]))
        return [found[i] for i in range(len(codes))]

    def _kernel(self, x: Tensor, shape: Sequence[int] | None = None) -> Any:
        """The C library, if `x` is in a CPU's memory and large enough that a call of C is faster; else `None`."""
        numel = x.numel() if shape is None else prod(shape)
        if numel < LARGE or type(x) not in _PLAIN or not x.is_cpu or x.dtype != torch.float32 or not concrete(x):
            return None
        return _library(self.bits, self.code, self.signed)

    def _bits(self, draws: Draws | BlockDraws | None, rows: Tensor, low: int) -> Tensor | None:
        """Random bits of these rows, by block; `low` is the place of their first number in the tensor."""
        if draws is None:
            return None
        if isinstance(draws, BlockDraws):
            return draws.bits(self._blocks(rows).to(torch.float32))
        return self._blocks(draws.bits(low, low + rows.numel(), rows.device).view(rows.shape))

    def _encoded(self, rows: Tensor, bits: Tensor | None) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(rows.dtype, torch.float32)
        x = self._blocks(rows).to(wide)
        size = x.abs()
        scale = size.amax(-1, keepdim=True)
        negative = torch.ones_like(scale, dtype=torch.bool) if self.signed else x.signbit().any(-1, keepdim=True)
        # This makes the scale of a block with an infinity NaN, since inf - inf is NaN.
        scale = scale + (scale - scale)
        # `lift` moves scales to where a reciprocal is finite: that of a subnormal number is infinite.
        lift = torch.ones_like(scale).masked_fill(scale < 2.0**-64, 2.0**64).masked_fill(scale > 2.0**64, 2.0**-64)
        y = size * lift * torch.where(scale > 0, scale * lift, torch.inf).reciprocal()
        signed, (n, m) = self.signed or _one_kind(negative), self._ends
        if self.code == "dynamic":
            y = torch.copysign(y, x)
            code = where(
                signed,
                lambda: self._from_table(x, y, scale, True, bits, rows.dtype),
                lambda: self._from_table(x, y, scale, False, bits, rows.dtype),
            )
            return self._stored(code, x, scale, negative, signed, rows)
        if self.code == "companded":
            at = where(signed, lambda: y * (2 * n) / (y + 1), lambda: exact_root(y) * m)
        else:
            at = where(signed, lambda: y * n, lambda: y * m)
        code = at.round()
        if bits is not None:
            # `u` is never near 0 or 1, so that rounding errors of `at` never move a number that has a code.
            u, low = _fractions(bits), at.floor()
            if self.code == "companded":
                above = where(
                    signed, lambda: (y * (2 * n - low) - low) * (2 * n - 1 - low), lambda: y * m**2 - low * low
                )
                gap: Any = where(signed, lambda: torch.full_like(low, 2 * n), lambda: low + low + 1)
            else:
                above, gap = at - low, 1
            found = low + (u * gap < above)
            # Numbers of 16 bits and subnormal numbers have larger rounding errors: here those with a code are found.
            code = torch.where(self._numbers(code, scale, signed, rows.dtype) == size, code, found)
        code = where(signed, lambda: torch.copysign(code, x) + n, code)
        return self._stored(code, x, scale, negative, signed, rows)

    def _from_table(
        self, x: Tensor, y: Tensor, scale: Tensor, signed: bool, bits: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """The places in a table of numbers `y`, from -1 to 1: of the nearest entry, or of one of two neighbours."""
        table = self._table(signed, y)
        low = (torch.bucketize(y, table, right=True) - 1).clamp(0, len(table) - 1)
        high = (low + 1).clamp(max=len(table) - 1)
        below, above = table[low], table[high]
        code = torch.where(y - below > above - y, high, low)
        if bits is not None:
            found = torch.where(_fractions(bits) * (above - below) < y - below, high, low)
            code = torch.where((table[code] * scale).to(dtype).to(scale.dtype) == x, code, found)
        return code.to(scale.dtype)

    def _table(self, signed: bool, like: Tensor) -> Tensor:
        table = torch.tensor(dynamic_map(self.bits, signed), dtype=like.dtype)
        # A copy from memory that is not pinned could wait for the device.
        return table.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else table.to(like.device)

    def _stored(
        self, code: Tensor, x: Tensor, scale: Tensor, negative: Tensor, signed: bool | Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        # A second moment other than zero gets a code other than zero.
        code = where(signed, code, lambda: code.maximum((x > 0).to(code.dtype)))
        # In a block whose scale is zero or NaN all codes are zero.
        code = code.to(torch.uint8) * (scale > 0)
        scales = torch.where(negative, -scale, scale).squeeze(-1).to(rows.dtype)
        return code.flatten(1)[:, : rows.shape[1]], scales

    def _decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        wide = torch.promote_types(scales.dtype, torch.float32)
        scale, code = scales.to(wide).unsqueeze(-1), self._blocks(codes).to(wide)
        signed, n = _one_kind(scale < 0), self._ends[0]
        if self.code == "dynamic":
            code = code.long()
            found = where(signed, lambda: self._table(True, scale)[code], lambda: self._table(False, scale)[code])
            return (found * scale.abs()).to(scales.dtype).flatten(1)[:, : codes.shape[1]]
        # Zeros are -0.0, so that a block whose negative numbers have all become zero is still of the signed kind.
        code = where(signed, lambda: -(n - code), code)
        found = self._numbers(code, scale.abs(), signed, scales.dtype)
        return found.to(scales.dtype).flatten(1)[:, : codes.shape[1]]

    def _numbers(self, code: Tensor, scale: Tensor, signed: bool | Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of codes from -127 to 127 or from 0 to 255, as they are in a dtype."""
        n, m = self._ends
        # These multiply by a reciprocal, as a GPU does to divide by a number. For all n used here, n * (1 / n) is 1.
        if self.code == "companded":
            y = where(signed, lambda: code / (2 * n - code.abs()), lambda: code * code * (1 / m**2))
        else:
            y = where(signed, lambda: code * (1 / n), lambda: code * (1 / m))
        return (y * scale).to(dtype).to(scale.dtype)

    @property
    def _ends(self) -> tuple[int, int]:
        """The code of 1 in a block with a negative number, and in a block without one."""
        return 2 ** (self.bits - 1) - 1, 2**self.bits - 1

    def _blocks(self, rows: Tensor) -> Tensor:
        return _blocks(rows, self.block)


def dynamic_map(bits: int, signed: bool) -> tuple[float, ...]:
    """The table of dynamic tree quantization (Dettmers et al., 2022), in its order.

    The bits of a code, without that of the sign, are zeros, a one and a fraction. With `e` zeros it is the middle of an
    interval of `[0.1, 1]`, cut into as many as the fraction has values, times `10**-e`. Without a sign the fraction has
    one bit more. Of the two codes that are left one is zero, the other is 1; as published there is no -1.

    Examples:
        >>> [round(x, 4) for x in dynamic_map(4, True)[7:]]
        [-0.0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0]
        >>> len(dynamic_map(8, True)), len(dynamic_map(8, False)), min(dynamic_map(8, True))
        (256, 256, -0.99296875)
    """
    levels = bits - 1
    values: list[float] = []
    for i in range(levels):
        count = 2**i if signed else 2 ** (i + 1)
        values += [10.0 ** (i + 1 - levels) * (0.1 + 0.9 * (j + 0.5) / count) for j in range(count)]
    # The zero is -0.0, so that a block whose negative numbers have all become zero is still of the signed kind.
    return (*(-x for x in reversed(values)), -0.0, *values, 1.0) if signed else (0.0, *values, 1.0)


@dataclass(frozen=True)
class Float8:
    """Numbers as floats of 8 bits, of which 3 are of the mantissa (e4m3), to nearest: small numbers keep their digits.

    Attributes:
        block: numbers of a row that share a scale, their largest magnitude.

    Examples:
        >>> x = torch.tensor([[1.0, 0.01, -0.003, 0.0]])
        >>> Float8().decode(*Float8().encode(x), (1, 4))
        tensor([[ 1.0000,  0.0100, -0.0031,  0.0000]])
    """

    block: int = 128
    bits: ClassVar[int] = 8

    def nbytes(self, numel: int) -> int:
        """Bytes of the codes of a row, and of its scales."""
        return numel + -(-numel // self.block) * 4

    def encode(self, x: Tensor, draws: None = None) -> tuple[Tensor, Tensor]:
        """Codes, uint8 in the shape of `x` (rows, numbers), and scales (rows, blocks), fp32."""
        blocks = _blocks(x.to(torch.float32), self.block)
        scale = blocks.abs().amax(-1, keepdim=True)
        # This makes the scale of a block with an infinity NaN, since inf - inf is NaN.
        scale = scale + (scale - scale)
        y = blocks / torch.where(scale == 0, torch.inf, scale) * LARGEST
        codes = reinterpret(y.to(torch.float8_e4m3fn), torch.uint8)
        return codes.flatten(1)[:, : x.shape[1]], scale.squeeze(-1)

    def decode(self, codes: Tensor, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """The numbers of codes, fp32."""
        y = reinterpret(_blocks(codes, self.block), torch.float8_e4m3fn).to(torch.float32)
        return (y / LARGEST * scales.unsqueeze(-1)).flatten(1)[:, : shape[1]].reshape(tuple(shape))


def _blocks(rows: Tensor, block: int) -> Tensor:
    """Rows as `(rows, blocks, numbers)`, with zeros behind the last block."""
    row = rows.shape[1]
    blocks = -(-row // block)
    rows = pad(rows, (0, blocks * block - row)) if row % block else rows
    return rows.reshape(rows.shape[0], blocks, block)


@dataclass(frozen=True)
class Coded:
    """A tensor that is kept as codes, for a kernel that updates it without its numbers in memory.

    Attributes:
        how: the settings of the codes.
        codes, scales: the results of `Codes.encode`. A kernel writes new ones over them.
        draws: the random bits that round new numbers; `None` if they are rounded to the nearest code.
    """

    how: Codes
    codes: Tensor
    scales: Tensor
    draws: Draws | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its numbers."""
        return self.scales.dtype

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.codes, self.scales

    def clone(self) -> Coded:
        return Coded(self.how, self.codes.clone(), self.scales.clone(), self.draws)


class Coding(NamedTuple):
    """Which columns of a program are kept as codes, and by which code.

    Attributes:
        columns: the columns; their numbers are all fp32, or all bf16.
        bits, code: of `Codes`.
    """

    columns: tuple[int, ...]
    bits: int
    code: str


def coding_of(columns: Sequence[Sequence[Any]]) -> Coding | None:
    """How columns are kept as codes: those that are lists of `Coded`, all of the same settings."""
    coded = [i for i, column in enumerate(columns) if type(column[0]) is Coded]
    if not coded:
        return None
    how = columns[coded[0]][0].how
    return Coding(tuple(coded), how.bits, how.code)


# Elements that are coded in one call on a GPU: a dozen temporary tensors are as long.
TOGETHER = 1 << 24


def _alike(shapes: Sequence[Sequence[int]], tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of tensors of a GPU that can be coded in one call; each other tensor alone."""
    groups: list[list[int]] = []
    opened: dict[Any, tuple[list[int], int]] = {}
    for i, (shape, x) in enumerate(zip(shapes, tensors, strict=True)):
        kind = prod(shape[1:]), x.dtype, x.device, bool(prod(shape)) and x.is_cuda and concrete(x)
        group, size = opened.get(kind, ([], 0))
        if not kind[-1] or not group or size + prod(shape) > TOGETHER:
            group, size = [], 0
            groups.append(group)
        group.append(i)
        opened[kind] = group, size + prod(shape)
    return groups


def _drawn(draws: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Tensor:
    """The random bits of several leaves, one behind the other, in as many launches as for one leaf."""
    stride, begin = stride_of(FORMAT), 0
    words: list[tuple[int, int, int]] = []
    for one, n in zip(draws, sizes, strict=True):
        key: Any = stream_key(one.seed, number(one.step), one.key, block=one.offset >> 32)
        first = key[0] + (one.offset - begin) * stride
        begin += n
        words.append((as_int32(first), as_int32(key[1]), begin))
    packed = torch.tensor(list(zip(*words, strict=True)), dtype=torch.int32)
    # A copy from memory that is not pinned could wait for the device.
    on_device = packed.pin_memory().to(device, non_blocking=True)
    at = torch.arange(begin, dtype=torch.int32, device=device)
    # Not `repeat_interleave`, which waits for the device.
    first, k1 = on_device[:2].index_select(1, torch.bucketize(at, on_device[2], right=True))
    return draw((at * as_int32(stride)).add_(first), k1)


def _fractions(bits: Tensor) -> Tensor:
    """Numbers between 0 and 1, and never near either."""
    return ((bits >> 16 & 0xFFF0) | 8).to(torch.float32) * 2.0**-16


def _one_kind(signed: Tensor) -> bool | Tensor:
    """`signed` as one bool if a CPU sees that all blocks are of one kind, which halves the work; else unchanged."""
    if not signed.is_cpu or not concrete(signed) or is_shape_only(signed):
        return signed
    found = bool(signed.any())
    return found if not found or bool(signed.all()) else signed


def _paired(codes: Tensor) -> Tensor:
    """Rows of codes of 4 bits, two in a byte, the first one below.

    >>> _paired(torch.tensor([[1, 2, 3]], dtype=torch.uint8)).tolist()
    [[33, 3]]
    """
    even = pad(codes, (0, codes.shape[1] % 2))
    return even[:, 0::2] | even[:, 1::2] << 4


def _apart(pairs: Tensor, row: int) -> Tensor:
    """The inverse of `_paired`, for rows of `row` codes.

    >>> _apart(torch.tensor([[33, 3]], dtype=torch.uint8), 3).tolist()
    [[1, 2, 3]]
    """
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)[:, :row]


# ----------------------------------------------------------------------------------------------------------------------
# `codes.c` does the same in one pass, on float32 in a CPU's memory.


# For smaller tensors a call of C takes longer than torch.
LARGE = 1 << 11
HEADERS = [Path(__file__).with_name(name) for name in ("native_codes.h", "native_draws.h", "native_threads.h")]
_FILES = [Path(__file__).with_name("codes.c"), *HEADERS]
_PLAIN = (Tensor, torch.nn.Parameter)


class _Job(ctypes.Structure):
    """``job`` of ``codes.c``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales")),
        ("row", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("random", ctypes.c_int),
        *((name, ctypes.c_uint64) for name in ("seed", "step", "key", "offset")),
    ]


def _encode(kernel: Any, rows: Tensor, how: Codes, draws: Draws | BlockDraws | None) -> tuple[Tensor, Tensor]:
    where: Any = (0, 0, 0, 0, 0)
    if isinstance(draws, BlockDraws):
        where = 2, draws.seed, 0, 0, 0
    elif draws is not None:
        where = 1, draws.seed, number(draws.step), draws.key, draws.offset
    count, row = rows.shape
    codes = torch.empty((count, row if how.bits == 8 else -(-row // 2)), dtype=torch.uint8)
    scales = torch.empty((count, -(-row // how.block)))
    addresses = rows.data_ptr(), codes.data_ptr(), scales.data_ptr()
    job = _Job(*addresses, row, how.block, *where)
    kernel.zerofn_encode(ctypes.byref(job), count, torch.get_num_threads(), native.parallel())
    return codes, scales


def _decode(kernel: Any, codes: Tensor, scales: Tensor, how: Codes, row: int) -> Tensor:
    x = torch.empty((len(scales), row))
    job = _Job(x.data_ptr(), codes.data_ptr(), scales.data_ptr(), row, how.block)
    kernel.zerofn_decode(ctypes.byref(job), len(scales), torch.get_num_threads(), native.parallel())
    return x


def defines_of(how: Codes) -> list[str]:
    """Macro definitions for the compiler, as `native_codes.h` wants them."""
    found = [f"-DZF_BITS={how.bits}", f"-DZF_MAP={MAPS.index(how.code)}", f"-DZF_SIGNED={int(how.signed)}"]
    if how.code == "dynamic":
        tables = [[f"{x!r}f" for x in dynamic_map(how.bits, signed)] for signed in (True, False)]
        found += [f"-DZF_{name}={','.join(t)}" for name, t in zip(("TABLE", "POSITIVE_TABLE"), tables, strict=True)]
    return [*found, f"-DZF_STRIDE={stride_of(FORMAT)}u"]


@functools.cache
def _library(bits: int, code: str, signed: bool = False) -> Any:
    """The C library, after a check that it gives the bits of torch on a sample; else ``None``."""
    command = native.quiet_compiler()
    if command is None:
        return None
    try:
        library = native.library(command, _FILES, defines_of(Codes(bits, 128, code, signed)), _declared)
    except (OSError, AttributeError):
        return None
    how, draws = Codes(bits, 37, code, signed), Draws(1, torch.tensor(2), 3, 4)
    x = torch.cat([one.reshape(-1, 90) for (one,) in native.sample(90 * 5)]).nan_to_num(0.0)
    for given in (None, draws, BlockDraws(5)):
        mine = _encode(library, x, how, given)
        codes, scales = how._encoded(x, how._bits(given, x, 0))
        theirs = codes if bits == 8 else _paired(codes), scales
        back = _decode(library, *mine, how, 90), how._decoded(codes, scales)
        if not all(map(torch.equal, (*mine, back[0]), (*theirs, back[1]))):
            return None
    return library


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    for function in (library.zerofn_encode, library.zerofn_decode):
        function.argtypes = [ctypes.POINTER(_Job), ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
        function.restype = None
    return library
