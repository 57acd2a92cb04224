"""`optimizer`: a transform from a formula on one leaf, with counts of updates, a learning rate and kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..kernels.recording import only_compiled
from ..kernels.terms import once
from .arguments import LARGEST, learning_rate
from .facts import Facts
from .kernel_derivatives import Pulled, by_hand, updated_by
from .layout import Layout, Leaves
from .leaf_arguments import Given, LeafList, LeafStep, Numbers
from .state import counter
from .transform import ScalarOrSchedule, Transform, TransformState
from .update_context import Context, Prepared
from .update_counts import Derived, by_count, each, one_more
from .vmapped_kernels import Kernel, kernel_on_members

Slots = dict[str, Callable[[Tensor], Tensor]]
NONE: Mapping[str, Any] = MappingProxyType({})


# (parameter, gradient, slots by name, what else) -> (new parameter, new slots)
Formula = Callable[[Tensor, Tensor, dict[str, Tensor], LeafStep], tuple[Tensor, dict[str, Tensor]]]
Operator = Callable[[LeafList], bool]


def optimizer(
    name: str,
    lr: ScalarOrSchedule,
    slots: Slots,
    formula: Formula,
    kernel: Kernel | None = None,
    numbers: Numbers = NONE,
    shared: Mapping[str, Callable[[], Tensor]] = MappingProxyType({}),
    settable: Mapping[str, Any] = NONE,
    derived: Derived | None = None,
    operator: Operator | None = None,
    pulled: Pulled | None = None,
    counterpart: type | None = None,
    torch_names: Mapping[str, str] = NONE,
) -> Transform:
    """An optimizer from its formula on one leaf.

    State: `step`, the updates applied (schedules read it); `count`, the same per leaf, since a leaf without a gradient
    is left alone, as in torch.optim, and its bias correction must not move; one tensor per leaf for each slot.

    Args:
        name: the transform's name.
        lr: a number, or a function of the step.
        slots: how each per-leaf state tensor starts, from the parameter.
        formula: the arithmetic, of torch operations that write none of their arguments: it is what is differentiated,
            batched and compiled. Each element from its own elements, its leaf's path and its place in the leaf alone.
        kernel: the same in place, on lists; taken where nothing records, and under `torch.func.vmap` alone on the
            leaves of all members. Its bits are the formula's, or the bound is the transform's to state.
        numbers: hyperparameters of the formula, by name.
        shared: how each further tensor that all leaves share starts; it stays as it is.
        settable: hyperparameters that `opt.param_groups` may change, with their values, by the names of the
            transform's arguments. A pair such as `betas` is `beta1` and `beta2` among `numbers`, or `betas`.
        derived: from the updates of a leaf, the rate and the hyperparameters to further numbers of the formula by name,
            `at.derived`: bias corrections. Computed once for leaves that have had equally many updates; where those
            cannot be read, once for all, on tensors of the shape `(leaves,)`. Tensors come in float64.
        operator: whether the kernel of these leaves may stand in a compiled graph: there it calls an operator that
            `torch.library` knows, and `count` is a tensor. Else, and where derivatives are recorded, the formula does.
        pulled: the derivative of the formula by hand, `(dp, dslots, p, g, slots, at) -> (dp, dg, dslots)`: cotangents
            of the new parameter and slots, the old parameter, the gradient and the new slots, to cotangents of the
            old ones. With it the kernel is taken where a step is differentiated backwards, but not by its numbers.
        counterpart: the class of `torch.optim` that does the same; `opt.state_dict()` has the keys of its groups.
        torch_names: what that class calls slots that have another name here.
    """
    update = _Update(name, lr, slots, formula, kernel, dict(numbers), dict(shared), derived, operator, pulled)
    facts = Facts(
        optimizes=True,
        rate=lr,
        settable=tuple(settable.items()),
        copies=kernel is None,
        keeps=False,
        counterpart=counterpart,
        torch_names=tuple(torch_names.items()),
    )
    return Transform(
        name,
        needs="element",
        facts=facts,
        init_fn=update.init,
        prepare_fn=update.prepare,
        update_fn=update.update,
    )


@dataclass(eq=False)
class _Update:
    """The halves of an optimizer; fields are arguments of `optimizer`."""

    name: str
    lr: ScalarOrSchedule
    slots: Slots
    formula: Formula
    kernel: Kernel | None
    # Plain dicts: the compiler fails at a MappingProxyType where dicts have been written to.
    numbers: dict[str, Any]
    shared: dict[str, Callable[[], Tensor]]
    derived: Derived | None
    operator: Operator | None
    pulled: Pulled | None

    def __post_init__(self) -> None:
        # A rate that is one number is checked here, and not at each step.
        self.checked = isinstance(self.lr, float) and 0.0 <= self.lr <= LARGEST

    def init(self, leaves: Leaves, layout: Layout) -> TransformState:
        state: TransformState = {"step": counter(), "count": {p: counter() for p in leaves}}
        state |= {key: start() for key, start in self.shared.items()}
        for slot, start in self.slots.items():
            state[slot] = {p: start(x) for p, x in leaves.items()}
        return state

    def prepare(self, state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        # A group has one optimizer: its prefix is its name, whatever the user calls the transform.
        rate = ctx.lr.get(ctx.prefix, self.lr)
        if rate is not self.lr or not self.checked:
            rate = learning_rate(self.name, rate, ctx.read(state["step"]), ctx.unrecorded)
        changed, numbers = ctx.numbers.get(ctx.prefix), self.numbers
        if changed:
            numbers = {**numbers, **_by_number(changed, numbers)}
        if ctx.recorded:
            (rate,) = once(rate)
            rate, numbers = ctx.replicated(rate), {key: ctx.replicated(x) for key, x in numbers.items()}
        ctx.report("lr", rate)
        return Prepared(carry=(rate, numbers), state={"step": state["step"] + 1})

    def update(self, grads: Leaves, state: TransformState, params: Leaves, carry: tuple[Any, Numbers], ctx: Context):
        counts = one_more(state["count"], grads, ctx.recorded)
        common = {key: state[key] for key in self.shared if key in state} if self.shared else {}
        given = Given(grads, params, {slot: state[slot] for slot in self.slots}, counts, *carry, common, ctx)
        kernel, pulled, derived = self.kernel, self.pulled, self.derived
        if kernel is not None and not ctx.recorded:
            new, own = _in_place(kernel, by_count(counts).items(), given)
        elif kernel is not None and (groups := _groups(self.operator, given)) is not None:
            new, own = _in_place(kernel, groups, given._replace(ctx=replace(ctx, donate=ctx.donate_to_kernels)))
        elif kernel is not None and pulled is not None and _pulled_back(given):
            new, own = _with_derivative(kernel, pulled, derived, given)
        elif kernel is not None and (made := kernel_on_members(kernel, given)) is not None:
            new, own = made
        else:
            new, own = _by_formula(self.formula, derived, given)
        return new, {**own, "count": counts}


def _groups(operator: Operator | None, given: Given) -> list[tuple[Any, list[str]]] | None:
    """Counts and paths of leaves on which a graph calls the operator; `None` where it computes the formula."""
    if operator is None or not given.counts:
        return None
    leaves = _listed(list(given.grads), None, given._replace(ctx=replace(given.ctx, donate=True)))
    tensors = *leaves.params, *leaves.grads, *(x for column in leaves.slots.values() for x in column)
    if only_compiled((*tensors, leaves.lr, *leaves.numbers.values())) and operator(leaves):
        return [(torch.stack(list(given.counts.values())), leaves.paths)]
    return None


def _listed(group: list[str], count: Any, given: Given) -> LeafList:
    """Leaves as lists for a kernel, which writes parameters and slots: copies of the old ones unless donated."""
    grads, params, slots, _, lr, numbers, common, ctx = given
    # By `map` over C functions: this runs for every leaf in every step.
    columns = {}
    for name, x in {"": params, **slots}.items():
        column: list[Any] = list(map(x.__getitem__, group))
        columns[name] = column if ctx.donate else list(map(Tensor.clone, column))
    offsets = [ctx.offsets.get(p, 0) for p in group] if ctx.offsets else [0] * len(group)
    gradients, written = list(map(grads.__getitem__, group)), columns.pop("")
    norms = [] if ctx.norms is not None and ctx.norms.requested(group, gradients) else None
    return LeafList(written, gradients, columns, count, lr, group, offsets, numbers, common, norms)


def _in_place(kernel: Kernel, groups: Iterable[tuple[Any, list[str]]], given: Given) -> tuple[Leaves, TransformState]:
    """New parameters and slots by a kernel on lists; in the memory of the old ones where that is donated."""
    new: Leaves = {}
    own: TransformState = {}
    for count, group in groups:
        leaves = _listed(group, count, given)
        if given.ctx.donate:
            given.ctx.written.add(given.ctx.prefix)
        kernel(leaves)
        if leaves.norms and given.ctx.norms is not None:
            given.ctx.norms.add(group, leaves.norms)
        new.update(zip(group, leaves.params, strict=True))
        for slot, tensors in leaves.slots.items():
            own.setdefault(slot, {}).update(zip(group, tensors, strict=True))
    return new, own


def _pulled_back(given: Given) -> bool:
    """Whether the update of these leaves can use the hand-written derivative."""
    tensors = [[given.params[p], g, *(old[p] for old in given.slots.values())] for p, g in given.grads.items()]
    return given.ctx.recorded and by_hand(tensors, (given.lr, *given.numbers.values()))


def _with_derivative(
    kernel: Kernel, pulled: Pulled, derived: Derived | None, given: Given
) -> tuple[Leaves, TransformState]:
    """As `_in_place`, in new memory and recorded by autograd, with the hand-written derivative."""
    grads, params, slots, counts, lr, numbers, common, ctx = given
    derived_numbers = each(counts, lr, numbers, derived, ctx.recorded)
    steps = [LeafStep(count, lr, p, ctx.offsets.get(p, 0), numbers, common, made) for p, count, made in derived_numbers]
    paths = [at.path for at in steps]

    def run(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        n = len(paths)
        columns = [dict(zip(paths, tensors[i : i + n], strict=True)) for i in range(0, len(tensors), n)]
        olds = dict(zip(slots, columns[2:], strict=True))
        there = given._replace(params=columns[0], grads=columns[1], slots=olds)
        new, own = _in_place(kernel, by_count(counts).items(), there)
        return tuple(x for column in (new, *own.values()) for x in (column[p] for p in paths))

    tensors = [x[p] for x in (params, grads, *slots.values()) for p in paths]
    found = updated_by(run, pulled, list(slots), steps, tensors)
    new, *own = (dict(zip(paths, found[i : i + len(paths)], strict=True)) for i in range(0, len(found), len(paths)))
    return new, dict(zip(slots, own, strict=True))


def _by_formula(formula: Formula, derived: Derived | None, given: Given) -> tuple[Leaves, TransformState]:
    """New parameters, or directions, and slots by a formula, leaf by leaf."""
    grads, params, slots, counts, lr, numbers, common, ctx = given
    new: Leaves = {}
    own: TransformState = {slot: {} for slot in slots}
    dtypes = (x.dtype for p, g in grads.items() for x in (g, params[p]))
    for p, count, made in each(counts, lr, numbers, derived, ctx.recorded, dtypes):
        step = LeafStep(count, lr, p, ctx.offsets.get(p, 0), numbers, common, made)
        x, after = formula(params[p], grads[p], {slot: old[p] for slot, old in slots.items()}, step)
        # Leaf by leaf, so that no more than one leaf of a donated state is in memory twice.
        new[p] = x if lr is None else ctx.into(params[p], x)
        for slot, old in slots.items():
            own[slot][p] = ctx.into(old[p], after[slot])
    return new, own


def direction(
    name: str, slots: Slots, formula: Formula, numbers: Numbers = NONE, derived: Derived | None = None
) -> Transform:
    """A transform from a gradient to the direction of a step, from its formula on one leaf.

    State: `count`, the updates of each leaf, and one tensor per leaf for each slot. To be ended by an optimizer such as
    `scale_by_lr`.

    Args:
        name: the transform's name.
        slots: how each per-leaf state tensor starts, from the parameter.
        formula: as of `optimizer`, but that what it returns first is the direction; `at.lr` is `None`.
        numbers: hyperparameters of the formula, by name.
        derived: as of `optimizer`; the rate is `None`.
    """

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        state: TransformState = {"count": {p: counter() for p in leaves}}
        return state | {slot: {p: start(x) for p, x in leaves.items()} for slot, start in slots.items()}

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        return Prepared(carry={key: ctx.replicated(x) for key, x in numbers.items()})

    def update(grads: Leaves, state: TransformState, params: Leaves, found: Numbers, ctx: Context):
        counts = one_more(state["count"], grads, ctx.recorded)
        given = Given(grads, params, {slot: state[slot] for slot in slots}, counts, None, found, {}, ctx)
        out, own = _by_formula(formula, derived, given)
        return out, {**own, "count": counts}

    return Transform(
        name,
        needs="element",
        facts=Facts(directs=True, keeps=False),
        init_fn=init,
        prepare_fn=prepare,
        update_fn=update,
    )


def _by_number(given: Numbers, known: Numbers) -> dict[str, Any]:
    """Arguments of a transform as numbers of its formula: `betas` as `beta1` and `beta2`, where it knows those.

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


def without_elements(x: Tensor) -> Tensor:
    """A slot without elements, for an unused option: so the structure of a state does not depend on hyperparameters."""
    return torch.zeros(0, dtype=x.dtype, device=x.device)
