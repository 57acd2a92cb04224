"""Makes a transform from an optimizer's formula on one tensor: kernel, derivative, batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .._compat.functorch import as_batch, beneath_functorch, only_reverse, only_vmap, stacked
from .._compat.tensors import foreach, foreach_add, viewed
from .._errors import explain
from ..kernels.codes import Coded
from ..kernels.derivative import reverse
from ..kernels.formulas import beside, once
from ..kernels.joined import Passes
from ..kernels.lists import batches, enough, on_lists
from ..kernels.masters import Master
from ..kernels.norms import CHUNK, squared_norm
from ..kernels.numbers import UNKNOWN, NotOnLists
from ..kernels.plans import Plans, in_blocks
from ..kernels.program import Bits, Draws, TensorList, computed, printer_for
from ..kernels.recording import concrete, differentiated, number, only_compiled, root, straight_through
from ..kernels.rounding import leaf_key, stochastic_round
from .arguments import LARGEST, learning_rate
from .context import Context, Prepared, Rounding
from .facts import Facts, Scope
from .halves import Joining, UpdateOfStored, joins
from .layout import Layout, Leaves
from .spec import Spec, changes_gradients
from .state import counter
from .transform import OfTensors, ScalarOrSchedule, Transform, TransformState

# ----------------------------------------------------------------------------------------------------------------------
# These types are the arguments of an optimizer's formula, which updates one leaf, and of its kernel, which updates
# lists of leaves.


Numbers = Mapping[str, Any]
# The dtypes that are rounded to at random.
SHORT = (torch.bfloat16, torch.float16)


def stream_of(place: int) -> tuple[int, int]:
    """The stream of the random bits of a stored tensor, and the bit of its words from which they are taken.

    The parameter has place 0, and the slots those from 1 on. The parameter and the second slot share the words of
    stream 0, as in `low_precision_adam`.

    Examples:
        >>> [stream_of(place) for place in range(6)]
        [(0, 0), (1, 0), (0, 16), (1, 16), (2, 0), (2, 16)]
    """
    half = (0, 2, 1)[place] if place < 3 else place
    return half // 2, half % 2 * 16


@dataclass(frozen=True)
class LeafStep:
    """One update of one leaf: the arguments of a formula besides its tensors.

    Attributes:
        count: the number of the leaf's updates including this one; a 0-d tensor under `vmap` and in a compiled graph.
        lr: the learning rate of this update, a number or a 0-d tensor.
        path: the leaf's name.
        offset: the place in the whole leaf of the first stored element.
        numbers: hyperparameters by name; numbers, or 0-d tensors.
        shared: state that all leaves share, by name; only read.
        derived: the results of the optimizer's `derived` for count, rate and hyperparameters; numbers, or 0-d tensors.
        paths, offsets: of each leaf, where one call updates a list of leaves.
        rounding: how results are rounded where they are stored in 16 bits; by default to nearest.
        dtype: of the stored parameter, where the formula is given it in a wider one; else `None`.
    """

    count: Any
    lr: Any
    path: str
    offset: int
    numbers: Numbers = field(default_factory=dict)
    shared: TransformState = field(default_factory=dict)
    derived: Numbers = field(default_factory=dict)
    paths: Sequence[str] = ()
    offsets: Sequence[int] = ()
    rounding: Rounding | None = None
    dtype: torch.dtype | None = None

    def at_random(self, x: Any, dtype: torch.dtype, seed: int, form: Any, stream: int, shift: int = 0) -> Any:
        """`x` rounded at random to a dtype of 16 bits; its derivative is that of the identity.

        Random bits depend on the seed, the number of the update, the path and the global index of each element.

        Args:
            x: in float32.
            dtype: `torch.bfloat16` or `torch.float16`.
            seed: of the bits.
            form: the format of the draws.
            stream: tensors that shall have bits of their own have another stream, or another half of its words.
            shift: 16 takes the upper half of each word.
        """
        if isinstance(x, TensorList):
            draws = Draws(seed, self.count, form, list(map(leaf_key, self.paths)), list(self.offsets))
            return x.random(dtype, Bits(draws, stream, shift))
        bits = Draws(seed, self.count, form, [leaf_key(self.path)], [self.offset]).words(x, 0, stream, shift)
        if not differentiated(x):
            return stochastic_round(x, dtype, bits=bits)
        return straight_through(x, stochastic_round(x.detach(), dtype, bits=bits).float()).to(dtype)

    def stored(self, x: Any, dtype: torch.dtype, place: int, copy: bool = False) -> Any:
        """A result in the dtype in which it is stored: rounded as `rounding` says if that has 16 bits, else to nearest.

        Args:
            x: the result.
            dtype: in which it is stored.
            place: 0 of the parameter, then the slots from 1 on, in their order.
            copy: whether the result must not be `x` itself.
        """
        if self.rounding is None or dtype not in SHORT or x.dtype is not torch.float32:
            return x.to(dtype, copy=copy)
        return self.at_random(x, dtype, self.rounding.seed, self.rounding.form, *stream_of(place))

    def scalar(self, value: Any, like: Tensor) -> Any:
        """A number to compute with beside the tensor `like`.

        If `value` is a tensor it is converted to the dtype and the device of `like`. Anything else is returned
        unchanged. A formula calls `scalar` if it computes in another dtype than the one in which `optimizer` gives it
        numbers.
        """
        if isinstance(value, TensorList):
            return value.to(like.dtype)
        return beside(value, like, like.dtype) if isinstance(value, Tensor) else value

    def beside(self, like: Tensor) -> LeafStep:
        """The same update, with rate, hyperparameters and derived numbers passed through `scalar`."""
        if not any(isinstance(x, Tensor) for x in (self.lr, *self.numbers.values(), *self.derived.values())):
            return self
        numbers, derived = ({k: self.scalar(x, like) for k, x in of.items()} for of in (self.numbers, self.derived))
        rate = self.scalar(self.lr, like)
        return replace(self, lr=rate, numbers=numbers, derived=derived)


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

    def only(self, chosen: list[bool]) -> LeafList:
        """The leaves for which `chosen` is true, without a request for norms."""

        def pick(entries: list) -> list:
            return [x for x, on in zip(entries, chosen, strict=True) if on]

        slots = {name: pick(entries) for name, entries in self.slots.items()}
        count = torch.stack(pick([*self.count])) if isinstance(self.count, Tensor) else self.count
        lists = pick(self.params), pick(self.grads), slots, count, self.lr, pick(self.paths), pick(self.offsets)
        return LeafList(*lists, self.numbers, self.shared, comes=self.comes, where=self.where)


class Given(NamedTuple):
    """The arguments of an update of several leaves.

    Attributes:
        grads: by path, of the leaves that are updated.
        params: by path.
        slots: state by name and path.
        counts: updates of each leaf, including this one.
        lr: learning rate; `None` of a direction.
        numbers: hyperparameters by name.
        shared: state that all leaves share, by name.
        ctx: the step's context.
    """

    grads: Leaves
    params: Leaves
    slots: TransformState
    counts: Leaves
    lr: Any
    numbers: Numbers
    shared: TransformState
    ctx: Context


# ----------------------------------------------------------------------------------------------------------------------
# These functions count the updates of each leaf, and derive numbers from the counts, such as bias corrections.


# (updates of a leaf, rate, hyperparameters) -> numbers by name
Derived = Callable[[Any, Any, Numbers], Numbers]


def counters(paths: Collection[str]) -> Leaves:
    """A counter for each of these leaves: the elements of one tensor, so that all of them are read at once."""
    return dict(zip(paths, apart(torch.zeros(len(paths), dtype=torch.int64)), strict=True))


def apart(together: Tensor) -> tuple[Tensor, ...]:
    """The elements of a tensor of counters, which remembers them in its `elements`: a step may write these at once."""
    found = together.unbind()
    if not torch.compiler.is_compiling():
        # The references are weak: the elements keep their tensor alive, and strong ones would make a cycle.
        together.elements = list(map(weakref.ref, found))  # type: ignore[attr-defined]
    return found


def whole(counts: Collection[Tensor]) -> Tensor | None:
    """The tensor of which these counters are all the elements, in their order; `None` if there is none.

    Others on the same memory are counters of another state: members of a batch share those of the one that they were
    made from.
    """
    found = None if not counts else viewed(next(iter(counts)))
    known = getattr(found, "elements", ())
    return found if len(known) == len(counts) and all(map(is_, counts, map(weakref.ref.__call__, known))) else None


def one_more(counts: Leaves, paths: Collection[str], ctx: Context) -> Leaves:
    """Counts of these leaves plus one, by one `foreach` call: single additions show in a step of many small leaves."""
    before = list(map(counts.__getitem__, paths))
    if ctx.unread and before:
        return dict(zip(paths, _counted_unread(before, ctx), strict=True))
    after = [c + 1 for c in before] if ctx.recorded or not before else foreach_add(before, 1)
    return dict(zip(paths, after, strict=True))


def _counted_unread(before: list[Tensor], ctx: Context) -> list[Tensor]:
    """Counts plus one if the step counts, without reading them; in their memory if that is donated."""
    one: Any = 1 if ctx.choosing is None else ctx.choosing
    together = whole(before)
    if ctx.donate:
        ctx.written.add(ctx.prefix)
        if together is not None:
            together.add_(one)
        else:
            # It gets a list, since torch would read a single 0-d tensor as a number and wait for the device.
            foreach("add_", before, [one.to(before[0])] * len(before) if isinstance(one, Tensor) else one)
        return before
    return [*apart((torch.stack(before) if together is None else together) + one)]


def next_counts(counts: Leaves, paths: Collection[str]) -> tuple[dict[int, list[str]], list[int], Tensor | None]:
    """The counts of these leaves in this update, which Python can read.

    Leaves nearly always step together. Then their counts are all the elements of one tensor, and are read at once.

    Returns:
        The paths by their count in this update; the counts before it; and the tensor that has all of these as its
        elements, if there is one.
    """
    before = list(map(counts.__getitem__, paths))
    together = whole(before)
    numbers: Any = None if together is None else together.tolist()
    if numbers is None or len(set(numbers)) > 1:
        # `item` of each takes a third of the time of `torch.stack(...).tolist()`.
        numbers = list(map(Tensor.item, before))
    groups: dict[int, list[str]] = {}
    if len(set(numbers)) == 1:
        groups[numbers[0] + 1] = list(paths)
    else:
        for path, n in zip(paths, numbers, strict=True):
            groups.setdefault(n + 1, []).append(path)
    return groups, numbers, together


def by_count(counts: Leaves) -> dict[int, list[str]]:
    """Paths of leaves by their count."""
    return {n - 1: paths for n, paths in next_counts(counts, counts)[0].items()}


def each(
    counts: dict[str, Tensor],
    rate: Any,
    numbers: Numbers,
    derived: Derived | None,
    ctx: Context,
    dtypes: Iterable[torch.dtype] = (torch.float64,),
):
    """Every leaf's path, its count, and numbers derived from it, once for all leaves with the same count.

    Args:
        dtypes: of the tensors that derived tensors are combined with.
    """
    if ctx.unread or (ctx.recorded and not all(map(concrete, counts.values()))):
        # If all leaves are float32, one cast serves all of them, in place of one operation in the graph for each.
        narrow = all(dtype is torch.float32 for dtype in dtypes)
        yield from _unread(counts, rate, numbers, derived, torch.float32 if narrow else torch.float64)
        return
    for count, paths in by_count(counts).items():
        made = derived(count, _wide(rate), {k: _wide(x) for k, x in numbers.items()}) if derived else {}
        yield from ((path, count, made) for path in paths)


def _unread(
    counts: dict[str, Tensor], rate: Any, numbers: Numbers, derived: Derived | None, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor, Numbers]]:
    """As `each` if Python cannot read counts, under vmap and in a graph: numbers come from one tensor of all counts."""
    if derived is None:
        yield from ((path, count, {}) for path, count in counts.items())
        return
    # Counts are mostly on the CPU, and a rate may be elsewhere: torch mixes devices of 0-d tensors only.
    given = [x.device for x in (rate, *numbers.values()) if isinstance(x, Tensor) and x.device.type != "cpu"]
    together = torch.stack(list(counts.values()))
    together = together.to(given[0]) if given and together.is_cpu else together
    made = derived(_wide(together), _wide(rate), {k: _wide(x) for k, x in numbers.items()})
    spread = once(*(x.to(dtype).expand(len(counts)) if isinstance(x, Tensor) else x for x in made.values()))
    columns = [x.unbind() if isinstance(x, Tensor) else [x] * len(counts) for x in spread]
    for i, (path, count) in enumerate(counts.items()):
        yield path, count, {name: column[i] for name, column in zip(made, columns, strict=True)}


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) else x


# ----------------------------------------------------------------------------------------------------------------------
# An update of all leaves inside autograd is one `autograd.Function`: its forward is a kernel or a program, and its
# backward is the reversed formula, a program too (`zerofn.kernels.derivative`).


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


# ----------------------------------------------------------------------------------------------------------------------
# Under torch.func.vmap a kernel is called once, on a list of the leaves of all members of the batch.


Kernel = Callable[[LeafList], None]


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


def kernel_on_members(kernel: Kernel, given: Given) -> tuple[Leaves, TransformState] | None:
    """New parameters and slots by a kernel on lists of the leaves of all members; `None` if it cannot be used.

    It can be used in a single vmap, if nothing inside or outside of it differentiates. Members with one rate and one
    number of updates share a list, as leaves do. New values have memory of their own if members may skip the step,
    which is decided afterwards.
    """
    level = only_vmap()
    grads, params, slots, counts, lr, numbers, common, ctx = given
    if level is None or not grads:
        return None
    listed = [x for p in grads for x in (grads[p], params[p], counts[p], *(old[p] for old in slots.values()))]
    members = Members(level, [*listed, lr, *numbers.values(), *common.values()])
    if not members.plain:
        return None
    with beneath_functorch(), torch.no_grad():
        if ctx.donate_to_kernels:
            ctx.written.add(ctx.prefix)
        new = {p: members.own(params[p], ctx.donate_to_kernels) for p in grads}
        own = {slot: {p: members.own(old[p], ctx.donate_to_kernels) for p in grads} for slot, old in slots.items()}
        for group in _lists(members, given._replace(params=new, slots=own)):
            kernel(group)
        back = {slot: {p: as_batch(x, level) for p, x in of_leaf.items()} for slot, of_leaf in own.items()}
        return {p: as_batch(x, level) for p, x in new.items()}, back


def _lists(members: Members, given: Given) -> list[LeafList]:
    """Lists of leaves of members, each with one count, one rate, and one value of each hyperparameter."""
    grads, params, slots, counts, lr, numbers, common, ctx = given
    alike = not any(isinstance(x, Tensor) and stacked(x) is not None for x in (lr, *numbers.values(), *common.values()))
    rates, rest = members.each(lr), [{k: members.each(x) for k, x in named.items()} for named in (numbers, common)]
    found: dict[tuple[int, int], LeafList] = {}
    for p, g in grads.items():
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
            group.offsets.append(ctx.offsets.get(p, 0))
            for slot, x in zip(slots, own, strict=True):
                group.slots[slot].append(x)
    return list(found.values())


# ----------------------------------------------------------------------------------------------------------------------
# `optimizer` makes a transform of a formula for one leaf. It adds counts of updates, a learning rate and kernels.


Slots = dict[str, Callable[[Tensor], Tensor]]
NONE: Mapping[str, Any] = MappingProxyType({})


# (parameter, gradient, slots by name, step) -> (new parameter, new slots)
Formula = Callable[[Tensor, Tensor, dict[str, Tensor], LeafStep], tuple[Tensor, dict[str, Tensor]]]
# A formula that needs norms of whole leaves. It returns tensors of the leaf, and a function that gets their norms and
# returns the result.
NormFormula = Callable[
    [Tensor, Tensor, dict[str, Tensor], LeafStep],
    tuple[Sequence[Tensor], Callable[..., tuple[Tensor, dict[str, Tensor]]]],
]


class ByHand(NamedTuple):
    """A kernel by hand: the arguments of `with_kernel`, and the programs of `stored`."""

    run: Kernel
    takes: Callable[[LeafList], Sequence[bool]]
    plans: Plans

    def takes_all(self, leaves: LeafList) -> bool:
        return all(self.takes(leaves))


def in_one_dtype(formula: Any, slots: Slots, in_fp32: bool, rounds_grads: bool, directs: bool = False) -> Any:
    """A formula for tensors in their dtypes, from one for those of `optimizer(in_fp32=, rounds_grads=)`."""
    if in_fp32:
        return wide_formula(formula, slots, rounds_grads, directs)
    if not rounds_grads:
        return formula
    return lambda p, g, old, at: formula(p, g.to(p.dtype), old, at.beside(p))


def wide_formula(formula: Any, slots: Slots, rounds_grads: bool, directs: bool) -> Any:
    """A formula for tensors in their dtypes, from one for tensors in fp32 at least (`in_fp32` of `optimizer`).

    Args:
        formula: of one leaf; it may ask for norms.
        slots: how its state starts. Slots that start `like` the parameter are given in its dtype, others as they are.
        rounds_grads: whether gradients are rounded to the parameter's dtype first.
        directs: whether its result is a direction, which stays in fp32.
    """
    places = {name: place for place, (name, start) in enumerate(slots.items(), 1) if start is like}

    def wide(p: Tensor, g: Tensor, olds: dict[str, Tensor], at: LeafStep) -> Any:
        dtype, given = torch.promote_types(p.dtype, torch.float32), (p, g, *olds.values())
        # torch's kernels have no stochastic rounding to be like.
        rounds = rounds_grads and at.rounding is None
        x, seen = p.to(dtype), (g.to(p.dtype) if rounds else g).to(dtype)
        wide_at = at.beside(x) if p.dtype is dtype else replace(at.beside(x), dtype=p.dtype)

        def stored(y: Tensor, place: int | None) -> Tensor:
            # A formula may return a tensor of the old state unchanged. Then the new state gets a copy.
            copy = any([y is old for old in given])
            return y.to(y.dtype, copy=copy) if place is None else at.stored(y, p.dtype, place, copy)

        def narrow(new: Tensor, own: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            kept = {name: stored(y, places.get(name)) for name, y in own.items()}
            return new if directs else stored(new, 0), kept

        old = {name: y.to(dtype) if name in places else y for name, y in olds.items()}
        made: tuple[Any, Any] = formula(x, seen, old, wide_at)
        if isinstance(made[1], dict):
            return narrow(*made)
        measured, then = made
        return measured, lambda *norms: narrow(*then(*norms))

    return wide


def optimizer(
    name: str,
    lr: ScalarOrSchedule,
    slots: Slots,
    formula: Formula | NormFormula,
    numbers: Numbers = NONE,
    shared: Mapping[str, Callable[[], Tensor]] = MappingProxyType({}),
    settable: Mapping[str, Any] = NONE,
    derived: Derived | None = None,
    counterpart: type | None = None,
    torch_names: Mapping[str, str] = NONE,
    of_norms: bool = False,
    in_fp32: bool = False,
    rounds_grads: bool = False,
) -> Transform:
    """An optimizer from its formula on one leaf.

    The state has the number of updates (`step`, which schedules read), the number of updates of each leaf (`count`),
    and, for each slot, one tensor per leaf. A leaf without a gradient is not updated, as in `torch.optim`, and its
    `count` does not grow.

    Args:
        name: the transform's name.
        lr: the learning rate: a number, a 0-d tensor, or a function of the step.
        slots: by name, a function that makes the slot's first tensor for a leaf from the parameter, such as `like`.
        formula: the arithmetic of one leaf: `formula(p, g, slots, at) -> (new p, new slots)`, where `at` is a
            `LeafStep`. Its torch operations must not write into arguments, since zerofn differentiates, batches and
            compiles them. If it consists of arithmetic, of operators and of words such as `plus`, one kernel computes
            it for many leaves, which are then given as one `TensorList`. An element of a result may depend only on the
            elements at the same position in `p`, `g` and `slots`, on the leaf's path, and on the position in the leaf.
        numbers: hyperparameters of the formula, by name.
        shared: by name, a function that makes a tensor which all leaves share. No step changes the tensor.
        settable: hyperparameters that `opt.param_groups` may change, with their values, by the names of the
            transform's arguments. If `betas` is settable and `numbers` has no `betas`, a change sets the numbers
            `beta1` and `beta2`.
        derived: a function of the count of updates, the rate and the hyperparameters. It returns further numbers by
            name, such as bias corrections, which the formula finds in `at.derived`. It is called once for all leaves
            with the same count. If Python cannot read the counts it is called once for all leaves, with a tensor of the
            shape `(leaves,)` as the count. Tensors among its arguments are float64.
        counterpart: the class of `torch.optim` that does the same; `opt.state_dict()` has the keys of its groups.
        torch_names: for slots whose names differ in that class, from the name here to the name there.
        of_norms: whether the formula needs norms of whole leaves, for instance for a trust ratio. Such a formula
            returns a pair: a list of tensors, and a function. zerofn computes the norm of each tensor over all ranks
            that have shards of the leaf, and calls the function with these 0-d norms. The function returns the new
            parameter and the new slots. Ranks send one number for each norm, and do not send the leaf.
        in_fp32: whether the formula is given the parameter, the gradient and slots made by `like` in fp32 at least, and
            its numbers in that dtype too. Its results are converted back to the parameter's dtype. Only such results
            can be rounded at random (`precision(rounding="stochastic")`); then no kernel by hand runs.
        rounds_grads: whether gradients are rounded to the parameter's dtype first, as torch's kernels do; not if
            results are rounded at random. Without `in_fp32` the formula computes in that dtype, and is given its
            numbers in it.

    Examples:
        >>> import torch, zerofn as zf
        >>> def formula(p, g, slots, at):
        ...     m = at.numbers["beta"] * slots["m"] + g
        ...     return p - at.lr * m, {"m": m}
        >>> tx = optimizer("heavy_ball", 0.5, {"m": like}, formula, numbers={"beta": 0.9}, in_fp32=True)
        >>> state, _ = zf.update(tx, {"w": torch.ones(1)}, zf.init(tx, {"w": torch.ones(1)}))
        >>> state.params["w"]
        tensor([0.5000])
    """
    formula = in_one_dtype(formula, slots, in_fp32, rounds_grads)
    update = _OptimizerUpdate(name, lr, slots, formula, dict(numbers), dict(shared), derived, of_norms)
    facts = Facts(
        optimizes=True,
        rate=lr,
        settable=tuple(settable.items()),
        copies=False,
        keeps=False,
        counterpart=counterpart,
        torch_names=tuple(torch_names.items()),
        fixed=tuple([slot for slot, start in slots.items() if start is without_elements]),
        capturable=True,
        constant=tuple(shared),
        rounds=in_fp32,
    )
    return Transform(
        name,
        Scope.WHOLE if of_norms else Scope.LEAF,
        "number" if of_norms else "element",
        facts,
        init_fn=update.init,
        prepare_fn=update.prepare,
        update_fn=Joining(update.update) if of_norms else update.halves(),
    )


def with_kernel(
    built: Transform,
    run: Kernel,
    takes: Callable[[LeafList], Sequence[bool]] | None = None,
    stored: Formula | None = None,
) -> Transform:
    """An optimizer of `optimizer` with a kernel by hand, which runs in the place of the one printed from its formula.

    Write one only where it is faster than the printed one. It must compute the same bits as the formula, or the
    docstring of the optimizer must state a bound of the difference. It runs in ordinary steps, and, if nothing is
    differentiated, under one `torch.func.vmap`, on the leaves of all members of the batch. It does not run where
    results are rounded at random (`precision(rounding="stochastic")`).

    Args:
        built: the result of `optimizer(...)` without `of_norms`.
        run: a function of a `LeafList` that writes new parameters and slots into the old ones.
        takes: a function of a `LeafList` that is not of an ordinary step (`LeafList.where`). It returns a bool for each
            leaf: in a graph and on a device whether `run` updates it, which updates all or none; of leaves as they are
            stored whether a program of `stored` updates it. By default it is `False` for all.
        stored: a formula with the bits of `run`, of tensors in their dtypes. Leaves that are kept as codes
            (`zf.quantize`) or masters of 24 bits (`precision(store_dtype="bf16+8")`) are updated by it in one pass. By
            default it is the formula of `built`.

    Raises:
        TypeError: `built` is not made by `optimizer`, or needs norms.

    Examples:
        >>> import torch, zerofn as zf
        >>> plain = optimizer("descent", 0.5, {}, lambda p, g, slots, at: (p - at.lr * g, {}))
        >>> def run(leaves):
        ...     torch._foreach_add_(leaves.params, leaves.grads, alpha=-leaves.lr)
        >>> tx = with_kernel(plain, run)
        >>> zf.update(tx, {"w": torch.ones(1)}, zf.init(tx, {"w": torch.ones(1)}))[0].params["w"]
        tensor([0.5000])
    """
    update = _update_of(built, "with_kernel")
    plans = update.plans if stored is None else plans_of(stored, list(update.slots))
    made = replace(update, by_hand=ByHand(run, takes or _none, plans))
    return replace(built, init_fn=made.init, prepare_fn=made.prepare, update_fn=made.halves())


# (parameters, gradients, slots by name, step) -> the indices of leaves that it has not updated: the formula does
OfLists = Callable[[list[Tensor], list[Tensor], dict[str, list[Tensor]], LeafStep], Collection[int]]


def with_lists(built: Transform, run: OfLists) -> Transform:
    """An optimizer of `optimizer` that updates many leaves together in ordinary steps, although no program does.

    Write `run` for a formula that takes means along dimensions or products of matrices. It takes these of all leaves,
    or of stacks of leaves of one shape. It computes the arithmetic between them by programs on lists (`Plans`). A step
    that is recorded, that cannot read counts, or that rounds at random runs the formula leaf by leaf.

    Args:
        built: the result of `optimizer(...)` without `of_norms`.
        run: a function of the arguments of a formula, each for several leaves of one dtype on one device. It is given
            them in their dtypes, writes parameters and slots, and returns the indices of leaves that it has not
            updated. Numbers of the step are no tensors.

    Examples:
        >>> import torch, zerofn as zf
        >>> plain = optimizer("descent", 0.5, {}, lambda p, g, slots, at: (p - at.lr * g, {}))
        >>> def run(params, grads, slots, at):
        ...     torch._foreach_add_(params, grads, alpha=-at.lr)
        ...     return []
        >>> tx = with_lists(plain, run)
        >>> zf.update(tx, {"w": torch.ones(1 << 16)}, zf.init(tx, {"w": torch.ones(1 << 16)}))[0].params["w"][:1]
        tensor([0.5000])
    """
    made = replace(_update_of(built, "with_lists"), lists=run)
    return replace(built, init_fn=made.init, prepare_fn=made.prepare, update_fn=made.halves())


def _update_of(built: Transform, name: str) -> _OptimizerUpdate:
    half = joins(built.update_fn)
    update = None if half is None else getattr(half.func, "__self__", None)
    if not isinstance(update, _OptimizerUpdate) or update.of_norms:
        why = "only an optimizer of zerofn.extend.optimizer, without of_norms, runs a formula that a kernel replaces"
        raise TypeError(explain(f"{name}({built.name}(...))", why, f"{name}(optimizer(...), run)"))
    return update


def _none(leaves: LeafList) -> list[bool]:
    return [False] * len(leaves.params)


@dataclass(eq=False)
class _OptimizerUpdate:
    """The halves of an optimizer; fields are arguments of `optimizer`."""

    name: str
    lr: ScalarOrSchedule
    slots: Slots
    formula: Formula | NormFormula
    # These are plain dicts, since the compiler fails at a MappingProxyType of a dict that was written to.
    numbers: dict[str, Any]
    shared: dict[str, Callable[[], Tensor]]
    derived: Derived | None
    of_norms: bool
    by_hand: ByHand | None = None
    lists: OfLists | None = None

    def halves(self) -> UpdateOfStored:
        kernel = None if self.by_hand is None else self.by_hand.run
        apart = kernel.apart if type(kernel) is Joining else None
        return UpdateOfStored(Joining(self.update, apart=apart), self.on_stored)

    def __post_init__(self) -> None:
        # A rate that is one number is checked here, and not at each step.
        self.checked = isinstance(self.lr, float) and 0.0 <= self.lr <= LARGEST
        self.plans, self.backwards = (of(self.formula, list(self.slots)) for of in (plans_of, backwards_of))
        self.sums = plans_of(self.formula, list(self.slots), sums=True) if self.of_norms else None

    def init(self, leaves: Leaves, layout: Layout) -> TransformState:
        state: TransformState = {"step": counter(), "count": counters(leaves)}
        state |= {key: start() for key, start in self.shared.items()}
        for slot, start in self.slots.items():
            state[slot] = {p: start(x) for p, x in leaves.items()}
        return state

    def prepare(self, state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        # A group has one optimizer: its prefix is its name, whatever the user calls the transform.
        step, rate = state["step"], ctx.lr.get(ctx.prefix, self.lr)
        if rate is not self.lr or not self.checked:
            rate = _rate_at(self.name, rate, step, ctx)
        changed, numbers = ctx.numbers.get(ctx.prefix), self.numbers
        if changed:
            numbers = {**numbers, **_by_number(changed, numbers)}
        if ctx.recorded:
            (rate,) = once(rate)
            rate, numbers = ctx.replicated(rate), {key: ctx.replicated(x) for key, x in numbers.items()}
        ctx.report("lr", rate)
        if ctx.unread and ctx.choosing is not None:
            return Prepared((rate, numbers), {"step": step + ctx.choosing}, chosen=("step",))
        return Prepared((rate, numbers), {"step": step + 1})

    def update(self, grads: Leaves, state: TransformState, params: Leaves, carry: tuple[Any, Numbers], ctx: Context):
        # Kernels by hand round to nearest.
        derived, by_hand = self.derived, self.by_hand if ctx.rounding is None else None
        kernel = None if by_hand is None else by_hand.run
        runs = not ctx.recorded and not ctx.unread
        waits = runs and (kernel is None or (type(kernel) is Joining and ctx.donate))
        if ctx.passes is not None and not waits:
            ctx.settle()
        counts = {} if runs else one_more(state["count"], grads, ctx)
        common = {key: state[key] for key in self.shared if key in state} if self.shared else {}
        slots = dict(zip(self.slots, map(state.__getitem__, self.slots), strict=True))
        given = Given(grads, params, slots, counts, *carry, common, ctx)
        if runs:
            groups, before, together = next_counts(state["count"], grads)
            if kernel is not None:
                new, own = _in_place(kernel, groups.items(), given)
            else:
                new, own = _read(self.formula, self.plans, derived, groups, given, self.sums, self.lists)
            # Counts are raised after the kernel: if it refuses its arguments, they stay as they are.
            if together is not None and ctx.donate and not together.is_inference():
                # One write for all counts: a new tensor for each takes longer than the update of a small leaf.
                together.add_(1)
                if own is slots:
                    # Slots and counts were written in place, so the old state is the new one.
                    return new, state
                counts = state["count"]
            else:
                counts = dict(zip(grads, apart(torch.tensor(before, dtype=torch.int64).add_(1)), strict=True))
        elif ctx.unread:
            new, own = self._on_device(given, by_hand)
        elif by_hand is not None and (groups := _groups(by_hand, given)) is not None:
            in_kernels = given._replace(ctx=replace(ctx, donate=ctx.donate_to_kernels))
            new, own = _in_place(by_hand.run, groups, in_kernels, where="graph")
        elif kernel is not None and _reversible(given):
            new, own = _with_derivative(kernel, self.formula, self.backwards, derived, given)
        elif kernel is not None and (made := kernel_on_members(kernel, given)) is not None:
            new, own = made
        else:
            new, own = _by_formula(self.formula, derived, given, self.of_norms)
        return new, {**own, "count": counts}

    def on_stored(self, grads: Leaves, state: TransformState, params: Leaves, carry: tuple[Any, Numbers], ctx: Context):
        """As `update`, of leaves as they are stored: of those that a kernel by hand or a program takes."""
        if ctx.rounding is not None or ctx.recorded or ctx.unread or not grads:
            return {}, {}
        common = {key: state[key] for key in self.shared if key in state}
        slots = {name: state[name] for name in self.slots}
        given = Given(grads, params, slots, {}, *carry, common, ctx)
        if self.by_hand is None:
            return _on_stored(self.plans, self.derived, state["count"], given)
        every = _asked(given, "stored")
        taken = dict(zip(every.paths, self.by_hand.takes(every), strict=True))
        some = {path: g for path, g in grads.items() if taken[path]}
        return _on_stored(self.by_hand.plans, self.derived, state["count"], given._replace(grads=some))

    def _on_device(self, given: Given, by_hand: ByHand | None) -> tuple[Leaves, TransformState]:
        """The update in a step that reads no count and no rate in Python."""
        ctx = given.ctx
        on_host = not any(isinstance(x, Tensor) for x in given.numbers.values())
        if by_hand is None or not given.grads or not on_host or not by_hand.takes_all(_asked(given, "device")):
            return _by_formula(self.formula, self.derived, given, self.of_norms)
        each = list(given.counts.values())
        together = whole(each)
        counts = torch.stack(each) if together is None else together
        return _in_place(by_hand.run, [(counts, list(given.grads))], given, ctx.choosing, "device")


def _groups(by_hand: ByHand, given: Given) -> list[tuple[Any, list[str]]] | None:
    """Counts and paths of the leaves on which a graph calls a kernel; `None` if it computes the formula."""
    if not given.counts:
        return None
    leaves = _asked(given, "graph")
    tensors = *leaves.params, *leaves.grads, *(x for column in leaves.slots.values() for x in column)
    if only_compiled((*tensors, leaves.lr, *leaves.numbers.values())) and by_hand.takes_all(leaves):
        return [(torch.stack(list(given.counts.values())), leaves.paths)]
    return None


def _asked(given: Given, where: str) -> LeafList:
    """All leaves, for `ByHand.takes`."""
    return _listed(list(given.grads), None, given._replace(ctx=replace(given.ctx, donate=True)), None, where)


def _listed(group: list[str], count: Any, given: Given, comes: Tensor | None = None, where: str = "step") -> LeafList:
    """Leaves as lists for a kernel, which writes parameters and slots: copies of the old ones unless donated."""
    grads, params, slots, _, lr, numbers, common, ctx = given
    # By `map` over C functions: this runs for every leaf in every step.
    columns = {}
    for name, x in {"": params, **slots}.items():
        column: list[Any] = list(map(x.__getitem__, group))
        # `x` is a tensor or a `Coded`. The compiler cannot trace a `methodcaller`.
        columns[name] = column if ctx.donate else [x.clone() for x in column]
    offsets: list[Any] = [0] * len(group)
    if ctx.offsets:
        offsets = list(map(ctx.offsets.get, group, offsets))
    gradients, written = list(map(grads.__getitem__, group)), columns.pop("")
    norms = [] if ctx.wants_norms(group, grads) else None
    more = norms, comes, where, ctx.passes if where == "step" else None
    return LeafList(written, gradients, columns, count, lr, group, offsets, numbers, common, *more)


def _in_place(
    kernel: Kernel,
    groups: Iterable[tuple[Any, list[str]]],
    given: Given,
    comes: Tensor | None = None,
    where: str = "step",
) -> tuple[Leaves, TransformState]:
    """New parameters and slots by a kernel on lists, in the memory of the old ones if that is donated."""
    new: Leaves = {}
    own: TransformState = {}
    for count, group in groups:
        leaves = _listed(group, count, given, comes, where)
        if given.ctx.donate:
            given.ctx.written.add(given.ctx.prefix)
        kernel(leaves)
        if leaves.norms is not None and given.ctx.passes is not None:
            # It must not hold the gradients, which are then written for nobody.
            given.ctx.passes.then(partial(_add_found, group, leaves.norms, given.ctx))
        elif leaves.norms:
            _add_found(group, leaves.norms, given.ctx)
        if given.ctx.donate and group == list(given.params) and {len(group)} >= set(map(len, given.slots.values())):
            # All leaves were written in place.
            return given.params, given.slots
        new.update(zip(group, leaves.params, strict=True))
        for slot, tensors in leaves.slots.items():
            own.setdefault(slot, {}).update(zip(group, tensors, strict=True))
    return new, own


def _add_found(group: list[str], norms: list[float], ctx: Context) -> None:
    """Take the norms that a kernel has found, if it has."""
    if norms and ctx.norms is not None:
        ctx.norms.add(group, norms)


def _reversible(given: Given) -> bool:
    """Whether the update of these leaves is one `_Recorded`."""
    tensors = [[given.params[p], g, *(old[p] for old in given.slots.values())] for p, g in given.grads.items()]
    return given.ctx.recorded and bool(tensors) and reversible(tensors, (given.lr, *given.numbers.values()))


def _with_derivative(
    kernel: Kernel, formula: Any, backwards: Plans, derived: Derived | None, given: Given
) -> tuple[Leaves, TransformState]:
    """As `_in_place`, in new memory and recorded by autograd, with the reversed formula as its derivative."""
    grads, params, slots, counts, lr, numbers, common, ctx = given
    derived_numbers = each(counts, lr, numbers, derived, ctx)
    steps = [LeafStep(count, lr, p, ctx.offsets.get(p, 0), numbers, common, made) for p, count, made in derived_numbers]
    paths = [at.path for at in steps]
    n, several = len(paths), 1 + len(slots)

    def run(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        columns = [dict(zip(paths, tensors[i : i + n], strict=True)) for i in range(0, len(tensors), n)]
        olds = dict(zip(slots, columns[2:], strict=True))
        copied = given._replace(params=columns[0], grads=columns[1], slots=olds)
        new, own = _in_place(kernel, by_count(counts).items(), copied)
        return tuple(x for column in (new, *own.values()) for x in (column[p] for p in paths))

    def pull(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        columns = [list(tensors[i : i + n]) for i in range(0, len(tensors), n)]
        found = _by_program(backwards, columns, steps, lr)
        if found is None:
            rows = zip(steps, zip(*columns, strict=True), strict=True)
            found = zip(
                *[_pulled(formula, at, list(slots), row[:several], row[several:]) for at, row in rows], strict=True
            )
        return tuple(x for column in found for x in column)

    found = _Recorded.apply(run, pull, *(x[p] for x in (params, grads, *slots.values()) for p in paths))
    new, *own = (dict(zip(paths, found[i : i + len(paths)], strict=True)) for i in range(0, len(found), len(paths)))
    return new, dict(zip(slots, own, strict=True))


def _pulled(
    formula: Any, at: LeafStep, slots: list[str], cotangents: Sequence[Tensor], given: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The cotangents of one leaf's parameter, gradient and slots, by torch's operations."""

    def updated(p: Tensor, g: Tensor, *olds: Tensor) -> tuple[Tensor, ...]:
        x, after = formula(p, g, dict(zip(slots, olds, strict=True)), at)
        return x, *map(after.__getitem__, slots)

    return torch.func.vjp(updated, *given)[1](tuple(cotangents))


