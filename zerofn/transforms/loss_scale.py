"""`scale_loss`: loss scaling for fp16, static or dynamic.

In backward the view half multiplies gradients by the scale at the model's outputs, and divides them by it at its inputs
and parameters (`module/boundary.py`). So gradients outside of the model are true. The update half looks for overflow,
skips the step, and changes the scale.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..extend import (
    OVERFLOW_LEAF,
    SKIPPED_STEPS,
    TINY,
    Context,
    Facts,
    Layout,
    Leaves,
    Prepared,
    Scope,
    Spec,
    Transform,
    TransformState,
    View,
    at_once,
    check_count,
    check_number,
    counter,
    not_finite,
    not_finite_each,
    transform,
    where,
)

# After this many overflows in a row at the smallest scale, the scale is not the cause: the step raises.
STUCK = 50


@transform
def scale_loss(
    scale: float | str = "dynamic",
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 1.0,
    hysteresis: int = 1,
) -> Transform:
    """Scale the loss so that small gradients survive fp16, without a call in user code. bf16 needs no loss scale.

    Outside of the model, gradients of parameters and inputs do not contain the scale, to any order. A micro-step with
    an infinite or NaN gradient on any rank is skipped: it changes nothing but the counters of `scale_loss`.
    `scale_loss` does not divide by the number of micro-batches; `accumulate` does.

    The dynamic rule is that of `torch.amp.GradScaler` (Micikevicius et al., 2018). After an overflow
    `scale = max(scale * backoff_factor, min_scale)`; after `growth_interval` good micro-steps in a row
    `scale *= growth_factor`. With `hysteresis=n`, as in DeepSpeed, only the n-th overflow lowers the scale; growth
    restores the count.

    The metrics are `loss_scale`, `skipped`, `skipped_steps` and `overflow_leaf`. `overflow_leaf` is the index into
    `state.layout.leaves` of the first leaf whose gradient overflowed on any rank, or -1. `opt.overflow_leaf` is the
    path of this leaf.

    Inside of an attached model gradients are multiplied by the scale, and outputs are copies
    (docs/how-to/loss-scale.md). This has three consequences that `precision(param_dtype=torch.bfloat16)` alone does not
    have:

    * zerofn refuses backward hooks on submodules. zerofn cannot notice a tensor hook, `retain_grad()` or an
        `autograd.Function` inside the model: they get scaled gradients, so a backward that is not linear is wrong.
    * If the model returns `y, h` and computes `y` from `h`, then a hook on `h`, `h.retain_grad()` and
      `torch.autograd.grad(y, h)` raise in backward, as the returned `h` is not on the path of `y`.
    * A tensor that enters or leaves the model by an attribute, a forward hook, a closure or a list raises in backward.

    Args:
        scale: `"dynamic"`, or a positive number that never changes.
        init_scale: the first dynamic scale.
        growth_factor: at least 1.
        backoff_factor: between 0 and 1, exclusive.
        growth_interval: good micro-steps in a row until the scale grows.
        min_scale: the dynamic scale never falls below this.
        hysteresis: overflows until the scale backs off.

    Raises:
        ValueError: an argument is out of range, or is infinite in float32, the dtype of the scale; an argument of the
            dynamic rule is given with a static scale.
        FloatingPointError: at an update, after 50 overflows in a row at the smallest scale; names the leaf. On a GPU
            zerofn checks this in one of 50 micro-steps, so that the other 49 wait for nothing, and never in a CUDA
            graph.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.scale_loss(init_scale=8.0), zf.sgd(1.0))
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> state, metrics = zf.update(tx, {"w": torch.tensor([torch.inf])}, state)
        >>> bool(metrics["skipped"]), float(metrics["loss_scale"]), state.params["w"]
        (True, 4.0, tensor([0.]))
    """
    rule = _Rule(scale, init_scale, growth_factor, backoff_factor, growth_interval, min_scale, hysteresis)
    rule.check()
    return rule.transform()


@dataclass(frozen=True)
class _Rule:
    """The rule by which the scale changes; the fields are the arguments of `scale_loss`."""

    scale: float | str
    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    hysteresis: int

    @property
    def dynamic(self) -> bool:
        return self.scale == "dynamic"

    def check(self) -> None:
        if not isinstance(self.scale, str):
            check_number("scale_loss", "scale", self.scale, low=TINY)
        elif not self.dynamic:
            wrong, right = f"scale_loss(scale={self.scale!r})", "scale_loss('dynamic') or scale_loss(1024.0)"
            raise ValueError(explain(wrong, "scale is 'dynamic' or a positive number", right))
        check_number("scale_loss", "growth_factor", self.growth_factor, low=1.0)
        check_number("scale_loss", "backoff_factor", self.backoff_factor, low=TINY, high=1.0)
        check_number("scale_loss", "min_scale", self.min_scale, low=TINY)
        check_number("scale_loss", "init_scale", self.init_scale, low=self.min_scale if self.dynamic else 0.0)
        check_count("scale_loss", "growth_interval", self.growth_interval, "micro-steps")
        check_count("scale_loss", "hysteresis", self.hysteresis, "overflows")
        idle = {name: p.default for name, p in inspect.signature(scale_loss).parameters.items() if name != "scale"}
        without_effect = [name for name, default in idle.items() if getattr(self, name) != default]
        if not self.dynamic and without_effect:
            wrong = f"scale_loss({self.scale!r}, {', '.join(f'{n}=...' for n in without_effect)})"
            why = "a static scale never changes, so these have no effect"
            raise ValueError(explain(wrong, why, f"scale_loss({self.scale!r}), or scale_loss('dynamic', ...)"))

    def transform(self) -> Transform:
        return Transform(
            "scale_loss",
            Scope.TREE,
            needs="number",
            view_fn=lambda layout, ranks: View(factor=_scale_of),
            facts=Facts(keeps=False, capturable=True, skips=True),
            through=_through,
            init_fn=self.init,
            prepare_fn=self.prepare,
        )

    def init(self, leaves: Leaves, layout: Layout) -> TransformState:
        return {
            "scale": torch.tensor(self.init_scale if self.dynamic else self.scale, dtype=torch.float32),
            "good_steps": counter(),
            "hysteresis_left": counter(self.hysteresis),
            SKIPPED_STEPS: counter(),
            "stuck_steps": counter(),
        }

    def prepare(self, state: TransformState, grads: Leaves, params: Leaves, ctx: Context) -> Prepared:
        if ctx.late:
            # One number tells both whether a leaf has overflowed, and which is the first.
            ok: Any = None
            found = _first_overflow(grads, ctx)
        else:
            # `not_finite` is zero if all gradients are finite, else NaN, which the maximum makes infinite.
            ok = ctx.verdict((ctx.reduction.max(not_finite(grads)) == 0).cpu())
            # All ranks have the same `ok`, so all of them join the collective in the search.
            none = torch.zeros((), dtype=torch.float64)
            found = where(ok, none, lambda: _first_overflow(grads, ctx))
        count = len(ctx.layout.leaves)

        def decided(found: Any, *olds: Any) -> list[Any]:
            found = found.to(torch.int64)
            good = found == 0 if ok is None else torch.as_tensor(ok)
            new = self.after(dict(zip(state, olds, strict=True)), good)
            first = torch.where(found > 0, count - found, -1)
            shown = new["scale"].clone(), new[SKIPPED_STEPS].clone()
            return [good, ~good, first, *shown, *map(new.__getitem__, state)]

        good, bad, first, scale, skipped, *made = at_once(decided, found, *state.values())
        new, stuck = dict(zip(state, made, strict=True)), lambda: self.stuck(new["stuck_steps"], first, ctx)
        ctx.check(new["stuck_steps"], lambda steps: steps < STUCK, stuck, every=STUCK)
        ctx.report("loss_scale", scale, own=True)
        ctx.report("skipped", bad, own=True)
        ctx.report(OVERFLOW_LEAF, first, own=True)
        ctx.report(SKIPPED_STEPS, skipped, own=True)
        return Prepared(state=new, emit=good if ok is None else ok)

    def stuck(self, steps: Tensor, first: Tensor, ctx: Context) -> Exception:
        leaf, least = ctx.layout.leaves[int(first)].path, self.min_scale if self.dynamic else self.scale
        return FloatingPointError(_stuck_message(leaf, int(steps), int(ctx.micro_step) + 1, least))

    def after(self, state: TransformState, good: Any) -> TransformState:
        """The next state. It is made of products and sums, so that Python need not read `good`."""
        bad, now = ~good, state["scale"]
        streak = (state["good_steps"] + 1) * good
        grow = streak >= self.growth_interval
        at_minimum = now <= (self.min_scale if self.dynamic else torch.inf)
        left, backs_off = state["hysteresis_left"], bad
        if self.hysteresis > 1:
            backs_off = backs_off & (left <= 1)
            left = torch.where(grow, self.hysteresis, (left - bad.to(left.dtype)).clamp(min=1))
        if self.dynamic:
            now = torch.where(backs_off, (now * self.backoff_factor).clamp(min=self.min_scale), now)
            # The scale must not grow to infinity: half of infinity is infinity, so it would never shrink again.
            grown = now * self.growth_factor
            now = torch.where(grow & (grown < torch.inf), grown, now)
        return {
            "scale": now,
            "good_steps": streak * ~grow,
            "hysteresis_left": left,
            SKIPPED_STEPS: state[SKIPPED_STEPS] + bad,
            "stuck_steps": (state["stuck_steps"] + 1) * (bad & at_minimum),
        }


def _scale_of(state: Mapping[str, Any]) -> Tensor:
    return state["scale"]  # the compiler, which traces this, does not know itemgetter


def _through(spec: Spec) -> Spec:
    twice = "the loss would be scaled twice; with several models, give each a pipeline and a scale of its own"
    spec.refuse("unscaled_by", twice, spec.once)
    spec.refuse(
        "changed_by",
        "the gradient is still multiplied by the loss scale there, and overflow has not been looked for",
    )
    spec.refuse(
        "summed_by",
        "gradients under different loss scales would be added up, and one overflow would spoil the whole window",
    )
    return spec.after("unscaled_by")


def _first_overflow(grads: Leaves, ctx: Context) -> Tensor:
    """The number of leaves from the first one that is not finite on some rank to the last, in layout order; else 0."""
    count = len(ctx.layout.leaves)
    if not grads:
        return ctx.reduction.max(torch.zeros((), dtype=torch.float64))
    # `max` takes NaN for the largest number, and returns the index of the first one.
    largest, at = not_finite_each(grads, [leaf.path for leaf in ctx.layout.leaves]).max(0)
    return ctx.reduction.max(*at_once(lambda x, i: [torch.where(x != x, count - i, 0).to(torch.float64)], largest, at))


def _stuck_message(leaf: str, times: int, micro_step: int, scale: Any) -> str:
    return explain(
        f"{times} micro-steps in a row, the last being number {micro_step}, overflowed at the loss scale's "
        f"minimum, {scale:g}",
        f"the gradient of {leaf} is not finite, so the loss itself is not, or the model diverged",
        "a lower learning rate, clip_by_global_norm(1.0) after scale_loss, or precision(param_dtype=torch.bfloat16)",
    )
