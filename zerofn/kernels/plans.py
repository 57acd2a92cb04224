"""Traces a formula once, and runs it in every later step: numbers are data of a program, and its structure is kept.

A formula is a Python function of tensors and numbers. While it is traced, each number is a `Number`, which remembers
how it is computed: `1 - beta1` is computed anew in each step. Where the formula asks a number for a truth value, as in
`if decay:` or `count == 1`, the trace goes the way of the present value, and holds only while the answer is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode

from . import native, print_torch
from .codes import MOST as MOST_OF_BLOCK
from .codes import Coded
from .joined import LOOKING, Passes, Run
from .numbers import Guard, NotOnLists, Number, Values, line_of_error
from .operations import OPERATIONS
from .program import INSTEAD, Draws, Program, TensorList, Term, Traced, alike, as_dtype, printer_for
from .recording import concrete
from .rounding import FORMAT

# Keys and offsets of leaves, as `Draws` has them.
Places = Callable[[], tuple[Sequence[int], Sequence[int]]]


Take = Callable[[Tensor], Any]


def nowhere() -> tuple[Sequence[int], Sequence[int]]:
    """The places of leaves of a formula without random bits."""
    return (), ()


NONE: Mapping[int, str] = MappingProxyType({})


# The plans of one formula for one kind of columns, and the kinds.
MOST = 16
MOST_KINDS = 64
# For a result that may share the memory of another one, if both are one value.
SHARED = -1


# What a formula may ask torch, besides what a tensor is.
_ASKED = {"__get__", "promote_types", "result_type", "can_cast", "get_default_dtype", "is_tensor"}


class _Alone(TorchFunctionMode):
    """While a formula is traced: it computes with its arguments alone.

    Another tensor, such as a random one, would be the same in every step.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ not in _ASKED and not any([issubclass(x, TensorList | Number) for x in types]):
            raise NotOnLists(f"{function.__name__} of a tensor that is no argument")
        return function(*args, **kwargs or {})


class Plan(NamedTuple):
    """A formula as a program, and what its columns and numbers are.

    Attributes:
        program: for a printer.
        columns: for each column of the program the place of a given column, or, of a column that is only written, minus
            one minus the number of a result.
        numbers: from the numbers of a step.
        drawn: seed and number of the step of the random bits, from the numbers of a step; `None` if there are none.
        guards: what must hold.
        results: for each result the place of the given column that it is or is written into; `None` if it is new.
        dtypes: of the results.
        written: the places of given columns that are written.
        entries: the numbers that differ by leaf, as terms of the given ones.
        by_leaf: for each result its term, if it is a number of each leaf.
    """

    program: Program
    columns: tuple[int, ...]
    numbers: tuple[Callable[[Values], Any], ...]
    drawn: tuple[Callable[[Values], Any], Callable[[Values], Any]] | None
    guards: tuple[Guard, ...]
    results: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...]
    written: tuple[int, ...]
    entries: tuple[Term, ...] = ()
    by_leaf: tuple[Term | None, ...] = ()


