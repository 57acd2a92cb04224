"""Kernels by hand: how one takes the place of a formula in a step, in a graph, on a device, recorded and in a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import Function

from .._compat.functorch import as_batch, beneath_functorch, only_reverse, only_vmap, stacked, while_traced
from ..kernels.derivative import reverse
from ..kernels.joined import Passes
from ..kernels.lists import batches, enough, on_lists
from ..kernels.native import compiler
from ..kernels.numbers import UNKNOWN, NotOnLists
from ..kernels.plans import Plans
from ..kernels.recording import number, only_compiled, operator
from ..kernels.rounding import FORMAT_ENTRY, leaf_key
from .context import Context
from .counts import by_count, by_leaf, whole, wide
from .leaf_step import LeafStep, Numbers
from .leaf_updates import About, LeafFormula, Updates, numbers_of, plans_of
from .transform import TransformState


@dataclass(frozen=True)
class LeafList:
    """The leaves that one call of a kernel updates, as lists of tensors.

    All leaves of the lists have had the same number of updates. In a compiled graph and on a device whose numbers are
    not read the lists have all leaves, whatever their numbers of updates are.

    Attributes:
        params: the parameters, which the kernel writes in place.
        grads: the gradients, which the kernel never writes.
        slots: by name, the tensors of each slot, which the kernel writes in place.
        count: the number of updates including this one; a tensor of the shape `(leaves,)` in a graph and on a device.
        lr: the learning rate of this update; maybe a 0-d tensor in a graph and on a device.
        paths: the paths of the leaves.
        offsets: the global index of each leaf's first stored element.
        numbers: hyperparameters by name.
        shared: state that all leaves share, by name. The kernel only reads it.
        norms: an empty list if a metric needs the norms of the gradients, otherwise `None`. A kernel that computes the
            norms anyway appends one for each leaf. If the list stays empty, zerofn computes the norms in another pass.
        comes: a 0-d bool tensor on the device, or `None`. If it is false, the kernel must write nothing.
        where: where the kernel runs. `"step"`: an ordinary step. `"graph"`: a compiled graph, for which the kernel
            calls an operator that `torch.library` knows. `"device"`: a step in which Python may not read counts or
            rates (`Context.unread`). And `"stored"`, which no kernel is given: leaves as they are stored, whose slots
            are each a `Coded` or whose parameters are each a `Master`.
        passes: for a kernel that is `Joining`: where its programs wait for those of its neighbours (`Context.passes`).
            Then the norms may be appended when they have run.
    """

    params: list[Tensor]
    grads: list[Tensor]
    slots: dict[str, list[Tensor]]
    count: Any
    lr: Any
    paths: list[str]
    offsets: list[int]
    numbers: Numbers = field(default_factory=dict)
    shared: TransformState = field(default_factory=dict)
    norms: list[float] | None = None
    comes: Tensor | None = None
    where: str = "step"
    passes: Passes | None = None

    def places(self, entries: Sequence[int]) -> tuple[list[int], list[int]]:
        """The keys and the offsets of some leaves, for random bits."""
        return [leaf_key(self.paths[i]) for i in entries], [self.offsets[i] for i in entries]

    def only(self, chosen: list[bool]) -> LeafList:
        """The leaves for which `chosen` is true, without a request for norms."""

        def pick(entries: list) -> list:
            return [x for x, on in zip(entries, chosen, strict=True) if on]

        slots = {name: pick(entries) for name, entries in self.slots.items()}
        count = torch.stack(pick([*self.count])) if isinstance(self.count, Tensor) else self.count
        lists = pick(self.params), pick(self.grads), slots, count, self.lr, pick(self.paths), pick(self.offsets)
        return LeafList(*lists, self.numbers, self.shared, comes=self.comes, where=self.where)


Kernel = Callable[[LeafList], None]


class ByHand(NamedTuple):
    """A kernel by hand.

    Attributes:
        run: updates a list of leaves.
        takes: which leaves it updates in a step that is no ordinary one.
        plans: programs with its bits, of leaves as they are stored.
        backwards: the programs of the reversed formula.
    """

    run: Kernel
    takes: Callable[[LeafList], Sequence[bool]]
    plans: Plans
    backwards: Plans

    def takes_all(self, leaves: LeafList) -> bool:
        return all(self.takes(leaves))


def asked(updates: Updates, where: str) -> LeafList:
    """All leaves, for `ByHand.takes`."""
    return _listed(list(updates.grads), None, replace(updates, ctx=replace(updates.ctx, donate=True)), None, where)


def _listed(
    group: list[str], count: Any, updates: Updates, comes: Tensor | None = None, where: str = "step"
) -> LeafList:
    """Leaves as lists for a kernel, which writes parameters and slots: copies of the old ones unless donated."""
    ctx = updates.ctx
    # By `map` over C functions: this runs for every leaf in every step.
    columns = {}
    for name, x in {"": updates.params, **updates.slots}.items():
        column: list[Any] = list(map(x.__getitem__, group))
        # `x` is a tensor or a `Coded`. The compiler cannot trace a `methodcaller`.
        columns[name] = column if ctx.donate else [x.clone() for x in column]
    offsets: list[Any] = [0] * len(group)
    if ctx.offsets:
        offsets = list(map(ctx.offsets.get, group, offsets))
    gradients, written = list(map(updates.grads.__getitem__, group)), columns.pop("")
    norms = [] if ctx.wants_norms(group, updates.grads) else None
    numbers = count, updates.lr, group, offsets, updates.numbers, updates.shared
    return LeafList(written, gradients, columns, *numbers, norms, comes, where, ctx.passes if where == "step" else None)


def update_unread(by_hand: ByHand, updates: Updates) -> bool:
    """Update leaves in a step that reads no count and no rate in Python; whether the kernel does that."""
    if not updates.grads or any(isinstance(x, Tensor) for x in updates.numbers.values()):
        return False
    if not by_hand.takes_all(asked(updates, "device")):
        return False
    each = list(updates.counts.values())
    together = whole(each)
    counts = torch.stack(each) if together is None else together
    update_in_place(by_hand.run, [(counts, list(updates.grads))], updates, updates.ctx.choosing, "device")
    return True


def update_recorded(by_hand: ByHand, formula: LeafFormula, updates: Updates) -> bool:
    """Update leaves in a step that is recorded; whether the kernel does that.

    Args:
        by_hand: the kernel.
        formula: that it stands for.
        updates: of the leaves.
    """
    if not updates.counts:
        return False
    if _in_graph(by_hand, updates):
        return True
    rows = [[updates.params[p], g, *(old[p] for old in updates.slots.values())] for p, g in updates.grads.items()]
    if reversible(rows, (updates.lr, *updates.numbers.values())):
        _with_derivative(by_hand, formula, updates)
        return True
    return _on_members(by_hand.run, updates)


def _in_graph(by_hand: ByHand, updates: Updates) -> bool:
    """Call a kernel as an operator of a compiled graph; whether it takes the leaves, and nothing else records."""
    leaves = asked(updates, "graph")
    tensors = *leaves.params, *leaves.grads, *(x for column in leaves.slots.values() for x in column)
    if not only_compiled((*tensors, leaves.lr, *leaves.numbers.values())) or not by_hand.takes_all(leaves):
        return False
    counts = torch.stack(list(updates.counts.values()))
    donated = replace(updates, ctx=replace(updates.ctx, donate=updates.ctx.donate_to_kernels))
    update_in_place(by_hand.run, [(counts, leaves.paths)], donated, where="graph")
    updates.new, updates.own = donated.new, donated.own
    return True


def update_in_place(
    kernel: Kernel,
    groups: Iterable[tuple[Any, list[str]]],
    updates: Updates,
    comes: Tensor | None = None,
    where: str = "step",
) -> None:
    """Update leaves by a kernel on lists, in the memory of the old ones if that is donated."""
    ctx = updates.ctx
    for count, group in groups:
        leaves = _listed(group, count, updates, comes, where)
        if ctx.donate:
            ctx.written.add(ctx.prefix)
        kernel(leaves)
        if leaves.norms is not None and ctx.passes is not None:
            # It must not hold the gradients, which are then written for nobody.
            ctx.passes.then(partial(_add_found, group, leaves.norms, ctx))
        elif leaves.norms:
            _add_found(group, leaves.norms, ctx)
        updates.take(group, leaves.params, list(leaves.slots.values()))


def _add_found(group: list[str], norms: list[float], ctx: Context) -> None:
    """Take the norms that a kernel has found, if it has."""
    if norms and ctx.norms is not None:
        ctx.norms.add(group, norms)


# ----------------------------------------------------------------------------------------------------------------------
# `Programs` is the kernel of an optimizer that has none by hand, in steps that are recorded: it is one operator of a
# compiled graph, and runs for many elements under autograd and under torch.func.vmap.


class Programs:
    """A kernel that updates lists of leaves by programs of a formula, and leaf by leaf where there is none.

    Args:
        name: of the optimizer.
        formula: of one leaf, without norms.
        numbers, shared: the names of its hyperparameters, and of the state that all leaves share.
    """

    def __init__(self, name: str, formula: LeafFormula, numbers: Sequence[str], shared: Sequence[str]):
        self.formula, self.numbers, self.shared = formula, list(numbers), list(shared)
        # A string, since the compiler may take an int for one that changes.
        self.key = f"{name} {next(_NUMBERED)}"
        _KNOWN[self.key] = self
        self.by_hand = ByHand(self.run, self.takes, formula.plans, backwards_of(formula.formula, formula.slots))

    def update(self, updates: Updates) -> bool:
        """Update leaves in a step that is recorded; whether that is done."""
        if updates.ctx.rounding is not None or not updates.grads:
            return False
        if torch.compiler.is_compiling():
            return FORMAT_ENTRY in updates.shared and _in_graph(self.by_hand, updates)
        return enough(_numel(updates)) and update_recorded(self.by_hand, self.formula, updates)

    def takes(self, leaves: LeafList) -> list[bool]:
        """Whether a compiled graph calls the kernel, if bits are drawn: where it is in C.

        Random bits are a hundred operations, with which a compiler spends seconds for each leaf.
        """
        drawn = leaves.where == "graph" and leaves.shared.keys() == set(self.shared)
        numbers = set(map(type, leaves.numbers.values())) <= {float, int, Tensor}
        taken = drawn and numbers and all([x.is_cpu for x in (*leaves.params, *leaves.grads)]) and _builds()
        return [taken] * len(leaves.params)

    def run(self, leaves: LeafList) -> None:
        if leaves.where != "graph":
            self.update_lists(leaves)
            return
        numbers = [torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in (leaves.lr, *leaves.numbers.values())]
        slots = [x for column in leaves.slots.values() for x in column]
        shared = [leaves.shared[name] for name in self.shared]
        given = leaves.count, torch.stack(numbers), shared, self.key, leaves.paths, leaves.offsets
        _UPDATE(leaves.params, leaves.grads, slots, *given)

    def update_lists(self, leaves: LeafList) -> None:
        """Update leaves of one count, which is a number."""
        numbers, derived = leaves.numbers, self.formula.derived
        made = derived(leaves.count, wide(leaves.lr), {k: wide(x) for k, x in numbers.items()}) if derived else {}
        step = LeafStep(leaves.count, leaves.lr, UNKNOWN, UNKNOWN, numbers, leaves.shared, made)
        columns = [leaves.params, leaves.grads, *leaves.slots.values()]
        rest: Collection[int] = range(len(leaves.params))
        if on_lists(columns):
            about, into = About(tuple([(name, number(x)) for name, x in leaves.shared.items()])), range(2, len(columns))
            rest = []
            for batch, rows in batches(*columns):
                try:
                    self.formula.plans.run(rows, numbers_of(step), [0, *into], about, partial(leaves.places, batch))
                except NotOnLists:
                    rest += batch
        for i in rest:
            p, g, *olds = [column[i] for column in columns]
            at = replace(step, path=leaves.paths[i], offset=leaves.offsets[i])
            x, after = self.formula.formula(p, g, dict(zip(leaves.slots, olds, strict=True)), at)
            for old, new in zip((p, *olds), (x, *map(after.__getitem__, leaves.slots)), strict=True):
                old.copy_(new)


_KNOWN: WeakValueDictionary[str, Programs] = WeakValueDictionary()
_NUMBERED = itertools.count()


@while_traced
def _builds() -> bool:
    return compiler() is not None


def _numel(updates: Updates) -> int:
    """The elements of the leaves that are updated; those of all members of a batch."""
    sizes = [updates.params[path].numel() for path in updates.grads]
    if only_vmap() is None:
        return sum(sizes)
    with beneath_functorch():
        rows = [stacked(x) for x in (*updates.grads.values(), updates.lr) if isinstance(x, Tensor)]
        return sum(sizes) * max([len(x) for x in rows if x is not None], default=1)


def _run_operator(
    params: list[Tensor],
    grads: list[Tensor],
    slots: list[Tensor],
    counts: Tensor,
    numbers: Tensor,
    shared: list[Tensor],
    key: str,
    paths: list[str],
    offsets: list[int],
) -> None:
    """`Programs.update_lists` on leaves that may have different numbers of updates.

    Args:
        slots: those of all leaves for each slot, one list after the other.
        counts: the number of this update, for each leaf; on the CPU.
        numbers: the rate and the hyperparameters, in float64.
        shared: state that all leaves share.
        key: of the programs.
    """
    programs, many, found = _KNOWN[key], len(params), counts.tolist()
    lr, *rest = numbers.tolist()
    named = dict(zip(programs.numbers, rest, strict=True)), dict(zip(programs.shared, shared, strict=True))
    columns = {name: slots[i * many : (i + 1) * many] for i, name in enumerate(programs.formula.slots)}
    for step in dict.fromkeys(found):
        leaves = LeafList(params, grads, columns, step, lr, paths, offsets, *named)
        programs.update_lists(leaves.only([x == step for x in found]))


# One call takes all leaves. The compiler does not trace it: the schema says what it writes.
_UPDATE = operator(
    "update_(Tensor(a0!)[] params, Tensor[] grads, Tensor(a2!)[] slots, Tensor counts, Tensor numbers, "
    "Tensor[] shared, str key, str[] paths, SymInt[] offsets) -> ()",
    _run_operator,
)


# ----------------------------------------------------------------------------------------------------------------------
# An update of all leaves inside autograd is one `autograd.Function`: its forward is a kernel, and its backward is the
# reversed formula, a program (`zerofn.kernels.derivative`).


# From tensors, one list after the other, to tensors.
Run = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


_WIDE = (torch.float32, torch.float64)


def reversible(tensors: Sequence[Sequence[Tensor]], numbers: Sequence[Any]) -> bool:
    """Whether a reversed formula gives the derivative: in reverse mode only, by these tensors and by no number.

    Args:
        tensors: for each leaf the parameter, the gradient and the slots. 16-bit tensors are rounded by the formula.
        numbers: rates and hyperparameters.
    """
    if any(isinstance(x, Tensor) for x in numbers) or not only_reverse():
        return False
    return all(x.dtype in _WIDE and x.dtype == own[0].dtype for own in tensors for x in own)


class _Recorded(Function):
    """The update of all leaves in one call: one call of a `Function` costs as much as many small leaves."""

    @staticmethod
    def forward(run: Run, pull: Run, *given: Tensor) -> tuple[Tensor, ...]:
        return run(given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        _, ctx.pull, *given = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple:
        tensors = (*cotangents, *ctx.saved_tensors)
        kept = torch.is_grad_enabled() and only_reverse()
        return None, None, *(_Pull.apply(ctx.pull, *tensors) if kept else ctx.pull(tensors))


class _Pull(Function):
    """The backward of `_Recorded`. Its own derivative computes it again, and saves no intermediates."""

    @staticmethod
    def forward(pull: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        # An argument that is a result too could not be saved.
        return tuple([y.view_as(y) if any(y is x for x in tensors) else y for y in pull(tensors)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.pull = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple:
        back = torch.func.vjp(lambda *tensors: ctx.pull(tensors), *ctx.saved_tensors)[1]
        return None, *back(cotangents)


def _with_derivative(by_hand: ByHand, formula: LeafFormula, updates: Updates) -> None:
    """Update leaves by a kernel in new memory, recorded by autograd, with the reversed formula as its derivative."""
    grads, params, slots, counts = updates.grads, updates.params, updates.slots, updates.counts
    ctx, more = updates.ctx, (updates.numbers, updates.shared)
    rows = by_leaf(counts, updates.lr, updates.numbers, formula.derived, ctx)
    steps = [LeafStep(count, updates.lr, p, ctx.offsets.get(p, 0), *more, made) for p, count, made in rows]
    paths = [at.path for at in steps]
    n, several = len(paths), 1 + len(slots)

    def run(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        columns = [dict(zip(paths, tensors[i : i + n], strict=True)) for i in range(0, len(tensors), n)]
        olds = dict(zip(slots, columns[2:], strict=True))
        copied = replace(updates, params=columns[0], grads=columns[1], slots=olds)
        update_in_place(by_hand.run, by_count(counts).items(), copied)
        return tuple(x for column in (copied.new, *copied.own.values()) for x in (column[p] for p in paths))

    def pull(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        columns = [list(tensors[i : i + n]) for i in range(0, len(tensors), n)]
        found = _by_program(by_hand.backwards, columns, steps)
        if found is None:
            rows = zip(steps, zip(*columns, strict=True), strict=True)
            pulled = [_pulled(formula.formula, at, list(slots), row[:several], row[several:]) for at, row in rows]
            found = list(zip(*pulled, strict=True))
        return tuple(x for column in found for x in column)

    found = _Recorded.apply(run, pull, *(x[p] for x in (params, grads, *slots.values()) for p in paths))
    new, *own = (found[i : i + n] for i in range(0, len(found), n))
    updates.take(paths, new, own)


def _pulled(
    formula: Any, at: LeafStep, slots: list[str], cotangents: Sequence[Tensor], given: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The cotangents of one leaf's parameter, gradient and slots, by torch's operations."""

    def updated(p: Tensor, g: Tensor, *olds: Tensor) -> tuple[Tensor, ...]:
        x, after = formula(p, g, dict(zip(slots, olds, strict=True)), at)
        return x, *map(after.__getitem__, slots)

    return torch.func.vjp(updated, *given)[1](tuple(cotangents))


