"""`adam` and `adamw`: torch.optim's arithmetic, through torch's own fused kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._compat import fused_adam_, fused_adamw_, tell_autograd
from .._errors import bad_leaves, explain
from ..extend import (
    Layout,
    LeafList,
    Leaves,
    ScalarOrSchedule,
    Transform,
    TransformState,
    check_lr,
    check_number,
    like,
    misfit,
    optimizer,
    plain,
    transform,
    typed,
)


@transform
def adam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Transform:
    """Adam (Kingma & Ba, 2015); `weight_decay` is added to the gradient, as in `torch.optim.Adam`.

    `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g^2`,
    `p -= lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)`. The same bits as
    `torch.optim.Adam(fused=True)`. Moments have the stored dtype of the parameters; for 16-bit
    parameters use `low_precision_adam`, whose rounding keeps small updates.

    Of a leaf that is cut over ranks the bits are those of the whole but near the ends of pieces: torch's kernel rounds
    the last elements of a tensor, fewer than a vector has, otherwise than those before, by about one unit in the last
    place of a moment in each update.

    Args:
        lr: a non-negative number, or a function of the optimizer step (0 before the first update).
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: L2 penalty.

    >>> import torch, zerofn as zf
    >>> tx = zf.adam(lr=0.1)
    >>> state = zf.init(tx, {"w": torch.zeros(1)})
    >>> state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
    >>> state.params["w"]
    tensor([-0.1000])
    """
    return _adam("adam", lr, betas, eps, weight_decay, decoupled=False)


@transform
def adamw(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Transform:
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019): `p *= 1 - lr * weight_decay` first.

    The same bits as `torch.optim.AdamW(fused=True)`, whose defaults it shares. See `adam`. Parameters and moments that
    are stored in 16 bits are rounded to nearest, as torch rounds them: an update below half a unit in the last place
    changes nothing, and with bf16 parameters and a rate of 1e-5 that is every update. Use `low_precision_adam` there.

    >>> import torch, zerofn as zf
    >>> zf.adamw(learning_rate=1e-3)
    Traceback (most recent call last):
    ...
    TypeError: adamw() has no keyword 'learning_rate'. Did you mean lr=? It takes: lr, betas, eps, weight_decay.
    """
    return _adam("adamw", lr, betas, eps, weight_decay, decoupled=True)


def check_adam(function: str, lr: Any, betas: Any, eps: Any, weight_decay: Any) -> None:
    """Refuse hyperparameters that are no numbers or out of range."""
    check_lr(function, lr)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        why: str | None = f"betas is a pair of numbers, and {betas!r} is none"
    else:
        why = next(filter(None, (misfit("each of betas", beta, 0.0, 1.0) for beta in betas)), None)
    if why:
        raise ValueError(explain(f"{function}(betas={betas!r})", why, f"{function}(betas=(0.9, 0.999))"))
    check_number(function, "eps", eps)
    check_number(function, "weight_decay", weight_decay)


def _adam(name: str, lr: Any, betas: Any, eps: float, weight_decay: float, decoupled: bool) -> Transform:
    check_adam(name, lr, betas, eps, weight_decay)
    beta1, beta2 = betas
    fused = fused_adamw_ if decoupled else fused_adam_

    def update_group(group: LeafList) -> None:
        params, slots = group.params, group.slots
        grads = typed(params, group.grads)
        kinds = {(p.dtype, p.device) for p in params}
        if len(kinds) > 1:
            for kind in kinds:
                update_group(group.where([(p.dtype, p.device) == kind for p in params]))
            return
        if plain(params) and isinstance(group.count, int):
            step = torch.tensor(float(group.count), dtype=torch.float32, device=params[0].device)
            fused(
                params,
                grads,
                slots["exp_avg"],
                slots["exp_avg_sq"],
                [],
                [step] * len(params),
                lr=group.lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
            )
            tell_autograd(params)
            return
        for p, g, m, v in zip(params, grads, slots["exp_avg"], slots["exp_avg_sq"], strict=True):
            _formula(p, g, m, v, torch.as_tensor(group.count, dtype=torch.float64), group.lr)

    def _formula(p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: Tensor, rate: Any) -> None:
        """The definition, for tensors that fused kernels do not take; `t` may differ along a vmapped axis."""
        if decoupled:
            p.mul_(1 - rate * weight_decay)
        elif weight_decay:
            g = g + weight_decay * p
        m.add_((g - m) * (1 - beta1))
        v.mul_(beta2).add_((1 - beta2) * g * g)
        size = rate / (1 - beta1**t)
        p.sub_(size * m / (v.sqrt() / (1 - beta2**t).sqrt() + eps))

    built = optimizer(name, lr, {"exp_avg": like, "exp_avg_sq": like}, update_group)

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        narrow = [
            (p, f"stored in {x.dtype}, and so would its moments be")
            for p, x in leaves.items()
            if x.dtype == torch.float16
        ]
        if narrow:
            what = f"{name}: squared gradients fall below fp16's smallest number, 6e-8, so second moments would be zero"
            raise ValueError(bad_leaves(what, narrow, "zf.low_precision_adam(...), whose moments are bf16 or fp32"))
        return built.init_fn(leaves, layout)

    return replace(built, init_fn=init)
