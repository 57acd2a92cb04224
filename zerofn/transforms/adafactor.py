"""`adafactor`: a second moment of a matrix that is kept as that of its rows and that of its columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..extend import (
    LeafStep,
    ScalarOrSchedule,
    Transform,
    check_lr,
    check_number,
    length,
    misfit,
    optimizer,
    plus,
    transform,
    where,
    without_elements,
)


@transform
def adafactor(
    lr: ScalarOrSchedule = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
) -> Transform:
    """Adafactor (Shazeer & Stern, 2018, algorithms 4 and 5), as `torch.optim.Adafactor`.

    `s = t^beta2_decay`. Of a matrix `r += s (mean over columns of g^2 - r)`, `c += s (mean over rows of g^2 - c)`, `v =
    r c / max(mean(r), eps1)`; of a vector or a number `v += s (g^2 - v)`. `u = g / max(sqrt(v), eps1)`; `p *= 1 - lr *
    weight_decay`; `p -= min(lr, 1 / sqrt(t)) * max(rms(p), eps2) * u / max(1, rms(u) / d)`, where `rms(p)` is from
    before the decay. A leaf of more dimensions is a stack of matrices, as in torch.

    A matrix of n rows and m columns has a state of n + m numbers, in fp32 or wider. It needs whole leaves
    (`needs="leaf"`): a sharded leaf is gathered on one rank, its owner, and computed once.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update). It is
            the limit of the root mean square of an update divided by that of the leaf.
        beta2_decay: exponent in `s = t^beta2_decay`, the weight of the last gradient in `r`, `c` and `v`; in [-1, 0).
        eps: a pair `(eps1, eps2)`. `eps1` is the least root of a second moment, by default the `eps` of the dtype.
            `eps2` takes the place of `rms(p)` in the update if `rms(p)` is smaller.
        d: the largest root mean square of `u`: a larger `u` is scaled down to it. At least 1.
        weight_decay: decoupled from the gradient, multiplied by `lr`.

    Raises:
        ValueError: an argument is out of range.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.adafactor(lr=0.1)
        >>> state = zf.init(tx, {"w": torch.ones(2, 3)})
        >>> {name: tuple(x["w"].shape) for name, x in state.transforms["adafactor"].items() if name.endswith("var")}
        {'row_var': (2, 1), 'col_var': (1, 3)}
        >>> zf.update(tx, {"w": torch.ones(2, 3)}, state)[0].params["w"][0]
        tensor([0.9000, 0.9000, 0.9000])
    """
    check_lr("adafactor", lr)
    check_number("adafactor", "beta2_decay", beta2_decay, -1.0, 0.0)
    _check_eps(eps)
    check_number("adafactor", "d", d, low=1.0)
    check_number("adafactor", "weight_decay", weight_decay)

    def sizes(count: Any, rate: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
        most = count**-0.5
        # `where` needs two numbers or two tensors. Adding zero times the other makes both tensors if one is.
        rho = where(rate < most, lambda: rate + 0 * most, lambda: most + 0 * rate)
        return {"share": count ** numbers["beta2_decay"], "rho": rho}

    def formula(x: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        share, rho = at.derived.values()
        decay, most, rate = at.numbers["weight_decay"], at.numbers["d"], at.lr
        new = dict(slots)
        least = torch.finfo(x.dtype).eps if eps[0] is None else eps[0]
        size = rho * (length(x) / max(x.numel(), 1) ** 0.5).clamp(min=eps[1])
        squares = g * g
        if g.ndim > 1:
            new["row_var"] = r = plus(slots["row_var"], share, _mean(squares, -1) - slots["row_var"])
            new["col_var"] = c = plus(slots["col_var"], share, _mean(squares, -2) - slots["col_var"])
            v = r @ c / _mean(r, -2).clamp(min=least)
        else:
            new["variance"] = v = plus(slots["variance"], share, squares - slots["variance"])
        u = g * v.clamp(min=least * least).rsqrt()
        clipped = (length(u) / max(u.numel(), 1) ** 0.5 / most).clamp(min=1.0)
        return x * (1 - rate * decay) - size / clipped * u, new

    slots = {"row_var": _of_rows, "col_var": _of_columns, "variance": _of_elements}
    numbers = {"beta2_decay": beta2_decay, "d": d, "weight_decay": weight_decay}
    more: Any = dict(numbers=numbers, settable={"weight_decay": weight_decay}, derived=sizes, in_fp32=True)
    return replace(optimizer("adafactor", lr, slots, formula, **more), needs="leaf")


def _mean(x: Tensor, dim: int) -> Tensor:
    """The mean along a dimension, which is kept; 0 if the dimension is empty."""
    return x.sum(dim, keepdim=True) / max(x.shape[dim], 1)


def _of_rows(x: Tensor) -> Tensor:
    return _zeros(x, (*x.shape[:-1], 1)) if x.ndim > 1 else without_elements(x)


def _of_columns(x: Tensor) -> Tensor:
    return _zeros(x, (*x.shape[:-2], 1, x.shape[-1])) if x.ndim > 1 else without_elements(x)


def _of_elements(x: Tensor) -> Tensor:
    return without_elements(x) if x.ndim > 1 else _zeros(x, x.shape)


def _zeros(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _check_eps(eps: Any) -> None:
    pair = isinstance(eps, tuple | list) and len(eps) == 2
    if not pair or (eps[0] is not None and misfit("eps", eps[0], 0.0, 1.0)) or misfit("eps", eps[1], 0.0, 1.0):
        why = "eps is a pair of numbers in [0, 1), of which the first may be None"
        raise ValueError(explain(f"adafactor(eps={eps!r})", why, "adafactor(eps=(None, 0.001))"))
