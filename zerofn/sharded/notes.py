"""Notes, which autograd saves in place of full parameters. A note says which parameter backward has to gather again.

So no full parameter outlives its use. At the end of a block's call its graph is walked, and full parameters among saved
tensors are exchanged for notes (`Walks`). Saved-tensor hooks around the call would do so at once, but under such hooks
torch refuses `torch.func.grad`, `vjp` and `jacrev`. Where the user has such hooks around the call, of a checkpoint or
of `save_on_cpu`, torch refuses these anyway. Ours are then put inside of them (`noting`), or a checkpoint would hold
all parameters that it recomputes. torch runs only the hooks that were entered last, so ours pass tensors that are no
parameters on to the user's.

Saved tensors that no walk reaches stay full parameters, and are freed with the graph: the numbers are right, and memory
holds them longer. These are tensors of a loss that a block keeps in an attribute, of writes into views of activations
that multiply by a parameter, and of C++ nodes. Where another module than its own computes with a parameter, it is saved
until that module's call ends.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat.autograd import next_sequence_nr, saved_by, saved_tensors_hooks, sequence_nr
from .._compat.functorch import innermost, uncompiled
from .._compat.tensors import version
from .gather_on_use import Units

# Above every number of an autograd node.
NEVER = 1 << 64
_FIRST = itemgetter(0)


class Note(NamedTuple):
    """Saved in place of a full parameter or of a view of it: the parameter, its age, and the form of the view."""

    source: Units
    age: int
    unit: int
    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool
    neg: bool


def note_of(source: Units, t: Tensor) -> Note | None:
    """The note for a saved tensor; `None` if it is not a full parameter."""
    found = None if type(t) is not Tensor else source.schedule.origin(t)
    if found is None:
        return None
    sizes = tuple(t.size()), tuple(t.stride()), int(t.storage_offset())
    return Note(source, source.age(*found), *found, *sizes, t.dtype, t.is_conj(), t.is_neg())


@uncompiled
def _unpack(note: Note) -> Tensor:
    with torch.no_grad():
        full = note.source.parameter(note.unit, note.index, note.age)
    if note.dtype != full.dtype:
        # The real or the imaginary part of a complex parameter.
        full = full.reshape(-1).view(note.dtype)
    x = full.as_strided(note.size, note.stride, note.offset)
    x = torch.conj(x) if note.conj else x
    return -x if note.neg else x


@uncompiled
def _pack_inside(source: Units, pack: Callable[[Tensor], Any], t: Tensor) -> Any:
    """A saved-tensor hook inside of the user's `pack`, which gets all tensors that are not full parameters."""
    note = note_of(source, t)
    return pack(t) if note is None else note


@uncompiled
def _unpack_inside(source: Units, unpack: Callable[[Any], Tensor], saved: Any) -> Tensor:
    return _unpack(saved) if isinstance(saved, Note) and saved.source is source else unpack(saved)


def noting(source: Units) -> AbstractContextManager:
    """A context in which full parameters of `source` are saved as notes at once, if the user has saved-tensor hooks."""
    outer = saved_tensors_hooks()
    if outer is None:
        return contextlib.nullcontext()
    pack, unpack = partial(_pack_inside, source, outer[0]), partial(_unpack_inside, source, outer[1])
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _Call(NamedTuple):
    """A running call of a block.

    Attributes:
        module: the block.
        start: the number of the first autograd node that may be made in it.
        inner: for each ended call inside of it, in order: the number of its first node, the number behind its last
            one, and the older nodes that its graph leads to.
    """

    module: Any
    start: int
    inner: list[tuple[int, int, list[Any]]]


class Walks:
    """The running calls of blocks in one thread. The graph of each is walked when the call ends.

    Args:
        source: gathers parameters.
    """

    def __init__(self, source: Units):
        self.source = source
        self.open: list[_Call] = []

    def begin(self, module: Any) -> None:
        """Record that a call begins."""
        # Under the user's saved-tensor hooks, `noting` has made the notes already.
        self.open.append(_Call(module, next_sequence_nr() if saved_tensors_hooks() is None else NEVER, []))

    def end(self, module: Any, outputs: Iterable[Tensor]) -> None:
        """Walk the graph of a call that has ended. An exception has ended calls inside of it that are still open."""
        while self.open:
            call = self.open.pop()
            if call.module is module:
                break
        else:
            return
        if call.start == NEVER:
            return
        older = self._walk(call, [innermost(t).grad_fn for t in outputs])
        if self.open:
            self.open[-1].inner.append((call.start, next_sequence_nr(), older))

    def _walk(self, call: _Call, nodes: list[Any]) -> list[Any]:
        """Make notes at all nodes of a call, beginning at its outputs. Return the older nodes that they lead to."""
        starts = list(map(_FIRST, call.inner))
        older: list[Any] = []
        # Nodes are kept alive, since another node could otherwise get the id of a freed one.
        seen: dict[int, Any] = {}
        passed: set[int] = set()
        while nodes:
            node = nodes.pop()
            if node is None or id(node) in seen:
                continue
            seen[id(node)] = node
            number = sequence_nr(node)
            if number < call.start:
                older.append(node)
                continue
            k = bisect_right(starts, number) - 1
            if k >= 0 and number < call.inner[k][1]:
                # This node belongs to an inner call, which was walked when it ended.
                if k not in passed:
                    passed.add(k)
                    nodes += call.inner[k][2]
                continue
            for saved in saved_by(node):
                self._exchange(saved)
            nodes += map(_FIRST, node.next_functions)
        return older

    def _exchange(self, saved: Any) -> None:
        t = saved.data
        # Values that hooks have packed are no tensors. A tensor that was written into stays for torch, which compares
        # versions if there are no hooks, and then refuses the backward.
        if not isinstance(t, Tensor) or (note := note_of(self.source, t)) is None or version(t):
            return
        with contextlib.suppress(RuntimeError):
            # torch raises if the user's hooks return the tensor that they got.
            saved.register_hooks(lambda _: note, _unpack)
