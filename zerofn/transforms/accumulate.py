"""`accumulate`: the mean of the gradients of several micro-batches, held back until it is complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..extend import (
    COUNT,
    Context,
    Facts,
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
    times,
    transform,
    weight_of,
    where,
)


@transform
def accumulate(every: int, weighted: bool = False) -> Transform:
    """Hold `every - 1` micro-steps back and let the mean gradient of all of them through at the last.

    Nothing else divides by the number of micro-steps: neither the loss nor `scale_loss`. The mean is over
    the micro-steps that arrived, so closing a window early (`opt.set_boundary(True)`) is right too.
    `accumulate(1)` is the identity and holds no buffer.

    The buffer has the dtype of the gradients: `precision(grad_dtype=torch.float32)` makes it fp32, and so does
    `weighted` of fp16.

    Args:
        every: micro-steps in a window.
        weighted: weight each micro-batch by `weight=` of `step`, `zf.update` or `opt.step`, for
            instance its number of tokens, so that a mean loss over unequal micro-batches is the mean
            loss of the big batch: `sum(w_i * g_i) / sum(w_i)`.

    Raises:
        ValueError: `every` is no positive int, `weighted` no bool; at an update, a weight is missing or has no use.

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

    window = _Window(every, weighted)
    return Transform(
        "accumulate",
        needs="element",
        facts=Facts(window=every, weighted=weighted, keeps=False),
        through=_through,
        init_fn=window.init,
        prepare_fn=window.prepare,
        update_fn=window.update,
    )


@dataclass(frozen=True)
class _Window:
    every: int
    weighted: bool

    def init(self, leaves: Leaves, layout: Layout) -> TransformState:
        state: TransformState = {
            COUNT: counter(),
            "sum": {p: torch.zeros_like(x, dtype=_sum_dtype(x, self.weighted)) for p, x in leaves.items()},
            # A leaf without any gradient in a window has none, rather than one of zeros, at its end.
            "seen": {p: torch.tensor(False) for p in leaves},
        }
        return {**state, "weight": torch.zeros((), dtype=torch.float64)} if self.weighted else state

    def prepare(self, state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        now = ctx.read(state[COUNT]) + 1
        due = (now >= self.every) if ctx.boundary is None else ctx.boundary
        new = {COUNT: _reset(state[COUNT] + 1, due)}
        weight, total = None, now if ctx.averaged else 1
        if self.weighted:
            weight = _weight(ctx)
            sum_of_weights = state["weight"] + weight
            new["weight"] = _reset(sum_of_weights, due)
            total = where(due, lambda: _total(sum_of_weights, ctx), lambda: torch.ones_like(sum_of_weights))
        return Prepared(carry=(due, ctx.number(weight), ctx.number(total)), state=new, emit=due)

    def update(self, grads: Leaves, state: TransformState, params: Leaves, carry: tuple, ctx: Context):
        due, weight, total = carry
        out, sums, seen = {}, {}, {}
        for path, whole in state["sum"].items():
            before, g = state["seen"][path], grads.get(path)
            begun = ctx.read(before)
            if g is not None:
                addend = _weighed(g.to(whole.dtype), weight) if self.weighted else g
                whole = sums[path] = _plus(whole, addend, begun, ctx)
            if may(due) and (g is not None or may(begun)):
                out[path] = ctx.put(torch.div, whole, total)
                # Nothing reads the sum of a closed window, but with `donate` the same is kept as without.
                sums[path] = where(due, out[path], whole)
            # A window is closed by setting `seen` to false: the buffer need not be zeroed.
            seen[path] = _reset(before if g is None else _true(before, begun), due)
        return (out if may(due) else grads), {"sum": sums, "seen": seen}


def _through(spec: Spec) -> Spec:
    return spec.after("summed_by")


def _sum_dtype(grad: Tensor, weighted: bool) -> torch.dtype:
    """fp32 for weighted fp16: tokens times a gradient may exceed 65504, and `scale_loss` has looked before that."""
    return torch.float32 if weighted and grad.dtype == torch.float16 else grad.dtype


def _plus(old: Tensor, g: Tensor, begun: Any, ctx: Context) -> Tensor:
    """`old + g` in the dtype of `old`; the first gradient of a window overwrites."""
    return where(begun, lambda: ctx.put(torch.add, old, g), lambda: ctx.copied(old, g))


def _weighed(g: Tensor, weight: Any) -> Tensor:
    """`g * weight`; a micro-batch without weight counts for nothing even if its mean is 0 / 0."""
    return times(where(weight != 0, g, lambda: torch.zeros_like(g)), weight)


def _true(x: Tensor, already: Any) -> Tensor:
    return where(already, x, lambda: torch.ones_like(x))


def _reset(x: Tensor, due: Any) -> Tensor:
    """`x` while the window is open, and zero in the next one."""
    return where(due, lambda: torch.zeros_like(x), x)


def _weight(ctx: Context) -> Tensor:
    if ctx.weight is None:
        raise ValueError(
            explain(
                "a step without weight= through accumulate(weighted=True)",
                "unequal micro-batches cannot be averaged without knowing how large each is",
                "step(state, *batch, weight=number_of_tokens), or opt.step(weight=number_of_tokens)",
            )
        )
    # Beside the counters, which are on the CPU.
    weight = weight_of(ctx.weight).cpu()
    ctx.check(weight, lambda x: 0 <= x < float("inf"), lambda: no_weight(ctx.weight))
    return weight


def _total(sum_of_weights: Tensor, ctx: Context) -> Tensor:
    """What a closed window is divided by.

    Each rank has its own weights, but its part of the mean over ranks is divided by those of all.
    """
    total = ctx.reduction.mean(sum_of_weights)
    wrong = "accumulate(weighted=True) closed a window whose weights add up to 0"
    right = "weight=max(number_of_tokens, 1), or leave such micro-batches out"
    ctx.check(total, lambda x: x != 0, lambda: ValueError(explain(wrong, "a mean over nothing is not defined", right)))
    return total