class Plans:
    """The plans of one formula.

    Args:
        formula: from lists of tensors, numbers by name and what else it depends on to lists of tensors, and lists whose
            sums over each leaf are wanted.

    Examples:
        >>> plans = Plans(lambda lists, n, about: ([lists[0] - n["lr"] * lists[1]], []))
        >>> p, g = [torch.ones(2)], [torch.ones(2)]
        >>> for lr in (0.5, 0.25):
        ...     found = plans.run([p, g], {"lr": lr}, into=[0])
        >>> p, len(plans.known)
        ([tensor([0.2500, 0.2500])], 1)
    """

    def __init__(self, formula: Callable[[list[Any], Any, Any], tuple[Sequence[Any], Sequence[Any]]]):
        self.formula = formula
        self.known: dict[Any, list[Plan]] = {}

    def run(
        self,
        columns: Sequence[list[Any] | Tensor],
        numbers: Values,
        into: Sequence[int | None] | None = None,
        about: Any = None,
        places: Places = nowhere,
        comes: Tensor | None = None,
        roots: bool = False,
        passes: Passes | None = None,
        take: Take | None = None,
        spread: Mapping[int, str] = NONE,
    ) -> tuple[list[Any], Tensor | None]:
        """Run the formula on lists of leaves; every element is read before it is written.

        Args:
            columns: each of one dtype, all on one device, for which there is a printer. The first one is of tensors.
                Others may be of `Coded` that `in_blocks` allows; then `into` has their places. Or, in the place of a
                list, a tensor of shape (leaves,), on any device, has a number for each leaf.
            numbers: by name: of Python, or tensors on any device, 0-d or with a number for each leaf, (leaves,). A 0-d
                tensor of the host is read, after the arithmetic of the formula with other numbers.
            into: for each result the place of the column whose memory it is written into; by default, and where it is
                `None`, into new memory; `SHARED` is new memory, or that of another result.
            about: a key of what else the formula depends on.
            places: returns the keys and the offsets of the leaves. It is called for random bits alone.
            comes: a bool of a GPU. If it is false, nothing is written, or new tensors alone.
            roots: whether the roots of the sums are wanted.
            passes: where the program waits for others; by default it runs now.
            take: gets the sums when it has run. Without it a program with sums waits for nothing.
            spread: the places of columns that are only read, and have for leaves that are matrices a number for each
                of their `"rows"`, or one for each of their `"columns"`. Such a program does not wait.

        Returns:
            The results, and the sums, (sums, leaves); `None` if there are none. A result whose `into` is the place of
            numbers is a new tensor of numbers.

        Raises:
            NotOnLists: it is no program of operations that printers know.
        """
        kinds = [(True, x.dtype) if isinstance(x, Tensor) else (x[0].dtype, type(x[0]) is Coded) for x in columns]
        tensors = {name: x for name, x in numbers.items() if isinstance(x, Tensor)}
        if tensors:
            numbers = {**numbers, **{name: _for_each(x, columns[0]) for name, x in tensors.items()}}
            kinds += [(name, x.dtype, x.ndim) for name, x in numbers.items() if isinstance(x, Tensor)]
        kind = about, None if into is None else tuple(into), tuple(kinds), tuple(spread.items())
        plans = self.known.get(kind, [])
        # One after the other: a later question may have no answer where an earlier one has another.
        plan = next((x for x in plans if all(guard.of(numbers) == guard.answer for guard in x.guards)), None)
        if plan is None:
            # A formula whose answers differ from step to step would be traced in each.
            if len(plans) >= MOST or (not plans and len(self.known) >= MOST_KINDS):
                raise NotOnLists("a formula that asks too much of its numbers")
            plan = _spread(self._traced(columns, numbers, into, about), spread)
            self.known.setdefault(kind, []).append(plan)
        return run(plan, columns, numbers, places, comes, roots, passes, take)

    def _traced(
        self, columns: Sequence[list[Any] | Tensor], numbers: Values, into: Sequence[int | None] | None, about: Any
    ) -> Plan:
        guards: list[Guard] = []

        first: Any = columns[0]

        def named(name: Any) -> Any:
            x: Any = numbers[name]
            if isinstance(x, Tensor) and x.ndim:
                return TensorList(first, Term("entries", (name,), x.dtype))
            return Number(lambda given: given[name], x, guards)

        lists = [
            TensorList(first, Term("entries", (i,), x.dtype)) if isinstance(x, Tensor) else TensorList(x)
            for i, x in enumerate(columns)
        ]
        try:
            with _Alone():
                made, sums = self.formula(lists, {name: named(name) for name in numbers}, about)
        except NotOnLists:
            raise
        except Exception as error:
            # A formula that gets lists and such numbers may raise any error. A real one is raised again by a tensor.
            raise NotOnLists(f"{type(error).__name__}: {error}", line_of_error(error)) from error
        if wrote := [x for x in lists if x.memory is not None and x.pending]:
            raise NotOnLists("an argument that the formula writes", wrote[0].written_at)
        results, stores, by_leaf = [], [], []
        fresh: dict[int, list[Tensor]] = {}
        split = _Split()
        sums = [TensorList(x.like, split.of(x.term)) for x in sums]
        for i, x in enumerate(made):
            place = None if into is None else into[i]
            if into is not None and place == SHARED:
                same = [j for j, y in zip(into, made, strict=True) if y is x and j not in (None, SHARED)]
                place = same[0] if same and lists[same[0]].dtype == x.dtype else None
                if place is not None:
                    results.append(place)
                    by_leaf.append(None)
                    continue
            by_leaf.append(None)
            if place is not None and isinstance(columns[place], Tensor):
                by_leaf[-1] = as_dtype(x.term, lists[place].dtype)
                if not split.by_leaf(x.term):
                    raise NotOnLists("a number of each leaf that differs by element")
                results.append(None)
            elif place is not None:
                # A formula may return its argument unchanged: there is nothing to write. Codes are made anew.
                if x is not lists[place] or type(lists[place].like[0]) is Coded:
                    stores.append(TensorList(lists[place].like, split.of(as_dtype(x.term, lists[place].dtype))))
                    stores[-1].memory = lists[place].like
                results.append(place)
            elif x.pending:
                # A formula may return one value twice: each has memory of its own.
                stores.append(TensorList(x.like, split.of(x.term)))
                stores[-1].memory = fresh[i] = [torch.empty(0, dtype=x.dtype, device=first[0].device)]
                results.append(None)
            else:
                results.append(next((i for i, given in enumerate(lists) if given.memory is x.memory), None))
                if results[-1] is None:
                    raise NotOnLists("a result that is computed while the formula is traced")
        pending = [x for x in stores if x.pending or type(x.memory[0]) is Coded]
        found = Traced([*pending, *sums])
        program = found.program(pending, sums)
        places = []
        for column in found.columns:
            place = next((i for i, given in enumerate(lists) if given.memory is column), None)
            if place is None:
                place = -1 - next(i for i, memory in fresh.items() if memory is column)
            places.append(place)
        draws = found.draws
        if found.scalars:
            raise NotOnLists("a tensor that is no argument")
        return Plan(
            program,
            tuple(places),
            tuple(map(_of, found.numbers)),
            None if draws is None else (_of(draws.seed), _of(draws.step)),
            tuple(guards),
            tuple(results),
            tuple([x.dtype for x in made]),
            tuple([i for i in places if i >= 0 and any(lists[i].memory is x.memory for x in pending)]),
            tuple(split.found),
            tuple(by_leaf),
        )