def _by_program(
    backwards: Plans, columns: list[list[Tensor]], steps: Sequence[LeafStep], lr: Any
) -> list[list[Tensor]] | None:
    """The cotangents of all leaves by the reversed program; `None` if there is none, or something records."""
    numbers = _numbers(steps[0], lr)
    if len({at.count for at in steps}) > 1 or not set(map(type, numbers.values())) <= {int, float, bool}:
        return None
    if not on_lists(columns):
        return None
    try:
        return backwards.run(columns, numbers, None, ((), False, None))[0]
    except NotOnLists:
        return None


def _numbers(step: LeafStep, lr: Any) -> dict[Any, Any]:
    """The numbers of an update by name, as `plans_of` takes them."""
    found: dict[Any, Any] = {(0, name): x for name, x in step.numbers.items()}
    found |= {(1, name): x for name, x in step.derived.items()}
    return found | ({(2, "count"): step.count} if lr is None else {(2, "count"): step.count, (2, "lr"): lr})


def backwards_of(formula: Any, slots: Sequence[str]) -> Plans:
    """The programs of an optimizer's reversed formula: of cotangents of its results, and of its arguments."""
    forwards = plans_of(formula, slots).formula
    several = 1 + len(slots)

    def traced(lists: list[Any], numbers: Mapping[Any, Any], about: Any) -> Any:
        results, _ = forwards(lists[several:], numbers, about)
        return reverse(results, lists[:several], lists[several:]), []

    return Plans(traced)


