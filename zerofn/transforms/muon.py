"""`muon`: orthogonalized momentum, for matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, explain
from ..extend import (
    Layout,
    LeafStep,
    Leaves,
    ScalarOrSchedule,
    Transform,
    TransformState,
    check_count,
    check_dtype,
    check_flag,
    check_lr,
    check_number,
    length,
    like,
    on_stacks,
    optimizer,
    transform,
)

# (a, b, c) of the quintic `a x + b x^3 + c x^5`: iterating it drives singular values from (0, 1] close to 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# The factors of the rate for a matrix with so many rows and columns, by torch's names.
SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: max(1.0, rows / max(columns, 1)) ** 0.5,
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
}
FLOATS = (torch.float32, torch.bfloat16, torch.float64)


@transform
def muon(
    lr: ScalarOrSchedule = 1e-3,
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    weight_decay: float = 0.0,
    dtype: torch.dtype | None = None,
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    adjust_lr_fn: str = "original",
) -> Transform:
    """Momentum whose singular values are made nearly equal by a Newton-Schulz iteration (Jordan et al., 2024).

    `m += (1 - momentum) * (g - m)`; `u = g + momentum * (m - g) if nesterov else m`; `x = u / norm(u)`; then `steps`
    times `x = a x + (b y + c y y) x` with `y = x x^T` and (a, b, c) = (3.4445, -4.7750, 2.0315); finally `p *= 1 - lr *
    weight_decay`, `p -= lr * sqrt(max(1, rows / columns)) * x`. This is `torch.optim.Muon`, except for `dtype`. The
    Muon of Moonlight (Liu et al., 2025), for learning rates and decays of AdamW, is `adjust_lr_fn="match_rms_adamw"`:
    `p -= lr * 0.2 * sqrt(max(rows, columns)) * x`.

    `muon` updates matrices, and stacks of matrices such as the experts of a layer, (experts, rows, columns). Each
    matrix of a stack is treated as a leaf of its own. Give other leaves another optimizer by `zf.partition`. It needs
    whole leaves (`needs="leaf"`): a sharded leaf is gathered on one rank, its owner, and computed once. Under
    `all_reduce` every rank computes all leaves. All but the iteration is in fp32 at least, and each stored number is
    rounded once.

    Args:
        lr: a non-negative number, or a function of the optimizer step (0 before the first update).
        momentum: decay of the average gradient, in [0, 1).
        nesterov: whether to add the gradient once more.
        steps: iterations.
        weight_decay: decoupled from the gradient, multiplied by `lr`.
        dtype: of the iteration; by default that of the stored parameter. The paper and torch use bfloat16, which is
            fast on a GPU.
        ns_coefficients: (a, b, c).
        adjust_lr_fn: `"original"`, or `"match_rms_adamw"`, which makes an update as large as an update of AdamW.

    Raises:
        ValueError: an argument is out of range; when the state is made, a leaf is neither a matrix nor a stack of
            matrices (every such leaf is named).

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.partition({"w": zf.muon(lr=0.02), "b": zf.adamw(lr=1e-3)}, lambda path: path)
        >>> state = zf.init(tx, {"w": torch.zeros(2, 3), "b": torch.zeros(2)})
        >>> state, _ = zf.update(tx, {"w": torch.eye(2, 3), "b": torch.ones(2)}, state)
        >>> bool((state.params["w"].diagonal() < -0.01).all())
        True
    """
    check_lr("muon", lr)
    check_number("muon", "momentum", momentum, high=1.0)
    check_number("muon", "weight_decay", weight_decay)
    check_flag("muon", "nesterov", nesterov)
    check_count("muon", "steps", steps, "iterations")
    check_dtype("muon", "dtype", dtype, FLOATS)
    _check_iteration(ns_coefficients, adjust_lr_fn)
    scale_of = SCALES[adjust_lr_fn]

    def formula(p: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        beta, decay, rate = *at.numbers.values(), at.lr
        m = slots["momentum"]
        # This is `lerp`, written out since torch.func.vmap has no rule for it.
        m = m + (g - m) * (1 - beta)
        kept, inner = p.dtype, dtype or at.dtype or g.dtype

        def direction(u: Tensor) -> Tensor:
            return orthogonal(u, steps, inner, ns_coefficients)

        def factor(shape: torch.Size) -> Any:
            return rate * scale_of(*shape[-2:])

        u = g + (m - g) * beta if nesterov else m
        return p * (1 - rate * decay) - on_stacks(direction, factor, u.to(inner), kept), {"momentum": m}

    numbers, decays = {"momentum": momentum, "weight_decay": weight_decay}, {"weight_decay": weight_decay}
    torch_form: Any = dict(counterpart=torch.optim.Muon, torch_names={"momentum": "momentum_buffer"})
    more: Any = dict(settable=decays, in_fp32=True, rounds_grads=True, **torch_form)
    built = optimizer("muon", lr, {"momentum": like}, formula, numbers=numbers, **more)

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        # This is checked before the first step, where only the owner of a leaf would raise while other ranks wait.
        _check_matrices(leaves, layout)
        return built.init_fn(leaves, layout)

    return replace(built, needs="leaf", init_fn=init)


def _check_iteration(coefficients: Any, scale: Any) -> None:
    if not isinstance(coefficients, tuple) or len(coefficients) != 3 or not all(map(_is_number, coefficients)):
        why = "ns_coefficients is 3 numbers: a, b and c of a x + b x^3 + c x^5"
        raise ValueError(explain(f"muon(ns_coefficients={coefficients!r})", why, f"ns_coefficients={COEFFICIENTS}"))
    if not isinstance(scale, str) or scale not in SCALES:
        why = f"adjust_lr_fn is {' or '.join(map(repr, SCALES))}"
        raise ValueError(explain(f"muon(adjust_lr_fn={scale!r})", why, 'adjust_lr_fn="match_rms_adamw"'))


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)


def _check_matrices(leaves: Leaves, layout: Layout) -> None:
    shapes = {leaf.path: tuple(leaf.shape) for leaf in layout.leaves}
    wrong = [(path, f"of shape {shapes[path]}") for path in leaves if len(shapes[path]) not in (2, 3)]
    if wrong:
        right = 'zf.partition({"matrix": zf.muon(...), "rest": zf.adamw(...)}, labels)'
        raise ValueError(bad_leaves("muon is for matrices", wrong, right))


def orthogonal(
    u: Tensor, steps: int, dtype: torch.dtype, coefficients: tuple[float, float, float] = COEFFICIENTS
) -> Tensor:
    """A matrix with the singular vectors of `u` (rows, columns) and singular values near 1; or a stack of them."""
    a, b, c = coefficients
    x = u.to(dtype)
    wide = u.shape[-2] > u.shape[-1]
    x = x.mT if wide else x
    if x.ndim > 2:
        x = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
        x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    else:
        x = x / length(x).clamp(min=1e-7)
    for _ in range(steps):
        y = x @ x.mT
        if x.ndim > 2:
            # This takes three launches, and no temporaries for scaled matrices. It rounds in another order.
            x = torch.baddbmm(x, torch.baddbmm(y, y, y, beta=b, alpha=c), x, beta=a)
        else:
            x = torch.addmm(x, torch.addmm(y, y, y, beta=b, alpha=c), x, beta=a)
    return (x.mT if wide else x).reshape(u.shape)