def _spread(plan: Plan, spread: Mapping[int, str]) -> Plan:
    """The plan whose columns at these places have numbers of rows or columns."""
    of = tuple([spread.get(place, "") for place in plan.columns[: len(plan.program.loads)]])
    if not any(of):
        return plan
    if of[0] or not spread.keys().isdisjoint([*plan.written, *plan.results]):
        raise NotOnLists("a number of a row that comes first, or is a result")
    return plan._replace(program=plan.program._replace(spread=of))


def in_blocks(row: Sequence[Any], offset: int) -> bool:
    """Whether a program runs on a leaf as it is stored: block by block of tensors that are each a `Coded`.

    Args:
        row: tensors of one shape, the first one no `Coded`.
        offset: the global index of the first element.
    """
    coded = [x for x in row if type(x) is Coded]
    plain = [x for x in row if type(x) is not Coded]
    first, numel = plain[0], plain[0].numel()
    tensors, place = [*plain, *(y for x in coded for y in x.tensors)], first.get_device()
    if not numel or not (first.is_cpu or first.is_cuda):
        return False
    if not all([type(x) in _PLAIN and x.get_device() == place and x.is_contiguous() for x in tensors]):
        return False
    # A slot of an unused option has no elements.
    if any([x.shape != first.shape and x.numel() for x in plain[1:]]):
        return False
    if not coded:
        return True
    how, dtype, draws = coded[0].how, coded[0].dtype, [x.draws for x in coded]
    # A byte of two codes of 4 bits belongs to one block.
    if how.signed or how.block > MOST_OF_BLOCK or (how.bits == 4 and how.block % 2) or not first.ndim:
        return False
    if how.code not in getattr(printer_for(first.device), "MAPS", ()):
        return False
    if dtype not in (torch.float32, torch.bfloat16) or any([x.how != how or x.dtype != dtype for x in coded]):
        return False
    # Random bits have another key after 2**32 elements.
    if offset >> 32 != (offset + numel - 1) >> 32:
        return False
    known = [x for x in draws if x is not None]
    if len(known) not in (0, len(draws)):
        return False
    return all([concrete(x.step) and x.seed == known[0].seed and x.offset == offset for x in known])


