"""Stores in the shards what a block's forward writes into its full parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add, attrgetter
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


_SHAPE = attrgetter("shape")
# A tensor's address, shape and strides.
Region = tuple[int, tuple[int, ...], tuple[int, ...]]


def place(x: Tensor) -> Region:
    """The address, shape and strides of a tensor; `x.data = y` changes them."""
    return x.data_ptr(), x.shape, x.stride()


def places(xs: Sequence[Tensor]) -> list[Region]:
    """`place` of each tensor, in one comprehension: every call of the model asks it for every leaf."""
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

    def fits(self, leaf: Leaf, other: Tensor, full: Tensor) -> bool:
        """Whether `x` may be stored, after forward has replaced a leaf's tensor by `w.data = x`."""
        fits = (other.numel(), other.dtype, other.device) == (full.numel(), full.dtype, full.device)
        if not fits:
            self.lost[leaf.path] = f"its .data was exchanged for {tuple(other.shape)} {other.dtype} on {other.device}"
        return fits

    def store(self, leaf: Leaf, full: Tensor, rows: Tensor | None) -> bool:
        """Store this rank's rows of a full parameter if they have changed. Return whether they were stored.

        Args:
            leaf: the leaf.
            full: its full parameter.
            rows: this rank's rows from before the write; by default those of the shard.
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
# `FreedCopies` watches full parameters that were freed here while user code still has them, and stores later writes.
#
# User code may keep a full parameter after its unit was freed (`torch._foreach_mul_` of a list of many blocks'
# parameters). It is watched as long as user code has it, at most to the end of the call, so memory use does not grow.


# A storage is one Python object for as long as anybody has a tensor on it.
StorageRef = weakref.ref[torch.UntypedStorage]


# For a leaf whose unit is freed: the tensors that forward got, with the place of their memory then; and the tensor that
# forward assigned by `w.data = x`, if it did.
Escaped = tuple[list[tuple[weakref.ref[Tensor], Region]], Tensor | None]


@dataclass
class FreedCopy:
    """The full parameter of one leaf, freed here, that user code still has.

    Attributes:
        place: the leaf's unit and place in it.
        ref: its memory; `None` if forward has put another tensor there, which is kept to the end of the call.
        full: a flat tensor on that memory.
        rows: this rank's rows of it at the last look.
        views: tensors on it that forward was given, and where their memory was then.
    """

    place: tuple[int, int]
    ref: StorageRef | None
    full: Tensor
    rows: Tensor
    views: list[tuple[Tensor, Region]]

    def is_used(self) -> bool:
        """Whether user code still has the memory. To find out, this drops all references of its own."""
        if self.ref is None:
            return True
        refs = [(weakref.ref(view), was) for view, was in self.views]
        self.views, self.full = [], self.rows
        self.views = alive(refs)
        found = flat_memory(self.ref, self.rows.dtype)
        self.full = self.rows if found is None else found
        return found is not None


class FreedCopies:
    """The freed full parameters of one model's units that user code still has.

    Args:
        units: leaves that are gathered together.
        write_back: stores what was written into them.
    """

    def __init__(self, units: list[list[Leaf]], write_back: WriteBack):
        self.units, self.write_back = units, write_back
        self.copies: list[FreedCopy] = []

    def hold(self, i: int, escaped: list[Escaped], memories: list[tuple[StorageRef, torch.dtype]]) -> None:
        """Remember which tensors of a freed unit user code still has, for `look_again`."""
        for j, (leaf, (views, own), (ref, dtype)) in enumerate(zip(self.units[i], escaped, memories, strict=True)):
            full = flat_memory(ref, dtype) if own is None else own
            if full is not None:
                rows = self.write_back.rows(leaf, full).clone()
                self.copies.append(FreedCopy((i, j), ref if own is None else None, full, rows, alive(views)))

    def look_again(self) -> list[tuple[int, int]]:
        """Store what was written since the last look. Return the changed leaves, by unit and place in it."""
        changed: list[tuple[int, int]] = []
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():
            for copy in self.copies:
                leaf = self.units[copy.place[0]][copy.place[1]]
                for n, (view, was) in enumerate(copy.views):
                    if place(view) != was and self.write_back.fits(leaf, view, copy.full):
                        copy.full, copy.ref, copy.views[n] = view.detach(), None, (view, place(view))
                        self.write_back.note(leaf, copy.full)
                if self.write_back.store(leaf, copy.full, copy.rows):
                    copy.rows.copy_(self.write_back.rows(leaf, copy.full))
                    changed.append(copy.place)
        self.copies = [copy for copy in self.copies if copy.is_used()]
        return changed


def alive(refs: list[tuple[weakref.ref[Tensor], Region]]) -> list[tuple[Tensor, Region]]:
    """The tensors that are still there."""
    return [(x, was) for x, was in ((ref(), was) for ref, was in refs) if x is not None]


def flat_memory(ref: StorageRef, dtype: torch.dtype) -> Tensor | None:
    """The whole storage as a flat tensor; `None` if it was freed."""
    storage = ref()
    if storage is None or not storage.nbytes():
        return None
    flat = torch.empty(0, dtype=dtype, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,))  # type: ignore[call-overload]


# ----------------------------------------------------------------------------------------------------------------------
# `ForwardWrites` finds what a model's forward writes into its own parameters under `shard`, and stores it.
#
# Forward gets full parameters from an all-gather. A momentum encoder, a codebook or a clamp writes into them, and the
# write would be lost when they are freed. It is found at that moment, by comparing this rank's rows with the gathered
# ones: one pass over 1/N of the parameter and no collective. A version count alone would cost less, but `w.data`,
# NumPy and `foreach` over `w.data` escape it.


class GivenViews:
    """The tensors on one unit's full parameters that forward was given, by leaf.

    Attributes:
        views: the tensors, one tuple for each time that forward was given them.
        places: `place` of each at that time; `view.data = x` changes it.
        nodes: the autograd nodes that made them.
        own: by index of a leaf in the unit, the tensor that forward has put there by `w.data = x`.
    """

    def __init__(self) -> None:
        self.views: list[tuple[Tensor, ...]] = []
        self.places: list[list[Region]] = []
        self.nodes: list[Any] = []
        self.own: dict[int, Tensor] = {}

    def add(self, views: tuple[Tensor, ...]) -> None:
        """Record one more tensor of each leaf that forward is given."""
        self.views.append(views)
        self.places.append(places(views))
        # All were made by one node, if any was.
        for v in views:
            if v.grad_fn is not None:
                self.nodes.append(v.grad_fn)
                break

    def version(self, j: int) -> int:
        """How often these tensors of one leaf were written into, as far as autograd counts it."""
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

    def is_replaced(self, j: int) -> bool:
        """Whether forward has put another tensor in a leaf's place by `w.data = x`."""
        for views, were in zip(self.views, self.places, strict=True):
            if place(views[j]) != were[j]:
                return True
        return j in self.own

    def replaced(self) -> dict[int, Tensor]:
        """The tensors that forward has put in leaves' places since the last call of this."""
        found: dict[int, Tensor] = {}
        for n, views in enumerate(self.views):
            now = places(views)
            if now != self.places[n]:
                found |= {j: v for j, v in enumerate(views) if now[j] != self.places[n][j]}
                self.places[n] = now
        return found