def _by_program(
    backwards: Plans, columns: list[list[Tensor]], steps: Sequence[LeafStep]
) -> Sequence[Sequence[Tensor]] | None:
    """The cotangents of all leaves by the reversed program; `None` if there is none, or something records."""
    numbers = numbers_of(steps[0])
    if len({at.count for at in steps}) > 1 or not set(map(type, numbers.values())) <= {int, float, bool}:
        return None
    if not on_lists(columns):
        return None
    try:
        return backwards.run(columns, numbers, None, About())[0]
    except NotOnLists:
        return None


def backwards_of(formula: Any, slots: Sequence[str]) -> Plans:
    """The programs of an optimizer's reversed formula: of cotangents of its results, and of its arguments."""
    forwards = plans_of(formula, slots).formula
    several = 1 + len(slots)

    def traced(lists: list[Any], numbers: Mapping[Any, Any], about: About) -> Any:
        results, _ = forwards(lists[several:], numbers, about)
        return reverse(results, lists[:several], lists[several:]), []

    return Plans(traced)


# ----------------------------------------------------------------------------------------------------------------------
# Under torch.func.vmap a kernel is called once, on a list of the leaves of all members of the batch.


class Members:
    """The members of a batch under vmap.

    Args:
        level: of the vmap.
        tensors: some of them batched; from these its size is known.
    """

    def __init__(self, level: int, tensors: list[Any]):
        self.level = level
        with beneath_functorch():
            found = [batch for x in tensors if isinstance(x, Tensor) and (batch := stacked(x)) is not None]
        self.size = len(found[0]) if found else 0
        # torch.func does not say whether autograd follows a batched tensor, so the tensors inside are asked.
        inner = [*found, *(x for x in tensors if isinstance(x, Tensor))]
        self.plain = self.size > 0 and not (torch.is_grad_enabled() and any(x.requires_grad for x in inner))

    def each(self, x: Any) -> list[Any]:
        """The value of `x` for each member: its own, or the same for all."""
        batch = stacked(x) if isinstance(x, Tensor) else None
        return [x] * self.size if batch is None else list(batch.unbind())

    def own(self, x: Tensor, donate: bool) -> Tensor:
        """All members one after the other, to be written: in the memory of `x` if it is donated, else in a copy."""
        batch = stacked(x)
        if batch is None:
            batch = x.expand(self.size, *x.shape)
        elif donate and batch.is_contiguous():
            return batch
        return batch.clone(memory_format=torch.contiguous_format)