def plans_of(formula: Any, slots: Sequence[str], sums: bool = False) -> Plans:
    """The programs of an optimizer's formula; with `sums`, of the sums of squares whose roots are its norms."""

    def traced(lists: list[Any], numbers: Mapping[Any, Any], about: tuple[Any, ...]) -> Any:
        (p, g, *olds), (shared, wants_norms, rounding, *masters) = lists, about
        residual = olds.pop() if masters else None
        p = p if residual is None else p.joined(residual)
        olds, norms = olds[: len(slots)], olds[len(slots) :]
        named: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for (of, name), x in numbers.items():
            if of < 2:
                named[of][name] = x
        rate = numbers.get((2, "lr"))
        at = LeafStep(numbers[2, "count"], rate, UNKNOWN, UNKNOWN, named[0], dict(shared), named[1], rounding=rounding)
        x, after = formula(p, g, dict(zip(slots, olds, strict=True)), at)
        if sums:
            return [], [_squared(y) for y in x]
        if not isinstance(after, Mapping):
            x, after = after(*norms)
        made = [x if residual is None else x.upper_half(), *map(after.__getitem__, slots)]
        made += [] if residual is None else [x.residual()]
        return made, [g.to(torch.float32).square()] if wants_norms else []

    return Plans(traced)


def _squared(x: Any) -> Any:
    # A sum of float64 is no program.
    return x.to(torch.promote_types(x.dtype, torch.float32)).square()


