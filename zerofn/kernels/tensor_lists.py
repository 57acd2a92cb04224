"""Checks on lists of tensors before a fused kernel is called, and gradients in the layout of their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, methodcaller

import torch
from torch import Tensor

from .._compat.functorch import functorch_active, is_wrapped

# Read of every leaf in every step, and so from C.
_DTYPE, _DEVICE, _STRIDE = attrgetter("dtype"), attrgetter("device"), methodcaller("stride")
_IS_CPU = attrgetter("is_cpu")


def plain(tensors: list[Tensor]) -> bool:
    """Whether fused kernels can take the tensors: one dtype and device, and no torch.func wrapper."""
    return not_wrapped(tensors) and alike(tensors)


def not_wrapped(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor is a wrapper of torch.func, batched or differentiated."""
    return not (functorch_active() and any(map(is_wrapped, tensors)))


def alike(tensors: list[Tensor]) -> bool:
    """Whether a fused kernel can take the tensors together: of one dtype and device."""
    return len(set(map(_DTYPE, tensors))) == 1 and (all(map(_IS_CPU, tensors)) or len(set(map(_DEVICE, tensors))) == 1)


def typed(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Gradients in their parameters' dtypes and strides; the same tensors where they are already.

    Fused kernels walk memory, so a channels-last parameter needs a channels-last gradient.
    """
    if list(map(_DTYPE, params)) == list(map(_DTYPE, grads)):
        # Nearly all lie without a gap and in the order of rows. Comparing strides takes longer, since it makes tuples.
        rows = all(map(Tensor.is_contiguous, params)) and all(map(Tensor.is_contiguous, grads))
        if rows or list(map(_STRIDE, params)) == list(map(_STRIDE, grads)):
            return grads
    return [
        g if g.dtype == p.dtype and g.stride() == p.stride() else torch.empty_like(p).copy_(g)
        for p, g in zip(params, grads, strict=True)
    ]
