"""How leaves are packed into the buffer of a collective in a compiled graph: by `torch.cat`, not in place.

Outside of graphs a wire writes leaves into a buffer, in one pass over memory. In a graph that is slow: for each write
the compiler copies the whole buffer, or proves that it need not, so that the cost grows with the square of the number
of leaves. The numbers are the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def row_of(parts: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """Parts (n, ...) of leaves end to end, each padded with zeros to its width.

    >>> row_of([torch.ones(2), torch.ones(1)], [2, 3])
    tensor([1., 1., 1., 0., 0.])
    """
    return torch.cat([_filled(x, each) for x, each in zip(parts, widths, strict=True)])


def wholes_of(rows: Tensor, widths: Sequence[int], numels: Sequence[int]) -> list[Tensor]:
    """The inverse of `row_of`, of the rows of all ranks: whole leaves (numel, ...).

    >>> wholes_of(torch.tensor([[0.0, 1.0, 5.0], [2.0, 0.0, 6.0]]), [2, 1], [3, 2])
    [tensor([0., 1., 2.]), tensor([5., 6.])]
    """
    blocks = rows.split(list(widths), dim=1)
    return [x.reshape(-1, *rows.shape[2:])[:n] for x, n in zip(blocks, numels, strict=True)]


def rows_to_sum(
    grads: Sequence[Tensor | None], widths: Sequence[int], size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Leaves (numel, ...) divided by `size`, cut into `size` rows; at the end of each row a flag for each leaf.

    >>> rows_to_sum([torch.tensor([2.0, 4.0, 6.0]), None], [2, 1], 2, torch.float32, torch.device("cpu"))
    tensor([[1., 2., 0., 1., 0.],
            [3., 0., 0., 1., 0.]])
    """
    tail = next((x.shape[1:] for x in grads if x is not None), torch.Size())
    one = torch.ones((size, 1, *tail), dtype=dtype, device=device)
    blocks = [
        one.new_zeros((size, each, *tail)) if x is None else _filled(over(x, size, dtype), size * each)
        for x, each in zip(grads, widths, strict=True)
    ]
    cut = [x.reshape(size, each, *tail) for x, each in zip(blocks, widths, strict=True)]
    return torch.cat([*cut, *(torch.zeros_like(one) if x is None else one for x in grads)], dim=1)


def flat_to_sum(
    grads: Sequence[Tensor | None], numels: Sequence[int], size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Leaves divided by `size`, end to end; at the end a flag for each leaf.

    >>> flat_to_sum([torch.tensor([2.0, 4.0]), None], [2, 1], 2, torch.float32, torch.device("cpu"))
    tensor([1., 2., 0., 1., 0.])
    """
    one = torch.ones(1, dtype=dtype, device=device)
    flat = [one.new_zeros(n) if x is None else over(x, size, dtype) for x, n in zip(grads, numels, strict=True)]
    return torch.cat([*flat, *(torch.zeros_like(one) if x is None else one for x in grads)])


def over(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """`x / size` in `dtype`, divided in the wider of the two dtypes."""
    wide = torch.promote_types(x.dtype, dtype) == x.dtype
    return (x / size).to(dtype) if wide else x.to(dtype) / size


def _filled(x: Tensor, length: int) -> Tensor:
    return torch.cat([x, x.new_zeros((length - len(x), *x.shape[1:]))]) if len(x) < length else x