_PLAIN = (Tensor, torch.nn.Parameter)


def _for_each(x: Tensor, leaves: Any) -> Tensor:
    """A number of all leaves as one for each leaf, unless it is on the host."""
    if x.is_cpu and not x.ndim:
        return x
    device = leaves[0].device
    return (x if device.type == "cpu" else x.to(device, non_blocking=True)).expand(len(leaves))


def _of(x: Any) -> Callable[[Values], Any]:
    if isinstance(x, TensorList) and x.term.name == "entries":
        # The number of the update of each leaf, of random bits.
        return itemgetter(x.term.args[0])
    return x.of if isinstance(x, Number) else lambda given: x


class _Split:
    """Splits terms: what is a number of each leaf is computed before the program, which is given the result.

    Attributes:
        found: the terms of these numbers, in the order of their places.
    """

    def __init__(self):
        self.found: list[Term] = []
        self._made: dict[int, tuple[Term, Term, bool]] = {}

    def by_leaf(self, term: Term) -> bool:
        """Whether a term is a number of each leaf."""
        return self._split(term)[1]

    def of(self, term: Term) -> Term:
        """The term for a program."""
        made, by_leaf = self._split(term)
        if not by_leaf:
            return made
        place = next((i for i, x in enumerate(self.found) if x is term), len(self.found))
        self.found += [term] if place == len(self.found) else []
        return Term("entries", (place,), term.dtype)

    def _split(self, term: Term) -> tuple[Term, bool]:
        if id(term) not in self._made:
            inner = [x for x in term.args if isinstance(x, Term)]
            # A constant goes with either kind.
            kinds = {self.by_leaf(x) for x in inner if x.name != "constant"}
            made, by_leaf = term, term.name == "entries" or kinds == {True}
            if len(kinds) == 2:
                if len({x.dtype for x in inner if x.dtype is not torch.bool}) > 1:
                    # torch's number of a leaf has no dimensions, and does not widen what it meets.
                    raise NotOnLists("a number of each leaf in another dtype")
                args = [self.of(x) if isinstance(x, Term) else x for x in term.args]
                made = Term(term.name, tuple(args), term.dtype)
            elif kinds == {False}:
                # An argument may have been split.
                args = [self.of(x) if isinstance(x, Term) else x for x in term.args]
                if any(x is not y for x, y in zip(args, term.args, strict=True)):
                    made = Term(term.name, tuple(args), term.dtype)
            # The term is kept, so that no other gets its id.
            self._made[id(term)] = term, made, by_leaf
        return self._made[id(term)][1:]


def _by_leaf(term: Any, columns: Sequence[Any], numbers: Values, known: dict[int, Any]) -> Any:
    """Numbers of each leaf, (leaves,), by torch's operations."""
    if not isinstance(term, Term):
        return term.of(numbers) if isinstance(term, Number) else term
    if id(term) not in known:
        if term.name == "entries":
            # The place of a column, or the name of a number.
            place = term.args[0]
            value = columns[place] if isinstance(place, int) else numbers[place]
        else:
            args = [_by_leaf(x, columns, numbers, known) for x in term.args]
            if term.name == "constant":
                value = args[0]
            elif term.name == "to":
                value = args[0].to(term.dtype)
            else:
                value = (OPERATIONS[term.name].torch or getattr(torch, term.name))(*args)
        known[id(term)] = value
    return known[id(term)]


