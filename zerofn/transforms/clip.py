"""`clip_by_global_norm` and `clip_by_value`."""

from __future__ import annotations

from torch import Tensor

from ..extend import (
    TINY,
    Context,
    Facts,
    Leaves,
    Prepared,
    Scope,
    Transform,
    TransformState,
    check_number,
    root,
    squared_norm,
    transform,
)


@transform
def clip_by_global_norm(max_norm: float) -> Transform:
    """Shrink the whole gradient to the norm `max_norm` where it is longer (Pascanu et al., 2013).

    `g * min(1, max_norm / (norm + 1e-6))`, the formula of `torch.nn.utils.clip_grad_norm_`. The norm is
    that of the true gradient over all leaves and all ranks; metrics show it as `grad_norm`, before
    clipping, and of several in a chain that of the first. A NaN or infinite norm makes every gradient NaN or zero,
    as in torch: `scale_loss` before it skips such steps.

    Args:
        max_norm: positive.

    >>> import torch, zerofn as zf
    >>> tx = zf.chain(zf.clip_by_global_norm(1.0), zf.sgd(1.0))
    >>> state = zf.init(tx, {"w": torch.zeros(2)})
    >>> state, metrics = zf.update(tx, {"w": torch.tensor([3.0, 4.0])}, state)
    >>> float(metrics["grad_norm"]), state.params["w"]
    (5.0, tensor([-0.6000, -0.8000]))
    """
    check_number("clip_by_global_norm", "max_norm", max_norm, low=TINY)

    def prepare(state: TransformState, grads: Leaves, params: Leaves, ctx: Context) -> Prepared:
        norm = root(ctx.reduction.sum(squared_norm(grads)))
        ctx.report("grad_norm", norm)
        return Prepared(carry=ctx.replicated((max_norm / (norm + 1e-6)).clamp(max=1.0)))

    def update(grads: Leaves, state: TransformState, params: Leaves, coefficient: Tensor, ctx: Context):
        return {path: g * coefficient.to(g.dtype) for path, g in grads.items()}, state

    return Transform(
        "clip_by_global_norm",
        Scope.TREE,
        needs="number",
        facts=Facts(reports=frozenset(["grad_norm"])),
        prepare_fn=prepare,
        update_fn=update,
    )


@transform
def clip_by_value(max_value: float) -> Transform:
    """Clamp every element of the gradient to [-max_value, max_value].

    >>> import torch, zerofn as zf
    >>> zf.clip_by_value(1.0).update({"w": torch.tensor([-3.0, 0.5])}, {}, {"w": torch.zeros(2)})[0]
    {'w': tensor([-1.0000,  0.5000])}
    """
    check_number("clip_by_value", "max_value", max_value, low=TINY)

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: None, ctx: Context):
        limit = ctx.replicated(max_value)
        return {path: g.clamp(-limit, limit) for path, g in grads.items()}, state

    return Transform("clip_by_value", needs="element", update_fn=update)
