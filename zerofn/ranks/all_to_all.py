"""`all_to_all`: a tensor cut over ranks along one dimension becomes whole there, and is cut along another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.recording import numbers_alone
from .collective_checks import Split, check_match
from .collectives import exchange_into
from .differentiable import LinearCollective
from .group import Group


def balanced(length: int, size: int) -> list[int]:
    """The lengths in which `torch.tensor_split` cuts a length over ranks: the first parts may be longer by one.

    >>> balanced(5, 4), balanced(2, 3)
    ([2, 1, 1, 1], [1, 1, 0])
    """
    return [length // size + (rank < length % size) for rank in range(size)]


def _exchanged(x: Tensor, group: Group, split_dim: int, concat_dim: int, splits: list[int], split: Split) -> Tensor:
    check_match(_call(split_dim, concat_dim, splits), x, group, split, free=concat_dim)
    parts = x.split(splits, dim=split_dim)
    shapes = []
    for length in split.rows:
        shape = list(x.shape)
        shape[split_dim], shape[concat_dim] = splits[group.rank], length
        shapes.append(torch.Size(shape))
    sent = torch.cat([part.reshape(-1) for part in parts])
    got = sent.new_empty(sum(shape.numel() for shape in shapes))
    widths = [shape.numel() for shape in shapes]
    exchange_into(got, sent, widths, [part.numel() for part in parts], group)
    return torch.cat([p.view(shape) for p, shape in zip(got.split(widths), shapes, strict=True)], dim=concat_dim)


def _call(split_dim: int, concat_dim: int, splits: Sequence[int]) -> str:
    return f"all_to_all(split_dim={split_dim}, concat_dim={concat_dim}, splits={list(splits)})"


class _Exchange(LinearCollective):
    @staticmethod
    def forward(x: Tensor, group: Group, split_dim: int, concat_dim: int, splits: list[int], split: Split) -> Tensor:
        return _exchanged(x, group, split_dim, concat_dim, splits, split)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        group, split_dim, concat_dim, _, split = ctx.args
        return _Exchange.apply(g, group, concat_dim, split_dim, split.rows, Split()), None, None, None, None, None


class _ExchangeRows(LinearCollective):
    @staticmethod
    def forward(x: Tensor, outs: list[int], ins: list[int], group: Group) -> Tensor:
        # What is sent is of the lengths that ranks have agreed on, but for a batch.
        check_match("an exchange of rows", x, group, Split(), free=0)
        return _rows(x, outs, ins, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        outs, ins, group = ctx.args
        return _ExchangeRows.apply(g, ins, outs, group), None, None, None


def _rows(x: Tensor, outs: list[int], ins: list[int], group: Group) -> Tensor:
    got, wide = x.new_empty((sum(outs), *x.shape[1:])), math.prod(x.shape[1:])
    lengths = [n * wide for n in outs], [n * wide for n in ins]
    exchange_into(got.view(-1), x.contiguous().view(-1), *lengths, group)
    return got


def exchange_rows(x: Tensor, outs: list[int], ins: list[int], group: Group) -> Tensor:
    """Send `ins[r]` rows of `x` to rank r of several, in turn; of what is returned `outs[r]` rows come from it.

    Its own adjoint, with the lengths swapped.
    """
    if numbers_alone((x,)):
        return _rows(x, outs, ins, group)
    return _ExchangeRows.apply(x, outs, ins, group)  # type: ignore[return-value]


def all_to_all(
    x: Tensor, group: Group, split_dim: int, concat_dim: int, *, splits: Sequence[int] | None = None
) -> Tensor:
    """Cut along `split_dim`, whole along `concat_dim`: part `r` of `x` goes to rank `r`.

    Its own adjoint, with the dimensions swapped.

    With `split_dim=1` and `concat_dim=2`, (batch, heads, part of the sequence, features) becomes (batch, part of the
    heads, sequence, features), the ranks' parts one after the other. Lengths along `concat_dim` may differ between
    ranks, and that of `split_dim` need not divide by their number. Each rank sends all but its own part: (N - 1) / N
    of its bytes.

    Args:
        x: this rank's tensor. group: the ranks. split_dim: the dimension that is cut, negative from the end.
            concat_dim: the one that becomes whole. splits: the length along `split_dim` of each rank; by default those
            of `torch.tensor_split`. The way back needs them if ranks had other lengths.

    Raises:
        ValueError: on every rank, if dtypes, arguments or other dimensions differ between ranks, the dimensions are not
            two of `x`, or `splits` does not add up to the length of `split_dim`.

    >>> all_to_all(torch.ones(2, 3), Group(), 0, 1)
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    return exchange(x, group, split_dim, concat_dim, splits, Split())


def exchange(
    x: Tensor, group: Group, split_dim: int, concat_dim: int, splits: Sequence[int] | None, split: Split
) -> Tensor:
    """`all_to_all`; fills in `split` with the lengths of the ranks' parts."""
    first, second = (d + x.dim() if d < 0 else d for d in (split_dim, concat_dim))
    wrong = ""
    if not (0 <= first < x.dim() and 0 <= second < x.dim() and first != second):
        wrong = f"needs two dimensions of x, which has {x.dim()}"
    elif splits is not None and (len(splits) != group.size or min(splits) < 0 or sum(splits) != x.shape[first]):
        wrong = f"needs {group.size} lengths that add up to {x.shape[first]}"
    if wrong:
        if group.size > 1:
            # On another rank the arguments may be right: an error there too.
            check_match(_call(split_dim, concat_dim, splits or []), x, group, Split())
        raise ValueError(f"{_call(split_dim, concat_dim, splits or [])} {wrong}")
    if group.size == 1:
        split.rows = [x.shape[second]]
        return x
    parts = balanced(x.shape[first], group.size) if splits is None else list(splits)
    return _Exchange.apply(x, group, first, second, parts, split)  # type: ignore[return-value]
