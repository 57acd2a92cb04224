"""How a leaf is cut over ranks: by rows of its first dimension, as torch cuts a tensor into chunks.

So no row is split, a rank's shard is what torch calls `Shard(0)`, and nothing is padded: the last ranks' shards may be
shorter, or empty. A shard is still one range of the flattened leaf, which is what norms, checkpoints and the counters
of stochastic rounding need.

A leaf with fewer rows than ranks would leave ranks without a shard: it is cut flat, into ranges of one length, and a
transform that needs rows or whole leaves gets it at an owner. The alternative is to cut it along its longest dimension.
Shards would then be strided, to be copied together before they are sent, and no range of the flattened leaf; and no
rank would have less to do. The largest rank over the mean, flat and by the longest dimension, of BERT's token types,
the positions of a ViT, a Swin's bias by distance, and a small tensor:

>>> import torch
>>> def balance(shape, size):
...     parts = [len(x) for x in torch.arange(max(shape)).chunk(size)]
...     return round(width(shape, size) * size / prod(shape), 2), round(max(parts) * size / max(shape), 2)
>>> [balance(*x) for x in (((2, 768), 8), ((1, 197, 768), 64), ((169, 3), 256), ((7, 8, 9), 16))]
[(1.0, 1.0), (1.0, 1.0), (1.01, 1.51), (1.02, 1.78)]
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod


def width(shape: Sequence[int], size: int) -> int:
    """How many elements of a leaf the first of `size` ranks has; the others have as many, or what is left.

    >>> width((5, 3), 2), width((2, 3), 4), width((), 2)
    (9, 2, 1)
    """
    numel = prod(shape)
    if not cut_by_rows(shape, size):
        return -(-numel // size)
    return -(-shape[0] // size) * (numel // shape[0])


def span(shape: Sequence[int], rank: int, size: int) -> tuple[int, int]:
    """The range of the flattened leaf that a rank holds.

    >>> [span((5, 3), rank, 2) for rank in range(2)], [span((2, 3), rank, 4) for rank in range(4)]
    ([(0, 9), (9, 15)], [(0, 2), (2, 4), (4, 6), (6, 6)])
    """
    each, numel = width(shape, size), prod(shape)
    return min(rank * each, numel), min((rank + 1) * each, numel)


def cut_by_rows(shape: Sequence[int], size: int) -> bool:
    """Whether ranks hold whole rows of a leaf.

    >>> cut_by_rows((5, 3), 2), cut_by_rows((1, 3), 2), cut_by_rows((), 1), cut_by_rows((4, 0), 2)
    (True, False, False, True)
    """
    return len(shape) > 0 and shape[0] >= max(size, 1)


def rows_of(shape: Sequence[int], leaf: Sequence[int], low: int, high: int, size: int) -> tuple[int, ...] | None:
    """The shape of this rank's rows of a tensor that has the elements of a leaf; `None` where ranks split rows.

    Args:
        shape: of the tensor: that of the leaf, or another one.
        leaf: the shape of the leaf.
        low, high: this rank's range of it.
        size: how many ranks share it.

    >>> rows_of((5, 3), (5, 3), 9, 15, 2), rows_of((15,), (5, 3), 9, 15, 2), rows_of((3, 5), (5, 3), 9, 15, 2)
    ((2, 3), (6,), None)

    A short leaf is cut flat, and a rank without any of it has no rows either where others have split ones:

    >>> rows_of((2, 3), (2, 3), 0, 2, 4), rows_of((2, 3), (2, 3), 6, 6, 4), rows_of((1, 1), (1, 1), 1, 1, 4)
    (None, None, (0, 1))
    """
    row = prod(shape[1:])
    if not shape or (row and width(leaf, size) % row):
        return None
    return rows_between(shape, low, high)


def rows_between(shape: Sequence[int], low: int, high: int) -> tuple[int, ...] | None:
    """The shape of a range of the flattened leaf, if it is of whole rows; else `None`. A 0-d leaf is one row.

    >>> rows_between((5, 3), 9, 15), rows_between((5, 3), 2, 6), rows_between((5, 3), 15, 15)
    ((2, 3), None, (0, 3))
    >>> rows_between((), 0, 1), rows_between((), 1, 1)
    ((), (0,))
    """
    if not shape:
        return () if high > low else (0,)
    row = prod(shape[1:])
    if row and (low % row or high % row):
        return None
    return ((high - low) // row if row else 0, *shape[1:])
