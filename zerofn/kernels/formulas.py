"""The words of formulas: `x + factor * a * b`, a step towards another tensor, roots, numbers in compiled graphs.

Each has one rounding for each operation and fuses nothing, so that its bits are the same on every processor, in every
kernel, and wherever a shard ends. torch's own `add(alpha=)`, `addcmul` and `lerp` fuse a product with a sum on some
processors, and not in the last elements of a tensor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .numbers import Number
from .program import TensorList, Term, as_dtype, in_dtype
from .recording import certain, differentiated, recorded


def once(*numbers: Any) -> tuple[Any, ...]:
    """The same numbers; in a compiled graph they are tensors in memory, which are computed once.

    Without `once` the compiler inlines the computation of a small tensor into the loop over elements that uses it. With
    the two powers of a bias correction in that loop, AdamW takes three times as long. `once` passes the tensors through
    `torch.stack`, because the compiler does not inline what is stacked.
    """
    if not torch.compiler.is_compiling():
        return numbers
    found, kinds = list(numbers), {}
    for i, x in enumerate(numbers):
        if isinstance(x, Tensor):
            kinds.setdefault((x.dtype, x.device, x.shape), []).append(i)
    for places in kinds.values():
        # One tensor is stacked twice, since a stack of one would be a view of it.
        for i, x in zip(places, torch.stack([found[i] for i in (*places, places[0])]).unbind(), strict=False):
            found[i] = x
    return tuple(found)


def beside(number: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A number to compute with beside `like`: on its device, and in this dtype if one is given.

    A 0-d tensor of the host may stay there: operations of a GPU read it as a number, and a copy would wait.
    """
    if number.is_cpu and not number.ndim and like.device.type == "cuda" and not recorded((number,)):
        return number.to(dtype or number.dtype)
    return number.to(like.device, dtype or number.dtype)


def rounded(number: Any, like: Tensor) -> Any:
    """A number, rounded to the dtype of `like`, to compute with beside it.

    Examples:
        >>> torch.ones(1, dtype=torch.bfloat16) * rounded(torch.tensor(1.001), torch.ones(1, dtype=torch.bfloat16))
        tensor([1.], dtype=torch.bfloat16)
    """
    if isinstance(number, Number):
        return number.through(partial(in_dtype, like.dtype))
    if isinstance(like, TensorList) and isinstance(number, Tensor) and not number.is_cpu:
        # In the kernel, not in a launch of its own.
        return as_dtype(Term("scalar", (number,), number.dtype), like.dtype)
    return beside(number, like, like.dtype) if isinstance(number, Tensor) else in_dtype(like.dtype, number)


def times(x: Tensor, factor: Any) -> Tensor:
    """`factor * x` in the dtype of `x`; the factor is a number, or a 0-d tensor on any device.

    Examples:
        >>> times(torch.ones(2, dtype=torch.bfloat16), torch.tensor(3.0))
        tensor([3., 3.], dtype=torch.bfloat16)
    """
    return (x * beside(factor, x)).to(x.dtype) if isinstance(factor, Tensor) else x * factor


def plus(x: Tensor, factor: Any, y: Tensor) -> Tensor:
    """`x + factor * y`, where the factor is a number or a 0-d tensor on any device.

    Examples:
        >>> plus(torch.ones(2), 0.5, torch.tensor([2.0, 4.0]))
        tensor([2., 3.])
    """
    return x + (beside(factor, y) if isinstance(factor, Tensor) else factor) * y


def plus_product(x: Tensor, factor: Any, a: Tensor, b: Tensor) -> Tensor:
    """`x + factor * a * b`, where the factor is a number or a 0-d tensor on any device.

    Examples:
        >>> plus_product(torch.ones(2), 0.5, torch.tensor([2.0, 4.0]), torch.tensor([3.0, 3.0]))
        tensor([4., 7.])
    """
    return x + (beside(factor, a) if isinstance(factor, Tensor) else factor) * a * b


def plus_quotient(x: Tensor, factor: Any, a: Tensor, b: Tensor) -> Tensor:
    """`x + factor * a / b`, where the factor is a number or a 0-d tensor on any device.

    Examples:
        >>> plus_quotient(torch.ones(2), 0.5, torch.tensor([2.0, 4.0]), torch.tensor([2.0, 2.0]))
        tensor([1.5000, 2.0000])
    """
    return x + (beside(factor, a) if isinstance(factor, Tensor) else factor) * a / b


def at_most(norm: Tensor, most: Any) -> Tensor | None:
    """The factor `min(1, most / (norm + 1e-6))`, which brings a norm down to `most`; `None` if it is 1.

    With `None` the caller leaves out the multiplication, so no bit of a gradient changes. If nothing records and the
    norm is on the CPU, `at_most` reads the norm. On a GPU it does not read the norm, which would synchronise.

    Examples:
        >>> at_most(torch.tensor(5.0), 1.0), at_most(torch.tensor(0.5), 1.0)
        (tensor(0.2000), None)
    """
    read = norm.is_cpu and not recorded((norm, most))
    if read and norm.item() * 1.001 + 1e-5 < most:
        return None
    if norm.is_cuda and not recorded((norm, most)):
        return ((TensorList([norm]) + 1e-6).reciprocal() * most).clamp(max=1.0).tensors[0]
    ratio = (norm + 1e-6).reciprocal().mul(most)
    if read:
        # A factor of at most 1, or NaN, needs no clamp.
        return None if ratio.item() > 1 else ratio
    return None if norm.is_cpu and certain(ratio > 1) else once(ratio.clamp(max=1.0))[0]


def towards(x: Tensor, y: Tensor, weight: Any, out: Tensor | None = None) -> Tensor:
    """`x + weight * (y - x)` in the dtype of `x`; into `out` if that is given.

    Examples:
        >>> towards(torch.zeros(2), torch.ones(2), 0.25)
        tensor([0.2500, 0.2500])
    """
    step = (y.to(x.dtype) - x) * (weight.to(x) if isinstance(weight, Tensor) and isinstance(x, Tensor) else weight)
    return x + step if out is None else torch.add(x, step, out=out)


def moment_root(x: Tensor) -> Tensor:
    """The root of a second moment, to which the caller adds an epsilon; at least 1e-19 if derivatives may be asked for.

    `moment_root` takes a third of the operations of `root`. A value below the smallest normal number of its dtype
    counts as that number, and its derivative is 0. The root of that number is 1e-19 in float32, which changes no digit
    of an epsilon of 1e-10 or more. In float64 the root is 1.5e-154, too small beside any epsilon.

    Examples:
        >>> torch.func.grad(lambda x: moment_root(x * x) + 1e-8)(torch.tensor(0.0))
        tensor(0.)
    """
    if not differentiated(x):
        return exact_root(x)
    least = torch.finfo(x.dtype).tiny
    # `<` is false for NaN, so that NaN stays.
    return exact_root(torch.where(x < least, least, x))


def exact_root(x: Tensor) -> Tensor:
    """The root of float32 numbers, correctly rounded.

    On a CPU torch takes roots of long float32 tensors from a library that is off by a unit in the last place in one of
    six numbers. A root in float64, rounded to float32, is always the nearest number. For float64 there is no wider
    dtype, and torch's root is off in one of eighty.

    Examples:
        >>> exact_root(torch.tensor(2.0))
        tensor(1.4142)
    """
    if x.dtype is torch.float64 or isinstance(x, TensorList) or not x.is_cpu or torch.compiler.is_compiling():
        return x.sqrt()
    return x.double().sqrt().to(x.dtype)
