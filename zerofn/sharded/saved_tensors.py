"""What autograd saves of a gathered parameter: a note of where it came from, and not the tensor.

So what is gathered does not outlive its use: backward gathers it again. At the end of a block's call its graph is
walked, and what it has saved of gathered parameters is exchanged for notes (`Walks`). Hooks for saved tensors that
stand around the call would do so at once, but while there are any torch refuses `torch.func.grad`, `vjp` and `jacrev`.
Where the user has some around the call, of a checkpoint or of `save_on_cpu`, torch refuses these anyway, and ours are
put inside of them (`noting`): a checkpoint holds all that it repeats. Hooks do not add up, torch runs those
that were entered last, so what is no parameter is handed on to the user's.

What no walk reaches is saved as it is, and freed with the graph: right, and as large as a parameter. These are a loss
that a block keeps in an attribute, writes into views of activations that multiply by a parameter, and C++ nodes; a
parameter that another module than its own computes with is saved until that one's call ends.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat.autograd import next_sequence, number_of, saved_by, saved_tensors_hooks
from .._compat.compiler import uncompiled
from .._compat.functorch import innermost
from .._compat.tensors import local_of, version
from ..ranks.dtensor_parameters import Form, is_distributed
from .gather_on_use import Units

NEVER = 1 << 64
_NODE = itemgetter(0)


class Note(NamedTuple):
    """What is saved in place of a gathered parameter, or of a view of it."""

    source: Units
    age: int
    unit: int
    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    # What is saved of one that tensor parallelism has made is a distributed tensor.
    form: Form | None


def note_of(source: Units, t: Tensor) -> Note | None:
    """The note for a tensor that is saved; `None` for what is no parameter."""
    local = _local(t)
    found = source.gathered.origin(local)
    if found is None or source.watch.is_elsewhere(*found):
        return None
    place = tuple(local.size()), tuple(local.stride()), int(local.storage_offset())
    return Note(source, source.age(*found), *found, *place, None if local is t else Form.of(t))


def _local(t: Tensor) -> Tensor:
    """What this rank has of a tensor that is saved."""
    return t if type(t) is Tensor or not is_distributed(t) else local_of(t)


@uncompiled
def _unpack(note: Note) -> Tensor:
    with torch.no_grad():
        full = note.source.parameter(note.unit, note.index, note.age)
    local = full.as_strided(note.size, note.stride, note.offset)
    return local if note.form is None else note.form.wrap(local)


class _Hooks:
    """Hooks for saved tensors, inside of others."""

    def __init__(self, source: Units, outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]):
        self.source, self.outer = source, outer

    @uncompiled
    def pack(self, t: Tensor) -> Any:
        note = note_of(self.source, t)
        return self.outer[0](t) if note is None else note

    @uncompiled
    def unpack(self, saved: Any) -> Tensor:
        return _unpack(saved) if isinstance(saved, Note) and saved.source is self.source else self.outer[1](saved)


def noting(source: Units) -> AbstractContextManager:
    """Inside, the parameters that `source` has gathered are saved as notes, if there are hooks around."""
    outer = saved_tensors_hooks()
    if outer is None:
        return contextlib.nullcontext()
    hooks = _Hooks(source, outer)
    return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)


class _Walk:
    """The call of one module, under way.

    Attributes:
        module: it.
        start: the number of the first autograd node that may be made in it.
        inner: of calls inside of it that have been walked, in order: where their nodes begin and end, and the older
            nodes that lead out of them.
    """

    __slots__ = ("inner", "module", "start")

    def __init__(self, module: Any, start: int):
        self.module, self.start = module, start
        self.inner: list[tuple[int, int, list[Any]]] = []


class Walks:
    """The calls of blocks that are under way in one thread, each walked when it ends.

    Args:
        source: what gathers.
    """

    def __init__(self, source: Units):
        self.source = source
        self.open: list[_Walk] = []

    def begin(self, module: Any) -> None:
        """A call begins."""
        # Hooks that are there have packed all, when it ends.
        self.open.append(_Walk(module, next_sequence() if saved_tensors_hooks() is None else NEVER))

    def end(self, module: Any, outputs: Iterable[Tensor]) -> None:
        """It has ended, and those inside of it which an error has ended have as well."""
        while self.open:
            walk = self.open.pop()
            if walk.module is module:
                break
        else:
            return
        if walk.start == NEVER:
            return
        older = self._through(walk, [innermost(t).grad_fn for t in outputs])
        if self.open:
            self.open[-1].inner.append((walk.start, next_sequence(), older))

    def _through(self, walk: _Walk, nodes: list[Any]) -> list[Any]:
        """Go through all nodes of a call; the older ones that they lead to."""
        starts = [start for start, _, _ in walk.inner]
        older: list[Any] = []
        # Nodes are kept: an id is only unique among the living.
        seen: dict[int, Any] = {}
        passed: set[int] = set()
        while nodes:
            node = nodes.pop()
            if node is None or id(node) in seen:
                continue
            seen[id(node)] = node
            number = number_of(node)
            if number < walk.start:
                older.append(node)
                continue
            k = bisect_right(starts, number) - 1
            if k >= 0 and number < walk.inner[k][1]:
                if k not in passed:
                    passed.add(k)
                    nodes += walk.inner[k][2]
                continue
            for saved in saved_by(node):
                self._exchange(saved)
            nodes += map(_NODE, node.next_functions)
        return older

    def _exchange(self, saved: Any) -> None:
        t = saved.data
        # What hooks have packed is no tensor. What has been written into since is left to torch, which compares
        # versions where there are no hooks, and refuses a backward with other numbers than forward's.
        if not isinstance(t, Tensor) or (note := note_of(self.source, t)) is None or version(_local(t)):
            return
        with contextlib.suppress(RuntimeError):
            # It is refused where the user's hooks hand on what they are given.
            saved.register_hooks(lambda _: note, _unpack)
