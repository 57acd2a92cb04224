"""`adopt`: Adam that divides each gradient by the second moment of those before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..extend import (
    LeafStep,
    ScalarOrSchedule,
    Transform,
    check_flag,
    like,
    moment_root,
    optimizer,
    plus,
    plus_product,
    transform,
    where,
)
from .adam import check_adam, with_moment_check


@transform
def adopt(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.9999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    use_clipping: bool = True,
) -> Transform:
    """ADOPT (Taniguchi et al., 2024, "Modified Adam Can Converge with Any beta2 with the Optimal Rate", algorithm 2).

    At the first update `v = g^2`, and nothing else. Then `u = g / max(sqrt(v), eps)`; with `use_clipping`, `u` is
    clamped to [-c, c] with `c = (t - 1)^(1/4)`; `m = b1 m + (1 - b1) u`; `p *= 1 - lr * weight_decay`; `p -= lr * m`;
    `v = b2 v + (1 - b2) g^2`. The moments have the stored dtype of the parameters.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).
        betas: decay of the two moments, each in [0, 1).
        eps: least root of the second moment.
        weight_decay: decoupled from the gradient, multiplied by `lr`.
        use_clipping: whether quotients are clamped, as the authors do; algorithm 1 does not.

    Raises:
        ValueError: an argument is out of range; when the state is made, a parameter is stored in fp16.

    Warns:
        UserWarning: a parameter is stored in bf16. It comes when the state is made or planned.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.adopt(lr=1.0)
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> for size in (2.0, 1.0):
        ...     state, _ = zf.update(tx, {"w": torch.full((1,), size)}, state)
        >>> state.params["w"]  # -0.1 * 1 / 2
        tensor([-0.0500])
    """
    check_adam("adopt", lr, betas, eps, weight_decay)
    check_flag("adopt", "use_clipping", use_clipping)

    def most_allowed(count: Any, rate: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
        return {"most": (count - 1) ** 0.25}

    def formula(x: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        beta1, beta2, small, decay, rate = *at.numbers.values(), at.lr
        m, v = slots["exp_avg"], slots["exp_avg_sq"]
        first, most = at.count == 1, at.derived["most"]

        def later() -> tuple[Tensor, Tensor]:
            u = g / moment_root(v).clamp(min=small)
            u = u.clamp(-most, most) if use_clipping else u
            new = plus(m, 1 - beta1, u - m)
            return x * (1 - rate * decay) - rate * new, new

        new, moment = (where(first, old, lambda i=i: later()[i]) for i, old in enumerate((x, m)))
        v = where(first, lambda: g * g, lambda: plus_product(v * beta2, 1 - beta2, g, g))
        return new, {"exp_avg": moment, "exp_avg_sq": v}

    slots = {"exp_avg": like, "exp_avg_sq": like}
    numbers = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
    settable: Any = {"betas": tuple(betas), "weight_decay": weight_decay}
    more: Any = dict(settable=settable, derived=most_allowed, in_fp32=True)
    return with_moment_check(optimizer("adopt", lr, slots, formula, numbers=numbers, **more))
