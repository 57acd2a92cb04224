"""Writes into full parameters under `shard` are stored in the shards, and compared over ranks.

Each rank stores its own rows. These fit together if all ranks write the same numbers, which a checksum of the full
parameter compares at the step. Where the full parameter has another dtype than the shard, only elements that were
written are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from .._errors import bad_leaves
from ..core.layout import Leaf, Leaves

_SHAPE = attrgetter("shape")
# Of a tensor: address, shape, strides.
Region = tuple[int, tuple[int, ...], tuple[int, ...]]


def place(x: Tensor) -> Region:
    """Where a tensor's memory is: `x.data = y` changes it."""
    return x.data_ptr(), x.shape, x.stride()


def places(xs: Sequence[Tensor]) -> list[Region]:
    """`place` of each, without a call in Python for each: every call of the model asks of every leaf."""
    return list(zip(map(Tensor.data_ptr, xs), map(_SHAPE, xs), map(Tensor.stride, xs), strict=True))


WRITTEN = "what the model wrote in forward into its parameters"
# Numbers that ranks compare are not negative, and have at most 63 bits.
MASK = (1 << 62) - 1
# Elements below which it takes longer to choose an integer dtype for a comparison than to compare.
FEW = 1 << 12


class WriteBack:
    """Stores in shards what was written into full parameters.

    Args:
        params: this rank's shards by path.
        span: this rank's flat range of a leaf.
        exact: whether a full parameter has the stored numbers, in whatever dtype. Where a view half has made other
            numbers of them, a write is found and cannot be stored.

    Attributes:
        lost: by path, why a write could not be stored.
        sums: by path, `checksum` of every leaf that was written into since the last step.
    """

    def __init__(self, params: Leaves, span: Callable[[Leaf], tuple[int, int]], exact: bool):
        self.params, self.span, self.exact = params, span, exact
        # `span` of leaves that were asked for, by path.
        self.spans: dict[str, tuple[int, int]] = {}
        self.lost: dict[str, str] = {}
        self.sums: dict[str, int] = {}

    def rows(self, leaf: Leaf, full: Tensor) -> Tensor:
        """This rank's rows of a full parameter, flat."""
        if leaf.path not in self.spans:
            self.spans[leaf.path] = self.span(leaf)
        low, high = self.spans[leaf.path]
        return full.reshape(-1)[low:high]

    def note(self, leaf: Leaf, full: Tensor) -> None:
        """A leaf was written into, in rows of this rank or of others."""
        if not self.exact:
            self.lost[leaf.path] = "seen through a view half of the pipeline, which has no way back from here"
        else:
            self.sums[leaf.path] = checksum(full)

    def fits(self, leaf: Leaf, other: Tensor, full: Tensor) -> bool:
        """Whether a tensor that forward has put in a leaf's place by `w.data = x` may be stored."""
        fits = (other.numel(), other.dtype, other.device) == (full.numel(), full.dtype, full.device)
        if not fits:
            self.lost[leaf.path] = f"its .data was exchanged for {tuple(other.shape)} {other.dtype} on {other.device}"
        return fits

    def store(self, leaf: Leaf, full: Tensor, rows: Tensor | None) -> bool:
        """Store this rank's rows of a full parameter if they have changed; whether they were stored.

        Args:
            leaf: the leaf.
            full: its full parameter.
            rows: this rank's rows as they were; by default as the shard has them.
        """
        mine, stored = self.rows(leaf, full), self.params[leaf.path]
        if rows is None:
            rows = stored if stored.dtype == mine.dtype else stored.to(mine.dtype)
        if same(mine, rows):
            return False
        if not self.exact:
            self.note(leaf, full)
            return False
        stored.copy_(carried(mine, rows, stored))
        return True

    def marks(self) -> dict[str, int]:
        """A number that must be equal on all ranks at a step, under a name for the message."""
        paths = ", ".join(sorted(self.sums))
        total = sum(self.sums.values()) & MASK
        return {f"{WRITTEN} {paths}; Average what it is computed from." if paths else WRITTEN: total}

    def check(self) -> None:
        """Raise if a write could not be stored.

        Raises:
            RuntimeError: names every such parameter.
        """
        if not self.lost:
            return
        bad = sorted(self.lost.items())
        self.lost.clear()
        raise RuntimeError(
            bad_leaves(
                "the model wrote into parameters in its forward, where under shard they are gathered copies",
                bad,
                "with torch.no_grad(): self.w.copy_(new), in a pipeline whose view halves change dtypes alone\n"
                "         with opt.gathered(): the write, between two calls\n"
                "         or keep what forward writes in a buffer",
            )
        )


def carried(mine: Tensor, before: Tensor, stored: Tensor) -> Tensor:
    """What to store of `mine`, which was `before`. Where dtypes differ, what was not written stays as stored.

    >>> stored = torch.tensor([0.1, 0.2])
    >>> before = stored.bfloat16()
    >>> carried(torch.stack([before[0], before[1] * 2]), before, stored)
    tensor([0.1000, 0.4004])
    """
    return mine if mine.dtype == stored.dtype else torch.where(mine == before, stored, mine.to(stored.dtype))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one dtype have equal numbers, or equal bits: NaN is not equal to itself."""
    if a.numel() < FEW:
        return torch.equal(a, b) or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    # `torch.equal` takes about as long for a number of 16 bits as for one of 64.
    x, y = a.reshape(-1), b.reshape(-1)
    odd = (x.nbytes | x.element_size() * (int(x.storage_offset()) | int(y.storage_offset()))) & 7
    words = torch.int64 if odd == 0 else torch.int32 if odd == 4 else torch.uint8
    return torch.equal(x.view(words), y.view(words)) or torch.equal(a, b)


def checksum(x: Tensor) -> int:
    """A number below 2^62 that is equal for equal bits, and hardly ever for others."""
    bits = x.reshape(-1).view(torch.uint8)
    words = F.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
    # Each word has a factor of its own, or a permutation would have the same sum; odd, or bits would be lost.
    return int((words * (2 * torch.arange(len(words), device=x.device) + 1)).sum()) & MASK
