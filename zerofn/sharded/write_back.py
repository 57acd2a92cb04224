"""What is written into copies of sharded parameters goes back to where they are stored, and is compared over ranks.

Each rank stores the rows that it has a part of; they agree where all write the same, and whether they did is compared
at the step (`checksum`). In another dtype than the stored one what is written is stored element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from .._errors import bad_leaves
from ..core.layout import Leaf, Leaves

_SHAPE = attrgetter("shape")
# Where a tensor's memory is, and how it lies there.
Place = tuple[int, tuple[int, ...], tuple[int, ...]]


def place(x: Tensor) -> Place:
    """Another after `x.data = y`."""
    return x.data_ptr(), x.shape, x.stride()


def places(xs: Sequence[Tensor]) -> list[Place]:
    """Of each; from C, since every call asks of every leaf."""
    return list(zip(map(Tensor.data_ptr, xs), map(_SHAPE, xs), map(Tensor.stride, xs), strict=True))


WRITTEN = "what the model wrote in forward into its parameters"
# Numbers that ranks compare are not negative, and have 63 bits.
MASK = (1 << 62) - 1
# Elements below which it takes longer to see in which words a tensor can be compared than to compare it.
FEW = 1 << 12


class WriteBack:
    """The way back from copies to what is stored.

    Args:
        params: this rank's shards by path.
        span: this rank's flat range of a leaf.
        exact: whether a copy has the numbers that are stored, in whatever dtype. Where a view has made others, what
            is written into it is noticed and cannot be stored.

    Attributes:
        lost: what could not be stored, by path, and why.
        sums: `checksum` of every leaf that was written into since the last step, by path.
    """

    def __init__(self, params: Leaves, span: Callable[[Leaf], tuple[int, int]], exact: bool):
        self.params, self.span, self.exact = params, span, exact
        # Of leaves that were looked at: this rank's range.
        self.spans: dict[str, tuple[int, int]] = {}
        self.lost: dict[str, str] = {}
        self.sums: dict[str, int] = {}

    def rows(self, leaf: Leaf, full: Tensor) -> Tensor:
        """This rank's rows of a leaf's copy, flat."""
        if leaf.path not in self.spans:
            self.spans[leaf.path] = self.span(leaf)
        low, high = self.spans[leaf.path]
        return full.reshape(-1)[low:high]

    def note(self, leaf: Leaf, full: Tensor) -> None:
        """A leaf has been written into, whether or not rows of this rank are among what is."""
        if not self.exact:
            self.lost[leaf.path] = "seen through a view half of the pipeline, which has no way back from here"
        else:
            self.sums[leaf.path] = checksum(full)

    def fits(self, leaf: Leaf, other: Tensor, full: Tensor) -> bool:
        """Whether other data that forward has put in a leaf's place may be stored in it."""
        fits = (other.numel(), other.dtype, other.device) == (full.numel(), full.dtype, full.device)
        if not fits:
            self.lost[leaf.path] = f"its .data was exchanged for {tuple(other.shape)} {other.dtype} on {other.device}"
        return fits

    def store(self, leaf: Leaf, full: Tensor, rows: Tensor | None) -> bool:
        """Store this rank's rows of a copy if they are not what they were; whether they are not."""
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
        """What must be the same on all ranks at a step, under one name."""
        paths = ", ".join(sorted(self.sums))
        total = sum(self.sums.values()) & MASK
        return {f"{WRITTEN} {paths}; Average what it is computed from." if paths else WRITTEN: total}

    def check(self) -> None:
        """Refuse what could not be stored.

        Raises:
            RuntimeError: every such parameter is named.
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


@contextmanager
def plainly() -> Iterator[None]:
    """Parameters are parts, and what is done with them is none of autograd's business."""
    with torch.no_grad(), torch.DisableTorchFunctionSubclass():
        yield


def carried(mine: Tensor, before: Tensor, stored: Tensor) -> Tensor:
    """What is stored of `mine`, which was `before`: in another dtype, an element that was not written is more exact.

    >>> stored = torch.tensor([0.1, 0.2])
    >>> before = stored.bfloat16()
    >>> carried(torch.stack([before[0], before[1] * 2]), before, stored)
    tensor([0.1000, 0.4004])
    """
    return mine if mine.dtype == stored.dtype else torch.where(mine == before, stored, mine.to(stored.dtype))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one dtype have the same numbers, or the same bits: NaN is not equal to itself."""
    if a.numel() < FEW:
        return torch.equal(a, b) or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    # `torch.equal` takes about as long for a number of 16 bits as for one of 64.
    x, y = a.reshape(-1), b.reshape(-1)
    odd = (x.nbytes | x.element_size() * (int(x.storage_offset()) | int(y.storage_offset()))) & 7
    words = torch.int64 if odd == 0 else torch.int32 if odd == 4 else torch.uint8
    return torch.equal(x.view(words), y.view(words)) or torch.equal(a, b)


class Sampling:
    """In which calls copies are compared for what NumPy or `.data` wrote, which nobody counts.

    It takes a pass over all of them: so in calls 1, 2, 4, 8, ..., and in each once one has been found written, for
    programs repeat themselves.

    >>> sampling = Sampling()
    >>> [sampling.next() for _ in range(4)]
    [(True, False), (True, True), (False, True), (True, True)]
    """

    def __init__(self) -> None:
        self.calls: dict[bool, int] = {}
        self.found = False

    def next(self, mode: bool = True) -> tuple[bool, bool]:
        """Of one more call: whether copies are compared in it, and whether they were not in all before it.

        Args:
            mode: calls are counted apart in `train()` and in `eval()`.
        """
        n = self.calls[mode] = self.calls.get(mode, 0) + 1
        return self.found or n & (n - 1) == 0, not self.found and n > 1


def checksum(x: Tensor) -> int:
    """A number that is equal on ranks that have the same bits, and hardly on others."""
    bits = x.reshape(-1).view(torch.uint8)
    words = F.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
    # Odd factors, or a permutation would have the same sum.
    return int((words * (2 * torch.arange(len(words), device=x.device) + 1)).sum()) & MASK