def _read(
    formula: Any,
    plans: Plans,
    derived: Derived | None,
    groups: Mapping[int, list[str]],
    given: Given,
    sums: Plans | None = None,
    lists: OfLists | None = None,
) -> tuple[Leaves, TransformState]:
    """New parameters, or directions, and slots by a formula, in a step that reads the counts in Python.

    Args:
        sums: the programs of the sums of squares, if the formula needs norms.
        lists: what updates leaves together in the place of a program, as `with_lists` says.
    """
    _, params, slots, _, lr, numbers, common, ctx = given
    new: Leaves = {}
    own: TransformState = {slot: {} for slot in slots}
    wide = {k: _wide(x) for k, x in numbers.items()}
    for count, group in groups.items():
        made = derived(count, _wide(lr), wide) if derived else {}
        step = LeafStep(count, lr, UNKNOWN, UNKNOWN, numbers, common, made, rounding=ctx.rounding)
        if sums is not None:
            _read_norms(formula, plans, sums, step, group, given, new, own)
            continue
        rest = _by_plans(plans, step, group, given, new, own) if lists is None else group
        if rest:
            ctx.settle()
        if lists is not None:
            rest = _together_by(lists, step, rest, given, new, own)
        elif rest:
            rest = _on_lists(formula, step, rest, given, new, own)
        if not rest and ctx.donate and lr is not None and len(group) == len(params):
            # All leaves were written in place.
            return params, slots
        for path in rest:
            _on_leaf(formula, replace(step, path=path, offset=ctx.offsets.get(path, 0)), given, new, own)
    return new, own