def _on_members(kernel: Kernel, updates: Updates) -> bool:
    """Update leaves by a kernel on lists of the leaves of all members; `False` if it cannot be used.

    It can be used in a single vmap, if nothing inside or outside of it differentiates. Members with one rate and one
    number of updates share a list, as leaves do. New values have memory of their own if members may skip the step,
    which is decided afterwards.
    """
    level = only_vmap()
    grads, params, slots, ctx = updates.grads, updates.params, updates.slots, updates.ctx
    if level is None or not grads:
        return False
    listed = [x for p in grads for x in (grads[p], params[p], updates.counts[p], *(old[p] for old in slots.values()))]
    numbers = updates.lr, *updates.numbers.values(), *updates.shared.values()
    members = Members(level, [*listed, *numbers])
    if not members.plain:
        return False
    with beneath_functorch(), torch.no_grad():
        if ctx.donate_to_kernels:
            ctx.written.add(ctx.prefix)
        new = {p: members.own(params[p], ctx.donate_to_kernels) for p in grads}
        own = {slot: {p: members.own(old[p], ctx.donate_to_kernels) for p in grads} for slot, old in slots.items()}
        for group in _lists(members, replace(updates, params=new, slots=own), numbers):
            kernel(group)
        back = [[as_batch(x, level) for x in of_leaf.values()] for of_leaf in own.values()]
        updates.take(list(grads), [as_batch(x, level) for x in new.values()], back)
    return True


