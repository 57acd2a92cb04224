"""`rmsprop`: the arithmetic of `torch.optim.RMSprop`, centered and with momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..extend import (
    LeafStep,
    ScalarOrSchedule,
    Transform,
    check_flag,
    check_lr,
    check_number,
    given,
    like,
    moment_root,
    optimizer,
    plus,
    plus_product,
    plus_quotient,
    transform,
    without_elements,
)


@transform
def rmsprop(
    lr: ScalarOrSchedule = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> Transform:
    """RMSprop (Tieleman & Hinton, 2012), as `torch.optim.RMSprop`.

    `g += weight_decay * p`; `v = alpha v + (1 - alpha) g^2`; `u = g / (sqrt(v) + eps)`; `m = momentum * m + u`;
    `p -= lr * m`. With `centered`, `a = alpha a + (1 - alpha) g` and `sqrt(v - a^2)` takes the place of `sqrt(v)`.

    States have the stored dtype of the parameters. Arithmetic is in fp32 at least, and each stored number is rounded
    once. In 16 bits `v` hardly moves, since `(1 - alpha) g^2` is below half a unit in its last place, unless
    `precision(rounding="stochastic")` comes before it.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).
        alpha: decay of the second moment, in [0, 1).
        eps: added to the root.
        weight_decay: L2 penalty.
        momentum: of the direction, in [0, 1).
        centered: whether to divide by the root of the variance instead of the second moment.

    Raises:
        ValueError: an argument is out of range.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.rmsprop(lr=0.1, alpha=0.75)
        >>> state, _ = zf.update(tx, {"w": torch.ones(1)}, zf.init(tx, {"w": torch.zeros(1)}))
        >>> round(state.params["w"].item(), 4)  # -lr / sqrt(1 - alpha)
        -0.2

    Notes:
        Each operation rounds once, and roots in fp32 are the nearest numbers: a shard has the bits of the full leaf, on
        every processor. `torch.optim.RMSprop` fuses products with sums on some processors, and its roots on a CPU are
        not always the nearest numbers, so that an update differs from it by a rounding of each product and root.
    """
    check_lr("rmsprop", lr)
    check_number("rmsprop", "alpha", alpha, high=1.0)
    check_number("rmsprop", "eps", eps)
    check_number("rmsprop", "weight_decay", weight_decay)
    check_number("rmsprop", "momentum", momentum, high=1.0)
    check_flag("rmsprop", "centered", centered)

    def formula(p: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        keep, small, decay, beta, rate = *at.numbers.values(), at.lr
        if given(decay):
            g = plus(g, decay, p)
        v = plus_product(slots["square_avg"] * keep, 1 - keep, g, g)
        new = {**slots, "square_avg": v}
        if centered:
            a = slots["grad_avg"]
            # This is `lerp`, written out since torch.func.vmap has no rule for it.
            new["grad_avg"] = a = a + (g - a) * (1 - keep)
            v = v - a * a
        spread = moment_root(v) + small
        if not given(momentum):
            return plus_quotient(p, -rate, g, spread), new
        m = plus_quotient(slots["momentum"] * beta, 1, g, spread)
        return plus(p, -rate, m), {**new, "momentum": m}

    kept = {"square_avg": True, "grad_avg": centered, "momentum": given(momentum)}
    slots = {name: like if of_leaf else without_elements for name, of_leaf in kept.items()}
    numbers = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
    # `momentum` can be set later only if the state has a buffer for it.
    settable = {"weight_decay": weight_decay, **({"momentum": momentum} if given(momentum) else {})}
    torch_form: Any = dict(counterpart=torch.optim.RMSprop, torch_names={"momentum": "momentum_buffer"})
    more: Any = dict(settable=settable, in_fp32=True, rounds_grads=True, **torch_form)
    return optimizer("rmsprop", lr, slots, formula, numbers=numbers, **more)
