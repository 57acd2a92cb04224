"""`scale_by_momo`: momentum times the step that a model of the loss determines."""

from __future__ import annotations

import torch
from torch import Tensor

from ..extend import (
    TINY,
    Context,
    Facts,
    Layout,
    Leaves,
    Prepared,
    Scope,
    Transform,
    TransformState,
    check_number,
    scaled,
    transform,
    wide_copy,
)


@transform
def scale_by_momo(beta: float = 0.9, lower_bound: float = 0.0, max_learning_rate: float = 1.0) -> Transform:
    """MoMo (Schaipp et al., 2024, "MoMo: Momentum Models for Adaptive Learning Rates", algorithm 1).

    It averages losses `f = beta f + (1 - beta) loss`, gradients `d = beta d + (1 - beta) g`, and the products `c = beta
    c + (1 - beta) <g, p>`; the first update begins with `beta = 0`. So `f + <d, p> - c` is an average of the linear
    models of all losses so far, at the parameters `p`. The result is `d` times `max(f - lower_bound + <d, p> - c, 0) /
    norm(d)^2`, or times `max_learning_rate`, if that is less.

    `chain(scale_by_momo(), sgd(1.0))` is the authors' MoMo. The loss is the mean over ranks and over the micro-batches
    of `accumulate`. A step of `zf.make_step` passes its own loss. Otherwise write `opt.backward(loss)`,
    `opt.step(loss=loss)` or `zf.update(tx, grads, state, loss=loss)`. `d` is kept in fp32 or wider.

    As in optax, a NaN loss makes the averages and the parameters NaN, and they stay NaN. `skip_nonfinite()` or
    `scale_loss()` before `scale_by_momo` skips steps whose gradients are not finite, and then the mean of the loss
    leaves out the skipped micro-batches. Do not pass a loss that is NaN while its gradients are finite.

    Args:
        beta: decay of the averages, in [0, 1).
        lower_bound: of the loss.
        max_learning_rate: the largest factor.

    Raises:
        ValueError: an argument is out of range; at a step, the loss is not given.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.scale_by_momo(0.5), zf.sgd(1.0))
        >>> step = zf.make_step(lambda p: 3 * p["w"].square().sum(), tx)
        >>> state, metrics = step(zf.init(tx, {"w": torch.ones(1)}))
        >>> float(metrics["momo_step"]), state.params["w"]  # 3 / 6^2, times a gradient of 6
        (0.0833333358168602, tensor([0.5000]))

    Notes:
        In an update in which a leaf has no gradient, the sums are those of the other leaves.
    """
    check_number("scale_by_momo", "beta", beta, high=1.0)
    check_number("scale_by_momo", "lower_bound", lower_bound, low=-float("inf"))
    check_number("scale_by_momo", "max_learning_rate", max_learning_rate, low=TINY)

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        first = {path: wide_copy(x).zero_() for path, x in leaves.items()}
        none = next(iter(first.values()), torch.zeros(())).new_zeros(())
        # `momo_beta` is 0 at first, so that the averages of the first update are its own values.
        return {"momentum": first, "momo_beta": none, "momo_loss": none.clone(), "momo_product": none.clone()}

    def momenta(state: TransformState, grads: Leaves, b: Tensor) -> Leaves:
        olds = state["momentum"]
        return {path: b * olds[path] + (1 - b) * g.to(olds[path].dtype) for path, g in grads.items()}

    def prepare(state: TransformState, grads: Leaves, params: Leaves, ctx: Context) -> Prepared:
        b = state["momo_beta"]
        sums = {}
        for path, d in momenta(state, grads, b).items():
            g, p = (x[path].to(d.dtype) for x in (grads, params))
            sums[path] = torch.stack([(g * p).sum(), (d * p).sum(), d.square().sum()])
        start = b.new_zeros(3)
        now, of_momentum, square = sum(ctx.total_each(sums).values(), start).to(b).unbind()
        loss, product = (
            b * ctx.replicated(state[name]) + (1 - b) * x
            for name, x in (("momo_loss", ctx.replicated(ctx.loss).to(b)), ("momo_product", now))
        )
        gap = (loss - lower_bound + of_momentum - product).clamp(min=0)
        # If the momentum is zero, the step is zero.
        step = (gap / torch.where(square > 0, square, 1.0)).clamp(max=max_learning_rate)
        step = torch.where(square > 0, step, torch.zeros_like(step))
        ctx.report("momo_step", step)
        numbers = {"momo_loss": ctx.reduction.alike(loss), "momo_product": ctx.reduction.alike(product)}
        return Prepared(carry=(b, step), state={"momo_beta": torch.full_like(b, beta), **numbers})

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: tuple[Tensor, Tensor], ctx: Context):
        b, step = carry
        new = momenta(state, grads, b)
        out = {path: d.to(grads[path].dtype) for path, d in scaled(new, step).items()}
        return out, {"momentum": {path: ctx.into(state["momentum"][path], d) for path, d in new.items()}}

    facts = Facts(reports=frozenset(["momo_step"]), capturable=True, wants=("loss",))
    return Transform("scale_by_momo", Scope.TREE, "number", facts, init, prepare, update_fn=update)
