"""Terms of transforms' formulas: `x + factor * a * b`, the factor of a clip, a step towards another tensor.

Each is one operation if the factor is a number: it reads memory once, and autograd saves its inputs instead of
intermediate products. If the factor is a tensor (a learned rate, or one that differs along a batch) there is no such
operation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import foreach_mul
from .recording import certain, differentiated, recorded


def once(*numbers: Any) -> tuple[Any, ...]:
    """The same numbers; in a graph as tensors in memory, which are computed once.

    Otherwise the compiler inlines the computation of a small tensor into the loop over elements that uses it: with the
    two powers of a bias correction in the loop, AdamW takes three times as long. It does not inline through a stack.
    """
    if not torch.compiler.is_compiling():
        return numbers
    found, kinds = list(numbers), {}
    for i, x in enumerate(numbers):
        if isinstance(x, Tensor):
            kinds.setdefault((x.dtype, x.device, x.shape), []).append(i)
    for places in kinds.values():
        # At least two, since a stack of one would be a view of it.
        for i, x in zip(places, torch.stack([found[i] for i in (*places, places[0])]).unbind(), strict=False):
            found[i] = x
    return tuple(found)


def times(x: Tensor, factor: Any) -> Tensor:
    """`factor * x` in the dtype of `x`; the factor is a number, or a 0-d tensor on any device.

    Examples:
        >>> times(torch.ones(2, dtype=torch.bfloat16), torch.tensor(3.0))
        tensor([3., 3.], dtype=torch.bfloat16)
    """
    return (x * factor.to(x.device)).to(x.dtype) if isinstance(factor, Tensor) else x * factor


def plus(x: Tensor, factor: Any, y: Tensor) -> Tensor:
    """`x + factor * y`, where the factor is a number or a 0-d tensor.

    Examples:
        >>> plus(torch.ones(2), 0.5, torch.tensor([2.0, 4.0]))
        tensor([2., 3.])
    """
    return x + factor * y if isinstance(factor, Tensor) else x.add(y, alpha=factor)


def plus_product(x: Tensor, factor: Any, a: Tensor, b: Tensor) -> Tensor:
    """`x + factor * a * b`, where the factor is a number or a 0-d tensor.

    Examples:
        >>> plus_product(torch.ones(2), 0.5, torch.tensor([2.0, 4.0]), torch.tensor([3.0, 3.0]))
        tensor([4., 7.])
    """
    return x + factor * a * b if isinstance(factor, Tensor) else x.addcmul(a, b, value=factor)


def plus_quotient(x: Tensor, factor: Any, a: Tensor, b: Tensor) -> Tensor:
    """`x + factor * a / b`, where the factor is a number or a 0-d tensor.

    Examples:
        >>> plus_quotient(torch.ones(2), 0.5, torch.tensor([2.0, 4.0]), torch.tensor([2.0, 2.0]))
        tensor([1.5000, 2.0000])
    """
    return x + factor * a / b if isinstance(factor, Tensor) else x.addcdiv(a, b, value=factor)


def at_most(norm: Tensor, most: Any) -> Tensor | None:
    """The factor `min(1, most / (norm + 1e-6))`, which brings a norm down to `most`; `None` if it is 1.

    Without the multiplication no bit of a gradient or a derivative changes. If nothing records and the norm is on the
    CPU it is read, and most steps compute nothing. On a GPU reading it would synchronise.

    Examples:
        >>> at_most(torch.tensor(5.0), 1.0), at_most(torch.tensor(0.5), 1.0)
        (tensor(0.2000), None)
    """
    read = norm.is_cpu and not recorded((norm, most))
    if read and norm.item() * 1.001 + 1e-5 < most:
        return None
    ratio = (norm + 1e-6).reciprocal().mul(most)
    if read:
        # A factor that is not above 1, or is NaN, needs no clamp.
        return None if ratio.item() > 1 else ratio
    return None if certain(ratio > 1) else once(ratio.clamp(max=1.0))[0]


def scaled(tensors: dict[str, Tensor], factor: Tensor | None) -> dict[str, Tensor]:
    """Each tensor times a 0-d factor, which is rounded to its dtype first; one call for all if nothing records.

    `None` is a factor of one.

    Examples:
        >>> scaled({"w": torch.ones(2)}, torch.tensor(0.5))
        {'w': tensor([0.5000, 0.5000])}
    """
    if factor is None:
        return tensors
    factors = {dtype: factor.to(dtype) for dtype in {x.dtype for x in tensors.values()}}
    if len(factors) == 1 and not recorded((factor, *tensors.values())):
        return dict(zip(tensors, foreach_mul(list(tensors.values()), *factors.values()), strict=True))
    return {path: x * factors[x.dtype] for path, x in tensors.items()}


def towards(x: Tensor, y: Tensor, weight: Any, out: Tensor | None = None) -> Tensor:
    """`x + weight * (y - x)` in the dtype of `x`; into `out` if that is given and the weight is a number.

    Examples:
        >>> towards(torch.zeros(2), torch.ones(2), 0.25)
        tensor([0.2500, 0.2500])
    """
    y = y.to(x.dtype)
    return x + (y - x) * weight.to(x) if isinstance(weight, Tensor) else torch.lerp(x, y, weight, out=out)


def moment_root(x: Tensor) -> Tensor:
    """The root of a second moment, to which an epsilon is added; at least 1e-19 if derivatives may be asked for.

    As `root`, with a third of the operations: a value below the smallest normal number, 1.2e-38, counts as that number
    and has no derivative. An epsilon from 1e-10 hides that root. In float64, where it is 1.5e-154, any epsilon does.

    Examples:
        >>> torch.func.grad(lambda x: moment_root(x * x) + 1e-8)(torch.tensor(0.0))
        tensor(0.)
    """
    if not differentiated(x):
        return x.sqrt()
    least = torch.finfo(x.dtype).tiny
    # `<` is false for NaN, so that NaN stays.
    return torch.where(x < least, least, x).sqrt()
