"""`clip_by_global_norm` and `clip_by_value`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..extend import (
    TINY,
    Context,
    Elementwise,
    Facts,
    Joining,
    Leaves,
    Prepared,
    Scope,
    Transform,
    TransformState,
    at_most,
    check_number,
    root,
    rounded,
    scaled,
    squared_norm,
    transform,
)


@transform
def clip_by_global_norm(max_norm: float, over: Callable[[Tensor], Any] | None = None) -> Transform:
    """Scale all gradients down so that their global norm is at most `max_norm` (Pascanu et al., 2013).

    `g * min(1, max_norm / (norm + 1e-6))`, the formula of `torch.nn.utils.clip_grad_norm_`. The norm is that of the
    true gradient over all leaves and all ranks. The metric `grad_norm` shows it before clipping; with several clips in
    a chain `grad_norm` is the norm before the first clip. A NaN or infinite norm makes every gradient NaN or zero, as
    in torch: put `scale_loss` or `skip_nonfinite` before the clip to skip such steps.

    Args:
        max_norm: positive.
        over: for a model whose pieces have pipelines of their own, in one process or in several jobs: a function that
            adds up the sums of squares of all pipelines, by whatever means they talk, so that all clip by one norm. It
            gets this pipeline's sum of squares as a 0-d tensor and returns the sum over all pipelines, as a number or a
            0-d tensor. It is called once per update on every rank and must return the same on every rank. A step that
            `scale_loss` skips does not call it: send NaN to the other pipelines then, and put `skip_nonfinite()` behind
            their clips, so that all of them skip it.

    Raises:
        TypeError: `over` cannot be called.
        ValueError: `max_norm` is not positive; at an update, `over` returned no number, or less than it was given.
        RuntimeError: at an update, `over` returned different numbers on different ranks.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.clip_by_global_norm(1.0), zf.sgd(1.0))
        >>> state = zf.init(tx, {"w": torch.zeros(2)})
        >>> state, metrics = zf.update(tx, {"w": torch.tensor([3.0, 4.0])}, state)
        >>> float(metrics["grad_norm"]), state.params["w"]
        (5.0, tensor([-0.6000, -0.8000]))
        >>> tx = zf.chain(zf.clip_by_global_norm(1.0, over=lambda squares: squares + 11.0), zf.sgd(1.0))
        >>> state, metrics = zf.update(tx, {"w": torch.tensor([3.0, 4.0])}, zf.init(tx, {"w": torch.zeros(2)}))
        >>> float(metrics["grad_norm"])
        6.0
    """
    check_number("clip_by_global_norm", "max_norm", max_norm, low=TINY)
    if over is not None and not callable(over):
        why = "over is a function of the sum of squares of this pipeline's gradients"
        right = f"clip_by_global_norm({max_norm}, over=lambda squares: squares + squares_of_the_others)"
        raise TypeError(explain(f"clip_by_global_norm({max_norm}, over={over!r})", why, right))

    # The result of the user's function is read to check it, which a captured graph cannot do.
    facts = Facts(reports=frozenset(["grad_norm"]), keeps=False, capturable=over is None)
    prepare = partial(_prepare, max_norm, over)
    clipped = Elementwise(lambda g, factor: g * rounded(factor, g), instead=lambda ctx, g, factor: scaled(g, factor))

    def update(grads: Leaves, state: TransformState, params: Leaves, factor: Tensor | None, ctx: Context):
        return grads if factor is None else clipped(ctx, grads, factor=factor)[0], state

    return Transform("clip_by_global_norm", Scope.TREE, "number", facts, prepare_fn=prepare, update_fn=Joining(update))


def _prepare(
    max_norm: float, over: Any, state: TransformState, grads: Leaves, params: Leaves, ctx: Context
) -> Prepared:
    squares = ctx.total(squared_norm, grads)
    norm = root(squares if over is None else _over_pipelines(over, squares, ctx))
    ctx.report("grad_norm", norm, own=True)
    return Prepared(carry=at_most(norm, ctx.replicated(max_norm)))


def _over_pipelines(over: Callable[[Tensor], Any], squares: Tensor, ctx: Context) -> Tensor:
    """The result of `over`, checked to be at least `squares` and equal on all ranks."""
    # The number is the same on all ranks. `alike` and `replicated` make its derivative count once, not once per rank.
    total = torch.as_tensor(ctx.replicated(over(ctx.reduction.alike(squares))))
    if total.ndim or not total.is_floating_point():
        raise _no_sum(squares, f"{tuple(total.shape)} {total.dtype}")
    total = total.to(squares)
    # A maximum over ranks may drop NaN, so NaN and infinity are sent as -1, which no sum of squares is.
    comparable = total.detach().nan_to_num(nan=-1.0, posinf=-1.0, neginf=-1.0)
    # The tolerance 1e-6 covers rounding to fp32, which may lose 2**-24 of the sum.
    least = squares.detach() * (1 - 1e-6)
    comparable, least = ctx.on_host(comparable, least)
    ctx.agreed(comparable, lambda most: _other_sums(float(comparable), float(most)))
    ctx.check(comparable, lambda x: not 0 <= x < least, lambda: _no_sum(squares, f"{float(comparable):g}"))
    return total


def _other_sums(here: float, most: float) -> Exception:
    return RuntimeError(
        explain(
            f"clip_by_global_norm(over=...): over returned {here:g} on this rank, and up to {most:g} on other ranks",
            "ranks would clip by different norms, and their copies of a parameter would drift apart",
            "over=lambda squares: ..., which returns the same number on every rank, such as an all-reduced sum",
        )
    )


def _no_sum(squares: Tensor, returned: str) -> Exception:
    return ValueError(
        explain(
            f"clip_by_global_norm(over=...): over returned {returned} for a sum of squares of {float(squares):g}",
            "over returns one number: the sum of squares over all pipelines, this one's included",
            "over=lambda squares: squares + squares_of_the_others",
        )
    )


@transform
def clip_by_value(max_value: float) -> Transform:
    """Clamp every element of every gradient to [-max_value, max_value].

    Args:
        max_value: positive.

    Raises:
        ValueError: `max_value` is not positive.

    Examples:
        >>> import torch, zerofn as zf
        >>> zf.clip_by_value(1.0).update({"w": torch.tensor([-3.0, 0.5])}, {}, {"w": torch.zeros(2)})[0]
        {'w': tensor([-1.0000,  0.5000])}
    """
    check_number("clip_by_value", "max_value", max_value, low=TINY)

    clamped = Elementwise(lambda g, limit: g.clamp(-limit, limit))

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: None, ctx: Context):
        return clamped(ctx, grads, limit=ctx.replicated(max_value))[0], state

    facts = Facts(keeps=False, capturable=True)
    return Transform("clip_by_value", needs="element", facts=facts, update_fn=Joining(update))
