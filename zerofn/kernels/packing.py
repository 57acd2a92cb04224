"""Packs leaves into the buffer of a collective, gradients divided by the number of ranks.

It writes into the buffer, or calls `torch.cat` in a compiled graph. The collective then sums, which gives the mean over
ranks. The division needs no pass of its own, and a sum in 16 bits does not overflow if the mean does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import repeat
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._compat.tensors import foreach_copy_, split_into

# Outside of graphs leaves are written into a buffer in place, in one pass over memory. In a graph that is slow: for
# each write the compiler copies the buffer, or proves that it need not, so the cost grows with the square of the number
# of leaves. There `torch.cat` packs them. The numbers are the same.


T = TypeVar("T")
_SHAPE = attrgetter("shape")


def remembered_by_shape(function: Callable[..., T]) -> Callable[..., T]:
    """Make of `function(shapes, ...)` a function of leaves, which caches results by the shapes of the leaves.

    A graph computes them anew, since the compiler would guard on the cache.

    Examples:
        >>> elements = remembered_by_shape(lambda shapes, size: [shape.numel() * size for shape in shapes])
        >>> elements([torch.ones(2, 3), torch.ones(4)], 10)
        [60, 40]
    """
    known = cache(function)

    def call(leaves: Sequence[Any], *more: Any) -> T:
        if torch.compiler.is_compiling():
            return function(tuple([leaf.shape for leaf in leaves]), *more)
        return known(tuple(map(_SHAPE, leaves)), *more)

    return call


def row_of(parts: Sequence[Tensor], widths: Sequence[int], into: Tensor) -> Tensor:
    """Shards (n,) end to end, each padded to its width, written into `into`: this rank's row of a buffer.

    Padding is not written, and nobody reads it. A graph returns a new tensor instead of `into`.

    Examples:
        >>> row_of([torch.ones(2), torch.ones(1)], [2, 1], torch.empty(3))
        tensor([1., 1., 1.])
    """
    if torch.compiler.is_compiling():
        return torch.cat([_filled(x, each) for x, each in zip(parts, widths, strict=True)])
    if sum(map(Tensor.numel, parts)) == into.numel():
        # No shard is padded.
        return torch.cat(list(parts), out=into)
    places = [place[: x.shape[0]] for x, place in zip(parts, into.split_with_sizes(list(widths)), strict=True)]
    foreach_copy_(places, list(parts))
    return into


# On the CPU a view of a leaf takes as long as copying this many elements by an index. Leaves that are smaller on
# average are permuted together.
FEW = 64


@cache
def _in_rows(widths: tuple[int, ...], numels: tuple[int, ...], size: int, more: int) -> Tensor:
    """For each element of flat leaves, end to end, its place in `size` rows of all widths and `more` columns."""
    each, begin, found = sum(widths) + more, 0, []
    with torch.inference_mode(False):
        for width, numel in zip(widths, numels, strict=True):
            i = torch.arange(numel, device="cpu")
            found.append(i // max(width, 1) * each + begin + i % max(width, 1))
            begin += width
        return torch.cat(found)


@cache
def _from_leaves(widths: tuple[int, ...], numels: tuple[int, ...], size: int, more: int) -> Tensor:
    """The inverse of `_in_rows`: for each place in the rows its element. Padding gets the index behind the last one."""
    places = _in_rows(widths, numels, size, more)
    with torch.inference_mode(False):
        found = torch.full((size * (sum(widths) + more),), len(places), device="cpu")
        found[places] = torch.arange(len(places), device="cpu")
        return found


def wholes_of(
    rows: Tensor,
    widths: Sequence[int],
    numels: Sequence[int],
    into: Sequence[Tensor] | None = None,
    few: bool = False,
) -> list[Tensor]:
    """Full flat leaves (numel,) from the rows of all ranks; the inverse of `row_of`.

    Args:
        rows: (ranks, sum of widths).
        widths: of each leaf in a row.
        numels: the elements of each leaf.
        into: flat tensors to write into; new ones by default.
        few: whether leaves have at most `FEW` elements on average.

    Examples:
        >>> wholes_of(torch.tensor([[0.0, 1.0, 5.0], [2.0, 0.0, 6.0]]), [2, 1], [3, 2])
        [tensor([0., 1., 2.]), tensor([5., 6.])]
    """
    size = rows.shape[0]
    if few and into and type(rows) is Tensor and rows.is_cpu:
        flat = rows.reshape(-1).index_select(0, _in_rows(tuple(widths), tuple(numels), size, 0))
        if into[0].dtype == rows.dtype:
            split_into(flat, list(numels), out=list(into))
        else:
            foreach_copy_(list(into), flat.split_with_sizes(list(numels)))
        return list(into)
    blocks = rows.split_with_sizes(list(widths), dim=1)
    if into is None and torch.compiler.is_compiling():
        return [x.reshape(-1)[:n] for x, n in zip(blocks, numels, strict=True)]
    fulls = into or [rows.new_empty(n) for n in numels]
    places, found = [], []
    for full, block, n, each in zip(fulls, blocks, numels, widths, strict=True):
        if n == size * each:
            places.append(full.view(size, each))
            found.append(block)
            continue
        full_rows = n // each if each else 0
        rest = n - full_rows * each
        places.append((full[: full_rows * each] if rest else full).view(full_rows, each))
        found.append(block[:full_rows])
        if rest:
            places.append(full[full_rows * each :])
            found.append(block[full_rows, :rest])
    foreach_copy_(places, found)
    return list(fulls)


def rows_to_sum(
    grads: Sequence[Tensor | None],
    widths: Sequence[int],
    numels: Sequence[int],
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    few: bool = False,
) -> Tensor:
    """Full flat gradients (numel,) divided by `size`, cut into `size` rows; at the end of each row a flag per leaf.

    Args:
        grads: `None` for a leaf without a gradient: it is sent as zeros, with the flag zero.
        widths: of each leaf in a row, padding included.
        numels: the elements of each leaf.
        size: the number of rows, one for each rank.
        dtype: of the sum.
        device: of the sum.
        few: whether leaves have at most `FEW` elements on average.

    Examples:
        >>> rows_to_sum([torch.tensor([2.0, 4.0, 6.0]), None], [2, 1], [3, 2], 2, torch.float32, torch.device("cpu"))
        tensor([[1., 2., 0., 1., 0.],
                [3., 0., 0., 1., 0.]])
    """
    if torch.compiler.is_compiling():
        one = torch.ones((size, 1), dtype=dtype, device=device)
        blocks = [
            one.new_zeros((size, each)) if x is None else _filled(divided_by_ranks(x, size, dtype), size * each)
            for x, each in zip(grads, widths, strict=True)
        ]
        cut = [x.reshape(size, each) for x, each in zip(blocks, widths, strict=True)]
        return torch.cat([*cut, *(torch.zeros_like(one) if x is None else one for x in grads)], dim=1)
    if _divided_at_once(grads, numels, dtype, device):
        if few and device.type == "cpu" and set(map(type, grads)) == {Tensor}:
            order = _from_leaves(tuple(widths), tuple(numels), size, len(grads))
            rows = torch.cat([*grads, torch.zeros(1, dtype=dtype, device=device)]).index_select(0, order)  # type: ignore[list-item]
            rows = rows.view(size, -1).div_(size)
            _write_flags(rows[:, -len(grads) :], grads)
            return rows
        cut = [
            torch.zeros((size, each), dtype=dtype, device=device)
            if x is None
            else (x if n == size * each else _filled(x, size * each)).reshape(size, each)
            for x, n, each in zip(grads, numels, widths, strict=True)
        ]
        flags = torch.ones((size, len(grads)), dtype=dtype, device=device)
        rows = torch.cat([*cut, flags], dim=1).div_(size)
        _write_flags(rows[:, -len(grads) :], grads)
        return rows
    rows = torch.empty((size, sum(widths) + len(grads)), dtype=dtype, device=device)
    *blocks, flags = rows.split_with_sizes([*widths, len(grads)], dim=1)
    given, places = [], []
    for x, numel, each, block in zip(grads, numels, widths, blocks, strict=True):
        full_rows = numel // each if each else 0
        if x is None:
            block.zero_()
            continue
        given.append(x[: full_rows * each].reshape(full_rows, each))
        places.append(block[:full_rows])
        if full_rows < size:
            block[full_rows:] = 0
            rest = numel - full_rows * each
            given.append(x[full_rows * each :])
            places.append(block[full_rows, :rest])
    _divide_into(given, size, places)
    _write_flags(flags, grads)
    return rows


def flat_to_sum(
    grads: Sequence[Tensor | None], numels: Sequence[int], size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Gradients divided by `size`, end to end; at the end a flag per leaf.

    Examples:
        >>> flat_to_sum([torch.tensor([2.0, 4.0]), None], [2, 1], 2, torch.float32, torch.device("cpu"))
        tensor([1., 2., 0., 1., 0.])
    """
    if torch.compiler.is_compiling():
        one = torch.ones(1, dtype=dtype, device=device)
        parts = [
            one.new_zeros(n) if x is None else divided_by_ranks(x, size, dtype)
            for x, n in zip(grads, numels, strict=True)
        ]
        return torch.cat([*parts, *(torch.zeros_like(one) if x is None else one for x in grads)])
    if _divided_at_once(grads, numels, dtype, device):
        parts = [
            torch.zeros(n, dtype=dtype, device=device) if x is None else x for x, n in zip(grads, numels, strict=True)
        ]
        flat = torch.cat([*parts, torch.ones(len(grads), dtype=dtype, device=device)]).div_(size)
        _write_flags(flat[-len(grads) :].unsqueeze(0), grads)
        return flat
    flat = torch.empty(sum(numels) + len(grads), dtype=dtype, device=device)
    *blocks, flags = flat.split_with_sizes([*numels, len(grads)])
    given, places = [], []
    for x, block in zip(grads, blocks, strict=True):
        if x is None:
            block.zero_()
        else:
            given.append(x)
            places.append(block)
    _divide_into(given, size, places)
    _write_flags(flags.unsqueeze(0), grads)
    return flat