def _on_leaf(formula: Any, step: LeafStep, given: Given, new: Leaves, own: TransformState) -> None:
    """Update one leaf by the formula. Results are written at once: one leaf of a donated state is in memory twice."""
    path = step.path
    olds = {slot: old[path] for slot, old in given.slots.items()}
    _written(formula(given.params[path], given.grads[path], olds, step), path, given, new, own)


def _written(found: Any, path: str, given: Given, new: Leaves, own: TransformState) -> None:
    """Write the results of a formula on one leaf."""
    (x, after), ctx = found, given.ctx
    new[path] = x if given.lr is None else ctx.into(given.params[path], x)
    for slot, olds in given.slots.items():
        own[slot][path] = ctx.into(olds[path], after[slot])


def _read_norms(
    formula: NormFormula,
    plans: Plans,
    sums: Plans,
    step: LeafStep,
    group: list[str],
    given: Given,
    new: Leaves,
    own: TransformState,
) -> None:
    """Update leaves of one count by a formula that needs norms of whole leaves: one pass for their squares, one more.

    Squares are added up in float64, whichever way a rank goes: ranks with shards of a leaf may go different ways.
    """
    params, grads, slots, ctx = given.params, given.grads, given.slots, given.ctx
    for paths in _together(group, ctx.layout):
        squares: Leaves = {}
        then: dict[str, tuple[list[torch.dtype], Callable[..., Any]]] = {}
        alone = _by_plans(sums, step, paths, given, new, own, squares=squares)
        if alone:
            ctx.settle()
        for path in alone:
            at = replace(step, path=path, offset=ctx.offsets.get(path, 0))
            measured, after = formula(params[path], grads[path], {slot: old[path] for slot, old in slots.items()}, at)
            squares[path] = torch.stack([_sum_of_squares(x) for x in measured])
            then[path] = [torch.promote_types(x.dtype, torch.float32) for x in measured], after
        totals = ctx.total_each({path: squares[path] for path in paths})
        rest = _by_plans(plans, step, [path for path in paths if path not in then], given, new, own, totals)
        for path in rest:
            # Its squares were a program, but nothing else is.
            ctx.settle()
            at = replace(step, path=path, offset=ctx.offsets.get(path, 0))
            measured, after = formula(params[path], grads[path], {slot: old[path] for slot, old in slots.items()}, at)
            then[path] = [torch.float32] * len(measured), after
        for path, (dtypes, after) in then.items():
            found = after(*map(Tensor.to, totals[path].sqrt().unbind(), dtypes))
            _written(found, path, given, new, own)


