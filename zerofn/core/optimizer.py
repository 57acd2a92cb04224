"""Makes a transform from an optimizer's formula on one leaf: counts of updates, a rate, kernels by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..kernels.formulas import once
from ..kernels.recording import number
from .arguments import LARGEST, learning_rate
from .context import Context, Prepared
from .counts import Derived, apart, counters, next_counts, one_more
from .facts import Facts, Scope
from .halves import Joining, UpdateOfStored, joins
from .kernels_by_hand import (
    ByHand,
    Kernel,
    LeafList,
    Programs,
    asked,
    backwards_of,
    update_in_place,
    update_recorded,
    update_unread,
)
from .layout import Layout, Leaves
from .leaf_step import LeafStep, Numbers
from .leaf_updates import NONE, Formula, LeafFormula, NormFormula, OfLists, Updates, plans_of, update_stored
from .spec import Spec, changes_gradients
from .state import counter
from .transform import OfTensors, ScalarOrSchedule, Transform, TransformState

Slots = dict[str, Callable[[Tensor], Tensor]]


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
    leaf_formula = LeafFormula(formula, list(slots), derived, of_norms)
    update = _Update(name, lr, slots, leaf_formula, dict(numbers), dict(shared))
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
        update_fn=update.halves(),
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
    formula, slots = update.formula, list(update.slots)
    plans = formula.plans if stored is None else plans_of(stored, slots)
    by_hand = ByHand(run, takes or _none, plans, backwards_of(formula.formula, slots))
    return replace(built, update_fn=replace(update, by_hand=by_hand).halves())


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
    update = _update_of(built, "with_lists")
    of = update.formula
    formula = LeafFormula(of.formula, of.slots, of.derived, lists=run)
    return replace(built, update_fn=replace(update, formula=formula).halves())


def _update_of(built: Transform, name: str) -> _Update:
    half = joins(built.update_fn)
    update = None if half is None else getattr(half.func, "__self__", None)
    if not isinstance(update, _Update) or update.formula.of_norms:
        why = "only an optimizer of zerofn.extend.optimizer, without of_norms, runs a formula that a kernel replaces"
        raise TypeError(explain(f"{name}({built.name}(...))", why, f"{name}(optimizer(...), run)"))
    return update


def _none(leaves: LeafList) -> list[bool]:
    return [False] * len(leaves.params)


@dataclass(eq=False)
class _Update:
    """The halves of an optimizer, or of a direction, which has no rate; fields are arguments of `optimizer`."""

    name: str
    lr: ScalarOrSchedule | None
    slots: Slots
    formula: LeafFormula
    # These are plain dicts, since the compiler fails at a MappingProxyType of a dict that was written to.
    numbers: dict[str, Any]
    shared: dict[str, Callable[[], Tensor]]
    by_hand: ByHand | None = None

    def __post_init__(self) -> None:
        # A rate that is one number is checked here, and not at each step.
        self.checked = isinstance(self.lr, float) and 0.0 <= self.lr <= LARGEST
        of, alone = self.formula, self.formula.of_norms or self.formula.lists is not None or self.lr is None
        self.programs = None if alone else Programs(self.name, of, list(self.numbers), list(self.shared))

    def halves(self) -> Any:
        """The update half: with one for leaves as they are stored, if the formula needs no norms."""
        kernel = None if self.by_hand is None else self.by_hand.run
        apart = kernel.apart if type(kernel) is Joining else None
        joining = Joining(self.update, apart=apart)
        return joining if self.formula.of_norms else UpdateOfStored(joining, self.on_stored)

    def init(self, leaves: Leaves, layout: Layout) -> TransformState:
        state: TransformState = {} if self.lr is None else {"step": counter()}
        state["count"] = counters(leaves)
        state |= {key: start() for key, start in self.shared.items()}
        for slot, start in self.slots.items():
            state[slot] = {p: start(x) for p, x in leaves.items()}
        return state

    def prepare(self, state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        numbers = self.numbers
        if changed := ctx.numbers.get(ctx.prefix):
            numbers = {**numbers, **_by_number(changed, numbers)}
        if ctx.recorded:
            numbers = {key: ctx.replicated(x) for key, x in numbers.items()}
        if self.lr is None:
            return Prepared((None, numbers))
        # A group has one optimizer: its prefix is its name, whatever the user calls the transform.
        step, rate = state["step"], ctx.lr.get(ctx.prefix, self.lr)
        if rate is not self.lr or not self.checked:
            rate = _rate_at(self.name, rate, step, ctx)
        if ctx.recorded:
            (rate,) = once(rate)
            rate = ctx.replicated(rate)
        ctx.report("lr", rate)
        if ctx.unread and ctx.choosing is not None:
            return Prepared((rate, numbers), {"step": step + ctx.choosing}, chosen=("step",))
        return Prepared((rate, numbers), {"step": step + 1})

    def update(self, grads: Leaves, state: TransformState, params: Leaves, carry: tuple[Any, Numbers], ctx: Context):
        # Kernels by hand round to nearest.
        by_hand = self.by_hand if ctx.rounding is None else None
        if by_hand is not None and not (type(by_hand.run) is Joining and ctx.donate and not ctx.unread):
            ctx.settle()
        slots = dict(zip(self.slots, map(state.__getitem__, self.slots), strict=True))
        shared = {key: state[key] for key in self.shared if key in state} if self.shared else {}
        updates = Updates(grads, params, slots, *carry, shared, ctx)
        if ctx.recorded or ctx.unread:
            updates.counts = counts = one_more(state["count"], grads, ctx)
            if not self._by_hand_unread(by_hand, updates):
                self.formula.update_unread(updates)
            return updates.new, {**updates.own, "count": counts}
        groups, before, together = next_counts(state["count"], grads)
        if by_hand is None:
            self.formula.update(groups, updates)
        else:
            update_in_place(by_hand.run, groups.items(), updates)
        # Counts are raised after the update: if it refuses its arguments, they stay as they are.
        if ctx.donate and together is not None and not together.is_inference():
            # One write for all counts: a new tensor for each takes longer than the update of a small leaf. Slots were
            # written in place too, so the old state is the new one.
            together.add_(1)
            return updates.new, state
        counts = dict(zip(grads, apart(torch.tensor(before, dtype=torch.int64).add_(1)), strict=True))
        return updates.new, {**updates.own, "count": counts}

    def _by_hand_unread(self, by_hand: ByHand | None, updates: Updates) -> bool:
        """Whether a kernel has updated leaves whose counts Python does not read."""
        if by_hand is None:
            return updates.ctx.recorded and self.programs is not None and self.programs.update(updates)
        if updates.ctx.unread:
            return update_unread(by_hand, updates)
        return update_recorded(by_hand, self.formula, updates)

    def on_stored(self, grads: Leaves, state: TransformState, params: Leaves, carry: tuple[Any, Numbers], ctx: Context):
        """As `update`, of leaves as they are stored: of those that a kernel by hand or a program takes."""
        if ctx.rounding is not None or ctx.recorded or ctx.unread or not grads:
            return {}, {}
        slots, plans = {slot: state[slot] for slot in self.slots}, self.formula.plans
        updates = Updates(grads, params, slots, *carry, {key: state[key] for key in self.shared if key in state}, ctx)
        if self.by_hand is not None:
            every, plans = asked(updates, "stored"), self.by_hand.plans
            taken = dict(zip(every.paths, self.by_hand.takes(every), strict=True))
            updates.grads = {path: g for path, g in grads.items() if taken[path]}
        counts = update_stored(plans, self.formula.derived, state["count"], updates)
        return (updates.new, {**updates.own, "count": counts}) if counts else ({}, {})


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
    update = _Update(name, None, slots, LeafFormula(formula, list(slots), derived, of_norms), dict(numbers), {})
    return Transform(
        name,
        Scope.WHOLE if of_norms else Scope.LEAF,
        "number" if of_norms else "element",
        Facts(directs=True, keeps=False, capturable=True, rounds=in_fp32),
        through=_in_fp32 if in_fp32 else None,
        init_fn=update.init,
        prepare_fn=update.prepare,
        update_fn=update.halves(),
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
