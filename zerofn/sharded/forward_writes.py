"""Stores in the shards what a block's forward writes into its full parameters.

Forward gets full parameters from an all-gather. A momentum encoder, a codebook or a clamp writes into them, and the
write would be lost when they are freed. autograd counts writes, and a unit compares the counts when it is resharded and
when a call ends (`unit.Unit.store_writes`). Writes through `w.data` and NumPy are not counted, and are lost.

Each rank stores its own rows. The rows fit together if all ranks write the same numbers, which a checksum of the full
parameter compares at the step. Where the full parameter has another dtype than the shard, only elements that were
written are stored.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from .._compat.tensors import version
from .._errors import bad_leaves
from ..core.layout import Leaf, Leaves, as_real
from ..core.rank_agreement import MASK, fingerprint

# The reason why a write is lost: only two units are gathered at a time, so a loop over all blocks frees earlier ones.
AFTER = "written after its block was freed; write into the parameters of one block before those of the next"
# An embedding with `max_norm` writes into the rows that it looks up, and ranks look up others.
LIMIT = (
    "of nn.Embedding(..., max_norm=c) write max_norm=None, and after each step, on every rank,\n"
    "         with torch.no_grad(), opt.gathered(): embedding.weight.renorm_(2, 0, c), which limits every row"
)
WRITTEN = "what the model wrote in forward into its parameters"


class ForwardWrites:
    """Stores in shards what was written into full parameters of one model.

    Args:
        params: this rank's shards by path.
        span: this rank's flat range of a leaf.
        exact: whether a full parameter has the stored numbers, in whatever dtype. If a view half has changed the
            numbers, a write is found and cannot be stored.

    Attributes:
        lost: by path, why a write could not be stored.
        sums: by path, `fingerprint` of every leaf that was written into since the last step.
        freed: tensors on full parameters that were freed in this call, which user code may still have: the leaf, the
            tensor, and how often it had been written into. A later write into one would be lost, and is refused.
    """

    def __init__(self, params: Leaves, span: Callable[[Leaf], tuple[int, int]], exact: bool):
        self.params, self.span, self.exact = params, span, exact
        self.lost: dict[str, str] = {}
        self.sums: dict[str, int] = {}
        self.freed: list[tuple[Leaf, Tensor, int]] = []

    def store(self, leaf: Leaf, full: Tensor) -> bool:
        """Store this rank's rows of a full parameter that was written into. Return whether they have changed."""
        if not self.exact:
            self.lost[leaf.path] = "seen through a view half of the pipeline, which has no way back from here"
            return False
        full = as_real(full, leaf)
        self.sums[leaf.path] = fingerprint(full)
        low, high = self.span(leaf)
        mine, stored = full.reshape(-1)[low:high], self.params[leaf.path]
        before = stored if stored.dtype == mine.dtype else stored.to(mine.dtype)
        if same(mine, before):
            return False
        stored.copy_(carried(mine, before, stored))
        return True

    def look_again(self) -> None:
        """Refuse writes into full parameters that were freed before, and forget those that nobody has any more."""
        still: list[tuple[Leaf, Tensor, int]] = []
        while self.freed:
            leaf, view, count = self.freed.pop()
            if version(view) != count:
                self.lost[leaf.path] = AFTER
            # The tensor was kept until this check, since user code may drop it after a write.
            ref = weakref.ref(view)
            del view
            if (view := ref()) is not None:
                still.append((leaf, view, count))
        self.freed = still

    def marks(self) -> dict[str, int]:
        """A number that must be equal on all ranks at a step, by the name that the error message uses."""
        paths = ", ".join(sorted(self.sums))
        total = sum(self.sums.values()) & MASK
        return {f"{WRITTEN} {paths}; Average what it is computed from; {LIMIT}" if paths else WRITTEN: total}

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
    """The rows to store after a write has changed `before` into `mine`.

    Where dtypes differ, elements that were not written keep their `stored` numbers.

    >>> stored = torch.tensor([0.1, 0.2])
    >>> before = stored.bfloat16()
    >>> carried(torch.stack([before[0], before[1] * 2]), before, stored)
    tensor([0.1000, 0.4004])
    """
    return mine if mine.dtype == stored.dtype else torch.where(mine == before, stored, mine.to(stored.dtype))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one dtype have equal numbers, or equal bits: NaN is not equal to itself."""
    return torch.equal(a, b) or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