def _lists(members: Members, updates: Updates, numbers: Sequence[Any]) -> list[LeafList]:
    """Lists of leaves of members, each with one count, one rate, and one value of each hyperparameter."""
    params, slots, counts = updates.params, updates.slots, updates.counts
    alike = not any(isinstance(x, Tensor) and stacked(x) is not None for x in numbers)
    rates = members.each(updates.lr)
    rest = [{k: members.each(x) for k, x in named.items()} for named in (updates.numbers, updates.shared)]
    found: dict[tuple[int, int], LeafList] = {}
    for p, g in updates.grads.items():
        states = [x[p].unbind() for x in slots.values()]
        columns = members.each(g), params[p].unbind(), members.each(counts[p]), *states
        for i, (grad, param, count, *own) in enumerate(zip(*columns, strict=True)):
            key = int(count), 0 if alike else i
            if key not in found:
                theirs: Any = [{k: x[i] for k, x in named.items()} for named in rest]
                found[key] = LeafList([], [], {slot: [] for slot in slots}, key[0], rates[i], [], [], *theirs)
            group = found[key]
            group.params.append(param)
            group.grads.append(grad)
            group.paths.append(p)
            group.offsets.append(updates.ctx.offsets.get(p, 0))
            for slot, x in zip(slots, own, strict=True):
                group.slots[slot].append(x)
    return list(found.values())
