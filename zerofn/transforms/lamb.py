"""`lamb`: Adam's direction in each leaf, as long as the leaf itself, for large batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
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
)
from .adam import check_adam, unbiased, with_moment_check


@transform
def lamb(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    ratio_bounds: tuple[float, float] = (0.0, math.inf),
) -> Transform:
    """LAMB (You et al., 2020, "Large Batch Optimization for Deep Learning", algorithm 2), with `phi(z) = z`.

    `m = b1 m + (1 - b1) g`; `v = b2 v + (1 - b2) g^2`; `u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) +
    weight_decay * p`; `p -= lr * norm(p) / norm(u) * u`, where the norms are those of the whole leaf, and their ratio
    is 1 if one of them is 0. Where leaves are sharded, ranks send two numbers for each leaf.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update). It is
            the norm of an update divided by the norm of the leaf.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: multiplies the parameter in `u`. So it counts in `norm(u)`, and the moments do not contain it.
        bias_correction: whether the moments are divided by `1 - b^t`.
        ratio_bounds: the ratio of the norms is clamped to these two numbers, unless a norm is 0. DeepSpeed's are
            `(0.01, 10.0)`.

    Raises:
        ValueError: an argument is out of range; when the state is made, a parameter is stored in fp16.

    Warns:
        UserWarning: a parameter is stored in bf16. It comes when the state is made or planned.

    Examples:
        >>> import torch, zerofn as zf
        >>> state = zf.init(zf.lamb(lr=0.5), {"w": torch.full((4,), 3.0)})
        >>> zf.update(zf.lamb(lr=0.5), {"w": torch.ones(4)}, state)[0].params["w"]  # half as long: 3 - 0.5 * 6 / 2
        tensor([1.5000, 1.5000, 1.5000, 1.5000])

    Notes:
        Biases and gains are often left out: `zf.partition({"matrix": zf.lamb(), "rest": zf.adamw()}, labels)`. It does
        not run within backward.
    """
    check_adam("lamb", lr, betas, eps, weight_decay)
    check_flag("lamb", "bias_correction", bias_correction)
    low, high = _bounds(ratio_bounds)

    def formula(x: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep):
        beta1, beta2, small, decay, rate = *at.numbers.values(), at.lr
        size, spread = at.derived.values()
        m, v = slots["exp_avg"], slots["exp_avg_sq"]
        m = plus(m, 1 - beta1, g - m)
        v = plus_product(v * beta2, 1 - beta2, g, g)
        u = plus(size * m / (moment_root(v) / spread + small), decay, x)

        def step(length: Tensor, of_update: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return x - rate * trust_ratio(length, of_update, low, high) * u, {"exp_avg": m, "exp_avg_sq": v}

        return (x, u), step

    slots = {"exp_avg": like, "exp_avg_sq": like}
    numbers = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
    settable = {"betas": tuple(betas), "weight_decay": weight_decay}
    derived = unbiased if bias_correction else uncorrected
    more: Any = dict(settable=settable, derived=derived, of_norms=True, in_fp32=True)
    return with_moment_check(optimizer("lamb", lr, slots, formula, numbers=numbers, **more))


def _bounds(given: Any) -> tuple[float, float]:
    """`ratio_bounds` as two floats; raises if they are none."""
    pair: tuple[Any, ...] = tuple(given) if isinstance(given, tuple | list) else ()
    good = len(pair) == 2 and all(isinstance(x, int | float) and not isinstance(x, bool) for x in pair)
    if not good or not 0 <= pair[0] <= pair[1]:
        why = "the bounds of a ratio are two numbers, 0 <= lowest <= highest"
        raise ValueError(explain(f"lamb(ratio_bounds={given!r})", why, "lamb(ratio_bounds=(0.01, 10.0))"))
    return float(pair[0]), float(pair[1])


def uncorrected(count: Any, lr: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """As `unbiased`, of moments that are taken as they are."""
    return {"size": 1.0, "spread": 1.0}


def trust_ratio(length: Tensor, of_update: Tensor, low: float = 0.0, high: float = math.inf) -> Tensor:
    """The quotient of two norms, clamped to `low` and `high`, 1 if one of them is 0; all 0-d.

    >>> trust_ratio(torch.tensor(6.0), torch.tensor(2.0)), trust_ratio(torch.tensor(6.0), torch.tensor(0.0))
    (tensor(3.), tensor(1.))
    """
    both = (length > 0) & (of_update > 0)
    # The inner `where` keeps the derivative of the branch that is not chosen finite.
    ratio = length / torch.where(both, of_update, 1.0)
    if (low, high) != (0.0, math.inf):
        ratio = ratio.clamp(low, high)
    return torch.where(both, ratio, 1.0)
