"""`adabelief`: Adam whose second moment is that of the gradient's distance from its average."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..extend import (
    LeafStep,
    ScalarOrSchedule,
    Transform,
    like,
    moment_root,
    optimizer,
    plus,
    plus_product,
    plus_quotient,
    transform,
)
from .adam import check_adam, unbiased, with_moment_check


@transform
def adabelief(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-16,
    weight_decay: float = 0.0,
) -> Transform:
    """AdaBelief (Zhuang et al., 2020, algorithm 2): larger steps where a gradient is close to its running average.

    `m = b1 m + (1 - b1) g`; `s = b2 s + (1 - b2) (g - m)^2 + eps`; `p *= 1 - lr * weight_decay`; `p -= lr / (1 - b1^t)
    * m / (sqrt(s / (1 - b2^t)) + eps)`. The moments have the stored dtype of the parameters.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).
        betas: decay of the two moments, each in [0, 1).
        eps: added to the second moment in each update, and to its root.
        weight_decay: decoupled from the gradient, multiplied by `lr`.

    Raises:
        ValueError: an argument is out of range; when the state is made, a parameter is stored in fp16.

    Warns:
        UserWarning: a parameter is stored in bf16. It comes when the state is made or planned.

    Examples:
        >>> import torch, zerofn as zf
        >>> state = zf.init(zf.adabelief(lr=0.09), {"w": torch.zeros(1)})
        >>> zf.update(zf.adabelief(lr=0.09), {"w": torch.ones(1)}, state)[0].params["w"]  # -0.09 / 0.9
        tensor([-0.1000])
    """
    check_adam("adabelief", lr, betas, eps, weight_decay)

    def formula(x: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        beta1, beta2, small, decay, rate = *at.numbers.values(), at.lr
        size, spread = at.derived.values()
        m, s = slots["exp_avg"], slots["exp_avg_var"]
        m = plus(m, 1 - beta1, g - m)
        s = plus_product(s * beta2, 1 - beta2, g - m, g - m) + small
        x = plus_quotient(x * (1 - rate * decay), -rate * size, m, moment_root(s) / spread + small)
        return x, {"exp_avg": m, "exp_avg_var": s}

    slots = {"exp_avg": like, "exp_avg_var": like}
    numbers = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
    settable = {"betas": tuple(betas), "weight_decay": weight_decay}
    more: Any = dict(settable=settable, derived=unbiased, in_fp32=True)
    return with_moment_check(optimizer("adabelief", lr, slots, formula, numbers=numbers, **more))
