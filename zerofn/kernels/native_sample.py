"""The numbers on which a C kernel is compared with torch before it is used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sample(numel: int) -> list[list[Tensor]]:
    """A parameter, a gradient and both moments, as lists of one tensor each, in float32.

    From subnormal to infinite, with each magnitude of one next to many of the others.
    """
    i = torch.arange(numel)
    return [
        [(1 + i % 97 / 97) * 2.0 ** (i * stride % 279 - 150) * sign]
        for stride, sign in zip((1, 2, 4, 5), (1 - i % 2 * 2, 1 - i % 3, 1, 1), strict=True)
    ]


def same_bits(found: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> bool:
    """Whether lists of one tensor each are equal to the bit; of a NaN it counts only that it is one."""
    pairs = zip(found, expected, strict=True)
    return all(a.nan_to_num(nan=0.5).equal(b.nan_to_num(nan=0.5)) for (a,), (b,) in pairs)
