"""A number of 24 bits as a bf16 number and 8 bits more: what bf16 has rounded away, in 256ths of its last place.

The 24 bits are the first ones of an fp32 number: its sign, its exponent and 15 bits of its mantissa. They are an
integer in which the numbers of one sign follow one another. The bf16 number is that integer over 256, to the nearest
(ties away from zero), and the residual is what remains, from -128 to 127. So both are made by shifts and a sum, each
pair is one number, and the bf16 number is the master rounded to nearest. FlashOptim (2026) keeps such a residual, in
127ths of half the distance to the next number.

The last 8 bits of an fp32 number are rounded to nearest, ties to even: the relative error is at most 2 ** -16. A change
of a parameter by less than 2 ** -17 of it is lost, where bf16 alone loses one below 2 ** -9. Random bits would keep it
on average, but then the residual is not needed: `low_precision_adam(rounding="stochastic")` does with 16 bits.

A zero, an infinity or a NaN has no residual, whatever is kept as one: someone may have written it by hand, over another
number whose residual is still there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._compat.functorch import reinterpret
from .recording import differentiated, straight_through

_SIZE, _INFINITE = 0x7FFFFFFF, 0x7F800000


def master_of(p: Tensor, residual: Tensor) -> Tensor:
    """The master, fp32, of a bf16 tensor and its residual, int8. Derivatives pass to `p` as through a cast.

    Examples:
        >>> p = torch.tensor([1.0, 1.0, -1.0, 0.0], dtype=torch.bfloat16)
        >>> (master_of(p, torch.tensor([1, -128, 64, 9], dtype=torch.int8)) - p) * 2**15
        tensor([  1., -64., -64.,   0.])
    """
    wide = p.to(torch.float32)
    pattern = reinterpret(wide, torch.int32)
    size = pattern & _SIZE
    more = (residual.to(torch.int32) << 8) * ((size > 0) & (size < _INFINITE))
    return straight_through(wide, reinterpret(pattern + more, torch.float32))


def split_master(x: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 tensor as the nearest bf16 numbers and their residuals, int8. Derivatives pass to the bf16 numbers.

    Examples:
        >>> p, residual = split_master(torch.tensor([1.0, 1.0 + 2**-15, 1.0 + 3 * 2**-9, torch.inf]))
        >>> p.tolist(), residual.tolist()
        ([1.0, 1.0, 1.0078125, inf], [0, 1, -64, 0])
    """
    pattern = reinterpret(x, torch.int32)
    near = (pattern + 0x7F + ((pattern >> 8) & 1)) >> 8
    top = (near + 0x80) >> 8
    p = reinterpret(top.to(torch.int16), torch.bfloat16)
    # The sum above carries a NaN over into another number.
    p = torch.where(x.isnan(), torch.nan, p)
    if differentiated(x):
        p = straight_through(x, p.to(torch.float32)).to(torch.bfloat16)
    return p, (near - (top << 8)).to(torch.int8)
