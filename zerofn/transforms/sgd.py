"""`sgd`: the arithmetic of `torch.optim.SGD`, momentum included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..extend import (
    LeafStep,
    ScalarOrSchedule,
    Transform,
    check_flag,
    check_lr,
    check_number,
    given,
    like,
    optimizer,
    plus,
    transform,
    where,
    without_elements,
)


@transform
def sgd(
    lr: ScalarOrSchedule,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> Transform:
    """Gradient descent with momentum, as `torch.optim.SGD` (Sutskever et al., 2013).

    `g += weight_decay * p`; `m = g` at the first update, then `m = momentum * m + (1 - dampening) * g`;
    `p -= lr * (g + momentum * m if nesterov else m)`. The state always has a momentum buffer, so that its structure
    does not depend on a number; with `momentum=0` the buffer has no elements.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).
        momentum: in [0, 1).
        dampening: in [0, 1].
        weight_decay: L2 penalty.
        nesterov: whether to look ahead by one step; needs momentum > 0 and dampening 0.

    Raises:
        ValueError: an argument is out of range, or `nesterov` without momentum or with dampening.

    Examples:
        >>> import torch, zerofn as zf
        >>> zf.sgd(0.5).update({"w": torch.ones(1)}, zf.sgd(0.5).init({"w": torch.zeros(1)}), {"w": torch.zeros(1)})[0]
        {'w': tensor([-0.5000])}

    Notes:
        Each operation rounds once: a shard has the bits of the full leaf, on every processor. `torch.optim.SGD` fuses
        products with sums on some processors, so that an update in fp32 or fp64 differs from it by one rounding of each
        product. Where products are exact, as with rates and decays that are powers of two, the bits are torch's. In
        bf16 and fp16 the formula is computed in fp32, and each result is rounded once.
    """
    check_lr("sgd", lr)
    check_number("sgd", "momentum", momentum, high=1.0)
    check_number("sgd", "dampening", dampening, high=1.0 + 1e-12)
    check_number("sgd", "weight_decay", weight_decay)
    check_flag("sgd", "nesterov", nesterov)
    if nesterov and (not given(momentum) or given(dampening)):
        wrong = f"sgd(momentum={momentum!r}, dampening={dampening!r}, nesterov=True)"
        why = "nesterov needs momentum > 0 and dampening 0"
        raise ValueError(explain(wrong, why, "sgd(lr, momentum=0.9, nesterov=True)"))

    def formula(p: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        decay, beta, damping = at.numbers.values()
        m = slots["momentum"]
        if given(decay):
            g = plus(g, decay, p)
        if given(momentum):
            # Without dampening the first update is no special case: momentum starts from zeros.
            first = given(dampening) and at.count == 1
            m = where(first, lambda: g.clone(), lambda: plus(m * beta, 1 - damping, g))
            g = plus(g, beta, m) if nesterov else m
        return plus(p, -at.lr, g), {"momentum": m}

    start = like if given(momentum) else without_elements
    numbers = {"weight_decay": weight_decay, "momentum": momentum, "dampening": dampening}
    # `momentum` can be set later only if the state has a buffer for it.
    settable = {"weight_decay": weight_decay, **({"momentum": momentum} if given(momentum) else {})}
    torch_form: Any = dict(counterpart=torch.optim.SGD, torch_names={"momentum": "momentum_buffer"})
    more: Any = dict(settable=settable, in_fp32=True, rounds_grads=True, **torch_form)
    return optimizer("sgd", lr, {"momentum": start}, formula, numbers=numbers, **more)
