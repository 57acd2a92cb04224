"""`all_to_all`: a tensor that is cut along one dimension becomes whole there, and is cut along another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .collective_checks import Cut, match
from .collectives import exchange_into
from .differentiable import Linear
from .group import Group


def balanced(length: int, size: int) -> list[int]:
    """How a length is cut over ranks, as `torch.tensor_split` cuts it: the first parts may be longer by one.

    >>> balanced(5, 4), balanced(2, 3)
    ([2, 1, 1, 1], [1, 1, 0])
    """
    return [length // size + (rank < length % size) for rank in range(size)]


def _exchanged(x: Tensor, group: Group, split_dim: int, concat_dim: int, splits: list[int], cut: Cut) -> Tensor:
    match(_called(split_dim, concat_dim, splits), x, group, cut, free=concat_dim)
    parts = x.split(splits, dim=split_dim)
    shapes = []
    for length in cut.rows:
        shape = list(x.shape)
        shape[split_dim], shape[concat_dim] = splits[group.rank], length
        shapes.append(torch.Size(shape))
    sent = torch.cat([part.reshape(-1) for part in parts])
    got = sent.new_empty(sum(shape.numel() for shape in shapes))
    widths = [shape.numel() for shape in shapes]
    exchange_into(got, sent, widths, [part.numel() for part in parts], group)
    return torch.cat([p.view(shape) for p, shape in zip(got.split(widths), shapes, strict=True)], dim=concat_dim)


def _called(split_dim: int, concat_dim: int, splits: Sequence[int]) -> str:
    return f"all_to_all(split_dim={split_dim}, concat_dim={concat_dim}, splits={list(splits)})"


class _Exchange(Linear):
    @staticmethod
    def forward(x: Tensor, group: Group, split_dim: int, concat_dim: int, splits: list[int], cut: Cut) -> Tensor:
        return _exchanged(x, group, split_dim, concat_dim, splits, cut)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        group, split_dim, concat_dim, _, cut = ctx.args
        return _Exchange.apply(g, group, concat_dim, split_dim, cut.rows, Cut()), None, None, None, None, None


def all_to_all(
    x: Tensor, group: Group, split_dim: int, concat_dim: int, *, splits: Sequence[int] | None = None
) -> Tensor:
    """Cut along `split_dim`, whole along `concat_dim`: part `r` of `x` goes to rank `r`.

    Its own adjoint, with the dimensions swapped.

    Of (batch, heads, part of the sequence, features) with `split_dim=1` and `concat_dim=2` comes (batch, part of the
    heads, sequence, features), the ranks' parts one after the other. What ranks bring may differ in length along
    `concat_dim`, and `split_dim` need not divide by the number of ranks. Each rank sends all but its own part: (N -
    1) / N of its bytes.

    Args:
        x: this rank's tensor. group: the ranks. split_dim: is cut; counted from the end if negative. concat_dim:
            becomes whole, another one. splits: lengths along `split_dim` for each rank; by default as
            `torch.tensor_split` cuts. To go back where ranks brought other lengths than these, their lengths.

    Raises:
        ValueError: on every rank, where dtypes, arguments or other dimensions differ between ranks, the two are not
            two dimensions of `x`, or `splits` does not add up to the length of `split_dim`.

    >>> all_to_all(torch.ones(2, 3), Group(), 0, 1)
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    return exchange(x, group, split_dim, concat_dim, splits, Cut())


def exchange(
    x: Tensor, group: Group, split_dim: int, concat_dim: int, splits: Sequence[int] | None, cut: Cut
) -> Tensor:
    """`all_to_all`, which leaves in `cut` how long each rank's part was."""
    first, second = (d + x.dim() if d < 0 else d for d in (split_dim, concat_dim))
    wrong = ""
    if not (0 <= first < x.dim() and 0 <= second < x.dim() and first != second):
        wrong = f"needs two dimensions of x, which has {x.dim()}"
    elif splits is not None and (len(splits) != group.size or min(splits) < 0 or sum(splits) != x.shape[first]):
        wrong = f"needs {group.size} lengths that add up to {x.shape[first]}"
    if wrong:
        if group.size > 1:
            # Another rank may have brought what is right.
            match(_called(split_dim, concat_dim, splits or []), x, group, Cut())
        raise ValueError(f"{_called(split_dim, concat_dim, splits or [])} {wrong}")
    if group.size == 1:
        cut.rows = [x.shape[second]]
        return x
    parts = balanced(x.shape[first], group.size) if splits is None else list(splits)
    return _Exchange.apply(x, group, first, second, parts, cut)  # type: ignore[return-value]
