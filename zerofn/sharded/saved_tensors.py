"""What autograd saves of a gathered parameter: a note of where it came from, and not the tensor.

So what is gathered does not outlive its use: backward gathers it again. Hooks for saved tensors do not add up,
torch runs those that were entered last. So everything that is no parameter is handed to the hooks that stand
around the call: those of a checkpoint around the model, of `save_on_cpu`, or of another model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._compat import eagerly, saved_tensors_hooks
from .gather_on_use import Units


class Note(NamedTuple):
    """What is saved in place of a gathered parameter, or of a view of it."""

    source: Units
    age: int
    unit: int
    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Notes:
    """Hooks for saved tensors, inside of others or of none."""

    def __init__(self, source: Units, outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None):
        self.source, self.outer = source, outer

    def pack(self, t: Tensor) -> Any:
        found = self.source.origin(t)
        if found is not None:
            size, stride = tuple(t.size()), tuple(t.stride())
            return Note(self.source, self.source.age(*found), *found, size, stride, int(t.storage_offset()))
        if self.outer is not None:
            return self.outer[0](t)
        # What goes through hooks is held by Python, so that a leaf that the model makes would look like one that
        # somebody holds (`module.graph_check`). Autograd remembers by itself whose derivative it is.
        return t.detach() if t.is_leaf and t.requires_grad else t

    def unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, Note) or saved.source is not self.source:
            return self.outer[1](saved) if self.outer is not None else saved  # type: ignore[return-value]
        return eagerly(_gathered, saved) if is_dynamo_compiling() else _gathered(saved)


def _gathered(note: Note) -> Tensor:
    with torch.no_grad():
        full = note.source.parameter(note.unit, note.index, note.age)
    return full.as_strided(note.size, note.stride, note.offset)


def noting(source: Units) -> AbstractContextManager:
    """Inside, the parameters that `source` has gathered are saved for backward as notes."""
    notes = _Notes(source, saved_tensors_hooks())
    return torch.autograd.graph.saved_tensors_hooks(notes.pack, notes.unpack)
