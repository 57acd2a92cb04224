"""Copies of parameters that have been let go, and that somebody still has: what is written into them later.

Somebody may have a copy after it has been let go (`torch._foreach_mul_` of a list of many blocks' parameters): it is
looked at as long as they do, and at most to the end of the call, so that memory grows by nothing of ours.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.layout import Leaf
from .write_back import Place, WriteBack, place, plainly

# Storages are one object for as long as anybody has a tensor on them.
StorageRef = weakref.ref[torch.UntypedStorage]


class Left(NamedTuple):
    """What somebody may have of a leaf that is let go: tensors on its memory, and data that stand in its place."""

    views: list[tuple[weakref.ref[Tensor], Place]]
    own: Tensor | None


@dataclass
class Held:
    """A copy of one leaf that has been let go, and that somebody has."""

    place: tuple[int, int]
    # Nothing where forward has put data of its own in its place: those are kept to the end of the call.
    ref: StorageRef | None
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


class LetGo:
    """The copies of one model's units that are kept here no longer.

    Args:
        units: leaves that are gathered together.
        back: the way back to what is stored.
    """

    def __init__(self, units: list[list[Leaf]], back: WriteBack):
        self.units, self.back = units, back
        self.held: list[Held] = []

    def hold(self, i: int, left: list[Left], refs: list[StorageRef], dtypes: list[torch.dtype]) -> None:
        """A unit's copy has been let go. What somebody has of it is looked at again later."""
        for j, (ref, leaf, dtype) in enumerate(zip(refs, self.units[i], dtypes, strict=True)):
            own = left[j].own
            full = locked(ref, dtype) if own is None else own
            if full is not None:
                rows = self.back.rows(leaf, full).clone()
                self.held.append(Held((i, j), ref if own is None else None, full, rows, alive(left[j].views)))

    def look_again(self) -> list[tuple[int, int]]:
        """Store what has been written since; the leaves of which it is, by unit and place in it."""
        changed: list[tuple[int, int]] = []
        if not self.held:
            return changed
        with plainly():
            for held in self.held:
                leaf = self.units[held.place[0]][held.place[1]]
                for n, (view, was) in enumerate(held.views):
                    if place(view) != was and self.back.fits(leaf, view, held.full):
                        held.full, held.ref, held.views[n] = view.detach(), None, (view, place(view))
                        self.back.note(leaf, held.full)
                if self.back.store(leaf, held.full, held.rows):
                    held.rows.copy_(self.back.rows(leaf, held.full))
                    changed.append(held.place)
        self.held = [held for held in self.held if held.renew()]
        return changed


def alive(refs: list[tuple[weakref.ref[Tensor], Place]]) -> list[tuple[Tensor, Place]]:
    """Tensors that somebody has."""
    return [(x, was) for x, was in ((ref(), was) for ref, was in refs) if x is not None]


def locked(ref: StorageRef, dtype: torch.dtype) -> Tensor | None:
    """All of a memory as a flat tensor, if anybody has it."""
    storage = ref()
    if storage is None or not storage.nbytes():
        return None
    flat = torch.empty(0, dtype=dtype, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,))  # type: ignore[call-overload]
