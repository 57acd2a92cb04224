"""`schedule_free_adamw`: AdamW whose average of iterates takes the place of a falling learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..extend import (
    AVERAGE,
    LeafStep,
    ScalarOrSchedule,
    Transform,
    check_number,
    like,
    moment_root,
    optimizer,
    plus,
    plus_product,
    transform,
)
from .adam import check_adam, unbiased, with_moment_check


@transform
def schedule_free_adamw(
    lr: ScalarOrSchedule = 2.5e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> Transform:
    """Schedule-free AdamW (Defazio et al., 2024, "The Road Less Scheduled", algorithm 1).

    The parameters `y` are where gradients are taken. `v = b2 v + (1 - b2) g^2`; `z -= lr * (g / (sqrt(v / (1 - b2^t)) +
    eps) + weight_decay * y)`; `x += c (z - x)`, where `c` is `w / (sum of all w)` with `w = t^r * (largest lr so
    far)^weight_lr_power`; `y = (1 - b1) z + b1 x`.

    Evaluate and export `x`, the average: `opt.averaged()`, `zf.full_params(tx, state, of="schedule_free_adamw")`,
    `zf.export_safetensors(..., of=...)`. `x` and `z` are kept in fp32 or wider.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update). For a
            warmup, `zf.schedules.warmup(2.5e-3, 1000)`; it need not fall.
        betas: share of the average in `y`, and decay of the second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient, multiplied by `lr`.
        r: exponent of the update in the weight of an iterate.
        weight_lr_power: exponent of the largest rate in that weight.

    Raises:
        ValueError: an argument is out of range; when the state is made, a parameter is stored in fp16.

    Warns:
        UserWarning: a parameter is stored in bf16. It comes when the state is made or planned.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.schedule_free_adamw(lr=0.1, betas=(0.5, 0.999))
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> for _ in range(2):  # z = -0.1, -0.2; x = -0.1, -0.15
        ...     state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
        >>> state.params["w"], zf.full_params(tx, state, of="schedule_free_adamw")["w"]
        (tensor([-0.1750]), tensor([-0.1500]))

    Notes:
        Statistics of BatchNorm are those of `y`. Compute them again for `x`.
    """
    check_adam("schedule_free_adamw", lr, betas, eps, weight_decay)
    check_number("schedule_free_adamw", "r", r)
    check_number("schedule_free_adamw", "weight_lr_power", weight_lr_power)

    def corrections(count: Any, rate: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
        return {"spread": unbiased(count, rate, numbers)["spread"], "by_count": count ** numbers["r"]}

    def formula(p: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        dtype = torch.promote_types(p.dtype, torch.float32)
        y, g, v = (t.to(dtype) for t in (p, g, slots["exp_avg_sq"]))
        beta1, beta2, small, decay, rate = (
            at.scalar(n, y) for n in (*(at.numbers[x] for x in ("beta1", "beta2", "eps", "weight_decay")), at.lr)
        )
        v = plus_product(v * beta2, 1 - beta2, g, g)
        u = plus(g / (moment_root(v) / at.scalar(at.derived["spread"], y) + small), decay, y)
        z = slots["z"] - rate * u
        top = _at_least(slots["lr_max"], at.scalar(at.lr, slots["lr_max"]))
        weight = at.scalar(at.derived["by_count"], top) * top ** at.numbers["weight_lr_power"]
        total = slots["weight_sum"] + weight
        # As long as all rates were 0 there is nothing to weigh.
        share = at.scalar(torch.where(total > 0, weight / torch.where(total > 0, total, 1.0), 0.0), y)
        x = slots[AVERAGE] + share * (z - slots[AVERAGE])
        new = z + beta1 * (x - z)
        kept = {"z": z, AVERAGE: x, "exp_avg_sq": v.to(p.dtype), "lr_max": top, "weight_sum": total}
        return new.to(p.dtype), kept

    # Numbers are kept where counters are, on the CPU.
    slots = {"z": _copy, AVERAGE: _copy, "exp_avg_sq": like, "lr_max": _number, "weight_sum": _number}
    numbers = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
    numbers |= {"r": r, "weight_lr_power": weight_lr_power}
    settable = {"betas": tuple(betas), "weight_decay": weight_decay}
    more: Any = dict(numbers=numbers, settable=settable, derived=corrections)
    return with_moment_check(optimizer("schedule_free_adamw", lr, slots, formula, **more))


def _copy(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


def _number(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32)


def _at_least(x: Tensor, least: Any) -> Tensor:
    return torch.maximum(x, least) if isinstance(least, Tensor) else x.clamp(min=least)
