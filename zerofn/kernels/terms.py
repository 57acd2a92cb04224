"""Terms of optimizers' formulas, such as `x + factor * a * b`, as one operation where the factor is a number.

One operation instead of three reads memory once, and autograd saves its inputs, not the intermediate products. A factor
that is a tensor, a rate that is learned or differs along a batch, has no such operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._compat.operators import foreach_mul
from .recording import differentiated, recorded


def once(*numbers: Any) -> tuple[Any, ...]:
    """The same numbers; in a graph as tensors that are materialised in memory, computed once.

    Otherwise the compiler inlines the computation of a small tensor into the loop over elements that uses it: with the
    two powers of a bias correction in the loop AdamW takes three times as long. It does not inline through a stack.
    """
    if not torch.compiler.is_compiling():
        return numbers
    found, kinds = list(numbers), {}
    for i, x in enumerate(numbers):
        if isinstance(x, Tensor):
            kinds.setdefault((x.dtype, x.device, x.shape), []).append(i)
    for places in kinds.values():
        # Never one alone, whose stack is a view of it.
        for i, x in zip(places, torch.stack([found[i] for i in (*places, places[0])]).unbind(), strict=False):
            found[i] = x
    return tuple(found)


def plus(x: Tensor, factor: Any, y: Tensor) -> Tensor:
    """`x + factor * y`."""
    return x + factor * y if isinstance(factor, Tensor) else x.add(y, alpha=factor)


def plus_product(x: Tensor, factor: Any, a: Tensor, b: Tensor) -> Tensor:
    """`x + factor * a * b`."""
    return x + factor * a * b if isinstance(factor, Tensor) else x.addcmul(a, b, value=factor)


def plus_quotient(x: Tensor, factor: Any, a: Tensor, b: Tensor) -> Tensor:
    """`x + factor * a / b`."""
    return x + factor * a / b if isinstance(factor, Tensor) else x.addcdiv(a, b, value=factor)


def scaled(tensors: Mapping[str, Tensor], factor: Tensor) -> dict[str, Tensor]:
    """Each of them times a 0-d factor, which is rounded to its dtype first; one call for all where nothing records."""
    factors = {dtype: factor.to(dtype) for dtype in {x.dtype for x in tensors.values()}}
    if len(factors) == 1 and not recorded((factor, *tensors.values())):
        return dict(zip(tensors, foreach_mul(list(tensors.values()), *factors.values()), strict=True))
    return {path: x * factors[x.dtype] for path, x in tensors.items()}


def moment_root(x: Tensor) -> Tensor:
    """`x.sqrt()` of a second moment, to be added to an epsilon: where derivatives may be asked for at least 1e-19.

    As `root`, with a third of the operations: what is below the smallest normal number, 1.2e-38, counts as that number
    and has no derivative. An epsilon from 1e-10 on does not change where the root of that is added, and in float64,
    where the root is 1.5e-154, no epsilon does.

    >>> torch.func.grad(lambda x: moment_root(x * x) + 1e-8)(torch.tensor(0.0))
    tensor(0.)
    """
    if not differentiated(x):
        return x.sqrt()
    least = torch.finfo(x.dtype).tiny
    # A comparison that a NaN fails, so that it stays.
    return torch.where(x < least, least, x).sqrt()
