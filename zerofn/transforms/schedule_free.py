"""`schedule_free`: an average of iterates in the place of a falling learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..extend import (
    AVERAGE,
    Context,
    Elementwise,
    Joining,
    Layout,
    LeafStep,
    Leaves,
    Prepared,
    ScalarOrSchedule,
    Shadow,
    Transform,
    TransformState,
    check_number,
    counter,
    like,
    moment_root,
    optimizer,
    plus,
    plus_product,
    rate_of,
    towards,
    transform,
    wide_copy,
    wrapped,
    wrapped_optimizer,
)
from .adam import check_adam, unbiased


@transform
def schedule_free(
    transform: Transform,
    momentum: float = 0.9,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
    weight_decay_at_y: float = 0.0,
) -> Transform:
    """Wrap an optimizer that has no momentum of its own, so that the learning rate need not fall (Defazio et al.,
    2024).

    Gradients are taken at the parameters `y`, and the optimizer updates `z` with them: `z -= lr * weight_decay_at_y *
    y`, and `z = optimizer(z, gradient)`. Then `x += c (z - x)`, where `c` is `w / (sum of all w)` with `w = t^r *
    (largest lr so far)^weight_lr_power`, and `y = (1 - momentum) z + momentum x`. The formula is that of the authors'
    `ScheduleFreeWrapper`.

    Evaluate and export `x`, the average: `opt.averaged()`, or `zf.full_params(tx, state, of="adamw")` with the
    optimizer's name. `x`, `z` and the optimizer's own state are kept in fp32 or wider.

    Args:
        transform: an optimizer with a learning rate, such as `sgd(lr)` or `adamw(lr, betas=(0.0, 0.999))`; or a
            `partition` of these.
        momentum: share of the average `x` in `y`, in [0, 1).
        r: exponent of `t`, the number of the update, in the weight `w` of an iterate.
        weight_lr_power: exponent of the largest learning rate so far, in the weight `w` of an iterate.
        weight_decay_at_y: weight decay of `y`, multiplied by the learning rate. The optimizer's own weight decay decays
            `z`.

    Raises:
        ValueError: an argument is out of range, or `transform` is no optimizer, or has no learning rate, or (when the
            state is made) keeps an average itself.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.schedule_free(zf.sgd(0.1), momentum=0.5)
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> for _ in range(2):  # z = -0.1, -0.2; x = -0.1, -0.15
        ...     state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
        >>> state.params["w"], zf.full_params(tx, state, of="sgd")["w"]
        (tensor([-0.1750]), tensor([-0.1500]))

    Notes:
        Statistics of BatchNorm are those of `y`. Compute them again for `x`.

        If you write into parameters of an attached model (`load_state_dict`, `opt.gathered()`, `p.copy_`), `z` and `x`
        become what you wrote: the first time all of this leaf, from then on the elements that differ.
    """
    check_number("schedule_free", "momentum", momentum, high=1.0)
    check_number("schedule_free", "r", r)
    check_number("schedule_free", "weight_lr_power", weight_lr_power)
    check_number("schedule_free", "weight_decay_at_y", weight_decay_at_y)

    def wrap(inner: Transform) -> Transform:
        def numbers(carry: Any, state: TransformState, ctx: Context):
            return ctx.replicated(rate_of(inner, state, ctx)), momentum, weight_decay_at_y

        return _averaging(inner, r, weight_lr_power, numbers)

    return wrapped_optimizer("schedule_free", transform, wrap, "iterates are weighted by its learning rate")


@transform
def schedule_free_adamw(
    lr: ScalarOrSchedule = 2.5e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> Transform:
    """Schedule-free AdamW (Defazio et al., 2024, "The Road Less Scheduled", algorithm 1).

    The parameters `y` are where gradients are taken. `v = b2 v + (1 - b2) g^2`; `z -= lr * (g / (sqrt(v / (1 - b2^t)) +
    eps) + weight_decay * y)`; `x += c (z - x)`, where `c` is `w / (sum of all w)` with `w = t^r * (largest lr so
    far)^weight_lr_power`; `y = (1 - b1) z + b1 x`.

    Evaluate and export `x`, the average: `opt.averaged()`, `zf.full_params(tx, state, of="schedule_free_adamw")`,
    `zf.export_safetensors(..., of=...)`. `x`, `z` and `v` are kept in fp32 or wider. It is `schedule_free` of Adam
    without a first moment.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update). The
            learning rate need not fall. For a warmup write `zf.schedules.warmup(2.5e-3, 1000)`.
        betas: share of the average `x` in `y`, and decay of the second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient, multiplied by `lr`.
        r: exponent of `t`, the number of the update, in the weight `w` of an iterate.
        weight_lr_power: exponent of the largest learning rate so far, in the weight `w` of an iterate.

    Raises:
        ValueError: an argument is out of range.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.schedule_free_adamw(lr=0.1, betas=(0.5, 0.999))
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> for _ in range(2):  # z = -0.1, -0.2; x = -0.1, -0.15
        ...     state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
        >>> state.params["w"], zf.full_params(tx, state, of="schedule_free_adamw")["w"]
        (tensor([-0.1750]), tensor([-0.1500]))

    Notes:
        Statistics of BatchNorm are those of `y`. Compute them again for `x`.

        If you write into parameters of an attached model (`load_state_dict`, `opt.gathered()`, `p.copy_`), `z` and `x`
        become what you wrote: the first time all of this leaf, from then on the elements that differ.
    """
    check_adam("schedule_free_adamw", lr, betas, eps, weight_decay)
    check_number("schedule_free_adamw", "r", r)
    check_number("schedule_free_adamw", "weight_lr_power", weight_lr_power)

    def formula(z: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        _, beta2, small, _ = at.numbers.values()
        v = plus_product(slots["exp_avg_sq"] * beta2, 1 - beta2, g, g)
        return z - at.lr * (g / (moment_root(v) / at.derived["spread"] + small)), {"exp_avg_sq": v}

    numbers = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
    settable = {"betas": tuple(betas), "weight_decay": weight_decay}
    more: Any = dict(numbers=numbers, settable=settable, derived=unbiased, in_fp32=True)
    core = optimizer("schedule_free_adamw", lr, {"exp_avg_sq": like}, formula, **more)

    def numbers_of(carry: Any, state: TransformState, ctx: Context):
        rate, own = carry
        return rate, own["beta1"], own["weight_decay"]

    return replace(_averaging(core, r, weight_lr_power, numbers_of), parts=())


def _averaging(inner: Transform, r: float, power: float, numbers: Callable[..., tuple[Any, Any, Any]]) -> Transform:
    """The wrapper; `numbers` gives the rate, the momentum and the decay from what `inner` has prepared."""

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        two = {slot: {path: wide_copy(x) for path, x in leaves.items()} for slot in ("z", AVERAGE)}
        none = {name: torch.zeros((), dtype=torch.float64) for name in ("lr_max", "weight_sum")}
        return {**two, **none, "iterates": counter()}

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        made = inner.prepare_fn(state, grads, {path: state["z"][path] for path in params}, ctx)
        rate, momentum, decay = numbers(made.carry, state, ctx)
        count, top = state["iterates"] + 1, state["lr_max"]
        top = torch.maximum(top, rate.to(top) if isinstance(rate, Tensor) else torch.full_like(top, rate))
        # The count is converted to float64, since in a batch or a graph it is an integer tensor.
        weight = count.to(top) ** r * top**power
        total = state["weight_sum"] + weight
        # While all rates were 0 the sum of weights is 0, and the share is 0.
        share = torch.where(total > 0, weight / torch.where(total > 0, total, 1.0), 0.0)
        kept = {**made.state, "lr_max": top, "weight_sum": total, "iterates": count}
        carry = made.carry, ctx.number(share), momentum, rate * decay
        return replace(made, carry=carry, state=kept)

    def averages_of(x: Tensor, y: Tensor, at: Tensor, share: Any, momentum: Any) -> tuple[Tensor, Tensor]:
        x = towards(x, at, share)
        return x, towards(at, x, momentum)

    widened = Elementwise(lambda g, z: g.to(z.dtype))
    decayed = Elementwise(lambda z, p, decay: plus(z, -decay, p.to(z.dtype)), replaces=1)
    averaged = Elementwise(averages_of, replaces=2)

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: tuple[Any, ...], ctx: Context):
        own, share, momentum, decay = carry
        olds, averages = ({path: state[slot][path] for path in grads} for slot in ("z", AVERAGE))
        (wide,), z = widened(ctx, grads, olds), olds
        if isinstance(decay, Tensor) or decay:
            (z,) = decayed(ctx, z, params, decay=decay)
        z, new = inner.update_fn(wide, state, z, own, ctx)
        x, y = averaged(ctx, averages, params, z, share=share, momentum=momentum)
        if any([at is not olds[path] for path, at in z.items()]):
            ctx.settle()
            z = {path: at if at is olds[path] else ctx.into(olds[path], at) for path, at in z.items()}
        return y, {**new, "z": z, AVERAGE: x}

    def init_wide(leaves: Leaves, layout: Layout) -> TransformState:
        return inner.init_fn({path: wide_copy(x) for path, x in leaves.items()}, layout)

    shadows = (*inner.facts.shadows, Shadow("z"), Shadow(AVERAGE))
    # Parameters are made anew of fp32 tensors in every update, so that nothing is lost.
    return wrapped(replace(inner, init_fn=init_wide), init, Joining(update), prepare, shadows=shadows, rounds=False)
