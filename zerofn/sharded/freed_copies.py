"""Full parameters that were freed here while user code still has them: later writes are found and stored.

User code may have a full parameter after its unit was freed (`torch._foreach_mul_` of a list of many blocks'
parameters). It is looked at as long as user code has it, at most to the end of the call, so memory use does not grow.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.layout import Leaf
from .write_back import Region, WriteBack, place

# A storage is one Python object for as long as anybody has a tensor on it.
StorageRef = weakref.ref[torch.UntypedStorage]


# Of a leaf whose unit is freed: tensors that forward was given and where their memory was then; and the tensor that
# forward put in the leaf's place by `w.data = x`, if it did.
Escaped = tuple[list[tuple[weakref.ref[Tensor], Region]], Tensor | None]


@dataclass
class FreedCopy:
    """The full parameter of one leaf, freed here, that user code still has.

    Attributes:
        place: the leaf's unit and place in it.
        ref: its memory; `None` where forward put a tensor of its own there, which is kept to the end of the call.
        full: a flat tensor on that memory.
        rows: this rank's rows of it, as they were when they were last looked at.
        views: tensors on it that forward was given, and where their memory was then.
    """

    place: tuple[int, int]
    ref: StorageRef | None
    full: Tensor
    rows: Tensor
    views: list[tuple[Tensor, Region]]

    def is_used(self) -> bool:
        """Whether anybody else has the memory. Drops all references from here to find out."""
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
        """Remember what user code still has of a unit that was freed, for `look_again`."""
        for j, (leaf, (views, own), (ref, dtype)) in enumerate(zip(self.units[i], escaped, memories, strict=True)):
            full = flat_memory(ref, dtype) if own is None else own
            if full is not None:
                rows = self.write_back.rows(leaf, full).clone()
                self.copies.append(FreedCopy((i, j), ref if own is None else None, full, rows, alive(views)))

    def look_again(self) -> list[tuple[int, int]]:
        """Store what was written since the last look; the leaves that changed, by unit and place in it."""
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
    """All of a storage as a flat tensor; `None` if nobody has it."""
    storage = ref()
    if storage is None or not storage.nbytes():
        return None
    flat = torch.empty(0, dtype=dtype, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,))  # type: ignore[call-overload]
