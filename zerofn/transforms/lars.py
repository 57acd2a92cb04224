"""`lars`: a learning rate for each leaf, by the norms of the leaf and of its gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..extend import (
    LeafStep,
    ScalarOrSchedule,
    Transform,
    check_flag,
    check_lr,
    check_number,
    like,
    optimizer,
    plus,
    transform,
)
from .lamb import trust_ratio


@transform
def lars(
    lr: ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust_coefficient: float = 1e-3,
    nesterov: bool = False,
) -> Transform:
    """LARS (You et al., 2017, "Large Batch Training of Convolutional Networks", algorithm 1).

    `r = trust_coefficient * norm(p) / (norm(g) + weight_decay * norm(p))`, where the norms are those of the whole leaf,
    and `r = 1` if `p` or the divisor is 0; `m = momentum * m + lr * r * (g + weight_decay * p)`; `p -= m`; with
    `nesterov`, `p -= lr * r * (g + weight_decay * p) + momentum * m`. Where leaves are sharded, ranks send two numbers
    for each leaf.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).
        momentum: in [0, 1).
        weight_decay: L2 penalty, which counts in the norm of the gradient.
        trust_coefficient: length of an update as a part of the length of the leaf, at `lr=1`.
        nesterov: whether to look ahead by one step.

    Raises:
        ValueError: an argument is out of range.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.lars(lr=1.0, trust_coefficient=0.5)
        >>> state = zf.init(tx, {"w": torch.full((4,), 3.0)})
        >>> zf.update(tx, {"w": torch.ones(4)}, state)[0].params["w"]  # 3 - 0.5 * 6 / 2
        tensor([1.5000, 1.5000, 1.5000, 1.5000])

    Notes:
        Biases and gains are often left out: `zf.partition({"matrix": zf.lars(1.0), "rest": zf.sgd(0.1)}, labels)`. It
        does not run within backward.
    """
    check_lr("lars", lr)
    check_number("lars", "momentum", momentum, high=1.0)
    check_number("lars", "weight_decay", weight_decay)
    check_number("lars", "trust_coefficient", trust_coefficient)
    check_flag("lars", "nesterov", nesterov)

    def formula(x: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep):
        beta, decay, trust, rate = *at.numbers.values(), at.lr
        m = slots["momentum"]

        def step(length: Tensor, of_grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            u = rate * trust_ratio(trust * length, of_grad + decay * length) * plus(g, decay, x)
            new = beta * m + u
            return x - (u + beta * new if nesterov else new), {"momentum": new}

        return (x, g), step

    numbers = {"momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient}
    settable: Any = {"momentum": momentum, "weight_decay": weight_decay}
    return optimizer(
        "lars", lr, {"momentum": like}, formula, numbers=numbers, settable=settable, of_norms=True, in_fp32=True
    )
