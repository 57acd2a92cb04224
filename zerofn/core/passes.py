"""Which passes over memory a step of a chain makes, found by running it on small tensors.

A pass is a program that runs on some leaves, joined with those of its neighbours in the chain. Bytes for each number
follow from the program, and the numbers from the leaves that the small tensors stand for. Nothing here knows a
transform by its name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from .._compat.tensors import operations_told
from ..kernels import print_c, print_torch
from ..kernels.codes import Coded
from ..kernels.joined import LOOKING
from ..kernels.numbers import RUN_BY, TOLD
from ..kernels.program import INSTEAD, Program, printer_for
from ..ranks.group import Group
from .facts import Scope
from .layout import Leaf, Leaves, Owner, make_layout
from .pipeline import Pipeline, first_state, pipeline
from .returned_values import COMPARED
from .spec import Spec
from .state import State
from .tree import flatten
from .update import apply

# Elements of the last dimension of a small tensor: they fill vectors of all kinds.
LINE = 32
# A gradient that a clip scales down, and whose square has every dtype.
GRADIENT = 100.0

KERNEL, LOOK, TORCH = "one kernel", "a look at gradients", "torch's operations"


class Pass(NamedTuple):
    """A pass of a step over some leaves.

    Attributes:
        transforms: the names of the transforms that it joins, in their order.
        leaves: the paths of the leaves.
        by: what computes it: `"one kernel"`; `"a look at gradients"`, for a norm or a search for overflows, which comes
            before the update of the first leaf; `"torch's operations"`, one after the other.
        numbers: the elements of these leaves that this rank updates.
        reads: bytes that it reads for each number of a leaf; 0 of torch's operations, which are not counted.
        writes: bytes that it writes for each number.
        held: whether it is one of a micro-step that only accumulates.
        why: why a function is no kernel, or of a kernel why it is called in each step, with the line that was the
            reason; empty if there is none.
        program: of a kernel.
    """

    transforms: tuple[str, ...]
    leaves: tuple[str, ...]
    by: str
    numbers: int
    reads: float
    writes: float
    held: bool = False
    why: str = ""
    program: Program | None = None

    @property
    def read(self) -> int:
        """The bytes that it reads."""
        return round(self.reads * self.numbers)

    @property
    def written(self) -> int:
        """The bytes that it writes."""
        return round(self.writes * self.numbers)


def passes_of(pipe: Pipeline) -> tuple[Pass, ...]:
    """The passes of a step of a pipeline that updates, and of a micro-step before it that is held.

    Steps run on small tensors of the dimensions, dtypes and devices of this rank's leaves, on a CPU for meta tensors.
    Functions of yours are called. What a transform decides by the size of a dimension it decides by the small one.

    Args:
        pipe: the pipeline, maybe of several ranks.
    """
    place = pipe.layout.placement
    owned = {path: rank == place.rank for _, _, ranks in place.owners for path, rank in ranks}
    whole = {leaf.path: leaf.numel for leaf in pipe.layout.leaves}
    shapes = {
        leaf.path: _small(leaf, None if leaf.path in owned else pipe.stations[-1].gives[leaf.path])
        for leaf in pipe.layout.leaves
    }
    handed = {at.transform: at.handed for at in pipe.stations}
    # The norm that metrics show is that of the gradients which reach the optimizer.
    optimizer = next(part.name for part in pipe.parts if part.facts.optimizes or part.facts.directs)

    def numbers(transform: str, path: str) -> int:
        name = next((x for x in handed if transform == x or transform.startswith(x + ".")), optimizer)
        spec = handed[name][path]
        if any([isinstance(x, Owner) for x in spec.placements]):
            return whole[path] if owned[path] else 0
        return spec.numel

    devices = {leaf.device for leaf in pipe.layout.leaves}
    if devices <= {"meta"}:
        return _Found(print_c, numbers).passes(pipe, shapes)
    # A step chooses the printer of each batch of leaves; leaves of several kinds of devices are rare.
    return _Found(printer_for(torch.device(min(devices))), numbers).passes(pipe, shapes)


def passes_of_large(pipe: Pipeline, printer: Any) -> tuple[tuple[Pass, ...], list[str]]:
    """The passes over leaves that fill vectors and are large, whatever their shapes; and why functions are no kernels.

    Args:
        pipe: a pipeline of one process.
        printer: as in `passes_of`.
    """
    shapes = {
        leaf.path: (*[min(n, 4) for n in leaf.shape[:-1]], LINE) if leaf.shape else () for leaf in pipe.layout.leaves
    }
    found = _Found(printer)
    return found.passes(pipe, shapes), list(found.reasons)


def reasons(step: Callable[[], Any], printer: Any) -> list[str]:
    """Why functions of yours are no kernels, or are called in each step, each with the line that was the reason."""
    found = _Found(printer)
    with found.watching():
        step()
    return [x for x in found.reasons if LINE_OF in x]


def alone(function: str, mesh: Any) -> Group:
    """A group of one rank, in place of any other one."""
    return Group()


def _small(leaf: Leaf, spec: Spec | None) -> tuple[int, ...]:
    """The shape of a small tensor that stands for this rank's part of a leaf, and fills vectors if that does."""
    part = leaf.shape if spec is None or not spec.numel or leaf.complex is not None else spec.local_shape
    return tuple([n if n <= 2 * LINE else LINE + n % LINE for n in part])