class ForwardWrites:
    """Finds what forward writes into full parameters, and stores it.

    Args:
        units: leaves that are gathered together.
        write_back: stores it.

    Attributes:
        freed: full parameters that were freed here and that user code still has.
    """

    def __init__(self, units: list[list[Leaf]], write_back: WriteBack):
        self.units, self.write_back = units, write_back
        self.freed = FreedCopies(units, write_back)
        # By unit, this rank's rows as they were gathered, if full parameters have other numbers than stored ones.
        self.began: dict[int, list[Tensor]] = {}
        # By unit, the views of full parameters that are kept now.
        self.given: dict[int, GivenViews] = {}
        # By unit and place in it, how many writes went into full parameters that are freed.
        self.counts = [[0] * len(unit) for unit in units]

    def begin(self, i: int, fulls: list[Tensor]) -> None:
        """Start watching a unit that was gathered."""
        if not self.write_back.exact:
            self.began[i] = [
                self.write_back.rows(leaf, x).clone() for leaf, x in zip(self.units[i], fulls, strict=True)
            ]

    def give(self, i: int, views: tuple[Tensor, ...]) -> None:
        """Record that forward is given these tensors of a unit's full parameters."""
        self.given.setdefault(i, GivenViews()).add(views)

    def is_replaced(self, i: int, j: int) -> bool:
        """Whether forward has put another tensor in a leaf's place; a new gather would not return it."""
        given = self.given.get(i)
        return given is not None and given.is_replaced(j)

    def version(self, i: int, j: int) -> int:
        """How often a leaf was written into: the version that autograd compares between forward and backward."""
        return self.counts[i][j] + (self.given[i].version(j) if i in self.given else 0)

    def settle(self, i: int, fulls: list[Tensor]) -> bool:
        """Store what forward has written into a unit's full parameters so far. Return whether it has written.

        A tensor that forward has put in a leaf's place takes that place in `fulls`.
        """
        given, changed = self.given[i], False
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():
            replaced, recorded, written = given.replaced(), given.recorded(), given.versions()
            for j, leaf in enumerate(self.units[i]):
                other = replaced.get(j)
                if other is not None and self.write_back.fits(leaf, other, fulls[j]):
                    fulls[j] = given.own[j] = other.detach()
                    self.counts[i][j] += 1
                if j in recorded:
                    self.write_back.lost[leaf.path] = "written with gradients enabled"
                changed |= self.write_back.store(leaf, fulls[j], self.began[i][j] if i in self.began else None)
                if other is not None or written[j]:
                    self.write_back.note(leaf, fulls[j])
        return changed

    def leave(self, i: int) -> list[Escaped] | None:
        """The tensors that forward was given of each leaf of a unit that is about to be freed; `None` if none."""
        given = self._take(i)
        if given is None:
            return None
        # By leaf, the views of each time that forward got them.
        views = zip(*[map(weakref.ref, views) for views in given.views], strict=True)
        both = zip(views, zip(*given.places, strict=True), strict=True)
        return [(list(zip(*of_leaf, strict=True)), given.own.get(j)) for j, of_leaf in enumerate(both)]

    def forget(self) -> None:
        """Stop watching the tensors that forward was given."""
        for i in list(self.given):
            self._take(i)
        self.freed.copies.clear()

    def _take(self, i: int) -> GivenViews | None:
        """Take the tensors of a unit that forward was given, and add up how often they were written."""
        given = self.given.pop(i, None)
        if given is not None:
            self.counts[i] = list(map(add, self.counts[i], given.versions()))
        return given