def _sum_of_squares(x: Tensor) -> Tensor:
    """The sum of squares of one tensor, 0-d, in float64 where there is one."""
    if not x.is_cpu or x.is_complex():
        found = squared_norm({"": x})
        return found if x.device.type == "mps" else found.double()
    # In pieces, which need no copy of the leaf in float64.
    parts = [part.double().square().sum() for part in x.reshape(-1).split(CHUNK)]
    return torch.stack(parts).sum()


def _by_plans(
    plans: Plans,
    step: LeafStep,
    group: list[str],
    given: Given,
    new: Leaves,
    own: TransformState,
    totals: Mapping[str, Tensor] = NONE,
    squares: Leaves | None = None,
) -> list[str]:
    """Update leaves by a program of the formula. Returns those for which there is none.

    Args:
        totals: sums of squares of each leaf, by path, whose roots are the norms that the formula needs.
        squares: gets the sums of squares of a program that gives these alone.
    """
    grads, params, slots, _, lr, _, _, ctx = given
    numbers = _numbers(step, lr)
    columns = [list(map(x.__getitem__, group)) for x in (params, grads, *slots.values())]
    # A slot of numbers beside leaves that are none.
    of_leaf = [i > 1 and _are_numbers(x, columns[0]) for i, x in enumerate(columns)]
    tensors = [x for x, one in zip(columns, of_leaf, strict=True) if not one]
    if not set(map(type, numbers.values())) <= {int, float, bool} or not on_lists(tensors):
        return group
    shared = tuple([(name, number(x)) for name, x in step.shared.items()])
    into: list[int | None] | None = None
    if ctx.donate and squares is None:
        ctx.written.add(ctx.prefix)
    if (ctx.donate or any(of_leaf)) and squares is None:
        # A direction is new, and so are slots of it if nothing is donated.
        into = [0 if lr is not None and ctx.donate else None]
        into += [i if ctx.donate or of_leaf[i] else None for i in range(2, len(columns))]
    rest: list[str] = []
    for batch, lists in batches(*columns):
        paths = group if len(batch) == len(group) else [group[i] for i in batch]
        rows = [torch.stack(x.like) if one else x.like for x, one in zip(lists, of_leaf, strict=True)]
        if totals:
            rows += torch.stack([totals[path] for path in paths], 1).sqrt().to(torch.float32).unbind()
        about = shared, squares is None and _rides(paths, given), step.rounding and step.rounding._replace(step=None)
        try:
            take = None if squares is not None else partial(_add_norms, paths, ctx)
            place = partial(places_of, paths, ctx)
            made, sums = plans.run(rows, numbers, into, about, place, passes=ctx.passes, take=take)
        except NotOnLists:
            rest += paths
            continue
        if squares is not None and sums is not None:
            squares.update(zip(paths, sums.mT.double().unbind(), strict=True))
            continue
        if about[1] and ctx.norms is not None:
            ctx.norms.expect(paths)
        x, *made = made
        new.update(zip(paths, x, strict=True))
        for i, (slot, tensors) in enumerate(zip(slots, made, strict=True), 2):
            if of_leaf[i]:
                # They stay tensors of their own, as they began.
                tensors = list(map(ctx.into, lists[i].like, map(Tensor.clone, tensors.unbind())))
            own[slot].update(zip(paths, tensors, strict=True))
    return rest


