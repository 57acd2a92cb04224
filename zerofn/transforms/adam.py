"""`adam` and `adamw`: the arithmetic of torch.optim, by torch's fused kernels or by C with the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, explain, users_line
from ..extend import (
    Joining,
    Layout,
    LeafList,
    LeafStep,
    Leaves,
    RoundedToNearest,
    ScalarOrSchedule,
    Transform,
    TransformState,
    check_betas,
    check_flag,
    check_lr,
    check_number,
    formula_of_torch,
    fused_on_device,
    fused_operator,
    fused_update,
    given,
    has_end,
    like,
    many_for_fused,
    moment_root,
    optimizer,
    plus,
    plus_product,
    plus_quotient,
    takes_stored,
    transform,
    with_kernel,
)


@transform
def adam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
) -> Transform:
    """Adam (Kingma & Ba, 2015); `weight_decay` is added to the gradient, as in `torch.optim.Adam`.

    `g += weight_decay * p`; `m = b1 m + (1 - b1) g`; `v = b2 v + (1 - b2) g^2`;
    `p -= lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)`. The moments have the stored dtype of the parameters. For
    16-bit parameters use `low_precision_adam`, whose rounding keeps small updates.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: L2 penalty.
        bias_correction: whether the moments are divided by `1 - b^t`. Without it the formula runs, and not torch's
            kernel.

    Raises:
        ValueError: an argument is out of range; when the state is made, a parameter is stored in fp16.

    Warns:
        UserWarning: a parameter is stored in bf16. It comes when the state is made or planned.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.adam(lr=0.1)
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
        >>> state.params["w"]
        tensor([-0.1000])

    Notes:
        The bits are those of `torch.optim.Adam(fused=True)`, also under `torch.func.vmap`. If autograd or
        `torch.func.grad` records an update, this holds in fp32 and fp64 while the hyperparameters are plain numbers:
        torch's kernel computes the values, and the formula gives the derivative.

        The formula is computed operation by operation in batches of derivatives, in forward mode, for derivatives by
        hyperparameters, and in a compiled graph of fewer than 32 leaves. Hyperparameters may then be 0-d tensors that
        differ along a batch or are differentiated, `adam(lr=rate)`. In fp32 the formula agrees with the kernel, which
        fuses products with sums, to 3e-7 of the largest term in each update.

        The derivative at an element whose gradient has always been zero is the limit for gradients that tend to zero:
        `lr / eps` at the first update. In derivatives and in the formula the root of a second moment below 1e-38 counts
        as 1e-19, which shows only with an `eps` below 1e-10.

        A shard has the bits of the full leaf, except in its last elements, those that do not fill a vector register.
        torch's kernel rounds them otherwise: a moment differs by about one unit in the last place in each update.
    """
    return adam_of("adam", lr, betas, eps, weight_decay, decoupled=False, corrected=bias_correction)


@transform
def adamw(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    bias_correction: bool = True,
) -> Transform:
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019).

    `p *= 1 - lr * weight_decay`, then the update of `adam` without its L2 penalty.

    With bf16 parameters an update below half a unit in the last place changes nothing, as in torch; at a rate of 1e-5
    that is every update. Use `low_precision_adam` there.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient, multiplied by `lr`.
        bias_correction: whether the moments are divided by `1 - b^t`, as in `adam`.

    Raises:
        ValueError: an argument is out of range; when the state is made, a parameter is stored in fp16.

    Warns:
        UserWarning: a parameter is stored in bf16. It comes when the state is made or planned.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.adamw(lr=0.1, weight_decay=0.5)
        >>> state, _ = zf.update(tx, {"w": torch.ones(1)}, zf.init(tx, {"w": torch.ones(1)}))
        >>> state.params["w"]  # 1 * (1 - 0.1 * 0.5) - 0.1
        tensor([0.8500])
        >>> zf.adamw(learning_rate=1e-3)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        TypeError: adamw() has no keyword 'learning_rate'. Did you mean lr=? It takes: lr, betas, ...

    Notes:
        The bits are those of `torch.optim.AdamW(fused=True)`, with the exceptions that `adam` lists.
    """
    return adam_of("adamw", lr, betas, eps, weight_decay, decoupled=True, corrected=bias_correction)


def check_adam(function: str, lr: Any, betas: Any, eps: Any, weight_decay: Any) -> None:
    """Refuse hyperparameters of Adam that are not numbers, or out of range."""
    check_lr(function, lr)
    check_betas(function, betas)
    check_number(function, "eps", eps)
    check_number(function, "weight_decay", weight_decay)


def with_moment_check(built: Transform) -> Transform:
    """`built` with a check of its first state: moments in fp16 are refused, and moments in bf16 get a warning."""

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        _check_moments(built.name, leaves)
        return built.init_fn(leaves, layout)

    return replace(built, init_fn=init)


