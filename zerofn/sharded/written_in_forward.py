"""What a model writes into its own parameters in forward, under `shard`: noticed, and stored.

Forward is given gathered copies. A momentum encoder, a codebook or a clamp writes into them, and what is written would
be gone with the copy. Each rank stores the rows that it has a part of; they agree where all write the same, and
whether they did is compared at the step (`checksum`).

In another dtype than the stored one what is written is stored element by element. Told by comparing this rank's rows
with what was gathered when a copy is let go, which takes one pass over 1/N of it and no collective. A version count
alone would cost less, but `w.data`, NumPy and `foreach` over `w.data` escape it.
Somebody may have a copy after it has been let go (`torch._foreach_mul_` of a list of many blocks' parameters): it is
kept as long as they do, and at most to the end of the call, so that memory grows by nothing of ours.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .._compat import strong, version
from .._errors import bad_leaves
from ..core.tree import Leaf, Leaves

# Where a tensor's memory is, and how it lies there.
Place = tuple[int, tuple[int, ...], tuple[int, ...]]


def place(x: Tensor) -> Place:
    """Another after `x.data = y`."""
    return x.data_ptr(), x.shape, x.stride()


class Given:
    """What forward has been given of one gathered unit: tensors on its memory, and the nodes that made them."""

    def __init__(self) -> None:
        self.views: list[tuple[Tensor, ...]] = []
        # Where their memory was; `view.data = x` puts them elsewhere.
        self.places: list[list[Place]] = []
        self.nodes: list[Any] = []
        # Data that forward has put in the place of a leaf's.
        self.own: dict[int, Tensor] = {}

    def add(self, views: tuple[Tensor, ...]) -> None:
        """More of them."""
        self.views.append(views)
        self.places.append([place(v) for v in views])
        self.nodes.append(next((v.grad_fn for v in views if v.grad_fn is not None), None))

    def version(self, j: int) -> int:
        """How often the leaf has been written into by way of them, as far as autograd would know."""
        return sum(0 if v[j].is_inference() else version(v[j]) for v in self.views)

    def is_elsewhere(self, j: int) -> bool:
        """Whether forward has put other data in the place of the leaf's."""
        views = zip(self.views, self.places, strict=True)
        return j in self.own or any(place(v[j]) != places[j] for v, places in views)

    def exchanged(self, j: int) -> Tensor | None:
        """The leaf, if forward has put other data in its place since this was asked last."""
        found = None
        for views, places in zip(self.views, self.places, strict=True):
            if place(views[j]) != places[j]:
                places[j], found = place(views[j]), views[j]
        return found


class Left(NamedTuple):
    """What somebody may have of a leaf that is let go: tensors on its memory, and data that stand in its place."""

    views: list[tuple[weakref.ref[Tensor], Place]]
    own: Tensor | None


WRITTEN = "what the model wrote in forward into its parameters"
# Numbers that ranks compare are not negative, and have 63 bits.
MASK = (1 << 62) - 1


@dataclass
class Held:
    """A copy of one leaf that has been let go, and that somebody has."""

    place: tuple[int, int]
    # Nothing where forward has put data of its own in its place: those are kept to the end of the call.
    ref: StorageWeakRef | None
    # Its memory, what this rank's rows were when they were looked at last, and what forward was given of it.
    full: Tensor
    rows: Tensor
    views: list[tuple[Tensor, Place]]

    def renew(self) -> bool:
        """Let go of the memory if nobody else has it; whether somebody has."""
        if self.ref is None:
            return True
        refs = [(weakref.ref(view), was) for view, was in self.views]
        self.views, self.full = [], self.rows
        self.views = alive(refs)
        found = locked(self.ref, self.rows.dtype)
        self.full = self.rows if found is None else found
        return found is not None


