"""Where a leaf lies in a tensor that the model itself has cut over ranks (tensor parallelism).

The chain does not know of such a cut: it is along another axis of ranks than those it reduces over, and all that
transforms and wires see is the part, a leaf of its own shape. What is of the whole tensor is said here: which elements
they are, and on which of several ranks that have the same ones they count.

The elements of the whole tensor are numbered box by box, as they lie on ranks. Where rows are cut that is the order of
the tensor itself, so a checkpoint and the draws of stochastic rounding are those of one process. Where columns are, the
elements of one rank are a range all the same, and no two ranks have the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ranks.dtensor_parameters import Box, in_box


@dataclass(frozen=True)
class Within:
    """The tensor that a leaf is a part of.

    Attributes:
        shape: of the whole tensor.
        boxes: the parts of all ranks, in their order, each once: where it begins in every dimension, and its sizes.
        at: which of them the leaf is.
        first: whether this rank is the first of those that have it, and counts it in sums.

    >>> columns = Within(torch.Size([2, 4]), (((0, 0), (2, 2)), ((0, 2), (2, 2))), at=1, first=True)
    >>> columns.before, columns.ordered
    (4, False)
    >>> Within(torch.Size([2, 4]), (((0, 0), (1, 4)), ((1, 0), (1, 4))), at=1, first=True).ordered
    True
    """

    shape: torch.Size
    boxes: tuple[Box, ...]
    at: int
    first: bool

    @property
    def cut(self) -> bool:
        """Whether ranks have different parts of it."""
        return len(self.boxes) > 1

    @property
    def before(self) -> int:
        """The number of the leaf's first element, counted box by box."""
        return sum(torch.Size(sizes).numel() for _, sizes in self.boxes[: self.at])

    @property
    def ordered(self) -> bool:
        """Whether elements that are counted box by box are in the order of the tensor."""
        return all(tuple(sizes[1:]) == tuple(self.shape[1:]) for _, sizes in self.boxes)

    def part(self, whole: Tensor) -> Tensor:
        """The leaf, of the whole tensor."""
        return in_box(whole, self.boxes[self.at])


def joined(flat: Tensor, shape: Sequence[int], boxes: Sequence[Box]) -> Tensor:
    """The whole tensor, of its elements box by box.

    >>> joined(torch.arange(4), (2, 2), [((0, 0), (2, 1)), ((0, 1), (2, 1))])
    tensor([[0, 2],
            [1, 3]])
    """
    whole, begin = flat.new_empty(torch.Size(shape)), 0
    for box in boxes:
        part = in_box(whole, box)
        part.copy_(flat[begin : begin + part.numel()].view(part.shape))
        begin += part.numel()
    return whole
