"""What a model writes into its own parameters in forward, under `shard`: noticed, and stored.

Forward is given gathered copies. A momentum encoder, a codebook or a clamp writes into them, and what is written would
be gone with the copy. Each rank stores the rows that it has a part of; they agree where all write the same, and
whether they did is compared at the step (`checksum`).

Told by comparing this rank's rows with what was gathered when a copy is let go, which takes one pass over 1/N of it
and no collective. A version count alone would cost less, but `w.data`, NumPy and `foreach` over `w.data` escape it.
Somebody may have a copy after it has been let go (`torch._foreach_mul_` of a list of many blocks' parameters): it is
kept as long as they do, and at most to the end of the call, so that memory grows by nothing of ours.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .._compat import strong, version
from .._errors import bad_leaves
from ..core.tree import Leaf, Leaves


class Given:
    """What forward has been given of one gathered unit: tensors on its memory, and the nodes that made them."""

    def __init__(self) -> None:
        self.views: list[tuple[Tensor, ...]] = []
        self.nodes: list[Any] = []

    def add(self, views: tuple[Tensor, ...]) -> None:
        """More of them."""
        self.views.append(views)
        self.nodes.append(next((v.grad_fn for v in views if v.grad_fn is not None), None))

    def version(self, j: int) -> int:
        """How often the leaf has been written into by way of them, as far as autograd would know."""
        return sum(0 if v[j].is_inference() else version(v[j]) for v in self.views)


WRITTEN = "what the model wrote in forward into its parameters"
# Numbers that ranks compare are not negative, and have 63 bits.
MASK = (1 << 62) - 1


@dataclass
class Held:
    """A copy of one leaf that has been let go, and that somebody has."""

    place: tuple[int, int]
    ref: StorageWeakRef
    # Its memory, what this rank's rows were when they were looked at last, and what forward was given of it.
    flat: Tensor
    rows: Tensor
    views: list[Tensor]

    def renew(self) -> bool:
        """Let go of the memory if nobody else has it; whether somebody has."""
        refs = [weakref.ref(view) for view in self.views]
        self.views, self.flat = [], self.rows
        self.views = alive(refs)
        found = locked(self.ref, self.rows.dtype)
        self.flat = self.rows if found is None else found
        return found is not None


class Written:
    """Notices what is written into gathered copies, and stores it.

    Args:
        units: leaves that are gathered together.
        params: this rank's shards by path.
        span: this rank's flat range of a leaf.
        exact: whether a copy has the numbers that are stored. Where a view has made others, what is written into it
            is noticed and cannot be stored.

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

    def version(self, i: int, j: int) -> int:
        """How often a leaf has been written into: what autograd compares between forward and backward."""
        return self.counts[i][j] + (self.given[i].version(j) if i in self.given else 0)

    def settle(self, i: int, fulls: list[Tensor]) -> bool:
        """Store what has been written into a unit's copy so far; whether there was something."""
        given = self.given.get(i)
        if given is None:
            return False
        changed = False
        with _plainly():
            for j, (leaf, full) in enumerate(zip(self.units[i], fulls, strict=True)):
                for views in given.views:
                    self._check(leaf, views[j], full, given.nodes)
                changed |= self._store(leaf, full.view(-1), self.began[i][j] if i in self.began else None)
                if given.version(j):
                    self._note(leaf, full)
        return changed

    def _note(self, leaf: Leaf, full: Tensor) -> None:
        """A leaf has been written into, whether or not rows of this rank are among what is."""
        stored = self.params[leaf.path].dtype
        if not self.exact:
            self.lost[leaf.path] = "seen through a view half of the pipeline, which has no way back from here"
        elif full.dtype != stored:
            self.lost[leaf.path] = f"seen in {full.dtype}, stored in {stored}"
        else:
            self.sums[leaf.path] = checksum(full)

    def _check(self, leaf: Leaf, view: Tensor, full: Tensor, nodes: list[Any]) -> None:
        if view.data_ptr() != full.data_ptr():
            self.lost[leaf.path] = "its .data was exchanged"
        elif view.grad_fn is not None and view.grad_fn not in nodes:
            self.lost[leaf.path] = "written with gradients enabled"

    def _store(self, leaf: Leaf, flat: Tensor, rows: Tensor | None) -> bool:
        """Store this rank's rows of a copy if they are not what they were; whether they are not."""
        low, high = self.span(leaf)
        mine, stored = flat[low:high], self.params[leaf.path]
        if rows is None:
            rows = stored if stored.dtype == mine.dtype else stored.to(mine.dtype)
        if same(mine, rows):
            return False
        if mine.dtype != stored.dtype or not self.exact:
            self._note(leaf, flat)
            return False
        stored.copy_(mine)
        return True

    def leave(self, i: int) -> list[list[weakref.ref[Tensor]]] | None:
        """A unit's copy is about to be let go: references to what forward was given, if anything was."""
        given = self.given.pop(i, None)
        if given is None:
            return None
        for j in range(len(self.units[i])):
            self.counts[i][j] += given.version(j)
        return [[weakref.ref(views[j]) for views in given.views] for j in range(len(self.units[i]))]

    def hold(
        self, i: int, views: list[list[weakref.ref[Tensor]]], refs: list[StorageWeakRef], dtypes: list[torch.dtype]
    ) -> None:
        """It has been let go. What somebody has of it is looked at again later."""
        for j, (ref, leaf, dtype) in enumerate(zip(refs, self.units[i], dtypes, strict=True)):
            flat = locked(ref, dtype)
            if flat is not None:
                low, high = self.span(leaf)
                self.held.append(Held((i, j), ref, flat, flat[low:high].clone(), alive(views[j])))

    def look_again(self) -> set[int]:
        """Store what has been written since into copies that somebody has; the units of which it is."""
        changed = set()
        with _plainly():
            for held in self.held:
                i, j = held.place
                leaf = self.units[i][j]
                for view in held.views:
                    self._check(leaf, view, held.flat, [view.grad_fn])
                if self._store(leaf, held.flat, held.rows):
                    low, high = self.span(leaf)
                    held.rows.copy_(held.flat[low:high])
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
                "with torch.no_grad(): self.w.copy_(new), where the model computes in the dtype that is stored\n"
                "         with opt.gathered(): the write, between two calls\n"
                "         or keep what forward writes in a buffer",
            )
        )


@contextmanager
def _plainly() -> Iterator[None]:
    """Parameters are parts, and what is done with them is none of autograd's business."""
    with torch.no_grad(), torch.DisableTorchFunctionSubclass():
        yield


def alive(refs: list[weakref.ref[Tensor]]) -> list[Tensor]:
    """Tensors that somebody has."""
    return [x for x in (ref() for ref in refs) if x is not None]


def locked(ref: StorageWeakRef, dtype: torch.dtype) -> Tensor | None:
    """All of a memory as a flat tensor, if anybody has it."""
    storage = strong(ref)
    if storage is None or not storage.nbytes():
        return None
    flat = torch.empty(0, dtype=dtype, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,))  # type: ignore[call-overload]


def same(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one dtype have the same numbers, or the same bits: NaN is not equal to itself."""
    return torch.equal(a, b) or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def checksum(x: Tensor) -> int:
    """A number that is equal on ranks that have the same bits, and hardly on others."""
    bits = x.reshape(-1).view(torch.uint8)
    words = F.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
    # Odd factors, or a permutation would have the same sum.
    return int((words * (2 * torch.arange(len(words), device=x.device) + 1)).sum()) & MASK
