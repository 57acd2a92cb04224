"""Differentiable collectives: pairs of autograd Functions, each the backward of the other, with `jvp` and `vmap` rules.

Nothing simpler is right: a raw collective inside `backward` has no derivative of its own (a Hessian-vector product
through it is silently wrong), `generate_vmap_rule` and the functional collectives fail or return garbage under
`torch.func`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ._group import Group
from ._transfers import all_gather_into, all_reduce_, reduce_scatter_into


def _gathered(x: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    # A cast is elementwise and commutes with the gather: the narrower of the two dtypes travels.
    sent = x.to(dtype) if dtype.itemsize < x.dtype.itemsize else x
    out = sent.new_empty((group.size * sent.shape[0], *sent.shape[1:]))
    all_gather_into(out, sent.contiguous(), group)
    return out.to(dtype)


def _scattered(x: Tensor, group: Group, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> Tensor:
    sent = x.to(reduce_dtype or x.dtype).contiguous()
    out = sent.new_empty((sent.shape[0] // group.size, *sent.shape[1:]))
    reduce_scatter_into(out, sent, group)
    return out.to(dtype)


def reduced(x: Tensor, group: Group, reduce_dtype: torch.dtype | None) -> Tensor:
    sent = x.to(reduce_dtype or x.dtype)
    sent = sent.clone(memory_format=torch.contiguous_format) if sent is x else sent.contiguous()
    all_reduce_(sent, group)
    return sent.to(x.dtype)


class _Linear(Function):
    """What the four collectives share: they are linear maps with an adjoint, along axis 0 or elementwise.

    So the tangent goes through the map itself, the cotangent through the adjoint, and a batch axis rides
    along as the last one. The maps below differ in nothing else, but are written out: autograd and
    `torch.func` find rules as static methods of each class, by name.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, *args = inputs
        ctx.args, ctx.dtype = args, x.dtype

    @classmethod
    def _vmap(cls, in_dims: tuple[Any, ...], x: Tensor, *args: Any) -> tuple[Tensor, int]:
        out = cls.apply(x.movedim(in_dims[0], -1), *args)
        return out, out.dim() - 1


class _Gather(_Linear):
    @staticmethod
    def forward(x: Tensor, group: Group, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> Tensor:
        return _gathered(x, group, dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        group, _, reduce_dtype = ctx.args
        return _Scatter.apply(g, group, ctx.dtype, reduce_dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Any:
        return _Gather.apply(t, *ctx.args)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Any:
        return _Gather._vmap(in_dims, x, *args)


class _Scatter(_Linear):
    @staticmethod
    def forward(x: Tensor, group: Group, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> Tensor:
        return _scattered(x, group, dtype, reduce_dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        group, _, reduce_dtype = ctx.args
        return _Gather.apply(g, group, ctx.dtype, reduce_dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Any:
        return _Scatter.apply(t, *ctx.args)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Any:
        return _Scatter._vmap(in_dims, x, *args)


class _Replicate(_Linear):
    @staticmethod
    def forward(x: Tensor, group: Group, reduce_dtype: torch.dtype | None) -> Tensor:
        return x.view_as(x)  # no copy; autograd refuses to have it changed in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Reduce.apply(g, *ctx.args), None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Any:
        return _Replicate.apply(t, *ctx.args)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Any:
        return _Replicate._vmap(in_dims, x, *args)


class _Reduce(_Linear):
    @staticmethod
    def forward(x: Tensor, group: Group, reduce_dtype: torch.dtype | None) -> Tensor:
        return reduced(x, group, reduce_dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Replicate.apply(g, *ctx.args), None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Any:
        return _Reduce.apply(t, *ctx.args)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Any:
        return _Reduce._vmap(in_dims, x, *args)


def all_gather(
    x: Tensor, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """The shards of all ranks, one after the other: (n, ...) -> (size * n, ...). Adjoint of `reduce_scatter`.

    `dtype` is that of the result (default: that of `x`): an fp32 shard with `dtype=bfloat16` travels in
    bf16, and its gradient comes back in fp32. Cotangents are added in `reduce_dtype` (default: their own)
    and returned in the dtype of `x`; a separate cast before the gather would round them on the way.

    >>> all_gather(torch.arange(3.0), Group())
    tensor([0., 1., 2.])
    """
    if group.size == 1:
        return x.to(dtype or x.dtype)
    check_axis(x, 1, "all_gather")
    return _Gather.apply(x, group, dtype or x.dtype, reduce_dtype)  # type: ignore[return-value]


def reduce_scatter(
    x: Tensor, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """This rank's part of the sum over ranks: (size * n, ...) -> (n, ...). Adjoint of `all_gather`.

    Adds in `reduce_dtype` (default: the dtype of `x`), returns in `dtype` (default: the dtype of `x`). From
    three ranks on, the order in which an element is summed depends on its place in the buffer: two layouts
    of the same numbers agree to rounding, not bit for bit.
    Raises `ValueError` when axis 0 does not divide by the number of ranks.

    >>> reduce_scatter(torch.arange(3.0), Group(), dtype=torch.float64)
    tensor([0., 1., 2.], dtype=torch.float64)
    """
    if group.size == 1:
        return x.to(dtype or x.dtype)
    check_axis(x, group.size, "reduce_scatter")
    return _Scatter.apply(x, group, dtype or x.dtype, reduce_dtype)  # type: ignore[return-value]


def replicate(x: Tensor, group: Group, *, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """`x` itself, equal on all ranks; its cotangent is the sum of all ranks' (in `reduce_dtype`).

    For a parameter that every rank holds and uses on data of its own. Adjoint of `all_reduce`.

    >>> replicate(torch.ones(2), Group())
    tensor([1., 1.])
    """
    if group.size == 1:
        return x
    return _Replicate.apply(x, group, reduce_dtype)  # type: ignore[return-value]


def all_reduce(x: Tensor, group: Group, *, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """The sum over ranks, on every rank. Adjoint of `replicate`.

    The result is one value that all ranks hold, so its cotangent is one value too: what is computed from
    it must be computed alike on every rank, and the cotangent passes through unchanged. (Summing it, as
    for N independent values, would count the one value N times.)

    >>> all_reduce(torch.ones(2), Group())
    tensor([1., 1.])
    """
    if group.size == 1:
        return x
    return _Reduce.apply(x, group, reduce_dtype)  # type: ignore[return-value]


def check_axis(x: Tensor, size: int, what: str) -> None:
    if x.dim() == 0 or x.shape[0] % size:
        raise ValueError(
            f"{what} needs an axis 0 that divides by {size}, got shape {tuple(x.shape)}; flatten and pad it first"
        )
