"""Matrices of many leaves: sums of squares of their rows and columns, and those of one shape as a stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .norms import CHUNK
from .program import printer_for, triton_module
from .recording import concrete, recorded


def squares_of_sides(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Sums of squares of each row, (rows,), and of each column, (columns,), of matrices, in fp32 at least.

    On a GPU they take two launches.

    Args:
        tensors: contiguous, with elements, of one dtype on one device. One of less than two dimensions is a matrix of
            one row; its squares are exact.

    Examples:
        >>> squares_of_sides([torch.tensor([[1.0, 2.0], [3.0, 4.0]])])
        ([tensor([ 5., 25.])], [tensor([10., 20.])])
    """
    shapes = [(x.shape[0], x.shape[1]) if x.ndim == 2 else (1, x.numel()) for x in tensors]
    printer = printer_for(tensors[0].device)
    if printer is not None and printer is triton_module("print_triton"):
        return triton_module("triton_sides").squares_of_sides(tensors, shapes)
    pairs = [_squares(x.view(shape)) for x, shape in zip(tensors, shapes, strict=True)]
    return [rows for rows, _ in pairs], [columns for _, columns in pairs]


def _squares(x: Tensor) -> tuple[Tensor, Tensor]:
    """Those of one matrix: by rows whose squares stay in the cache."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if len(x) == 1:
        squares = x.to(wide).square()
        return squares.sum(1), squares[0]
    rows: list[Tensor] = []
    columns: Any = None
    for part in x.split(max(CHUNK // 2 // x.shape[1], 1)):
        squares = part.to(wide).square()
        rows.append(squares.sum(1))
        columns = squares.sum(0) if columns is None else columns.add_(squares.sum(0))
    return rows[0] if len(rows) == 1 else torch.cat(rows), columns


def squares_of_one(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of squares of each row, (..., rows), and of each column, (..., columns), of a matrix or a stack of them.

    Of one matrix they have the bits of `squares_of_sides` on the CPU. They can be differentiated.
    """
    if x.is_cpu and x.ndim == 2 and x.numel() and x.is_contiguous() and not recorded((x,)):
        return _squares(x)
    squares = x * x
    return squares.sum(-1), squares.sum(-2)


def by_shape(function: Callable[..., Sequence[Tensor]], *columns: Sequence[Tensor]) -> list[list[Tensor]]:
    """Call `function` on stacks of the leaves whose tensors have the same shapes. On a CPU it gets one leaf at a time.

    Real models have few different shapes: on a GPU as many calls as these take the launches of so many leaves. On a CPU
    products of stacks would be no faster, and might have other bits.

    Args:
        function: of the places of some leaves, and for each column a tensor (..., rows, columns), whose first dimension
            is that of the leaves if it is a stack. It returns tensors of which each has that dimension.
        columns: a tensor for each leaf.

    Returns:
        For each result the tensors of all leaves.

    Examples:
        >>> by_shape(lambda places, x: [x @ x.mT], [torch.ones(1, 2), torch.ones(1, 1)])
        [[tensor([[2.]]), tensor([[1.]])]]
    """
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(zip(*columns, strict=True)):
        groups.setdefault(i if row[0].is_cpu else tuple([(x.shape, x.dtype) for x in row]), []).append(i)
    found: list[dict[int, Tensor]] = []
    for places in groups.values():
        one = len(places) == 1
        made = function(places, *[x[places[0]] if one else torch.stack([x[i] for i in places]) for x in columns])
        found = found or [{} for _ in made]
        for of, x in zip(found, made, strict=True):
            of.update(zip(places, [x] if one else x.unbind(), strict=True))
    return [[of[i] for i in range(len(columns[0]))] for of in found]


@lru_cache(maxsize=64)
def numbers_of_leaves(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers that differ by leaf and by no step, (leaves,), in float32 on a device: copied there once."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.float32).to(device)


def eigenvectors(x: Tensor) -> Any:
    """`torch.linalg.eigh` of symmetric matrices, which raises for numbers that are not finite at any size.

    LAPACK raises for small matrices only, and gives NaN for others.

    Raises:
        RuntimeError: there are no eigenvectors.

    Examples:
        >>> eigenvectors(torch.eye(2)).eigenvalues
        tensor([1., 1.])
    """
    if x.is_cpu and concrete(x) and not x.isfinite().all():
        raise RuntimeError("a number is not finite")
    return torch.linalg.eigh(x)
