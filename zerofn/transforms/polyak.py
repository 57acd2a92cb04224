"""`scale_by_polyak`: gradients times the step of Polyak, which the loss determines."""

from __future__ import annotations

import torch

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
    check_number,
    rounded,
    scaled,
    squared_norm,
    transform,
)


@transform
def scale_by_polyak(f_min: float = 0.0, max_learning_rate: float = 1.0, eps: float = 0.0) -> Transform:
    """Multiply gradients by `min((loss - f_min) / (norm(g)^2 + eps), max_learning_rate)` (Loizou et al., 2021).

    `chain(scale_by_polyak(), sgd(1.0))` is gradient descent with Polyak's step. The loss is the mean over ranks and
    over the micro-batches of `accumulate`. A step of `zf.make_step` passes its own loss. Otherwise write
    `opt.backward(loss)`, `opt.step(loss=loss)` or `zf.update(tx, grads, state, loss=loss)`.

    As in optax, a NaN loss makes the parameters NaN. `skip_nonfinite()` or `scale_loss()` before `scale_by_polyak`
    skips steps whose gradients are not finite, and then the mean of the loss leaves out the skipped micro-batches. If
    a loss may be NaN while its gradients are finite, put `skip_nonfinite()` after `scale_by_polyak` as well.

    Args:
        f_min: the least loss that can be reached.
        max_learning_rate: the largest factor.
        eps: added to the squared norm.

    Raises:
        ValueError: an argument is out of range; at a step, the loss is not given.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.scale_by_polyak(), zf.sgd(1.0))
        >>> step = zf.make_step(lambda p: 3 * p["w"].square().sum(), tx)
        >>> state, metrics = step(zf.init(tx, {"w": torch.ones(1)}))
        >>> float(metrics["polyak_step"]), state.params["w"]  # 3 / 6^2, times a gradient of 6
        (0.0833333358168602, tensor([0.5000]))
    """
    check_number("scale_by_polyak", "f_min", f_min, low=-float("inf"))
    check_number("scale_by_polyak", "max_learning_rate", max_learning_rate, low=TINY)
    check_number("scale_by_polyak", "eps", eps)

    def prepare(state: TransformState, grads: Leaves, params: Leaves, ctx: Context) -> Prepared:
        square, gap = ctx.total(squared_norm, grads) + eps, ctx.replicated(ctx.loss) - f_min
        # If the gradient is zero, the step is zero.
        step = (gap / torch.where(square > 0, square, 1.0)).clamp(max=max_learning_rate)
        step = torch.where(square > 0, step, torch.zeros_like(step))
        ctx.report("polyak_step", step)
        return Prepared(carry=step)

    shortened = Elementwise(lambda g, factor: g * rounded(factor, g), instead=lambda ctx, g, factor: scaled(g, factor))

    def update(grads: Leaves, state: TransformState, params: Leaves, step: torch.Tensor, ctx: Context):
        return shortened(ctx, grads, factor=step)[0], state

    facts = Facts(reports=frozenset(["polyak_step"]), keeps=False, capturable=True, wants=("loss",))
    return Transform("scale_by_polyak", Scope.TREE, "number", facts, prepare_fn=prepare, update_fn=Joining(update))