def _together_by(
    lists: OfLists, step: LeafStep, group: list[str], given: Given, new: Leaves, own: TransformState
) -> list[str]:
    """Update leaves by a function of `with_lists`. Returns those that are left."""
    grads, params, slots, _, lr, _, _, ctx = given
    columns = [list(map(x.__getitem__, group)) for x in (params, grads)]
    numbers = _numbers(step, lr).values()
    if ctx.rounding is not None or not set(map(type, numbers)) <= {int, float, bool} or not on_lists(columns):
        return group
    if printer_for(columns[0][0].device) is None:
        return group
    if ctx.donate:
        ctx.written.add(ctx.prefix)
    rest: list[str] = []
    for batch, (p, g) in batches(*columns):
        paths = [group[i] for i in batch]
        olds = {slot: list(map(old.__getitem__, paths)) for slot, old in slots.items()}
        written = p.like if ctx.donate else list(map(Tensor.clone, p.like))
        olds = olds if ctx.donate else {slot: list(map(Tensor.clone, x)) for slot, x in olds.items()}
        left = set(lists(written, g.like, olds, replace(step, paths=paths, offsets=_offsets(paths, ctx))))
        rest += [paths[i] for i in sorted(left)]
        done = [i for i in range(len(paths)) if i not in left]
        new.update((paths[i], written[i]) for i in done)
        for slot, tensors in olds.items():
            own[slot].update((paths[i], tensors[i]) for i in done)
    return rest


def _rides(paths: Sequence[str], given: Given) -> bool:
    """Whether norms for a metric ride on the pass of an update: on a GPU torch takes them in fewer launches."""
    return given.ctx.wants_norms(paths, given.grads) and given.grads[paths[0]].is_cpu


def _add_norms(paths: Sequence[str], ctx: Context, squares: Tensor) -> None:
    """Take the norms of gradients whose squares a pass has added up."""
    _add_roots(paths, ctx, squares[0].sqrt())


def _add_roots(paths: Sequence[str], ctx: Context, norms: Any) -> None:
    """Take the norms of gradients, (leaves,): as numbers, or as 0-d tensors of a GPU, which are not read."""
    if ctx.norms is not None:
        ctx.norms.add(paths, norms.tolist() if norms.is_cpu else norms.unbind())


def _offsets(paths: Sequence[str], ctx: Context) -> list[int]:
    return [ctx.offsets.get(path, 0) for path in paths]


def places_of(paths: Sequence[str], ctx: Context) -> tuple[list[int], list[int]]:
    """The keys and the offsets of leaves, for random bits."""
    return list(map(leaf_key, paths)), _offsets(paths, ctx)


def _are_numbers(column: list[Any], leaves: list[Tensor]) -> bool:
    """Whether a slot has one number for each leaf."""
    return bool(column) and not column[0].ndim and not any(x.ndim for x in column) and any(x.ndim for x in leaves)


def _on_stored(
    plans: Plans, derived: Derived | None, known: Leaves, given: Given
) -> tuple[dict[str, Any], TransformState]:
    """New parameters, or directions, and slots of leaves as they are stored: of those that a program takes.

    Args:
        known: the number of updates of each leaf.
        given: its slots are tensors or each a `Coded`; its parameters tensors, or each a `Master`.
    """
    grads, params, slots, _, lr, numbers, common, ctx = given
    rows = {path: [*_parts(params[path]), g, *(x[path] for x in slots.values())] for path, g in grads.items()}
    stored = {path: type(params[path]) is Master or any([type(x) is Coded for x in row]) for path, row in rows.items()}
    rows = {path: row for path, row in rows.items() if stored[path] and in_blocks(row, ctx.offsets.get(path, 0))}
    on_cpu = [row[0] for row in rows.values() if row[0].is_cpu]
    if not enough(sum(map(Tensor.numel, on_cpu)), on_cpu):
        rows = {path: row for path, row in rows.items() if not row[0].is_cpu}
    if not rows:
        return {}, {}
    new: dict[str, Any] = {}
    own: TransformState = {slot: {} for slot in slots}
    wide = {k: _wide(x) for k, x in numbers.items()}
    groups, before, _ = next_counts(known, rows)
    shared = tuple([(name, number(x)) for name, x in common.items()])
    for count, group in groups.items():
        made_of_count = derived(count, _wide(lr), wide) if derived else {}
        values = _numbers(LeafStep(count, lr, UNKNOWN, UNKNOWN, numbers, common, made_of_count), lr)
        if not set(map(type, values.values())) <= {int, float, bool}:
            return {}, {}
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
            about = shared, ctx.wants_norms(paths, grads), None, *([True] if masters else [])
            into = written if lr is not None else [None, *written]
            try:
                (x, *made), norms = plans.run(columns, values, into, about, partial(places_of, paths, ctx), roots=True)
            except NotOnLists:
                continue
            if ctx.donate:
                ctx.written.add(ctx.prefix)
            if norms is not None:
                _add_roots(paths, ctx, norms[0])
            new.update(zip(paths, list(map(Master, x, made.pop())) if masters else x, strict=True))
            for slot, tensors in zip(slots, made, strict=True):
                own[slot].update(zip(paths, tensors, strict=True))
    done = {path: n + 1 for path, n in zip(rows, before, strict=True) if path in new}
    counts = dict(zip(done, apart(torch.tensor(list(done.values()), dtype=torch.int64)), strict=True))
    return ({path: new[path] for path in done}, {**own, "count": counts}) if done else ({}, {})


def _parts(x: Any) -> list[Tensor]:
    """A parameter as it is stored: a tensor, or the two of a master."""
    return [x.p, x.residual] if type(x) is Master else [x]


def _on_lists(
    formula: Any, step: LeafStep, group: list[str], given: Given, new: Leaves, own: TransformState
) -> list[str]:
    """Update leaves by a formula on lists of them. Returns those on which it must run leaf by leaf."""
    grads, params, slots, _, lr, _, _, ctx = given
    columns = [list(map(x.__getitem__, group)) for x in (params, grads, *slots.values())]
    if ctx.recorded or not group or not on_lists(columns):
        return group
    rest: list[str] = []
    for batch, (p, g, *values) in batches(*columns):
        paths = group if len(batch) == len(group) else [group[i] for i in batch]
        olds = dict(zip(slots, values, strict=True))
        try:
            x, after = formula(p, g, dict(olds), replace(step, paths=paths, offsets=_offsets(paths, ctx)))
        except Exception:
            # A formula that gets lists may raise any error. Its leaves then run one by one, and a real error is raised
            # again there. Nothing of this batch is written yet, since a formula writes none of its arguments.
            rest += paths
            continue
        written: Any = x if lr is None else ctx.into(p, x)
        kept: dict[str, Any] = {slot: ctx.into(old, after[slot]) for slot, old in olds.items()}
        squares = [g.to(torch.float32).square()] if _rides(paths, given) else []
        sums = computed(written, *kept.values(), sums=squares)
        if sums is not None:
            _add_norms(paths, ctx, sums)
        new.update(zip(paths, written.tensors, strict=True))
        for slot, value in kept.items():
            own[slot].update(zip(paths, value.tensors, strict=True))
    return rest


