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
    concrete,
    counter,
    no_weight,
    number,
    transform,
    weight_of,
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
        now = number(state[COUNT]) + 1
        due = (now >= self.every) if ctx.boundary is None else ctx.boundary
        new: dict[str, Tensor] = {}
        weight, total = None, now if ctx.averaged else 1
        if self.weighted:
            weight = _weight(ctx)
            kept = state["weight"] + weight
            new["weight"] = torch.where(torch.as_tensor(due), torch.zeros_like(kept), kept)
            total = _total(kept, due, ctx)
        if concrete(state[COUNT]):
            new[COUNT] = counter(0 if due else now)
        else:
            new[COUNT] = torch.where(torch.as_tensor(due), torch.zeros_like(now), now)
        return Prepared(carry=(due, weight, ctx.number(torch.as_tensor(total))), state=new, emit=due)

    def update(self, grads: Leaves, state: TransformState, params: Leaves, carry: tuple, ctx: Context):
        due, weight, total = carry
        sums, seen = {}, {}
        for path, old in state["sum"].items():
            g = grads.get(path)
            if g is not None:
                addend = g if weight is None else _times(g.to(old.dtype), weight, ctx)
                sums[path] = _add(old, addend, state["seen"][path], ctx)
            # A window is closed by setting `seen` to false: the buffer need not be zeroed.
            seen[path] = _seen(state["seen"][path], g is not None)
        if due is False:
            return grads, {"sum": sums, "seen": seen}
        out = {}
        for path, now in seen.items():
            if not concrete(now) or bool(now):
                whole = sums.get(path, state["sum"][path])
                # A 0-d leaf would otherwise take the dtype of the weight.
                out[path] = ctx.own(whole).div_(total) if ctx.donate else (whole / total).to(whole.dtype)
                # Nothing reads the sum of a closed window, but with `donate` the same is kept as without.
                sums[path] = out[path] if due is True else torch.where(torch.as_tensor(due), out[path], whole)
        return out, {"sum": sums, "seen": {p: _closed(x, due) for p, x in seen.items()}}


def _through(spec: Spec) -> Spec:
    return spec.after("summed_by")


def _sum_dtype(grad: Tensor, weighted: bool) -> torch.dtype:
    """fp32 for weighted fp16: tokens times a gradient may exceed 65504, and `scale_loss` has looked before that."""
    return torch.float32 if weighted and grad.dtype == torch.float16 else grad.dtype


def _add(old: Tensor, g: Tensor, seen: Tensor, ctx: Context) -> Tensor:
    """`old + g` in the dtype of `old`; the first gradient of a window overwrites."""
    if not concrete(seen):
        return torch.where(seen.to(old.device), old + g, g).to(old.dtype)
    if ctx.recorded:
        return (old + g if bool(seen) else g).to(old.dtype)
    own = ctx.own(old)
    return own.add_(g) if bool(seen) else own.copy_(g)


def _seen(before: Tensor, now: bool) -> Tensor:
    return torch.ones_like(before) if now and (not concrete(before) or not bool(before)) else before


def _closed(seen: Tensor, due: Any) -> Tensor:
    return torch.zeros_like(seen) if due is True else torch.where(torch.as_tensor(due), torch.zeros_like(seen), seen)


def _weight(ctx: Context) -> Any:
    if ctx.weight is None:
        raise ValueError(
            explain(
                "a step without weight= through accumulate(weighted=True)",
                "unequal micro-batches cannot be averaged without knowing how large each is",
                "step(state, *batch, weight=number_of_tokens), or opt.step(weight=number_of_tokens)",
            )
        )
    weight = weight_of(ctx.weight)
    if concrete(weight):
        # Beside the counters, which are on the CPU.
        weight = weight.cpu()
        if not 0 <= weight.item() < float("inf"):
            raise no_weight(ctx.weight)
    return weight


def _total(kept: Tensor, due: Any, ctx: Context) -> Tensor:
    """What a closed window is divided by: the sum of its weights."""
    if due is not True and concrete(kept):
        return kept
    # Each rank has its own weights, but its part of the mean over ranks is divided by those of all.
    total = ctx.reduction.mean(kept)
    if not concrete(kept):
        # Of an open window nothing goes on; a division by a sum of zero would make NaN.
        return torch.where(torch.as_tensor(due), total, torch.ones_like(total))
    if concrete(total) and total.detach() == 0:
        raise ValueError(
            explain(
                "accumulate(weighted=True) closed a window whose weights add up to 0",
                "a mean over nothing is not defined",
                "weight=max(number_of_tokens, 1), or leave such micro-batches out",
            )
        )
    return total


def _times(g: Tensor, weight: Tensor, ctx: Context) -> Tensor:
    """`g * weight`; a micro-batch without weight counts for nothing even if its mean is 0 / 0."""
    if not ctx.recorded:
        return g * float(weight) if weight else torch.zeros_like(g)
    weight = weight.to(g.device)
    return (torch.where(weight == 0, torch.zeros_like(g), g) * weight).to(g.dtype)
