"""Stores in the shards what a block's forward writes into its full parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import add
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._compat.tensors import version
from .._errors import bad_leaves
from ..core.layout import Leaf, Leaves

# ----------------------------------------------------------------------------------------------------------------------
# Writes into full parameters under `shard` are stored in the shards, and compared over ranks.
#
# Each rank stores its own rows. The rows fit together if all ranks write the same numbers, which a checksum of the
# full parameter compares at the step. Where the full parameter has another dtype than the shard, only elements that
# were written are stored.


# Of two units that are gathered at a time; a loop over the blocks frees one after the other.
AFTER = "written after its block was freed; write into the parameters of one block before those of the next"
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
        exact: whether a full parameter has the stored numbers, in whatever dtype. If a view half has changed the
            numbers, a write is found and cannot be stored.

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
        """Record that a leaf was written into, in rows of this rank or of others."""
        if not self.exact:
            self.lost[leaf.path] = "seen through a view half of the pipeline, which has no way back from here"
        else:
            self.sums[leaf.path] = checksum(full)

    def store(self, leaf: Leaf, full: Tensor) -> bool:
        """Store this rank's rows of a full parameter that was written into. Return whether they have changed."""
        self.note(leaf, full)
        if not self.exact:
            return False
        mine, stored = self.rows(leaf, full), self.params[leaf.path]
        before = stored if stored.dtype == mine.dtype else stored.to(mine.dtype)
        if same(mine, before):
            return False
        stored.copy_(carried(mine, before, stored))
        return True

    def marks(self) -> dict[str, int]:
        """A number that must be equal on all ranks at a step, by the name that the error message uses."""
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


# ----------------------------------------------------------------------------------------------------------------------
# `ForwardWrites` finds what a model's forward writes into its own parameters under `shard`, and stores it.
#
# Forward gets full parameters from an all-gather. A momentum encoder, a codebook or a clamp writes into them, and the
# write would be lost when they are freed. autograd counts writes, and the count is looked at when they are freed.
# Writes through `w.data` and NumPy are not counted, and are lost: to find them took a pass over each parameter.


# A storage is one Python object for as long as anybody has a tensor on it.
StorageRef = weakref.ref[torch.UntypedStorage]


class GivenViews:
    """The tensors on one unit's full parameters that forward was given, by leaf.

    Attributes:
        views: the tensors, one tuple for each time that forward was given them.
        nodes: the autograd nodes that made them.
    """

    def __init__(self) -> None:
        self.views: list[tuple[Tensor, ...]] = []
        self.nodes: list[Any] = []

    def add(self, views: tuple[Tensor, ...]) -> None:
        """Record one more tensor of each leaf that forward is given."""
        self.views.append(views)
        # All were made by one node, if any was.
        for v in views:
            if v.grad_fn is not None:
                self.nodes.append(v.grad_fn)
                break

    def version(self, j: int) -> int:
        """How often these tensors of one leaf were written into, as autograd counts it."""
        return sum(version(views[j]) for views in self.views if not views[j].is_inference())

    def versions(self) -> list[int]:
        """`version` of each leaf."""
        counts = [0] * len(self.views[0])
        for views in self.views:
            for j, v in enumerate(views):
                if not v.is_inference():
                    counts[j] += version(v)
        return counts

    def recorded(self) -> set[int]:
        """The leaves that were written into while autograd recorded it."""
        found: set[int] = set()
        for views in self.views:
            for j, v in enumerate(views):
                if v.grad_fn is not None and v.grad_fn not in self.nodes:
                    found.add(j)
        return found


@dataclass
class FreedView:
    """A tensor on a full parameter that was freed here, and that user code still has.

    Attributes:
        unit, index: the leaf's unit and place in it.
        view: the tensor. User code may drop it after a write, and before the next look.
        count: how often it had been written into when it was freed.
    """

    unit: int
    index: int
    view: Tensor | None
    count: int

    def is_used(self) -> bool:
        """Whether user code still has the tensor. To find out, this drops its own reference."""
        if self.view is None:
            return False
        ref, self.view = weakref.ref(self.view), None
        self.view = ref()
        return self.view is not None


class ForwardWrites:
    """Finds what forward writes into full parameters, and stores it.

    Args:
        units: leaves that are gathered together.
        write_back: stores it.

    Attributes:
        freed: tensors of units that were freed in this call. A later write into one would be lost, and is refused.
    """

    def __init__(self, units: list[list[Leaf]], write_back: WriteBack):
        self.units, self.write_back = units, write_back
        self.freed: list[FreedView] = []
        # By unit, the views of full parameters that are kept now.
        self.given: dict[int, GivenViews] = {}
        # By unit, how many of its writes are stored.
        self.stored: dict[int, list[int]] = {}
        # By unit and place in it, how many writes went into full parameters that are freed.
        self.counts = [[0] * len(unit) for unit in units]

    def give(self, i: int, views: tuple[Tensor, ...]) -> None:
        """Record that forward is given these tensors of a unit's full parameters."""
        self.given.setdefault(i, GivenViews()).add(views)

    def version(self, i: int, j: int) -> int:
        """How often a leaf was written into: the version that autograd compares between forward and backward."""
        return self.counts[i][j] + (self.given[i].version(j) if i in self.given else 0)

    def store_writes(self, i: int, fulls: list[Tensor]) -> bool:
        """Store what forward has written into a unit's full parameters so far. Return whether the shards changed."""
        given, changed = self.given[i], False
        written = given.versions()
        before = self.stored.get(i, [0] * len(written))
        if written == before:
            return False
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():
            recorded = given.recorded()
            for j, leaf in enumerate(self.units[i]):
                if j in recorded:
                    self.write_back.lost[leaf.path] = "written with gradients enabled"
                elif written[j] != before[j]:
                    changed |= self.write_back.store(leaf, fulls[j])
        self.stored[i] = written
        return changed

    def leave(self, i: int) -> list[tuple[int, weakref.ref[Tensor]]]:
        """Stop watching a unit that is about to be freed. Return its tensors, by place in the unit, for `hold`."""
        given = self._take(i)
        views = () if given is None else given.views
        return [(j, weakref.ref(view)) for each in views for j, view in enumerate(each) if not view.is_inference()]

    def hold(self, i: int, left: list[tuple[int, weakref.ref[Tensor]]]) -> None:
        """Watch the tensors of a unit that is freed now, those that user code still has."""
        for j, ref in left:
            view = ref()
            if view is not None:
                self.freed.append(FreedView(i, j, view, version(view)))

    def look_again(self) -> None:
        """Refuse writes into full parameters that were freed before, and forget those that nobody has any more."""
        for of in self.freed:
            if of.view is not None and version(of.view) != of.count:
                self.write_back.lost[self.units[of.unit][of.index].path] = AFTER
        self.freed = [of for of in self.freed if of.is_used()]

    def forget(self) -> None:
        """Stop watching the tensors that forward was given."""
        for i in list(self.given):
            self._take(i)
        self.freed.clear()

    def forget_leaf(self, i: int, j: int) -> None:
        """Stop watching the freed tensors of one leaf: it was updated since."""
        self.freed = [of for of in self.freed if (of.unit, of.index) != (i, j)]

    def _take(self, i: int) -> GivenViews | None:
        """Take the tensors of a unit that forward was given, and add up how often they were written."""
        given = self.given.pop(i, None)
        self.stored.pop(i, None)
        if given is not None:
            self.counts[i] = list(map(add, self.counts[i], given.versions()))
        return given
