"""`radam`: Adam whose steps are short until the second moment is known, the arithmetic of `torch.optim.RAdam`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..extend import (
    LeafStep,
    ScalarOrSchedule,
    Transform,
    check_flag,
    given,
    like,
    moment_root,
    optimizer,
    plus,
    plus_product,
    transform,
    where,
)
from .adam import check_adam, unbiased, with_moment_check


@transform
def radam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
) -> Transform:
    """RAdam (Liu et al., 2020, "On the Variance of the Adaptive Learning Rate and Beyond"), as `torch.optim.RAdam`.

    `g += weight_decay * p`, or with `decoupled_weight_decay` `p *= 1 - lr * weight_decay`; `m` and `v` as in `adam`;
    `R = 2 / (1 - b2) - 1`; `r = R - 2 t b2^t / (1 - b2^t)`. While `r <= 5`, `p -= lr / (1 - b1^t) * m`; then `p -= lr /
    (1 - b1^t) * m * sqrt((r - 4)(r - 2) R / ((R - 4)(R - 2) r)) * sqrt(1 - b2^t) / (sqrt(v) + eps)`.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: L2 penalty, or decoupled.
        decoupled_weight_decay: whether the decay is AdamW's.

    Raises:
        ValueError: an argument is out of range; when the state is made, a parameter is stored in fp16.

    Warns:
        UserWarning: a parameter is stored in bf16. It comes when the state is made or planned.

    Examples:
        >>> import torch, zerofn as zf
        >>> state = zf.init(zf.radam(lr=0.1), {"w": torch.zeros(1)})
        >>> zf.update(zf.radam(lr=0.1), {"w": torch.full((1,), 3.0)}, state)[0].params["w"]  # -0.1 * 3
        tensor([-0.3000])
    """
    check_adam("radam", lr, betas, eps, weight_decay)
    check_flag("radam", "decoupled_weight_decay", decoupled_weight_decay)

    def rectified(count: Any, rate: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
        beta2 = numbers["beta2"]
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * count * beta2**count / (1 - beta2**count)
        made = unbiased(count, rate, numbers)
        # Until the second moment is known, 5 stands in for the length, so that the root below is real.
        r = where(length > 5, lambda: length, lambda: 0 * length + 5)

        def factor() -> Any:
            variance = (r - 4) * (r - 2) * longest / ((longest - 4) * (longest - 2) * r)
            return abs(variance) ** 0.5 * made["spread"]

        return {"length": length, "size": made["size"], "factor": where(length > 5, factor, 0.0)}

    def formula(x: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        beta1, beta2, small, decay, rate = *at.numbers.values(), at.lr
        size, factor = at.derived["size"], at.derived["factor"]
        m, v = slots["exp_avg"], slots["exp_avg_sq"]
        if decoupled_weight_decay:
            x = x * (1 - rate * decay)
        elif given(decay):
            g = plus(g, decay, x)
        m = plus(m, 1 - beta1, g - m)
        v = plus_product(v * beta2, 1 - beta2, g, g)
        u = where(at.derived["length"] > 5, lambda: m * factor / (moment_root(v) + small), lambda: m)
        return x - rate * size * u, {"exp_avg": m, "exp_avg_sq": v}

    slots = {"exp_avg": like, "exp_avg_sq": like}
    numbers = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
    more: Any = dict(settable={"betas": tuple(betas), "weight_decay": weight_decay}, derived=rectified)
    more |= {"in_fp32": True, "rounds_grads": True}
    return with_moment_check(optimizer("radam", lr, slots, formula, numbers=numbers, **more))