def _ones(leaf: Leaf, shape: tuple[int, ...]) -> Tensor:
    return torch.ones(shape, dtype=leaf.dtype, device="cpu" if leaf.device == "meta" else leaf.device)


def _with_late_reductions(pipe: Pipeline, of: Pipeline) -> Pipeline:
    """A pipeline of one rank, which waits for all gradients where one of several ranks reduces them."""
    late = [x.name for x in of.road.after_update if of.road.late and x.dtypes is None]
    parts = [
        replace(part, scope=Scope.WHOLE, update_fn=lambda grads, state, *_: (grads, state))
        if part.name in late and part.idle
        else part
        for part in pipe.parts
    ]
    return replace(pipe, parts=tuple(parts))


# What stands in front of the line of a reason.
LINE_OF = ", line "


@dataclass(eq=False)
class _Found:
    """A printer that keeps the programs of a step, which run by torch's operations; and what computes the rest.

    Attributes:
        printer: whose programs they are.
        thread: which looks. Another one may train meanwhile.
        numbers: from the name of a transform and a path to the elements that small tensors of that leaf stand for;
            `None` if all leaves are large, whatever their size.
        now: the update half that runs.
        of: the update halves of the program that comes next, if it is one that has waited.
        looks: whether `now` only looks at gradients.
        running: whether a program runs, or a step is prepared: operations are those of no transform.
        reasons: why functions are no kernels, and of which update half.
        known: by the id of a tensor a reference to it, and its path.
        sizes: the elements of the small tensors, by path.
        programs: by names of transforms, program and bytes for each number the paths of leaves, and how many elements
            at the end of each the program leaves to torch. Statistics of rows and preconditioners do not count.
        seen: by name, whether it only looks, and path, the bytes of a number that torch's operations have read.
    """

    printer: Any
    numbers: Callable[[str, str], int] | None = None
    now: str = ""
    of: tuple[str, ...] = ()
    looks: bool = False
    running: bool = False
    reasons: dict[str, str] = field(default_factory=dict)
    known: dict[int, tuple[Any, str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    programs: dict[tuple[tuple[str, ...], Program, float, float], dict[str, int]] = field(default_factory=dict)
    seen: dict[tuple[str, bool], dict[str, int]] = field(default_factory=dict)
    thread: int = field(default_factory=get_ident)

    # ------------------------------------------------------------------------------------------------------------------
    # What the executor and the programs call.

    def prepares(self, name: str) -> None:
        if get_ident() == self.thread:
            self.now, self.looks = name, True

    def updates(self, name: str) -> None:
        if get_ident() == self.thread:
            self.now, self.looks = name, False

    def joins(self, names: tuple[str, ...]) -> None:
        if get_ident() == self.thread:
            self.of = names

    def elements(self, tensors: Iterable[Tensor]) -> float:
        """The elements that these tensors stand for."""
        if self.numbers is None:
            return math.inf
        paths = [(self._path(x), x.numel()) for x in tensors]
        return sum([numel if path is None else self.numbers(self.now, path) for path, numel in paths])

    def can(self, program: Program) -> bool:
        return self.printer.can(program)

    @property
    def MAPS(self) -> Any:
        return getattr(self.printer, "MAPS", ())

    def run(self, program: Program, columns: Sequence[Sequence[Any]], *given: Any, **more: Any) -> Any:
        names, self.of = self.of or (self.now,), ()
        names = tuple(dict.fromkeys([x for x in names if not x.startswith(".")])) or names
        reads = sum([_bytes(column[0]) for column in program.of_elements(columns[: len(program.loads)])])
        writes = sum([_bytes(columns[i][0]) for i, _ in program.stores])
        paths = self.programs.setdefault((names, program, reads, writes), {})
        for row in zip(*columns, strict=True):
            found = [path for x in row if (path := self._path(x)) is not None]
            numel = next(x.numel() for x in row if type(x) is not Coded)
            if found and 0 <= (left := self.sizes[found[0]] - numel) < LINE:
                paths[found[0]] = left
        self.running = True
        try:
            return print_torch.run(program, columns, *given, **more)
        finally:
            self.running = False

    def told(self, why: str) -> None:
        """Note why a function is no kernel, or is called in each step, with the line in it that was the reason."""
        if get_ident() == self.thread:
            self.reasons.setdefault(why, self.now)

    def operation(self, views: bool, given: tuple[Any, ...], made: Any) -> None:
        """Note of which leaves the tensors of an operation of torch are, and that it has touched them."""
        if self.running:
            return
        columns = [[x] if isinstance(x, Tensor) else x for x in given if isinstance(x, Tensor | list | tuple)]
        for column in columns:
            for x in column:
                path = self._path(x)
                if path is not None and not views and x.numel() == self.sizes[path]:
                    self.seen.setdefault((self.now, self.looks), {}).setdefault(path, x.element_size())
        results = [made] if isinstance(made, Tensor) else made if isinstance(made, list | tuple) else []
        for i, x in enumerate(results):
            for column in columns:
                y = column[0] if views and column else column[i] if i < len(column) else None
                path = self._path(y)
                if isinstance(x, Tensor) and path is not None and y is not None and (views or x.numel() == y.numel()):
                    self._note(x, path)
                    break

    # ------------------------------------------------------------------------------------------------------------------
    # Which leaf a tensor is of.

    def _path(self, x: Any) -> str | None:
        x = x.tensors[0] if type(x) is Coded else x
        known = self.known.get(id(x))
        return None if known is None or known[0]() is not x else known[1]

    def _note(self, x: Tensor, path: str) -> None:
        self.known[id(x)] = ref(x), path

    def _note_state(self, state: State, grads: Leaves) -> None:
        for path, x in [*state.leaves.items(), *grads.items()]:
            self._note(x, path)
        for own in state.transforms.values():
            self._note_slots(own, state.layout.every)

    def _note_slots(self, entry: Any, paths: Any) -> None:
        """Note the tensors below a path in a state."""
        for key, x in entry.items() if isinstance(entry, Mapping) else ():
            if key in paths:
                for y in flatten(x)[0]:
                    if isinstance(y, Tensor):
                        self._note(y, key)
            else:
                self._note_slots(x, paths)

    # ------------------------------------------------------------------------------------------------------------------
    # Steps on small tensors.

    @contextmanager
    def watching(self) -> Iterator[None]:
        instead = self if self.printer is not None else None
        INSTEAD.append(instead)
        TOLD.append(self.told)
        LOOKING.append(self)
        try:
            with operations_told(self.operation):
                yield
        finally:
            LOOKING.remove(self)
            TOLD.remove(self.told)
            INSTEAD.remove(instead)

    def passes(self, pipe: Pipeline, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Pass, ...]:
        """The passes of a step, in which leaves have these shapes."""
        # Random bits of your functions are no business of those who look.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            small = {leaf.path: _ones(leaf, shapes[leaf.path]) for leaf in pipe.layout.leaves}
            trainable = {leaf.path: leaf.trainable for leaf in pipe.layout.leaves}
            layout, leaves = make_layout(pipe.layout.join(small), lambda path: trainable.get(path, True))
            pipe = _with_late_reductions(pipeline(pipe.tx, layout, "zf.plan", alone), pipe)
            self.sizes = {path: x.numel() for path, x in leaves.items()}
            stored = {
                leaf.path: pipe.road.store(leaves[leaf.path], leaf).clone(memory_format=torch.contiguous_format)
                for leaf in layout.leaves
            }
            state = first_state(pipe, stored)
            window = math.prod([part.facts.window for part in pipe.parts])
            boundaries = [None] if window == 1 else [False, False, True]
            found: list[Pass] = []
            with self.watching():
                # Neighbours are joined once the first results of each were checked.
                for _ in range(COMPARED + 2):
                    found = []
                    for boundary in boundaries:
                        self.programs, self.seen = {}, {}
                        state = self._step(pipe, state, boundary)
                        # The first micro-step of a window may differ from the others.
                        found = [*(found if boundary else []), *self._passes(boundary is False)]
            return tuple(found)

    def _step(self, pipe: Pipeline, state: State, boundary: bool | None) -> State:
        self.running = True
        grads = {
            leaf.path: torch.full_like(state.leaves[leaf.path], GRADIENT, dtype=pipe.dtypes.gradient(leaf))
            for leaf in pipe.layout.trainable
        }
        like = next(iter(state.leaves.values()))
        given: dict[str, Any] = {name: like.new_ones(()) for name in pipe.wants}
        given |= {name: like.new_ones(shape) for name, shape in pipe.largest.items()}
        self._note_state(state, grads)
        self.running = False
        weight = 1.0 if pipe.weighted else None
        ctx = pipe.context(donate=True, micro_step=state.micro_step, boundary=boundary, given=given, weight=weight)
        return apply(pipe, grads, state, ctx)[0]

    def _passes(self, held: bool) -> list[Pass]:
        """The passes of the last step: looks come first, and torch's operations last."""
        made = []
        # A function that is refused once more, when it is called in each step, runs by torch for the last reason.
        last = {name: why for why, name in self.reasons.items() if LINE_OF in why}
        reasons = {name: why for why, name in reversed(self.reasons.items()) if LINE_OF in why}
        by_kernels = {name for names, *_ in self.programs for name in names}
        by_torch = {name for name, looks in self.seen if not looks}
        for (names, program, reads, writes), paths in self.programs.items():
            why = next((reasons[x] for x in names if x in reasons and x not in by_torch), "")
            shown = tuple([x.removeprefix(".") for x in names])
            made.append(Pass(shown, *self._of(names[0], paths, KERNEL), reads, writes, held, why, program))
        seen = dict(self.seen)
        # What computes without torch, in NumPy for instance, is not seen.
        seen |= {(name, False): dict.fromkeys(self.sizes, 0) for name in reasons.keys() - by_kernels - by_torch}
        for (name, looks), sizes in seen.items():
            for size in dict.fromkeys(sizes.values()) if looks else [None]:
                paths = {path: 0 for path, own in sizes.items() if size in (None, own)}
                of = self._of(name, paths, LOOK if looks else TORCH)
                made.append(Pass((name.removeprefix("."),), *of, size or 0, 0, held, last.get(name, "")))
        return sorted([x for x in made if x.numbers], key=lambda x: (LOOK, KERNEL, TORCH).index(x.by))

    def _of(self, name: str, paths: Mapping[str, int], by: str) -> tuple[tuple[str, ...], str, int]:
        """The leaves of a pass of which this rank has elements, what computes it, and these elements."""
        own = {x: self.sizes[x] if self.numbers is None else self.numbers(name, x) for x in paths}
        numbers = {x: max(n - paths[x], 0) for x, n in own.items()}
        return tuple([path for path, n in numbers.items() if n]), by, sum(numbers.values())


def _bytes(x: Any) -> float:
    """The bytes of a number in a tensor of a column."""
    # Codes come in blocks of numbers that share a scale.
    return x.how.bits / 8 + x.dtype.itemsize / x.how.block if type(x) is Coded else x.element_size()


RUN_BY.update([_Found.passes.__code__, reasons.__code__])
