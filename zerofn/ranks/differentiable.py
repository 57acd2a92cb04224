"""Differentiable collectives: pairs of Functions, each the backward of the other, with `jvp` and `vmap` rules.

Nothing simpler is right. A raw collective inside `backward` has no derivative of its own: a Hessian-vector product
through it is silently wrong. `generate_vmap_rule` and torch's functional collectives fail or return garbage under
`torch.func`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .collective_checks import Split, check_match
from .collectives import all_gather_into, all_reduce_, reduce_scatter_into
from .group import Group


def _gathered(x: Tensor, group: Group, dtype: torch.dtype, split: Split) -> Tensor:
    # A cast is elementwise and commutes with the gather: the narrower of the two dtypes travels.
    sent = (x.to(dtype) if dtype.itemsize < x.dtype.itemsize else x).contiguous()
    check_match("all_gather", sent, group, split, free=0)
    width = max(split.rows)
    if not split.even:
        sent = torch.cat([sent, sent.new_zeros((width - len(sent), *sent.shape[1:]))])
    out = sent.new_empty((group.size * width, *sent.shape[1:]))
    all_gather_into(out, sent, group)
    if not split.even:
        out = torch.cat([part[:n] for part, n in zip(out.split(width), split.rows, strict=True)])
    return out.to(dtype)


def _scattered(x: Tensor, group: Group, dtype: torch.dtype, reduce_dtype: torch.dtype | None, split: Split) -> Tensor:
    sent = x.to(reduce_dtype or x.dtype).contiguous()
    check_match("reduce_scatter", sent, group, Split() if split.rows else Split(split.leaves))
    if not split.rows:
        split.rows = [len(sent) // group.size] * group.size
    width, mine = max(split.rows), split.rows[group.rank]
    if not split.even:
        padded = sent.new_zeros((group.size, width, *sent.shape[1:]))
        for row, part in zip(padded, sent.split(split.rows), strict=True):
            row[: len(part)] = part
        sent = padded.flatten(0, 1)
    out = sent.new_empty((width, *sent.shape[1:]))
    reduce_scatter_into(out, sent, group)
    return out[:mine].to(dtype)


def reduced(x: Tensor, group: Group, reduce_dtype: torch.dtype | None, split: Split | None = None) -> Tensor:
    sent = x.to(reduce_dtype or x.dtype)
    check_match("all_reduce", sent, group, split or Split())
    sent = sent.clone(memory_format=torch.contiguous_format) if sent is x else sent.contiguous()
    all_reduce_(sent, group)
    return sent.to(x.dtype)


class LinearCollective(Function):
    """The `jvp` and `vmap` rules of a collective: a linear map along axis 0 or elementwise.

    The tangent goes through the map itself, and a batch axis is moved to the end, where the map does not look.
    Autograd and `torch.func` call static methods without the class, so each class gets functions of its own.
    """

    def __init_subclass__(cls) -> None:
        def tangent(ctx: Any, t: Tensor, *_: Any) -> Any:
            return cls.apply(t, *ctx.args)

        def batched(info: Any, in_dims: tuple[Any, ...], x: Tensor, *args: Any) -> tuple[Tensor, int]:
            out = cls.apply(x.movedim(in_dims[0], -1), *args)
            return out, out.dim() - 1  # type: ignore[union-attr]

        cls.jvp, cls.vmap = staticmethod(tangent), staticmethod(batched)  # type: ignore[assignment]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, *args = inputs
        ctx.args, ctx.dtype = args, x.dtype


class _Gather(LinearCollective):
    @staticmethod
    def forward(x: Tensor, group: Group, dtype: torch.dtype, reduce_dtype: torch.dtype | None, split: Split) -> Tensor:
        return _gathered(x, group, dtype, split)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        group, _, reduce_dtype, split = ctx.args
        return _Scatter.apply(g, group, ctx.dtype, reduce_dtype, split), None, None, None, None


class _Scatter(LinearCollective):
    @staticmethod
    def forward(x: Tensor, group: Group, dtype: torch.dtype, reduce_dtype: torch.dtype | None, split: Split) -> Tensor:
        return _scattered(x, group, dtype, reduce_dtype, split)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        group, _, reduce_dtype, split = ctx.args
        return _Gather.apply(g, group, ctx.dtype, reduce_dtype, split), None, None, None, None


class _Replicate(LinearCollective):
    @staticmethod
    def forward(x: Tensor, group: Group, reduce_dtype: torch.dtype | None) -> Tensor:
        return x.view_as(x)  # no copy; autograd refuses to have it changed in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Reduce.apply(g, *ctx.args), None, None


class _Reduce(LinearCollective):
    @staticmethod
    def forward(x: Tensor, group: Group, reduce_dtype: torch.dtype | None) -> Tensor:
        return reduced(x, group, reduce_dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Replicate.apply(g, *ctx.args), None, None


class _Alike(LinearCollective):
    """The mean over ranks of what is the same on all of them, which nothing need be sent for."""

    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Shared.apply(g, *ctx.args), None


class _Shared(LinearCollective):
    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return x / group.size

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (group,) = ctx.args
        return _Reduce.apply(g, group, None) / group.size, None  # type: ignore[operator]


def all_gather(
    x: Tensor, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """The shards of all ranks, one after the other: (n, ...) -> (sum of n, ...). Adjoint of `reduce_scatter`.

    `n` may differ between ranks and be zero, as in the shards that `zf.shard` makes of a leaf.
    `dtype` is that of the result (default: that of `x`): an fp32 shard with `dtype=bfloat16` is sent in bf16, and its
    gradient comes back in fp32. Cotangents are added in `reduce_dtype` (default: their own dtype) and returned in the
    dtype of `x`; a separate cast before the gather would round them.
    Raises `ValueError`, on every rank, if dtypes or other dimensions differ between ranks.

    >>> all_gather(torch.arange(3.0), Group())
    tensor([0., 1., 2.])
    """
    if group.size == 1:
        return x.to(dtype or x.dtype)
    return gather(x, group, dtype, reduce_dtype, Split())


def gather(
    x: Tensor, group: Group, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, split: Split
) -> Tensor:
    """`all_gather` over several ranks; fills in `split`."""
    if x.dim() == 0:
        check_match("all_gather", x, group, split)  # an error on the other ranks too
        check_axis(x, 1, "all_gather")
    return _Gather.apply(x, group, dtype or x.dtype, reduce_dtype, split)  # type: ignore[return-value]


def reduce_scatter(
    x: Tensor, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """This rank's part of the sum over ranks: (size * n, ...) -> (n, ...). Adjoint of `all_gather`.

    Adds in `reduce_dtype` and returns in `dtype` (default of both: the dtype of `x`). From three ranks on, the order
    in which an element is summed depends on its place in the buffer: two layouts of the same numbers agree to rounding,
    not bit for bit.
    Raises `ValueError`, on every rank, if axis 0 does not divide by the number of ranks, or shapes or dtypes differ
    between ranks.

    >>> reduce_scatter(torch.arange(3.0), Group(), dtype=torch.float64)
    tensor([0., 1., 2.], dtype=torch.float64)
    """
    if group.size == 1:
        return x.to(dtype or x.dtype)
    return scatter(x, group, dtype, reduce_dtype, Split())


def scatter(
    x: Tensor, group: Group, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, split: Split
) -> Tensor:
    """`reduce_scatter` over several ranks, of a tensor that may hold the leaves of `split` side by side."""
    if x.dim() == 0 or x.shape[0] % group.size:
        check_match("reduce_scatter", x, group, split)
        check_axis(x, group.size, "reduce_scatter")
    return _Scatter.apply(x, group, dtype or x.dtype, reduce_dtype, split)  # type: ignore[return-value]


def replicate(x: Tensor, group: Group, *, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """`x` itself, equal on all ranks; its cotangent is the sum of those of all ranks, added in `reduce_dtype`.

    For a parameter that every rank holds and uses on its own data. Adjoint of `all_reduce`.

    >>> replicate(torch.ones(2), Group())
    tensor([1., 1.])
    """
    if group.size == 1:
        return x
    return _Replicate.apply(x, group, reduce_dtype)  # type: ignore[return-value]


def all_reduce(x: Tensor, group: Group, *, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """The sum over ranks, on every rank. Adjoint of `replicate`.

    The result is one value that all ranks hold, so its cotangent is one value too: every rank must compute the same
    from it, and the cotangent passes through unchanged. (To sum it, as for N values, would count it N times.)

    >>> all_reduce(torch.ones(2), Group())
    tensor([1., 1.])
    """
    if group.size == 1:
        return x
    return _Reduce.apply(x, group, reduce_dtype)  # type: ignore[return-value]


def alike(x: Tensor, group: Group) -> Tensor:
    """`x` itself, equal on all ranks, of which one value is wanted; each rank's cotangent is an equal part of its own.

    For a number made of `replicate`d ones, whose cotangents would be counted on every rank. Inverse of `replicate`.

    >>> alike(torch.ones(2), Group())
    tensor([1., 1.])
    """
    if group.size == 1:
        return x
    return _Alike.apply(x, group)  # type: ignore[return-value]


def nothing_of(x: Tensor) -> Tensor:
    """A tensor without elements, of shape (0, 1), that is a function of `x`.

    A collective that a rank has nothing for hangs on it: all ranks are to make the same collectives in backward. Of an
    axis alone `torch.cat` would leave it out of second derivatives.

    >>> nothing_of(torch.ones(2, 3)).shape
    torch.Size([0, 1])
    """
    return (x if x.dim() else x[None])[:0].reshape(0, 1)


def check_axis(x: Tensor, size: int, what: str) -> None:
    if x.dim() == 0 or x.shape[0] % size:
        raise ValueError(
            f"{what} needs an axis 0 that divides by {size}, got shape {tuple(x.shape)}; flatten and pad it first"
        )
