"""What every optimizer shares: its step, its learning rate, and the number of updates each leaf has had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .._compat import foreach_add, is_wrapped
from ..kernels.recording import readable
from .arguments import learning_rate
from .executor import counter
from .transform import Context, Facts, Prepared, ScalarOrSchedule, Transform, TransformState, number
from .tree import Layout, Leaves

Slots = dict[str, Callable[[Tensor], Tensor]]
Numbers = Mapping[str, Any]
NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class LeafStep:
    """One update of one leaf: what a formula is told besides its tensors.

    Attributes:
        count: updates of the leaf including this one; a 0-d tensor under `vmap` and in a compiled graph.
        lr: learning rate of this update; a number, or a 0-d tensor.
        path: the leaf's name.
        offset: global index of the leaf's first stored element.
        numbers: hyperparameters by name; numbers, or 0-d tensors.
        shared: state that all leaves share, by name; only read.
    """

    count: Any
    lr: Any
    path: str
    offset: int
    numbers: Numbers = field(default_factory=dict)
    shared: TransformState = field(default_factory=dict)

    def scalar(self, value: Any, like: Tensor) -> Any:
        """A number to compute with beside `like`: a tensor in its dtype and on its device, anything else as it is."""
        return value.to(like) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class LeafList:
    """Leaves that have had equally many updates, as lists of tensors; what a kernel works on.

    Attributes:
        params: to be written in place.
        grads: never written.
        slots: state by name, to be written in place.
        count: updates including this one.
        lr: learning rate of this update.
        paths: names of the leaves.
        offsets: global index of each leaf's first stored element.
        numbers: hyperparameters by name.
        shared: state that all leaves share, by name; only read.
    """

    params: list[Tensor]
    grads: list[Tensor]
    slots: dict[str, list[Tensor]]
    count: int
    lr: Any
    paths: list[str]
    offsets: list[int]
    numbers: Numbers = field(default_factory=dict)
    shared: TransformState = field(default_factory=dict)

    def where(self, chosen: list[bool]) -> LeafList:
        """The leaves for which `chosen` is true."""

        def pick(entries: list) -> list:
            return [x for x, on in zip(entries, chosen, strict=True) if on]

        slots = {name: pick(entries) for name, entries in self.slots.items()}
        lists = pick(self.params), pick(self.grads), slots, self.count, self.lr, pick(self.paths), pick(self.offsets)
        return LeafList(*lists, self.numbers, self.shared)


# (parameter, gradient, slots by name, what else) -> (new parameter, new slots)
Formula = Callable[[Tensor, Tensor, dict[str, Tensor], LeafStep], tuple[Tensor, dict[str, Tensor]]]
Kernel = Callable[[LeafList], None]


def optimizer(
    name: str,
    lr: ScalarOrSchedule,
    slots: Slots,
    formula: Formula,
    kernel: Kernel | None = None,
    numbers: Numbers = NONE,
    shared: Mapping[str, Callable[[], Tensor]] = MappingProxyType({}),
    settable: Mapping[str, Any] = NONE,
) -> Transform:
    """An optimizer from its formula on one leaf.

    State: `step`, the updates applied (schedules read it); `count`, the same per leaf, since a leaf
    without a gradient is left alone, as in torch.optim, and its bias correction must not move; and one
    tensor per leaf for each slot.

    Args:
        name: the transform's name.
        lr: a number, or a function of the step.
        slots: how each per-leaf state tensor starts, from the parameter.
        formula: the arithmetic, of torch operations that write none of their arguments: it is what is differentiated,
            batched and compiled. Each element from its own elements, its leaf's path and its place in the leaf alone.
        kernel: the same in place, on lists; taken where nothing records. Its bits are the formula's, or the bound
            is the transform's to state.
        numbers: hyperparameters of the formula, by name.
        shared: how each further tensor that all leaves share starts; it stays as it is.
        settable: hyperparameters that `opt.param_groups` may change, with their values, by the names of the
            transform's arguments. A pair such as `betas` is `beta1` and `beta2` among `numbers`, or `betas`.
    """

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        state: TransformState = {"step": counter(), "count": {p: counter() for p in leaves}}
        state |= {key: start() for key, start in shared.items()}
        for slot, start in slots.items():
            state[slot] = {p: start(x) for p, x in leaves.items()}
        return state

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        # One optimizer per group, so where it stands names it, whatever the user calls it.
        rate = learning_rate(name, ctx.lr.get(ctx.prefix, lr), number(state["step"]))
        ctx.report("lr", rate)
        now = {**numbers, **_by_number(ctx.numbers.get(ctx.prefix, NONE), numbers)}
        found = {key: ctx.replicated(x) for key, x in now.items()} if ctx.recorded else now
        return Prepared(carry=(ctx.replicated(rate), found), state={"step": state["step"] + 1})

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: tuple[Any, Numbers], ctx: Context):
        counts = dict(zip(grads, _next([state["count"][p] for p in grads]), strict=True))
        common = {key: state[key] for key in shared if key in state}
        old = {slot: state[slot] for slot in slots}
        if kernel is not None and not ctx.recorded:
            new, own = _in_place(kernel, grads, params, old, counts, (*carry, common), ctx)
        else:
            new, own = _by_formula(formula, grads, params, old, counts, (*carry, common), ctx)
        return new, {**own, "count": counts}

    facts = Facts(optimizes=True, rate=lr, settable=tuple(settable.items()))
    return Transform(name, needs="element", facts=facts, init_fn=init, prepare_fn=prepare, update_fn=update)


# The learning rate, `None` of a direction; hyperparameters; what all leaves share.
Shared = tuple[Any, Numbers, TransformState]


def _in_place(
    kernel: Kernel, grads: Leaves, params: Leaves, slots: TransformState, counts: Leaves, told: Shared, ctx: Context
) -> tuple[Leaves, TransformState]:
    """New parameters and slots by a kernel on lists; in the memory of the old ones where that is donated."""
    lr, numbers, common = told
    new = {p: ctx.own(params[p]) for p in grads}
    own = {slot: {p: ctx.own(old[p]) for p in grads} for slot, old in slots.items()}
    for count, group in _by_count(counts).items():
        lists = [new[p] for p in group], [grads[p] for p in group], {k: [x[p] for p in group] for k, x in own.items()}
        offsets = [ctx.offsets.get(p, 0) for p in group]
        kernel(LeafList(*lists, count, lr, group, offsets, numbers, common))
    return new, own


def _by_formula(
    formula: Formula, grads: Leaves, params: Leaves, slots: TransformState, counts: Leaves, told: Shared, ctx: Context
) -> tuple[Leaves, TransformState]:
    """New parameters, or directions, and slots by a formula, leaf by leaf."""
    lr, numbers, common = told
    new: Leaves = {}
    own: TransformState = {slot: {} for slot in slots}
    for count, group in _by_count(counts).items():
        for p in group:
            now = count if isinstance(count, int) else counts[p]
            step = LeafStep(now, lr, p, ctx.offsets.get(p, 0), numbers, common)
            x, made = formula(params[p], grads[p], {slot: old[p] for slot, old in slots.items()}, step)
            # Leaf by leaf, so that of a donated state no more than one leaf is there twice.
            new[p] = x if lr is None else ctx.into(params[p], x)
            for slot, old in slots.items():
                own[slot][p] = ctx.into(old[p], made[slot])
    return new, own


def direction(name: str, slots: Slots, formula: Formula, numbers: Numbers = NONE) -> Transform:
    """What turns a gradient into the direction of a step, from its formula on one leaf.

    State: `count`, the updates of each leaf, and one tensor per leaf for each slot. To be ended by an optimizer such as
    `scale_by_lr`.

    Args:
        name: the transform's name.
        slots: how each per-leaf state tensor starts, from the parameter.
        formula: as of `optimizer`, but that what it returns first is the direction; `at.lr` is `None`.
        numbers: hyperparameters of the formula, by name.
    """

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        state: TransformState = {"count": {p: counter() for p in leaves}}
        return state | {slot: {p: start(x) for p, x in leaves.items()} for slot, start in slots.items()}

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        return Prepared(carry={key: ctx.replicated(x) for key, x in numbers.items()})

    def update(grads: Leaves, state: TransformState, params: Leaves, found: Numbers, ctx: Context):
        counts = dict(zip(grads, _next([state["count"][p] for p in grads]), strict=True))
        old = {slot: state[slot] for slot in slots}
        out, own = _by_formula(formula, grads, params, old, counts, (None, found, {}), ctx)
        return out, {**own, "count": counts}

    return Transform(
        name,
        needs="element",
        facts=Facts(directs=True),
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


def _next(counts: list[Tensor]) -> list[Tensor]:
    """Each count plus one; in one call, since on many small leaves that is a good part of a step."""
    if not counts or not all(map(readable, counts)) or any(map(is_wrapped, counts)):
        return [c + 1 for c in counts]
    return list(foreach_add(counts, 1))


def _by_count(counts: dict[str, Tensor]) -> dict[Any, list[str]]:
    """Leaves that have had equally many updates, which is nearly always all of them."""
    groups: dict[Any, list[str]] = {}
    hidden = not all(map(readable, counts.values()))
    numbers = [] if hidden or not counts else torch.stack(list(counts.values())).tolist()
    # Under vmap and in a graph the number cannot be read; each leaf is then a group of its own.
    for path, number_or_path in zip(counts, numbers or counts, strict=True):
        groups.setdefault(number_or_path, []).append(path)
    return groups


def plain(tensors: list[Tensor]) -> bool:
    """Whether fused kernels can take the tensors: one dtype and device, and no torch.func wrapper."""
    return not any(is_wrapped(t) for t in tensors) and len({(t.dtype, t.device) for t in tensors}) == 1


def typed(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Gradients in their parameters' dtypes and strides; the same tensors where they are already.

    Fused kernels walk memory, so a channels-last parameter needs a channels-last gradient.
    """
    return [
        g if g.dtype == p.dtype and g.stride() == p.stride() else torch.empty_like(p).copy_(g)
        for p, g in zip(params, grads, strict=True)
    ]


def like(x: Tensor) -> Tensor:
    """A slot that starts as zeros of the parameter's shape, dtype and strides."""
    return torch.zeros_like(x)
