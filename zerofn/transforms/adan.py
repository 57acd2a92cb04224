"""`adan`: Adam with Nesterov's momentum, from the differences of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..extend import (
    LeafStep,
    ScalarOrSchedule,
    Transform,
    check_betas,
    check_lr,
    check_number,
    like,
    moment_root,
    optimizer,
    plus,
    plus_product,
    transform,
    where,
)
from .adam import with_moment_check


@transform
def adan(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Transform:
    """Adan (Xie et al., 2022, "Adaptive Nesterov Momentum Algorithm", algorithm 1), with the authors' corrections.

    `d = g - g_before`, 0 at first; `m = b1 m + (1 - b1) g`; `w = b2 w + (1 - b2) d`; `n = b3 n + (1 - b3) (g + b2
    d)^2`; `u = (m / (1 - b1^t) + b2 w / (1 - b2^t)) / (sqrt(n / (1 - b3^t)) + eps)`; `p = (p - lr * u) / (1 + lr *
    weight_decay)`. The state has four tensors for each leaf, in the stored dtype of the parameters.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).
        betas: decay of the three averages, each in [0, 1). The paper writes `1 - beta`.
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient, multiplied by `lr`.

    Raises:
        ValueError: an argument is out of range; when the state is made, a parameter is stored in fp16.

    Warns:
        UserWarning: a parameter is stored in bf16. It comes when the state is made or planned.

    Examples:
        >>> import torch, zerofn as zf
        >>> state = zf.init(zf.adan(lr=0.1), {"w": torch.zeros(1)})
        >>> zf.update(zf.adan(lr=0.1), {"w": torch.ones(1)}, state)[0].params["w"]
        tensor([-0.1000])
    """
    check_lr("adan", lr)
    check_betas("adan", betas, (0.98, 0.92, 0.99))
    check_number("adan", "eps", eps)
    check_number("adan", "weight_decay", weight_decay)

    def corrections(count: Any, rate: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
        beta1, beta2, beta3 = (numbers[name] for name in ("beta1", "beta2", "beta3"))
        return {
            "of_moment": 1 / (1 - beta1**count),
            "of_change": beta2 / (1 - beta2**count),
            "spread": (1 - beta3**count) ** 0.5,
        }

    def formula(x: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        beta1, beta2, beta3, small, decay, rate = *at.numbers.values(), at.lr
        of_moment, of_change, spread = at.derived.values()
        m, w, n, before = slots.values()
        d = where(at.count == 1, lambda: torch.zeros_like(g), lambda: g - before)
        m = plus(m, 1 - beta1, g - m)
        w = plus(w, 1 - beta2, d - w)
        seen = plus(g, beta2, d)
        n = plus_product(n * beta3, 1 - beta3, seen, seen)
        u = (of_moment * m + of_change * w) / (moment_root(n) / spread + small)
        x = (x - rate * u) / (1 + rate * decay)
        return x, dict(zip(slots, (m, w, n, g), strict=True))

    slots: Any = dict.fromkeys(("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad"), like)
    numbers = {**{f"beta{i}": beta for i, beta in enumerate(betas, 1)}, "eps": eps, "weight_decay": weight_decay}
    more: Any = dict(settable={"betas": tuple(betas), "weight_decay": weight_decay}, derived=corrections, in_fp32=True)
    return with_moment_check(optimizer("adan", lr, slots, formula, numbers=numbers, **more))
