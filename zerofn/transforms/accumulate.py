"""`accumulate`: gradient accumulation, the mean gradient over several micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..extend import (
    COUNT,
    Context,
    Elementwise,
    Facts,
    Joining,
    Layout,
    Leaves,
    Prepared,
    Spec,
    Transform,
    TransformState,
    check_count,
    check_flag,
    counter,
    may,
    no_weight,
    over_leaves,
    select,
    times,
    transform,
    weight_of,
    where,
)


@transform
def accumulate(every: int, weighted: bool = False) -> Transform:
    """Average the gradients of `every` micro-steps, and update at the last of them.

    `g = (g_1 + ... + g_n) / n`, where `n` is the number of micro-steps whose gradients were added. So an early update
    by `opt.set_boundary(True)` also gets the true mean. In the first `every - 1` micro-steps no transform after this
    one runs. Do not divide the loss by the number of micro-batches.

    `accumulate(1)` is the identity and has no buffer. The buffer has the gradient's dtype: write
    `precision(grad_dtype=torch.float32)` before it to sum in fp32.

    Args:
        every: micro-steps per optimizer step.
        weighted: weight each micro-batch by the `weight=` given to `step`, `zf.update` or `opt.step`, such as its
            number of tokens: `g = sum(w_i g_i) / sum(w_i)`, the gradient of a mean loss over the whole batch. Sums of
            fp16 gradients are then kept in fp32, since tokens times a gradient may exceed 65504.

    Raises:
        ValueError: `every` is not a positive int, or `weighted` not a bool; at an update, a weight is missing, is
            negative or infinite, or is given without `weighted`; the weights of a window add up to 0.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.accumulate(2), zf.sgd(1.0))
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> for g in (1.0, 3.0):
        ...     state, metrics = zf.update(tx, {"w": torch.tensor([g])}, state)
        ...     print(bool(metrics["updated"]), state.params["w"])
        False tensor([0.])
        True tensor([-2.])
    """
    check_count("accumulate", "every", every, "micro-batches")
    check_flag("accumulate", "weighted", weighted)
    if every == 1 and not weighted:
        return Transform("accumulate", needs="element", through=_through)

    added = Elementwise(lambda total, g: total + g, replaces=1, instead=_added)
    divided = Elementwise(lambda total, by: total / by, replaces=1, instead=_divided)
    window = _Window(every, weighted, added, divided)
    return Transform(
        "accumulate",
        needs="element",
        facts=Facts(window=every, weighted=weighted, keeps=False, capturable=not weighted),
        through=_through,
        init_fn=window.init,
        prepare_fn=window.prepare,
        update_fn=Joining(window.update),
    )


@dataclass(frozen=True)
class _Window:
    """The functions of `accumulate`, and its arguments.

    Attributes:
        added: a gradient, added to a sum.
        divided: a sum, divided by a number.
    """

    every: int
    weighted: bool
    added: Elementwise
    divided: Elementwise

    def init(self, leaves: Leaves, layout: Layout) -> TransformState:
        state: TransformState = {
            COUNT: counter(),
            "sum": {p: torch.zeros_like(x, dtype=_sum_dtype(x, self.weighted)) for p, x in leaves.items()},
            # A leaf that got no gradient in the whole window is passed on without one, and not with zeros. Then the
            # optimizer does not update it, as in torch.
            "seen": {p: torch.tensor(False) for p in leaves},
        }
        return {**state, "weight": torch.zeros((), dtype=torch.float64)} if self.weighted else state

    def prepare(self, state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        now = ctx.read(state[COUNT]) + 1
        due = (now >= self.every) if ctx.boundary is None else ctx.boundary
        new = {COUNT: where(due, torch.zeros_like(state[COUNT]), lambda: state[COUNT] + 1)}
        weight, total = None, now if ctx.averaged else 1
        if self.weighted:
            weight = _weight(ctx)
            sum_of_weights = state["weight"] + weight
            new["weight"] = where(due, torch.zeros_like(sum_of_weights), sum_of_weights)
            total = where(due, lambda: _total(sum_of_weights, ctx), lambda: torch.ones_like(sum_of_weights))
            weight, total = ctx.number(weight), ctx.number(total)
        return Prepared(carry=(due, weight, total), state=new, emit=due)

    def update(self, grads: Leaves, state: TransformState, params: Leaves, carry: tuple, ctx: Context):
        due, weight, total = carry
        if ctx.unread:
            # torch.where below chooses between sums and means, so neither may be written over the other.
            ctx = replace(ctx, donate=False)
        begun = ctx.read_each(state["seen"])
        addends = grads
        if self.weighted:
            ctx.settle()
            addends = over_leaves(lambda g, so_far: _weighed(g.to(so_far.dtype), weight), grads, state["sum"])
        joins = ctx.passes is not None and set(map(begun.__getitem__, grads)) == {True}
        if joins:
            (sums,) = self.added(ctx, {path: state["sum"][path] for path in grads}, addends)
        else:
            if ctx.passes is not None:
                ctx.settle()
            # The first gradient of a window overwrites the sum of the one before.
            sums = ctx.put_each("add", state["sum"], addends, begun)
        seen = ctx.marked(state["seen"], grads, begun)
        if not may(due):
            return grads, {"sum": sums, "seen": seen}
        if len(sums) < len(begun):
            # This adds leaves that had a gradient only in an earlier micro-step of the window.
            sums = {p: x for p, x in {**state["sum"], **sums}.items() if p in sums or may(begun[p])}
        means = self.divided(ctx, sums, by=total)[0] if joins else ctx.put_each("div", sums, total)
        # Nobody reads the sum of a closed window. It is set anyway, so that the state is the same with and without
        # `donate`. Setting `seen` to false closes the window, so the buffer need not be zeroed.
        closed = {"sum": means, "seen": {p: torch.zeros_like(x) for p, x in seen.items()}}
        return means, select(due, closed, {"sum": sums, "seen": seen})


def _added(ctx: Context, sums: Leaves, grads: Leaves) -> Leaves:
    return ctx.put_each("add", sums, grads)


def _divided(ctx: Context, sums: Leaves, by: Any) -> Leaves:
    return ctx.put_each("div", sums, by)


def _through(spec: Spec) -> Spec:
    return spec.after("summed_by")


def _sum_dtype(grad: Tensor, weighted: bool) -> torch.dtype:
    """The dtype of a sum: fp32 for weighted fp16, which may overflow behind the check of `scale_loss`."""
    return torch.float32 if weighted and grad.dtype == torch.float16 else grad.dtype


def _weighed(g: Tensor, weight: Any) -> Tensor:
    """`g * weight`. A micro-batch of weight 0 counts for nothing, even if its mean gradient is 0 / 0."""
    return times(where(weight != 0, g, lambda: torch.zeros_like(g)), weight)


def _weight(ctx: Context) -> Tensor:
    if ctx.weight is None:
        raise ValueError(
            explain(
                "a step without weight= through accumulate(weighted=True)",
                "micro-batches of unequal size cannot be averaged without the size of each",
                "step(state, *batch, weight=number_of_tokens), or opt.step(weight=number_of_tokens)",
            )
        )
    # The weight moves to the CPU, where the counters are.
    weight = weight_of(ctx.weight).cpu()
    ctx.check(weight, lambda x: 0 <= x < float("inf"), lambda: no_weight(ctx.weight))
    return weight


def _total(sum_of_weights: Tensor, ctx: Context) -> Tensor:
    """The divisor of a closed window: the sum of weights, averaged over ranks.

    Each rank has weights of its own, but the mean gradient over ranks is divided by the weights of all ranks.
    """
    total = ctx.reduction.mean(sum_of_weights)
    wrong = "accumulate(weighted=True) closed a window whose weights add up to 0"
    right = "weight=max(number_of_tokens, 1), or leave empty micro-batches out"
    ctx.check(total, lambda x: x != 0, lambda: ValueError(explain(wrong, "a mean over nothing is not defined", right)))
    return total