def flagged(flags: Tensor, given: Sequence[bool] = ()) -> list[bool]:
    """For each of the summed flags (leaves,), whether any rank had a gradient.

    A graph cannot branch on a number: there all are true, and a leaf that has a gradient on no rank gets one of zeros.

    Args:
        flags: one for each leaf.
        given: for each leaf, whether this rank had a gradient. If it had all, the host need not wait for the device.

    Examples:
        >>> flagged(torch.tensor([2.0, 0.0]))
        [True, False]
    """
    if torch.compiler.is_compiling() or (given and all(given)):
        return [True] * len(flags)
    # Flags are never NaN: an overflow in a leaf does not reach its flag.
    return (flags > 0).tolist()


def divided_by_ranks(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """`x / size` in `dtype`, divided in the wider of the two dtypes."""
    wide = torch.promote_types(x.dtype, dtype) == x.dtype
    return (x / size).to(dtype) if wide else x.to(dtype) / size


def _filled(x: Tensor, length: int) -> Tensor:
    return torch.cat([x, x.new_zeros((length - len(x), *x.shape[1:]))]) if len(x) < length else x


# Leaves with fewer elements than this are joined first and divided at once, since a second pass over memory takes less
# time than a call for each.
SMALL = 1 << 12


def _divided_at_once(
    grads: Sequence[Tensor | None], numels: Sequence[int], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether gradients are joined first, and divided then: with the same bits, if no cast comes before the division.

    On a device it is two launches instead of one for each leaf.
    """
    if device.type == "cpu" and sum(numels) >= SMALL * len(numels):
        return False
    return set(map(getattr, grads, repeat("dtype"), repeat(dtype))) == {dtype}


def _divide_into(xs: Sequence[Tensor], size: int, outs: Sequence[Tensor]) -> None:
    """Write `x / size` into `out` for each pair: divided in the wider of the two dtypes, in one pass over memory."""
    for x, out in zip(xs, outs, strict=True):
        if torch.promote_types(x.dtype, out.dtype) == x.dtype:
            torch.div(x, size, out=out)
        else:
            out.copy_(x).div_(size)


def _write_flags(flags: Tensor, fulls: Sequence[Tensor | None]) -> None:
    flags.fill_(1.0)
    for i, x in enumerate(fulls):
        if x is None:
            flags[:, i] = 0.0
