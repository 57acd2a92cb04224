"""Where a part of a sharded parameter meets a tensor that is none: sizes may fit by chance, and torch broadcasts.

`p - lr * torch.autograd.grad(loss, p)[0]` has the full parameter on one side, since that computes, and this rank's part
of the gradient on the other. Mostly torch says that sizes differ; where a row is as long as a part, it gives
numbers. So what has the shape of the part, and not that of the whole, is refused beside the whole; and beside a part
(`sharded.part`, or a parameter that is written into) what has another.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._compat import tagged_pointwise
from .._errors import explain

# fmt: off
# Of what torch does not tag as such.
POINTWISE = frozenset({
    "copy", "divide", "fill", "floor_divide", "isclose", "masked_fill", "multiply", "square", "subtract", "zero",
})
LOSSES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
# Names that mean a reduction as well.
REDUCING = frozenset({"max", "min"})
# What writes by index or along a dimension: in a flat part these are others. Of more dimensions torch says so, mostly.
PLACED = frozenset({
    "cumsum_", "cumprod_", "fill_diagonal_", "index_add_", "index_copy_", "index_fill_", "index_put_", "index_reduce_",
    "masked_scatter_", "put_", "renorm_", "scatter_", "scatter_add_", "scatter_reduce_", "tril_", "triu_",
})
# fmt: on
# `__radd__`, `__iadd__` and `__add__` are one operation.
DUNDERS = frozenset({"add", "sub", "mul", "truediv", "pow", "mod", "floordiv", "eq", "ne", "lt", "le", "gt", "ge"})


@functools.cache
def pointwise(name: str) -> bool:
    """Whether a function treats elements alone, so that shapes that differ are broadcast.

    >>> pointwise("_foreach_lerp_"), pointwise("__radd__"), pointwise("isnan"), pointwise("sum")
    (True, True, True, False)
    """
    if name.startswith("__") and name.endswith("__"):
        inner = name[2:-2]
        return inner in DUNDERS or inner[1:] in DUNDERS
    base = name.removeprefix("_foreach_").rstrip("_")
    return base in POINTWISE or (base not in REDUCING and tagged_pointwise(base))


def check_beside_whole(name: str, beside: list[Any], part: Tensor, full: tuple[int, ...], path: str) -> None:
    """Refuse what has the shape of a part beside the whole.

    Args:
        name: the function.
        beside: what it is given that is no sharded parameter.
        part: this rank's part of the parameter.
        full: the shape of the whole.
        path: the parameter's.
    """
    if part.shape == torch.Size(full) or all(not isinstance(x, Tensor) or x.shape != part.shape for x in beside):
        return
    raise RuntimeError(
        explain(
            f"{name} of the sharded parameter {path}, {full}, and a tensor of its part's shape {(*part.shape,)}",
            "under shard what computes with a parameter has the full one, while p.grad, p.data, p.detach() and the\n"
            "gradients of torch.autograd.grad are this rank's flat parts",
            "p.detach() + part, on parts alone; average.add_(p), on full ones alone;\n"
            "x.expand(full_shape) for a tensor that is no part, so that it can be told from one",
        )
    )


def check_beside_part(name: str, beside: list[Any], part: Tensor, what: str, written: Any = None) -> None:
    """Refuse what has another shape than the part.

    Args:
        name: the function.
        beside: what it is given beside the part.
        part: of a parameter that is written into, or of what `sharded.part` follows.
        what: that is.
        written: what is written into, if it is no part: not even one number broadcasts there.
    """
    for x in beside:
        if isinstance(x, Tensor) and (x.numel() != 1 or x is written) and x.shape != part.shape:
            raise RuntimeError(
                explain(
                    f"{name} of {what} and a tensor of shape {tuple(x.shape)}",
                    f"under shard what is written into, p.grad, p.data and what is in a state_dict() are flat parts:\n"
                    f"this one is {tuple(part.shape)}",
                    "with opt.gathered(), torch.no_grad(): p.copy_(full), on every rank\n"
                    "average.add_(p) for p of model.parameters(), and no p.data: a full average gets full parameters",
                )
            )


def check_slice(write: str, index: Any, what: str) -> None:
    """Refuse some elements: an index counts those of the part."""
    if index is not Ellipsis and not (isinstance(index, slice) and index == slice(None)):
        _refuse_placed(write, what)


def check_placed(name: str, what: str) -> None:
    """Refuse what writes by index or along a dimension."""
    if name in PLACED:
        _refuse_placed(f"p.{name}(...)", what)


def in_place(name: str) -> bool:
    """Whether a function writes into its first argument."""
    written = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
    return name in written or (name.endswith("_") and not name.endswith("__"))


def _refuse_placed(write: str, what: str) -> None:
    raise RuntimeError(
        explain(
            f"{write} of {what}",
            "under shard it is this rank's flat part: indices and dimensions would be those of the part",
            f"with opt.gathered(), torch.no_grad(): {write}, on every rank",
        )
    )