class Written:
    """Notices what is written into gathered copies, and stores it.

    Args:
        units: leaves that are gathered together.
        params: this rank's shards by path.
        span: this rank's flat range of a leaf.
        exact: whether a copy has the numbers that are stored, in whatever dtype. Where a view has made others, what
            is written into it is noticed and cannot be stored.

    Attributes:
        lost: what could not be stored, by path, and why.
        sums: `checksum` of every leaf that was written into since the last step, by path.
    """

    def __init__(
        self, units: list[list[Leaf]], params: Leaves, span: Callable[[Leaf], tuple[int, int]], exact: bool = True
    ):
        self.units, self.params, self.span, self.exact = units, params, span, exact
        # Where a copy has other numbers than those stored: this rank's rows of it, by unit.
        self.began: dict[int, list[Tensor]] = {}
        # Of the copies that are kept now, by unit.
        self.given: dict[int, Given] = {}
        self.held: list[Held] = []
        self.counts = [[0] * len(unit) for unit in units]
        self.lost: dict[str, str] = {}
        self.sums: dict[str, int] = {}

    def begin(self, i: int, fulls: list[Tensor]) -> None:
        """A unit has been gathered."""
        if not self.exact:
            spans = [self.span(leaf) for leaf in self.units[i]]
            self.began[i] = [x.reshape(-1)[low:high].clone() for x, (low, high) in zip(fulls, spans, strict=True)]

    def give(self, i: int, views: tuple[Tensor, ...]) -> None:
        """Forward has these tensors of a unit's copy from now on."""
        self.given.setdefault(i, Given()).add(views)

    def is_elsewhere(self, i: int, j: int) -> bool:
        """Whether forward has put other data in the place of a leaf's: a note would be of those that were gathered."""
        return i in self.given and self.given[i].is_elsewhere(j)

    def version(self, i: int, j: int) -> int:
        """How often a leaf has been written into: what autograd compares between forward and backward."""
        return self.counts[i][j] + (self.given[i].version(j) if i in self.given else 0)

    def settle(self, i: int, fulls: list[Tensor]) -> bool:
        """Store what has been written into a unit's copy so far; whether there was something.

        Data that forward has put in the place of a leaf's take their place in `fulls`.
        """
        given = self.given.get(i)
        if given is None:
            return False
        changed = False
        with _plainly():
            for j, leaf in enumerate(self.units[i]):
                other = given.exchanged(j)
                if other is not None and self._fits(leaf, other, fulls[j]):
                    fulls[j] = given.own[j] = other.detach()
                    self.counts[i][j] += 1
                if any(v[j].grad_fn is not None and v[j].grad_fn not in given.nodes for v in given.views):
                    self.lost[leaf.path] = "written with gradients enabled"
                changed |= self._store(leaf, fulls[j], self.began[i][j] if i in self.began else None)
                if other is not None or given.version(j):
                    self._note(leaf, fulls[j])
        return changed

    def _note(self, leaf: Leaf, full: Tensor) -> None:
        """A leaf has been written into, whether or not rows of this rank are among what is."""
        if not self.exact:
            self.lost[leaf.path] = "seen through a view half of the pipeline, which has no way back from here"
        else:
            self.sums[leaf.path] = checksum(full)

    def _fits(self, leaf: Leaf, other: Tensor, full: Tensor) -> bool:
        """Whether other data that forward has put in a leaf's place may be stored in it."""
        fits = (other.numel(), other.dtype, other.device) == (full.numel(), full.dtype, full.device)
        if not fits:
            self.lost[leaf.path] = f"its .data was exchanged for {tuple(other.shape)} {other.dtype} on {other.device}"
        return fits

    def _store(self, leaf: Leaf, full: Tensor, rows: Tensor | None) -> bool:
        """Store this rank's rows of a copy if they are not what they were; whether they are not."""
        low, high = self.span(leaf)
        mine, stored = full.reshape(-1)[low:high], self.params[leaf.path]
        if rows is None:
            rows = stored if stored.dtype == mine.dtype else stored.to(mine.dtype)
        if same(mine, rows):
            return False
        if not self.exact:
            self._note(leaf, full)
            return False
        stored.copy_(carried(mine, rows, stored))
        return True

    def leave(self, i: int) -> list[Left] | None:
        """A unit's copy is about to be let go: what forward was given of each leaf, if anything was."""
        given = self.given.pop(i, None)
        if given is None:
            return None
        for j in range(len(self.units[i])):
            self.counts[i][j] += given.version(j)
        both = list(zip(given.views, given.places, strict=True))
        return [
            Left([(weakref.ref(views[j]), places[j]) for views, places in both], given.own.get(j))
            for j in range(len(self.units[i]))
        ]

    def hold(self, i: int, left: list[Left], refs: list[StorageWeakRef], dtypes: list[torch.dtype]) -> None:
        """It has been let go. What somebody has of it is looked at again later."""
        for j, (ref, leaf, dtype) in enumerate(zip(refs, self.units[i], dtypes, strict=True)):
            own = left[j].own
            full = locked(ref, dtype) if own is None else own
            if full is not None:
                low, high = self.span(leaf)
                rows = full.reshape(-1)[low:high].clone()
                self.held.append(Held((i, j), ref if own is None else None, full, rows, alive(left[j].views)))

    def look_again(self) -> set[int]:
        """Store what has been written since into copies that somebody has; the units of which it is."""
        changed = set()
        with _plainly():
            for held in self.held:
                i, j = held.place
                leaf = self.units[i][j]
                for n, (view, was) in enumerate(held.views):
                    if place(view) != was and self._fits(leaf, view, held.full):
                        held.full, held.ref, held.views[n] = view.detach(), None, (view, place(view))
                        self._note(leaf, held.full)
                if self._store(leaf, held.full, held.rows):
                    low, high = self.span(leaf)
                    held.rows.copy_(held.full.reshape(-1)[low:high])
                    self.counts[i][j] += 1
                    changed.add(i)
        self.held = [held for held in self.held if held.renew()]
        return changed

    def forget(self) -> None:
        """Nothing that forward was given is its own any more."""
        for i in list(self.given):
            self.leave(i)
        self.held.clear()

    def marks(self) -> dict[str, int]:
        """What must be the same on all ranks at a step, under one name; it counts from there anew."""
        paths = ", ".join(sorted(self.sums))
        total = sum(self.sums.values()) & MASK
        self.sums.clear()
        return {f"{WRITTEN} {paths}; average what it is computed from" if paths else WRITTEN: total}

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
def _plainly() -> Iterator[None]:
    """Parameters are parts, and what is done with them is none of autograd's business."""
    with torch.no_grad(), torch.DisableTorchFunctionSubclass():
        yield


def alive(refs: list[tuple[weakref.ref[Tensor], Place]]) -> list[tuple[Tensor, Place]]:
    """Tensors that somebody has."""
    return [(x, was) for x, was in ((ref(), was) for ref, was in refs) if x is not None]


def locked(ref: StorageWeakRef, dtype: torch.dtype) -> Tensor | None:
    """All of a memory as a flat tensor, if anybody has it."""
    storage = strong(ref)
    if storage is None or not storage.nbytes():
        return None
    flat = torch.empty(0, dtype=dtype, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,))  # type: ignore[call-overload]


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
    return torch.equal(a, b) or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def checksum(x: Tensor) -> int:
    """A number that is equal on ranks that have the same bits, and hardly on others."""
    bits = x.reshape(-1).view(torch.uint8)
    words = F.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
    # Odd factors, or a permutation would have the same sum.
    return int((words * (2 * torch.arange(len(words), device=x.device) + 1)).sum()) & MASK
