"""`LeafFormula`: a formula of one leaf, and how it updates many: by programs on lists of leaves, or leaf by leaf."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..kernels.codes import Coded
from ..kernels.lists import batches, enough, listed, on_lists
from ..kernels.masters import Master
from ..kernels.norms import CHUNK, squared_norm
from ..kernels.numbers import UNKNOWN, NotOnLists
from ..kernels.plans import Plans, in_blocks
from ..kernels.program import computed, printer_for
from ..kernels.recording import number, root
from ..kernels.rounding import leaf_key
from .context import Context
from .counts import Derived, apart, by_leaf, derived_of_all, next_counts, wide
from .layout import Layout, Leaves
from .leaf_step import LeafStep, Numbers
from .transform import TransformState

NONE: Mapping[str, Any] = MappingProxyType({})

# (parameter, gradient, slots by name, step) -> (new parameter, new slots)
Formula = Callable[[Tensor, Tensor, dict[str, Tensor], LeafStep], tuple[Tensor, dict[str, Tensor]]]
# A formula that needs norms of whole leaves. It returns tensors of the leaf, and a function that gets their norms and
# returns the result.
NormFormula = Callable[
    [Tensor, Tensor, dict[str, Tensor], LeafStep],
    tuple[Sequence[Tensor], Callable[..., tuple[Tensor, dict[str, Tensor]]]],
]
# (parameters, gradients, slots by name, step) -> the indices of leaves that it has not updated: the formula does
OfLists = Callable[[list[Tensor], list[Tensor], dict[str, list[Tensor]], LeafStep], Collection[int]]


@dataclass
class Updates:
    """Updates of several leaves in one step: what they are of, and their results.

    Attributes:
        grads: by path, of the leaves that are updated.
        params: by path.
        slots: state by name and path.
        lr: learning rate; `None` of a direction.
        numbers: hyperparameters by name.
        shared: state that all leaves share, by name.
        ctx: the step's context.
        counts: updates of each leaf, including this one, where Python does not read them.
        new: new parameters, or directions, by path. They are in the memory of the old ones if that is donated.
        own: new slots by name and path, likewise.
    """

    grads: Leaves
    params: Leaves
    slots: TransformState
    lr: Any
    numbers: Numbers
    shared: TransformState
    ctx: Context
    counts: Leaves = field(default_factory=dict)
    new: Leaves = field(init=False, default_factory=dict)
    own: TransformState = field(init=False, default_factory=dict)

    def take(self, paths: Sequence[str], new: Sequence[Any], slots: Sequence[Sequence[Any]]) -> None:
        """Take results: of each leaf the parameter or direction, and of each slot its tensors."""
        self.new.update(zip(paths, new, strict=True))
        for slot, tensors in zip(self.slots, slots, strict=True):
            self.own.setdefault(slot, {}).update(zip(paths, tensors, strict=True))

    def take_leaf(self, path: str, made: tuple[Tensor, Mapping[str, Tensor]]) -> None:
        """Take the result of a formula on one leaf. It is written at once: of a donated state one leaf is twice in
        memory."""
        (x, after), ctx = made, self.ctx
        self.new[path] = x if self.lr is None else ctx.into(self.params[path], x)
        for slot, olds in self.slots.items():
            self.own.setdefault(slot, {})[path] = ctx.into(olds[path], after[slot])


class _Steps:
    """The `LeafStep` of leaves that are updated together: one for all, and that of each.

    Args:
        together: of all; its path and offset are unknown.
        ctx: the step's context.
        rows: makes of each leaf its path, count and derived numbers, where these differ.
    """

    def __init__(self, together: LeafStep, ctx: Context, rows: Callable[[], Iterator[Any]] | None = None):
        self.together, self.ctx, self.rows = together, ctx, rows
        self.apart: dict[str, LeafStep] | None = None

    def of(self, path: str) -> LeafStep:
        if self.rows is None:
            return self._of(path)
        # No `cached_property`, whose lock the compiler cannot trace.
        if self.apart is None:
            self.apart = {path: self._of(path, count=count, derived=made) for path, count, made in self.rows()}
        return self.apart[path]

    def _of(self, path: str, **more: Any) -> LeafStep:
        return replace(self.together, path=path, offset=self.ctx.offsets.get(path, 0), **more)


class LeafFormula:
    """A formula of one leaf, for tensors in their dtypes.

    Args:
        formula: of one leaf.
        slots: the names of its state.
        derived: further numbers, from count, rate and hyperparameters.
        of_norms: whether the formula needs norms of whole leaves.
        lists: what updates leaves together in the place of a program, as `with_lists` says.
    """

    def __init__(
        self,
        formula: Formula | NormFormula,
        slots: Sequence[str],
        derived: Derived | None = None,
        of_norms: bool = False,
        lists: OfLists | None = None,
    ):
        self.formula: Any = formula
        self.slots, self.derived, self.of_norms, self.lists = list(slots), derived, of_norms, lists
        self.plans = plans_of(formula, self.slots)
        self.sums = plans_of(formula, self.slots, sums=True) if of_norms else None

    def update(self, groups: Mapping[int, list[str]], updates: Updates) -> None:
        """Update leaves in a step that reads their counts in Python: `groups` has the paths of each count."""
        lr, numbers, ctx = updates.lr, updates.numbers, updates.ctx
        in_double = {k: wide(x) for k, x in numbers.items()}
        for count, paths in groups.items():
            made = self.derived(count, wide(lr), in_double) if self.derived else {}
            together = LeafStep(count, lr, UNKNOWN, UNKNOWN, numbers, updates.shared, made, rounding=ctx.rounding)
            self._update(paths, _Steps(together, ctx), updates)

    def update_unread(self, updates: Updates) -> None:
        """Update leaves in a step that is recorded, or that reads no count: `updates.counts` are tensors."""
        counts, lr, numbers, ctx = updates.counts, updates.lr, updates.numbers, updates.ctx
        dtypes = {x.dtype for path, g in updates.grads.items() for x in (g, updates.params[path])}
        given = counts, lr, numbers, self.derived, ctx, dtypes
        count, made = (UNKNOWN, NONE) if ctx.recorded or not counts else derived_of_all(*given)
        together = LeafStep(count, lr, UNKNOWN, UNKNOWN, numbers, updates.shared, made, rounding=ctx.rounding)
        self._update(list(updates.grads), _Steps(together, ctx, partial(by_leaf, *given)), updates)

    def _update(self, paths: list[str], steps: _Steps, updates: Updates) -> None:
        ctx = updates.ctx
        if self.of_norms:
            for some in _together(paths, ctx.layout):
                self._by_norms(some, steps, updates)
            return
        rest = paths
        if self.lists is not None and not ctx.recorded and not ctx.unread:
            ctx.settle()
            rest = self._by_lists(paths, steps.together, updates)
        elif self.lists is None:
            rest = _by_programs(self.plans, paths, steps.together, updates)
        if rest:
            ctx.settle()
        if self.lists is None and (steps.rows is None or (ctx.unread and not self.derived and ctx.rounding is None)):
            # Where nobody reads the counts, and nothing is derived from them, leaves with different ones are one list.
            rest = self._on_lists(rest, steps.together, updates)
        for path in rest:
            updates.take_leaf(path, self._on_leaf(path, steps, updates))

    def _on_leaf(self, path: str, steps: _Steps, updates: Updates) -> Any:
        olds = {slot: old[path] for slot, old in updates.slots.items()}
        return self.formula(updates.params[path], updates.grads[path], olds, steps.of(path))

    def _by_norms(self, paths: list[str], steps: _Steps, updates: Updates) -> None:
        """Update leaves by a formula that needs norms of whole leaves: one pass for their squares, one more.

        Squares are added up in float64, whichever way a rank goes: ranks with shards of a leaf may go different ways.
        """
        ctx, squares = updates.ctx, Leaves()
        then: dict[str, tuple[list[torch.dtype], Callable[..., Any]]] = {}
        assert self.sums is not None
        alone = _by_programs(self.sums, paths, steps.together, updates, squares=squares)
        if alone:
            ctx.settle()
        for path in alone:
            measured, after = self._on_leaf(path, steps, updates)
            squares[path] = torch.stack([_sum_of_squares(x, ctx.recorded) for x in measured])
            then[path] = [torch.promote_types(x.dtype, torch.float32) for x in measured], after
        totals = ctx.total_each({path: squares[path] for path in paths})
        others = [path for path in paths if path not in then]
        rest = _by_programs(self.plans, others, steps.together, updates, totals)
        for path in rest:
            # Its squares were a program, but nothing else is.
            ctx.settle()
            measured, after = self._on_leaf(path, steps, updates)
            then[path] = [torch.float32] * len(measured), after
        for path, (dtypes, after) in then.items():
            roots = map(root, totals[path].unbind()) if ctx.recorded else totals[path].sqrt().unbind()
            updates.take_leaf(path, after(*map(Tensor.to, roots, dtypes)))

    def _by_lists(self, group: list[str], step: LeafStep, updates: Updates) -> list[str]:
        """Update leaves by a function of `with_lists`. Returns those that are left."""
        ctx, slots = updates.ctx, updates.slots
        columns = [list(map(x.__getitem__, group)) for x in (updates.params, updates.grads)]
        numbers = numbers_of(step).values()
        if ctx.rounding is not None or not set(map(type, numbers)) <= {int, float, bool} or not on_lists(columns):
            return group
        if printer_for(columns[0][0].device) is None:
            return group
        if ctx.donate:
            ctx.written.add(ctx.prefix)
        rest: list[str] = []
        assert self.lists is not None
        for batch, (params, grads) in batches(*columns):
            paths = [group[i] for i in batch]
            olds = {slot: list(map(old.__getitem__, paths)) for slot, old in slots.items()}
            written = params if ctx.donate else list(map(Tensor.clone, params))
            olds = olds if ctx.donate else {slot: list(map(Tensor.clone, x)) for slot, x in olds.items()}
            at = replace(step, paths=paths, offsets=places_of(paths, ctx)[1])
            left = set(self.lists(written, grads, olds, at))
            rest += [paths[i] for i in sorted(left)]
            done = [i for i in range(len(paths)) if i not in left]
            taken = [[x[i] for i in done] for x in (written, *olds.values())]
            updates.take([paths[i] for i in done], taken[0], taken[1:])
        return rest

    def _on_lists(self, group: list[str], step: LeafStep, updates: Updates) -> list[str]:
        """Update leaves by the formula on lists of them, which it computes part by part. Returns those that are left.

        So it takes products of matrices in the middle (`zerofn.kernels.lists.on_stacks`), and runs by torch's
        operations on lists on a GPU without Triton.
        """
        ctx, slots = updates.ctx, updates.slots
        columns = [list(map(x.__getitem__, group)) for x in (updates.params, updates.grads, *slots.values())]
        if not group or ctx.recorded or not on_lists(columns):
            return group
        rest: list[str] = []
        for batch, lists in batches(*columns):
            paths = group if len(batch) == len(group) else [group[i] for i in batch]
            p, g, *values = listed(lists)
            olds = dict(zip(slots, values, strict=True))
            try:
                at = replace(step, paths=paths, offsets=places_of(paths, ctx)[1])
                x, after = self.formula(p, g, dict(olds), at)
            except Exception:
                # A formula that gets lists may raise any error. Its leaves then run one by one, and a real error is
                # raised again there. Nothing of this batch is written yet, since a formula writes none of its
                # arguments.
                rest += paths
                continue
            written: Any = x if updates.lr is None else ctx.into(p, x)
            kept: list[Any] = [ctx.into(old, after[slot]) for slot, old in olds.items()]
            squares = [g.to(torch.float32).square()] if _rides(paths, updates) else []
            sums = computed(written, *kept, sums=squares)
            if sums is not None:
                _add_norms(paths, ctx, sums)
            updates.take(paths, written.tensors, [value.tensors for value in kept])
        return rest


# One message sums the norms of leaves with about this many elements over ranks. Until then the tensors of their formula
# are kept, which for the whole tree would be too many.
TOGETHER = 1 << 26


def _together(paths: Sequence[str], layout: Layout) -> Iterator[list[str]]:
    """Paths of leaves whose norms are summed by one message."""
    # The sizes of whole leaves, not of shards, so that all ranks send the same number of messages.
    sizes = {leaf.path: leaf.numel for leaf in layout.leaves}
    found: list[str] = []
    elements = 0
    for path in paths:
        found.append(path)
        elements += sizes[path]
        if elements >= TOGETHER:
            yield found
            found, elements = [], 0
    if found:
        yield found


def _sum_of_squares(x: Tensor, recorded: bool) -> Tensor:
    """The sum of squares of one tensor, 0-d, in float64 where there is one."""
    if recorded:
        return squared_norm({"": x})
    if not x.is_cpu or x.is_complex():
        found = squared_norm({"": x})
        return found if x.device.type == "mps" else found.double()
    # In pieces, which need no copy of the leaf in float64.
    parts = [part.double().square().sum() for part in x.reshape(-1).split(CHUNK)]
    return torch.stack(parts).sum()


# ----------------------------------------------------------------------------------------------------------------------
# A formula as a program: `Plans` traces it for a kind of columns, and runs it on lists of leaves.


@dataclass(frozen=True)
class About:
    """What else a program of an optimizer depends on.

    Attributes:
        shared: state that all leaves share: names and numbers.
        norms: whether the squares of the gradients are added up for a metric.
        rounding: of results, without the number of the step.
        masters: whether parameters are masters of 24 bits, whose residuals are the last column.
    """

    shared: tuple[tuple[str, Any], ...] = ()
    norms: bool = False
    rounding: Any = None
    masters: bool = False


def plans_of(formula: Any, slots: Sequence[str], sums: bool = False) -> Plans:
    """The programs of an optimizer's formula; with `sums`, of the sums of squares whose roots are its norms.

    Their columns are parameters, gradients, the slots, and the norms that the formula needs.
    """

    def traced(lists: list[Any], numbers: Mapping[Any, Any], about: About) -> Any:
        p, g, *olds = lists
        residual = olds.pop() if about.masters else None
        p = p if residual is None else p.joined(residual)
        olds, norms = olds[: len(slots)], olds[len(slots) :]
        named: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for (of, name), x in numbers.items():
            if of < 2:
                named[of][name] = x
        given = numbers[2, "count"], numbers.get((2, "lr")), UNKNOWN, UNKNOWN
        at = LeafStep(*given, named[0], dict(about.shared), named[1], rounding=about.rounding)
        x, after = formula(p, g, dict(zip(slots, olds, strict=True)), at)
        if sums:
            return [], [_squared(y) for y in x]
        if not isinstance(after, Mapping):
            x, after = after(*norms)
        made = [x if residual is None else x.upper_half(), *map(after.__getitem__, slots)]
        made += [] if residual is None else [x.residual()]
        return made, [g.to(torch.float32).square()] if about.norms else []

    return Plans(traced)


def _squared(x: Any) -> Any:
    # A sum of float64 is no program.
    return x.to(torch.promote_types(x.dtype, torch.float32)).square()


def numbers_of(step: LeafStep) -> dict[Any, Any]:
    """The numbers of an update by name, as `plans_of` takes them."""
    found: dict[Any, Any] = {(0, name): x for name, x in step.numbers.items()}
    found |= {(1, name): x for name, x in step.derived.items()}
    return found | ({(2, "count"): step.count} if step.lr is None else {(2, "count"): step.count, (2, "lr"): step.lr})


def places_of(paths: Sequence[str], ctx: Context) -> tuple[list[int], list[int]]:
    """The keys and the offsets of leaves, for random bits."""
    return list(map(leaf_key, paths)), [ctx.offsets.get(path, 0) for path in paths]


def _by_programs(
    plans: Plans,
    group: list[str],
    step: LeafStep,
    updates: Updates,
    totals: Mapping[str, Tensor] = NONE,
    squares: Leaves | None = None,
) -> list[str]:
    """Update leaves by programs of a formula. Returns those for which there is none.

    Args:
        plans: of the formula.
        group: paths of the leaves.
        step: of all of them.
        updates: gets the results.
        totals: sums of squares of each leaf, by path, whose roots are the norms that the formula needs.
        squares: gets the sums of squares of a program that gives these alone.
    """
    params, ctx = updates.params, updates.ctx
    if ctx.recorded or not group:
        return group
    columns = [list(map(x.__getitem__, group)) for x in (params, updates.grads, *updates.slots.values())]
    # A slot of numbers beside leaves that are none.
    of_leaf = [i > 1 and _are_numbers(x, columns[0]) for i, x in enumerate(columns)]
    if not on_lists([x for x, one in zip(columns, of_leaf, strict=True) if not one]):
        return group
    if ctx.unread and params[group[0]].is_cpu:
        return group
    numbers = numbers_of(step)
    into = None if squares is not None else _into(updates, of_leaf)
    shared = tuple([(name, number(x)) for name, x in step.shared.items()])
    rounding = step.rounding and step.rounding._replace(step=None)
    if ctx.donate and squares is None:
        ctx.written.add(ctx.prefix)
    rest: list[str] = []
    for batch, lists in batches(*columns):
        paths = group if len(batch) == len(group) else [group[i] for i in batch]
        rows = [torch.stack(x) if one else x for x, one in zip(lists, of_leaf, strict=True)]
        if totals:
            rows += torch.stack([totals[path] for path in paths], 1).sqrt().to(torch.float32).unbind()
        about = About(shared, squares is None and _rides(paths, updates), rounding)
        more: dict[str, Any] = {}
        if squares is None:
            more = {"take": partial(_add_norms, paths, ctx), "comes": ctx.choosing if ctx.donate else None}
        try:
            place = partial(places_of, paths, ctx)
            made, sums = plans.run(rows, of_each(numbers, batch, group), into, about, place, passes=ctx.passes, **more)
        except NotOnLists:
            rest += paths
            continue
        if squares is not None and sums is not None:
            squares.update(zip(paths, sums.mT.double().unbind(), strict=True))
            continue
        if about.norms and ctx.norms is not None:
            ctx.norms.expect(paths)
        for i, one in enumerate(of_leaf[2:], 2):
            if one:
                # They stay tensors of their own, as they began.
                news = made[i - 1].unbind() if ctx.donate else map(Tensor.clone, made[i - 1].unbind())
                olds = dict(zip(paths, lists[i], strict=True))
                made[i - 1] = list(ctx.into_each(olds, dict(zip(paths, news, strict=True))).values())
        updates.take(paths, made[0], made[1:])
    return rest


def of_each(numbers: dict[Any, Any], batch: Sequence[int], group: Sequence[str]) -> dict[Any, Any]:
    """Numbers of the leaves of a batch: of tensors with a number for each leaf of the group those of the batch."""
    if len(batch) == len(group):
        return numbers
    return {key: x[list(batch)] if isinstance(x, Tensor) and x.ndim else x for key, x in numbers.items()}


def _into(updates: Updates, of_leaf: Sequence[bool]) -> list[int | None] | None:
    """Into which columns the results are written; `None` if all are new."""
    donate = updates.ctx.donate
    if not donate and not any(of_leaf):
        return None
    # A direction is new, and so are slots if nothing is donated.
    first = 0 if updates.lr is not None and donate else None
    return [first, *[i if donate or one else None for i, one in enumerate(of_leaf) if i > 1]]


def _are_numbers(column: list[Any], leaves: list[Tensor]) -> bool:
    """Whether a slot has one number for each leaf."""
    return bool(column) and not column[0].ndim and not any(x.ndim for x in column) and any(x.ndim for x in leaves)


def _rides(paths: Sequence[str], updates: Updates) -> bool:
    """Whether norms for a metric ride on the pass of an update: on a GPU torch takes them in fewer launches."""
    return updates.ctx.wants_norms(paths, updates.grads) and updates.grads[paths[0]].is_cpu


def _add_norms(paths: Sequence[str], ctx: Context, squares: Tensor) -> None:
    """Take the norms of gradients whose squares a pass has added up, (1, leaves), on the CPU."""
    if ctx.norms is not None:
        # In Python: operations of torch are slow just after a kernel has emptied the caches.
        ctx.norms.add(paths, list(map(math.sqrt, squares.tolist()[0])))


def _add_roots(paths: Sequence[str], ctx: Context, norms: Any) -> None:
    """Take the norms of gradients, (leaves,): as numbers, or as 0-d tensors of a GPU, which are not read."""
    if ctx.norms is not None:
        ctx.norms.add(paths, norms.tolist() if norms.is_cpu else norms.unbind())


# ----------------------------------------------------------------------------------------------------------------------
# Leaves that are kept as codes of 8 or 4 bits, or as masters of 24 bits, are updated by a program as they are stored.


def update_stored(plans: Plans, derived: Derived | None, known: Leaves, updates: Updates) -> TransformState:
    """Update leaves as they are stored: those that a program takes. Returns the counts of these.

    Args:
        plans: of the formula.
        derived: numbers of the formula.
        known: the number of updates of each leaf.
        updates: its slots are tensors or each a `Coded`; its parameters tensors, or each a `Master`.
    """
    grads, params, lr, ctx = updates.grads, updates.params, updates.lr, updates.ctx
    rows = {path: [*_parts(params[path]), g, *(x[path] for x in updates.slots.values())] for path, g in grads.items()}
    stored = {path: type(params[path]) is Master or any([type(x) is Coded for x in row]) for path, row in rows.items()}
    rows = {path: row for path, row in rows.items() if stored[path] and in_blocks(row, ctx.offsets.get(path, 0))}
    on_cpu = [row[0] for row in rows.values() if row[0].is_cpu]
    if not enough(sum(map(Tensor.numel, on_cpu)), on_cpu):
        rows = {path: row for path, row in rows.items() if not row[0].is_cpu}
    if not rows:
        return {}
    groups, before, _ = next_counts(known, rows)
    in_double = {k: wide(x) for k, x in updates.numbers.items()}
    shared = tuple([(name, number(x)) for name, x in updates.shared.items()])
    for count, group in groups.items():
        made_of_count = derived(count, wide(lr), in_double) if derived else {}
        step = LeafStep(count, lr, UNKNOWN, UNKNOWN, updates.numbers, updates.shared, made_of_count)
        kinds: dict[Any, list[str]] = {}
        for path in group:
            kind = rows[path][0].device, *((type(x) is Coded, x.dtype) for x in rows[path])
            kinds.setdefault((type(params[path]) is Master, kind), []).append(path)
        for (masters, _), paths in kinds.items():
            columns: list[list[Any]] = [list(x) for x in zip(*map(rows.__getitem__, paths), strict=True)]
            # The residuals are the last column.
            columns = [columns[0], *columns[2:], columns[1]] if masters else columns
            written = [*([0] if lr is not None else []), *range(2, len(columns))]
            for i in () if ctx.donate else written:
                columns[i] = [x.clone() for x in columns[i]]
            about = About(shared, ctx.wants_norms(paths, grads), masters=masters)
            into = written if lr is not None else [None, *written]
            place = partial(places_of, paths, ctx)
            try:
                (x, *made), norms = plans.run(columns, numbers_of(step), into, about, place, roots=True)
            except NotOnLists:
                continue
            if ctx.donate:
                ctx.written.add(ctx.prefix)
            if norms is not None:
                _add_roots(paths, ctx, norms[0])
            updates.take(paths, list(map(Master, x, made.pop())) if masters else x, made)
    done = {path: n + 1 for path, n in zip(rows, before, strict=True) if path in updates.new}
    return dict(zip(done, apart(torch.tensor(list(done.values()), dtype=torch.int64)), strict=True))


def _parts(x: Any) -> list[Tensor]:
    """A parameter as it is stored: a tensor, or the two of a master."""
    return [x.p, x.residual] if type(x) is Master else [x]