def _by_formula(
    formula: Any, derived: Derived | None, given: Given, of_norms: bool = False
) -> tuple[Leaves, TransformState]:
    """New parameters, or directions, and slots by a formula, in a step that is recorded or reads no count."""
    grads, params, slots, counts, lr, numbers, common, ctx = given
    new: Leaves = {}
    own: TransformState = {slot: {} for slot in slots}
    dtypes = (x.dtype for p, g in grads.items() for x in (g, params[p]))
    rows = list(each(counts, lr, numbers, derived, ctx, dtypes))
    more: Any = dict(numbers=numbers, shared=common, rounding=ctx.rounding)
    steps = {p: LeafStep(count, lr, p, ctx.offsets.get(p, 0), derived=made, **more) for p, count, made in rows}
    if of_norms:
        for path, (x, after) in zip(steps, _of_norms(formula, rows, given), strict=True):
            new[path] = x if lr is None else ctx.into(params[path], x)
            for slot, old in slots.items():
                own[slot][path] = ctx.into(old[path], after[slot])
        return new, own
    rest = list(steps)
    if steps and ctx.unread and not derived and ctx.rounding is None:
        # Nobody reads the counts, and nothing is derived from them: leaves with different ones are one list.
        rest = _on_lists(formula, replace(steps[rest[0]], path=UNKNOWN, offset=UNKNOWN), rest, given, new, own)
    for path in rest:
        _on_leaf(formula, steps[path], given, new, own)
    return new, own


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


def _of_norms(
    formula: NormFormula, rows: Sequence[tuple[str, Any, Numbers]], given: Given
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The results of a formula that needs norms of whole leaves, leaf by leaf."""
    grads, params, slots, _, lr, numbers, common, ctx = given
    by_path = {row[0]: row for row in rows}
    for paths in _together(list(by_path), ctx.layout):
        rest, squares = [], {}
        for p in paths:
            _, count, made = by_path[p]
            step = LeafStep(count, lr, p, ctx.offsets.get(p, 0), numbers, common, made, rounding=ctx.rounding)
            measured, then = formula(params[p], grads[p], {slot: old[p] for slot, old in slots.items()}, step)
            squares[p] = torch.stack([squared_norm({p: x}) for x in measured])
            rest.append(then)
        for then, totals in zip(rest, ctx.total_each(squares).values(), strict=True):
            yield then(*map(root, totals.unbind()))


def direction(
    name: str,
    slots: Slots,
    formula: Formula | NormFormula,
    numbers: Numbers = NONE,
    derived: Derived | None = None,
    of_norms: bool = False,
    in_fp32: bool = False,
    rounds_grads: bool = False,
) -> Transform:
    """A transform from a gradient to the direction of a step, from its formula on one leaf.

    State: `count`, the updates of each leaf, and one tensor per leaf for each slot. An optimizer such as `scale_by_lr`
    must follow it.

    Args:
        name: the transform's name.
        slots: by name, a function that makes the slot's first tensor for a leaf from the parameter, such as `like`.
        formula: as for `optimizer`, but its first result is the direction, and `at.lr` is `None`.
        numbers: hyperparameters of the formula, by name.
        derived: as for `optimizer`, but its second argument, the rate, is `None`.
        of_norms: as for `optimizer`.
        in_fp32, rounds_grads: as for `optimizer`, but the direction stays in the dtype in which the formula computed
            it.

    Examples:
        >>> import torch, zerofn as zf
        >>> def formula(p, g, slots, at):
        ...     m = at.numbers["beta"] * slots["m"] + g
        ...     return m.sign(), {"m": m}
        >>> sign = direction("sign", {"m": like}, formula, numbers={"beta": 0.9}, in_fp32=True)
        >>> tx = zf.chain(sign, zf.scale_by_lr(0.5))
        >>> state, _ = zf.update(tx, {"w": torch.ones(1)}, zf.init(tx, {"w": torch.ones(1)}))
        >>> state.params["w"]
        tensor([0.5000])
    """
    formula = in_one_dtype(formula, slots, in_fp32, rounds_grads, directs=True)
    plans = plans_of(formula, list(slots))
    sums = plans_of(formula, list(slots), sums=True) if of_norms else None

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        state: TransformState = {"count": counters(leaves)}
        return state | {slot: {p: start(x) for p, x in leaves.items()} for slot, start in slots.items()}

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        return Prepared(carry={key: ctx.replicated(x) for key, x in numbers.items()})

    def update(grads: Leaves, state: TransformState, params: Leaves, found: Numbers, ctx: Context):
        given = Given(grads, params, {slot: state[slot] for slot in slots}, {}, None, found, {}, ctx)
        if ctx.recorded or ctx.unread:
            ctx.settle()
            counts = one_more(state["count"], grads, ctx)
            out, own = _by_formula(formula, derived, given._replace(counts=counts), of_norms)
        else:
            groups, before, _ = next_counts(state["count"], grads)
            out, own = _read(formula, plans, derived, groups, given, sums)
            counts = dict(zip(grads, apart(torch.tensor(before, dtype=torch.int64).add_(1)), strict=True))
        return out, {**own, "count": counts}

    def on_stored(grads: Leaves, state: TransformState, params: Leaves, found: Numbers, ctx: Context):
        if ctx.rounding is not None or ctx.recorded or ctx.unread or not grads:
            return {}, {}
        given = Given(grads, params, {slot: state[slot] for slot in slots}, {}, None, found, {}, ctx)
        return _on_stored(plans, derived, state["count"], given)

    return Transform(
        name,
        Scope.WHOLE if of_norms else Scope.LEAF,
        "number" if of_norms else "element",
        Facts(directs=True, keeps=False, capturable=True, rounds=in_fp32),
        through=_in_fp32 if in_fp32 else None,
        init_fn=init,
        prepare_fn=prepare,
        update_fn=Joining(update) if of_norms else UpdateOfStored(Joining(update), on_stored),
    )


def _in_fp32(spec: Spec) -> Spec:
    """The spec behind a direction that is computed in fp32 at least, whatever the dtype of the gradient."""
    wide = spec.stored_dtype and torch.promote_types(spec.stored_dtype, torch.float32)
    return changes_gradients(spec).to(wide)


def rate_of(inner: Transform, state: TransformState, ctx: Context) -> Any:
    """Return the learning rate with which an optimizer makes this update, for a transform that wraps the optimizer.

    Args:
        inner: the optimizer.
        state: the optimizer's state, or a state that has its entries.
        ctx: the step's context. A rate that is set in it comes first.

    Returns:
        A number, or a 0-d tensor where Python cannot read the step.

    Raises:
        ValueError: the optimizer tells no rate (`Facts.rate`).
    """
    rate = ctx.lr.get(ctx.prefix, inner.facts.rate)
    if rate is None:
        right = "zf.leafwise(optimizer=True) of a function with an argument lr, or one of zf's own"
        raise ValueError(explain(f"the learning rate of {inner.name}(...)", "it has no Facts.rate", right))
    return _rate_at(inner.name, rate, state["step"], ctx) if callable(rate) else _rate_at(inner.name, rate, None, ctx)


def _rate_at(name: str, rate: Any, step: Tensor | None, ctx: Context) -> Any:
    # A user's schedule may read the number of the step in Python. Capturable steps have refused such schedules before.
    asks = ctx.verdicts and callable(rate) and not isinstance(rate, OfTensors)
    at = step if step is None else number(step) if asks else ctx.read(step)
    return learning_rate(name, rate, at, ctx.unrecorded)  # type: ignore[arg-type]


def _by_number(given: Numbers, known: Numbers) -> dict[str, Any]:
    """Arguments of a transform as numbers of its formula: `betas` as `beta1` and `beta2`, if the formula has these.

    >>> _by_number({"betas": (0.9, 0.99), "eps": 1e-8}, {"beta1": 0.9, "beta2": 0.9, "eps": 0.0})
    {'beta1': 0.9, 'beta2': 0.99, 'eps': 1e-08}
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        one = name.removesuffix("s")
        found |= {name: value} if name in known else {f"{one}{i}": x for i, x in enumerate(value, 1)}
    return found


def like(x: Tensor) -> Tensor:
    """A slot that starts as zeros of the parameter's shape, dtype and strides."""
    return torch.zeros_like(x)


def wide_copy(x: Tensor) -> Tensor:
    """A slot that starts as a copy of the parameter, in fp32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


def without_elements(x: Tensor) -> Tensor:
    """A slot without elements, for an unused option: so the structure of a state does not depend on hyperparameters."""
    return torch.zeros(0, dtype=x.dtype, device=x.device)