def _check_moments(name: str, leaves: Leaves) -> None:
    narrow = [
        (p, f"stored in {x.dtype}, and so would its moments be") for p, x in leaves.items() if x.dtype == torch.float16
    ]
    if narrow:
        what = f"{name}: squared gradients fall below fp16's smallest number, 6e-8, so second moments would be zero"
        raise ValueError(bad_leaves(what, narrow, "zf.low_precision_adam(...), whose moments are bf16 or fp32"))
    rounded = [p for p, x in leaves.items() if x.dtype == torch.bfloat16]
    if rounded:
        # This warns and does not raise, since torch does the same, and comparisons with torch need it.
        more = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
        why = (
            "bf16 has 8 bits, and plain Adam rounds to nearest: an update of less than a 512th of a parameter\n"
            "is lost, and with betas[1] above 0.998 a second moment grows, but never falls"
        )
        right = (
            'zf.low_precision_adam(...), which rounds stochastically, or with rounding="kahan"; or before it\n'
            'zf.precision(store_dtype=torch.bfloat16, rounding="stochastic"), or with fp32 masters\n'
            "zf.precision(store_dtype=torch.float32, param_dtype=torch.bfloat16)"
        )
        what = f"{name}: {rounded[0] or '<root>'}{more} stored in bf16, and so are the moments"
        warnings.warn(explain(what, why, right), RoundedToNearest, stacklevel=users_line())


def _corrections(count: Any, lr: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Bias corrections, in float64: minus the rate, and epsilon, each multiplied by the corrections of both moments.

    Two numbers, so that the root of the second moment is not divided by a third (Kingma & Ba, 2015, end of section 2).
    """
    spread = (1 - numbers["beta2"] ** count) ** 0.5
    return {"down": -lr * spread / (1 - numbers["beta1"] ** count), "small": numbers["eps"] * spread}


def uncorrected(count: Any, lr: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """As `_corrections`, of moments that are taken as they are."""
    return {"down": -lr, "small": numbers["eps"]}


def unbiased(count: Any, lr: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Corrections for moments that start at zero: a factor of the first, a divisor of the root of the second one."""
    return {"size": 1 / (1 - numbers["beta1"] ** count), "spread": (1 - numbers["beta2"] ** count) ** 0.5}


_KIND = attrgetter("dtype", "device")
# Every step reads these of every leaf. `is_cpu` is faster than `device`, for which torch makes an object.
_DTYPE, _IS_CPU = attrgetter("dtype"), attrgetter("is_cpu")


def _run(decoupled: bool, group: LeafList) -> None:
    """torch's fused kernel, called once for each dtype and device."""
    lists = group.params, group.grads, *group.slots.values()
    if group.where == "graph":
        fused_operator(*lists, step=group.count, decoupled=decoupled, lr=group.lr, **group.numbers)
        return
    kind_of = _DTYPE if all(map(_IS_CPU, group.params)) else _KIND
    kinds = set(map(kind_of, group.params))
    if len(kinds) > 1:
        if group.passes is not None:
            group.passes.settle()
        for kind in kinds:
            _run(decoupled, group.only([kind_of(p) == kind for p in group.params]))
        return
    if group.where == "device":
        # It reads counts on the device, and can skip the step there.
        more: Any = dict(group.numbers, lr=group.lr, comes=group.comes)
        fused_on_device(*lists, steps=group.count, decoupled=decoupled, **more)
        return
    more = dict(zip(group.numbers, map(float, group.numbers.values()), strict=True))
    more |= {"lr": group.lr, "norms": group.norms, "passes": group.passes}
    fused_update(*lists, step=group.count, decoupled=decoupled, **more)


def _takes(decoupled: bool, group: LeafList) -> list[bool]:
    """Whether torch's kernel, or a program with its bits, updates these leaves where the step is no ordinary one."""
    if group.where != "stored":
        return [group.where == "device" or many_for_fused(group.params, group.grads)] * len(group.params)
    rows = zip(group.params, group.grads, zip(*group.slots.values(), strict=True), strict=True)
    return [takes_stored(decoupled, float(group.numbers["beta1"]), *row) for row in rows]


def adam_of(
    name: str, lr: Any, betas: Any, eps: float, weight_decay: float, decoupled: bool, corrected: bool = True
) -> Transform:
    """Adam; with `decoupled`, AdamW; without `corrected`, no bias correction."""
    check_adam(name, lr, betas, eps, weight_decay)
    check_flag(name, "bias_correction", corrected)
    numbers = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}

    def formula(x: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        beta1, beta2, _, decay = at.numbers.values()
        down, small = at.derived.values()
        m, v = slots["exp_avg"], slots["exp_avg_sq"]
        if decoupled:
            x = x * (1 - at.lr * decay)
        elif given(decay):
            g = plus(g, decay, x)
        m = plus(m, 1 - beta1, g - m)
        v = plus_product(v * beta2, 1 - beta2, g, g)
        x = plus_quotient(x, down, m, moment_root(v) + small)
        return x, {"exp_avg": m, "exp_avg_sq": v}

    slots, settable = {"exp_avg": like, "exp_avg_sq": like}, {"betas": tuple(betas), "weight_decay": weight_decay}
    if not corrected:
        more: Any = dict(settable=settable, derived=uncorrected, in_fp32=True, rounds_grads=True)
        return with_moment_check(optimizer(name, lr, slots, formula, numbers=numbers, **more))
    counterpart = torch.optim.AdamW if decoupled else torch.optim.Adam
    more = dict(settable=settable, derived=_corrections, counterpart=counterpart)
    more |= {"in_fp32": True, "rounds_grads": True}
    built = optimizer(name, lr, slots, formula, numbers, **more)
    by_hand = Joining(_run, decoupled, apart=has_end), partial(_takes, decoupled), formula_of_torch(decoupled)
    return with_moment_check(with_kernel(built, *by_hand))
