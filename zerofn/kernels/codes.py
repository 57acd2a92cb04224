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

Sources: blocks with a scale of their own and more codes for small numbers (Dettmers et al., "8-bit Optimizers via
Block-wise Quantization", ICLR 2022); no zero among the codes of second moments (Li et al., "Memory Efficient Optimizers
with 4-bit States", NeurIPS 2023); the two functions (FlashOptim, 2026). Other than there, rounding is stochastic, by
bits from a counter (`rounding.py`): to nearest, a second moment that changes by a thousandth would stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from .recording import concrete

# Elements that are coded at once, so that temporary tensors stay in a CPU's cache.
AT_ONCE = 1 << 17

# From the first and the last element of a range, 32 random bits for each element of it.
Draw = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Codes:
    """How numbers become codes, and codes numbers.

    Attributes:
        bits: of a code, 8 or 4; two codes of 4 bits share a byte.
        block: numbers of a row that share a scale.
        companded: whether small magnitudes get more codes than large ones; if not, codes are evenly spaced.

    Examples:
        >>> codes, scales = Codes(8, 4).encode(torch.tensor([[-0.5, 0.25, 0.0, 1.0, 3.0]]))
        >>> codes, scales
        (tensor([[ 42, 178, 127, 254, 255]], dtype=torch.uint8), tensor([[-1.,  3.]]))
        >>> Codes(8, 4).decode(codes, scales, (1, 5))
        tensor([[-0.5030,  0.2512, -0.0000,  1.0000,  3.0000]])
    """

    bits: int = 8
    block: int = 128
    companded: bool = True

    def shrinks(self, x: Tensor) -> bool:
        """Whether codes and scales of a tensor take fewer bytes than the tensor.

        >>> [Codes().shrinks(torch.zeros(shape)) for shape in ((), (512,), (512, 1), (512, 2))]
        [False, False, False, True]
        """
        row = prod(x.shape[1:])
        return -(-row * self.bits // 8) + -(-row // self.block) * x.itemsize < row * x.itemsize

    def encode(self, x: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """The codes of a tensor with at least one dimension, and their scales.

        A block with an infinity or a NaN gets the scale NaN, and is NaN when it is decoded.

        Args:
            x: of a floating-point dtype.
            draw: gives random bits for a range of elements, by which numbers are rounded up or down at random, right on
                average; by default they are rounded to the nearest code. A number that has a code gets this code.

        Returns:
            Codes, uint8: of 8 bits in the shape of `x`, of 4 bits `(x.shape[0], half a row)`. Scales in the dtype of
            `x`, `(x.shape[0], blocks in a row)`.
        """
        row = prod(x.shape[1:])
        rows = x.reshape(x.shape[0], row)
        each = max(1, AT_ONCE // max(row, 1)) if x.is_cpu and concrete(x) else max(1, len(rows))
        parts = [
            self._encoded(part, None if draw is None else draw(low * row, (low + len(part)) * row))
            for low, part in zip(range(0, max(1, len(rows)), each), rows.split(each), strict=True)
        ]
        codes, scales = (torch.cat(column) if len(parts) > 1 else column[0] for column in zip(*parts, strict=True))
        return codes.reshape(x.shape).contiguous() if self.bits == 8 else _paired(codes), scales

    def decode(self, codes: Tensor, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """The numbers of codes, in the dtype of the scales.

        Args:
            codes, scales: as `encode` returns them.
            shape: of the numbers.
        """
        row = prod(shape[1:])
        codes = codes.reshape(shape[0], row) if self.bits == 8 else _apart(codes, row)
        each = max(1, AT_ONCE // max(row, 1)) if codes.is_cpu and concrete(codes) else max(1, len(codes))
        parts = [self._decoded(*part) for part in zip(codes.split(each), scales.split(each), strict=True)]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).reshape(tuple(shape)).contiguous()

    def _encoded(self, rows: Tensor, bits: Tensor | None) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(rows.dtype, torch.float32)
        x = self._blocks(rows).to(wide)
        scale = x.abs().amax(-1, keepdim=True)
        signed = x.signbit().any(-1, keepdim=True)
        # An infinity minus itself is NaN.
        scale = scale + (scale - scale)
        y = torch.where(scale > 0, x / scale, 0.0)
        code = torch.where(signed, _softsign(y) if self.companded else y, y.abs().sqrt() if self.companded else y)
        code = (code * torch.where(signed, self._ends[0], self._ends[1])).round()
        least = torch.where(~signed & (y > 0), 1.0, -float(self._ends[0]))
        code = code.maximum(least)
        if bits is not None:
            u = (self._blocks(bits.view(rows.shape)) >> 8 & 0xFFFFFF).to(torch.float32) * 2.0**-24
            here = self._numbers(code, scale, signed, rows.dtype)
            # The code on the other side of `x`, or the same one if `x` has a code.
            other = (code + (x - here).sign()).maximum(least)
            there = self._numbers(other, scale, signed, rows.dtype)
            code = torch.where(u < (x - here) / (there - here), other, code)
        code = torch.where(scale > 0, code + torch.where(signed, self._ends[0], 0), 0.0).to(torch.uint8)
        scales = torch.where(signed, -scale, scale).squeeze(-1).to(rows.dtype)
        return code.flatten(1)[:, : rows.shape[1]], scales

    def _decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        wide = torch.promote_types(scales.dtype, torch.float32)
        scale, code = scales.to(wide).unsqueeze(-1), self._blocks(codes).to(wide)
        signed = scale < 0
        # Zeros get a sign: a block whose negative numbers have all become zero keeps its kind.
        code = torch.where(signed, -(self._ends[0] - code), code)
        found = self._numbers(code, scale.abs(), signed, scales.dtype)
        return found.to(scales.dtype).flatten(1)[:, : codes.shape[1]]

    def _numbers(self, code: Tensor, scale: Tensor, signed: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of codes from -127 to 127 or from 0 to 255, as they are in a dtype."""
        n, m = self._ends
        # By factors, since a GPU divides by a number so; n times its reciprocal is 1 for all n that occur.
        if self.companded:
            y = torch.where(signed, code / (2 * n - code.abs()), code * code * (1 / m**2))
        else:
            y = torch.where(signed, code * (1 / n), code * (1 / m))
        return (y * scale).to(dtype).to(scale.dtype)

    @property
    def _ends(self) -> tuple[int, int]:
        """The code of 1 in a block with a negative number, and in a block without one."""
        return 2 ** (self.bits - 1) - 1, 2**self.bits - 1

    def _blocks(self, rows: Tensor) -> Tensor:
        """Rows as `(rows, blocks, numbers)`, with zeros behind the last block."""
        row = rows.shape[1]
        blocks = -(-row // self.block)
        rows = pad(rows, (0, blocks * self.block - row)) if row % self.block else rows
        return rows.reshape(rows.shape[0], blocks, self.block)


def _softsign(y: Tensor) -> Tensor:
    return 2 * y / (1 + y.abs())


def _paired(codes: Tensor) -> Tensor:
    """Rows of codes of 4 bits, two in a byte, the first one below.

    >>> _paired(torch.tensor([[1, 2, 3]], dtype=torch.uint8)).tolist()
    [[33, 3]]
    """
    even = pad(codes, (0, codes.shape[1] % 2))
    return even[:, 0::2] | even[:, 1::2] << 4


def _apart(pairs: Tensor, row: int) -> Tensor:
    """
    >>> _apart(torch.tensor([[33, 3]], dtype=torch.uint8), 3).tolist()
    [[1, 2, 3]]
    """
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)[:, :row]
