"""`lion`: updates of one size in every element, by the sign of a momentum."""

from __future__ import annotations

from torch import Tensor

from ..extend import (
    LeafStep,
    ScalarOrSchedule,
    Transform,
    check_betas,
    check_lr,
    check_number,
    like,
    optimizer,
    transform,
)


@transform
def lion(lr: ScalarOrSchedule = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> Transform:
    """Lion (Chen et al., 2023): step by the sign of an interpolation between momentum and gradient.

    `p *= 1 - lr * weight_decay`, `p -= lr * sign(b1 m + (1 - b1) g)`, `m = b2 m + (1 - b2) g`. The momentum is kept in
    the stored dtype of the parameters and computed in fp32 or wider. Choose a learning rate three to ten times smaller
    than for AdamW, and a weight decay larger by the same factor.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).
        betas: decay of the interpolation and of the momentum, each in [0, 1).
        weight_decay: decoupled from the gradient, multiplied by `lr`.

    Raises:
        ValueError: an argument is out of range.

    Examples:
        >>> import torch, zerofn as zf
        >>> state = zf.init(zf.lion(lr=0.1), {"w": torch.zeros(3)})
        >>> zf.update(zf.lion(lr=0.1), {"w": torch.tensor([5.0, -0.01, 0.0])}, state)[0].params["w"]
        tensor([-0.1000,  0.1000,  0.0000])
    """
    check_lr("lion", lr)
    check_betas("lion", betas)
    check_number("lion", "weight_decay", weight_decay)

    def formula(x: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        beta1, beta2, decay, rate = *at.numbers.values(), at.lr
        m = slots["momentum"]
        x = x * (1 - rate * decay) - rate * (beta1 * m + (1 - beta1) * g).sign()
        return x, {"momentum": beta2 * m + (1 - beta2) * g}

    numbers = {"beta1": betas[0], "beta2": betas[1], "weight_decay": weight_decay}
    settable = {"betas": tuple(betas), "weight_decay": weight_decay}
    return optimizer("lion", lr, {"momentum": like}, formula, numbers=numbers, settable=settable, in_fp32=True)