def run(
    plan: Plan,
    columns: Sequence[list[Any] | Tensor],
    numbers: Values,
    places: Places,
    comes: Tensor | None = None,
    roots: bool = False,
    passes: Passes | None = None,
    take: Take | None = None,
) -> tuple[list[Any], Tensor | None]:
    """Run a plan on leaves: `Plans.run`."""
    printer, by_leaf, no = printer_for(columns[0][0].device), plan.by_leaf, (None,) * len(plan.results)
    made: list[Any] = [
        None
        if term is not None
        else columns[place]
        if place is not None
        else [torch.empty_like(x, dtype=dtype) for x in columns[0]]
        for place, dtype, term in zip(plan.results, plan.dtypes, by_leaf or no, strict=True)
    ]
    value = partial(_by_leaf, columns=columns, numbers=numbers, known={})
    more: dict[str, Any] = {"entries": list(map(value, plan.entries))} if plan.entries else {}
    more |= ({} if comes is None else {"comes": comes}) | ({"roots": True} if roots else {})
    for i, term in enumerate(by_leaf):
        if term is not None:
            made[i] = value(term)
    used: list[Any] = [columns[i] if i >= 0 else made[-1 - i] for i in plan.columns]
    if not used:
        # Every result is an argument unchanged.
        return made, None
    plain = [column for column in used if type(column[0]) is not Coded]
    if plan.program.spread:
        # They are not joined with others.
        plain, passes = used, None if passes is None else passes.run()
    if printer is None or not printer.can(plan.program) or not alike(plan.program.of_elements(plain)):
        raise NotOnLists("an operation without a kernel, or tensors in another order in memory")
    if plan.drawn is not None and not all([all(map(Tensor.is_contiguous, column)) for column in plain]):
        # The bits are those of the index of an element, and not of its place in memory.
        raise NotOnLists("random bits of tensors that are not contiguous")
    if len(plain) < len(used) and plan.program.form not in (0, FORMAT):
        raise NotOnLists("random bits of an older format beside codes")
    draws = None
    if plan.drawn is not None:
        if printer is print_torch and not INSTEAD:
            # It says once what is missing: random bits are a hundred operations of torch.
            native.compiler()
        seed, step = (of(numbers) for of in plan.drawn)
        draws = Draws(seed, step, plan.program.form, *places())
    try:
        values = tuple([float(of(numbers)) for of in plan.numbers])
    except (ArithmeticError, TypeError, ValueError) as error:
        # It is raised again where the formula runs leaf by leaf.
        raise NotOnLists(f"{type(error).__name__}: {error}") from error
    found: list[Tensor] = []
    take = take or found.append
    if len(plain) == len(used) and not roots:
        # What is new is written only if somebody holds it when the program runs.
        waits = [x if i >= 0 else list(map(ref, x)) for i, x in zip(plan.columns, used, strict=True)]
        takes = ((len(plan.program.sums), take),) if plan.program.sums else ()
        line = Passes() if passes is None else passes
        entries = tuple(more.get("entries", ()))
        left = Run(plan.program, used[0], tuple(waits), values, draws, printer, entries, takes, comes=comes)
        line.add(left._replace(of=(LOOKING[-1].now,)) if LOOKING else left)
        if passes is None or (takes and take == found.append):
            line.run()
    else:
        if passes is not None:
            passes.run()
        sums = printer.run(plan.program, used, values, [], True, draws, **more)
        if sums is None:
            # Torch's operations have the same bits, if a kernel cannot be built.
            sums = print_torch.run(plan.program, used, values, [], True, draws, **more)
        written = [x for i in plan.written for x in columns[i]]
        increment_version([y for x in written for y in (x.tensors if type(x) is Coded else (x,))])
        if plan.program.sums:
            take(sums)
    return made, found[0] if found else None
