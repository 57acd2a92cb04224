"""Two programs that run one after the other as one, so that each tensor is read once and written once.

A value that the first one writes and the second one reads stays in a register. A value that the second one overwrites,
and one that nobody holds any more, is not written at all. Every number is rounded as before: bits are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import print_torch
from .program import KINDS, Draws, Program

# Who looks at the passes that a step makes (`zerofn.core.passes`). It knows which update half runs (`now`), and is told
# which ones have left the program that it is given next (`joins`).
LOOKING: list[Any] = []


class Joined(NamedTuple):
    """Two programs as one.

    Attributes:
        program: of both. Its numbers, scalars, numbers by leaf and sums are those of the first, then of the second.
        columns: for each of its columns the number of the program, 0 or 1, and the column there.
    """

    program: Program
    columns: tuple[tuple[int, int], ...]


@cache
def joined(first: Program, second: Program, same: tuple[int | None, ...]) -> Joined | None:
    """One program of two; `None` if it is none.

    Args:
        first, second: the programs, in their order.
        same: for each column of the second one the column of the first one that is the same memory, if there is one.

    Examples:
        >>> double = Program((0,), (), (), (("add", ("x0", "x0"), 0),), ((0, "x1"),), (0,), ())
        >>> joined(double, double, (0,)).program.steps
        (('add', ('x0', 'x0'), 0), ('add', ('x1', 'x1'), 0))
    """
    if first.form and second.form and first.form != second.form:
        return None
    written, kinds = dict(first.stores), second.kinds
    if any(i is not None and first.kinds[i] != kinds[column] for column, i in enumerate(same)):
        return None
    # A number that is stored would be read in the dtype of its column.
    if any(written[i][0] != "x" for i in same if i in written):
        return None
    # Of the first program all columns that are read, then those of the second one that the first one does not have. A
    # column that the first one only writes, and the second one reads, is read from its register.
    read = [(0, i) for i in range(len(first.loads))]
    read += [(1, i) for i in range(len(second.loads)) if same[i] is None]
    more = len(read) - len(first.loads)

    def of_first(name: str) -> str:
        i = int(name[1:])
        return f"x{i + more}" if name[0] == "x" and i >= len(first.loads) else name

    def of_second(name: str) -> str:
        kind, i = name[0], int(name[1:])
        if kind != "x":
            before = {"n": first.numbers, "s": first.scalars, "e": first.entries}
            return f"{kind}{i + len(before[kind])}" if kind in before else name
        if i >= len(second.loads):
            return f"x{len(read) + len(first.steps) + i - len(second.loads)}"
        column = same[i]
        if column is None:
            return f"x{read.index((1, i))}"
        return of_first(written.get(column, f"x{column}"))

    steps = [
        (name, tuple([x if x.isdigit() else of(x) for x in given]), kind)
        for of, each in ((of_first, first.steps), (of_second, second.steps))
        for name, given, kind in each
    ]
    overwritten = {same[column] for column, _ in second.stores}
    stores = [((0, i), of_first(x)) for i, x in first.stores if i not in overwritten]
    there = [(1, i) if before is None else (0, before) for i, before in enumerate(same)]
    stores += [(there[i], of_second(x)) for i, x in second.stores]
    columns = [*read, *[column for column, _ in stores if column not in read]]
    every = {0: first.kinds, 1: kinds}
    program = Program(
        loads=tuple([every[of][i] for of, i in read]),
        scalars=first.scalars + second.scalars,
        numbers=first.numbers + second.numbers,
        steps=tuple(steps),
        stores=tuple([(columns.index(column), x) for column, x in stores]),
        written=tuple([every[of][i] for (of, i), _ in stores]),
        sums=tuple([*map(of_first, first.sums), *map(of_second, second.sums)]),
        streams=tuple(sorted({*first.streams, *second.streams})),
        form=first.form or second.form,
        entries=first.entries + second.entries,
    )
    return Joined(program, tuple(columns))


@cache
def without(program: Program, dead: frozenset[int]) -> tuple[Program, tuple[int, ...]]:
    """A program that does not write some columns, which it does not read either; and the columns that it still has.

    Examples:
        >>> both = Program((0,), (), (), (("neg", ("x0",), 0),), ((0, "x1"), (1, "x1")), (0, 0), ())
        >>> without(both, frozenset({1}))[0].stores
        ((0, 'x1'),)
    """
    kept = [i for i in sorted(program.kinds) if i not in dead]
    stores = [(i, x, kind) for (i, x), kind in zip(program.stores, program.written, strict=True) if i not in dead]
    made = program._replace(
        stores=tuple([(kept.index(i), x) for i, x, _ in stores]), written=tuple([kind for _, _, kind in stores])
    )
    return made, tuple(kept)


class Run(NamedTuple):
    """A program that waits to run, and what it runs on.

    Attributes:
        program: the program.
        like: tensors of the shapes and strides of its columns.
        columns: of each column its tensors, or weak references to them if they are new and only written.
        numbers: of the program.
        draws: of the random bits, if there are some.
        printer: that runs it; `None` if torch's operations do.
        entries: numbers that differ by leaf, a tensor of shape (leaves,) of each.
        takes: who gets the sums, when the program has run: of each how many sums, and a function of (sums, leaves).
        after: what is called then.
        comes: a bool of a GPU. If it is false, only new tensors are written.
        of: the update halves that have left it, if somebody looks.
    """

    program: Program
    like: Sequence[Tensor]
    columns: tuple[Sequence[Any], ...]
    numbers: tuple[Any, ...]
    draws: Draws | None
    printer: Any
    entries: tuple[Tensor, ...] = ()
    takes: tuple[tuple[int, Callable[[Tensor], Any]], ...] = ()
    after: tuple[Callable[[], Any], ...] = ()
    comes: Tensor | None = None
    of: tuple[str, ...] = ()


class Passes:
    """Programs on lists of leaves that run later, together with those that follow them.

    What a program writes is there after `run`, and where it cannot be joined earlier. A result that is a new tensor,
    and that nobody holds when the program runs, is never written: it was a value between two formulas.

    Attributes:
        settled: how often somebody has had to look at what is in a tensor in the middle.

    Examples:
        >>> from zerofn.kernels.program import printer_for
        >>> passes, x = Passes(), [torch.ones(2)]
        >>> double = Program((0,), (), (), (("add", ("x0", "x0"), 0),), ((0, "x1"),), (0,), ())
        >>> for _ in range(3):
        ...     passes.add(Run(double, x, (x,), (), None, printer_for(x[0].device)))
        >>> passes.run()
        >>> x[0]
        tensor([8., 8.])
    """

    def __init__(self) -> None:
        self.waiting: Run | None = None
        self.settled = 0

    def add(self, run: Run) -> None:
        """Let a program wait; one that waits already and cannot be joined with it runs now."""
        before = self.waiting
        both = None if before is None else _both(_wanted(before), run)
        if both is None:
            self.run()
        self.waiting = both or run

    def then(self, call: Callable[[], Any]) -> None:
        """Call a function when what waits has run: now, if nothing does."""
        if self.waiting is None:
            call()
        else:
            self.waiting = self.waiting._replace(after=(*self.waiting.after, call))

    def settle(self) -> None:
        """Run what waits, for somebody who must look at what is in a tensor."""
        self.settled += 1
        self.run()

    def run(self) -> None:
        """Run what waits."""
        if self.waiting is None:
            return
        run, self.waiting = _wanted(self.waiting), None
        if run.program.stores or run.program.sums:
            _now(run)
        for call in run.after:
            call()


def _now(run: Run) -> None:
    """Run a program, and hand out its sums."""
    columns = [_tensors(run, i) for i in range(len(run.columns))]
    given = run.program, columns, run.numbers, [], True, run.draws, run.entries
    if LOOKING:
        LOOKING[-1].joins(run.of)
    more: dict[str, Any] = {}
    if run.comes is not None:
        fresh = [i for i, column in enumerate(run.columns) if type(column[0]) is ref]
        more = {"comes": run.comes, "fresh": frozenset(fresh)}
    found = None if run.printer is None else run.printer.run(*given, **more)
    # Torch's operations have the same bits, if a kernel cannot be built.
    sums = print_torch.run(*given, **more) if found is None else found
    increment_version([x for i in dict(run.program.stores) for x in columns[i]])
    if len(run.takes) == 1:
        run.takes[0][1](sums)
        return
    first = 0
    for n, take in run.takes:
        take(sums[first : first + n])
        first += n


def _wanted(run: Run) -> Run:
    """The run without results that nobody holds any more."""
    dead = [i for i, column in enumerate(run.columns) if type(column[0]) is ref and all([x() is None for x in column])]
    if not dead:
        return run
    program, kept = without(run.program, frozenset(dead))
    return run._replace(program=program, columns=tuple([run.columns[i] for i in kept]))


def _tensors(run: Run, i: int) -> list[Tensor]:
    """The tensors of a column. Of new ones some may be gone: what is written there goes into memory for a moment."""
    column = run.columns[i]
    if type(column[0]) is not ref:
        return list(column)
    dtype = list(KINDS)[run.program.kinds[i]]
    return [
        torch.empty_like(y, dtype=dtype) if (x := of()) is None else x for of, y in zip(column, run.like, strict=True)
    ]


def _differ(first: Draws, second: Draws) -> bool:
    """Whether draws are not the same. Tensors of a device are not read."""
    pairs = zip(first, second, strict=True)
    return any([x is not y and (isinstance(x, Tensor) or isinstance(y, Tensor) or x != y) for x, y in pairs])


def _both(first: Run, second: Run) -> Run | None:
    """Two runs as one; `None` if they have no memory in common and none is a copy, or if they cannot be joined."""
    if list(map(Tensor.numel, first.like)) != list(map(Tensor.numel, second.like)):
        return None
    if first.draws is not None and second.draws is not None and _differ(first.draws, second.draws):
        return None
    if first.comes is not second.comes:
        return None
    places = {tuple(map(Tensor.data_ptr, _tensors(first, i))): i for i in range(len(first.columns))}
    theirs = [tuple(map(Tensor.data_ptr, _tensors(second, i))) for i in range(len(second.columns))]
    if len(places) < len(first.columns) or len(set(theirs)) < len(theirs):
        return None
    same = tuple(map(places.get, theirs))
    taken = {*chain(*places)} - {0}
    # A column that has some leaves of another, or has them in another order, must see what was written there.
    apart = all([i is not None or taken.isdisjoint(x) for i, x in zip(same, theirs, strict=True)])
    # A copy of what a later program writes waits for it.
    unlike = set(same) == {None} and first.program.steps and second.program.steps
    if not apart or unlike:
        return None
    made, runs = joined(first.program, second.program, same), (first, second)
    if made is None or first.printer is None or not first.printer.can(made.program):
        return None
    return Run(
        made.program,
        first.like,
        tuple([runs[of].columns[i] for of, i in made.columns]),
        (*first.numbers, *second.numbers),
        first.draws or second.draws,
        first.printer,
        (*first.entries, *second.entries),
        (*first.takes, *second.takes),
        (*first.after, *second.after),
        first.comes,
        (*first.of, *second.of),
    )
