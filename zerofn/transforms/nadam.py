"""`nadam`: Adam with Nesterov's momentum, the arithmetic of `torch.optim.NAdam`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..extend import (
    LeafStep,
    ScalarOrSchedule,
    Transform,
    check_flag,
    check_number,
    given,
    like,
    moment_root,
    optimizer,
    plus,
    plus_product,
    transform,
)
from .adam import check_adam, unbiased, with_moment_check


@transform
def nadam(
    lr: ScalarOrSchedule = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
) -> Transform:
    """NAdam (Dozat, 2016, "Incorporating Nesterov Momentum into Adam"), as `torch.optim.NAdam`.

    `g += weight_decay * p`, or with `decoupled_weight_decay` `p *= 1 - lr * weight_decay`; `m` and `v` as in `adam`;
    `mu(t) = b1 (1 - 0.96^(t * momentum_decay) / 2)`; `M` is the product of `mu(1) ... mu(t)`; `p -= lr * ((1 - mu(t)) /
    (1 - M) * g + mu(t + 1) / (1 - M * mu(t + 1)) * m) / (sqrt(v / (1 - b2^t)) + eps)`. The product is kept for each
    leaf, in fp32.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: L2 penalty, or decoupled.
        momentum_decay: how fast the momentum comes to `betas[0]` from half of it.
        decoupled_weight_decay: whether the decay is AdamW's.

    Raises:
        ValueError: an argument is out of range; when the state is made, a parameter is stored in fp16.

    Warns:
        UserWarning: a parameter is stored in bf16. It comes when the state is made or planned.

    Examples:
        >>> import torch, zerofn as zf
        >>> state = zf.init(zf.nadam(lr=0.1), {"w": torch.zeros(1)})
        >>> zf.update(zf.nadam(lr=0.1), {"w": torch.ones(1)}, state)[0].params["w"]
        tensor([-0.1056])
    """
    check_adam("nadam", lr, betas, eps, weight_decay)
    check_number("nadam", "momentum_decay", momentum_decay)
    check_flag("nadam", "decoupled_weight_decay", decoupled_weight_decay)

    def momenta(count: Any, rate: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
        now, then = (numbers["beta1"] * (1 - 0.5 * 0.96 ** (t * numbers["momentum_decay"])) for t in (count, count + 1))
        return {"now": now, "then": then, "spread": unbiased(count, rate, numbers)["spread"]}

    def formula(x: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        beta1, beta2, small, decay, _, rate = *at.numbers.values(), at.lr
        now, then, spread = at.derived.values()
        m, v = slots["exp_avg"], slots["exp_avg_sq"]
        if decoupled_weight_decay:
            x = x * (1 - rate * decay)
        elif given(decay):
            g = plus(g, decay, x)
        m = plus(m, 1 - beta1, g - m)
        v = plus_product(v * beta2, 1 - beta2, g, g)
        # A number of the leaf, which a kernel is given in float64. A number that is a tensor has the dtype of `x`.
        before = slots["mu_product"].to(torch.float64)
        now, then = (at.scalar(n, before) for n in (now, then))
        product = before * now
        of_grad = (1 - product).reciprocal() * (1 - now)
        of_moment = (1 - product * then).reciprocal() * then
        x = x - rate * (at.scalar(of_grad, x) * g + at.scalar(of_moment, x) * m) / (moment_root(v) / spread + small)
        product = product.to(torch.float32)
        return x, {"exp_avg": m, "exp_avg_sq": v, "mu_product": product}

    # Numbers live on the CPU, as counters do.
    slots = {"exp_avg": like, "exp_avg_sq": like, "mu_product": lambda x: torch.ones((), dtype=torch.float32)}
    numbers = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
    settable = {"betas": tuple(betas), "weight_decay": weight_decay}
    more: Any = dict(numbers={**numbers, "momentum_decay": momentum_decay}, settable=settable, derived=momenta)
    more |= {"in_fp32": True, "rounds_grads": True}
    return with_moment_check(optimizer("nadam", lr, slots, formula, **more))
