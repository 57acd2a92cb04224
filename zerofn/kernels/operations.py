"""The operations of formulas, one row each: what it is in torch, in C, in Triton, and its derivative.

A formula is a program of these operations (`zerofn.kernels.program`). The reference is IEEE 754: each operation rounds
once, and a product is fused with a sum only where the row says so. So a program has the same bits on every target, and
those of torch's operation on a CPU, with two exceptions that a row names: torch's root of long float32 tensors is now
and then off by a unit in the last place, and torch fuses the product in `plus`, `addcmul` and `lerp` on processors that
can, except in the last elements of some tensors. The library's own formulas use none of these four on tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .masters import bf16_of_master, master_of, residual_of_master


class Operation(NamedTuple):
    """A row of the table.

    Attributes:
        c: the C expression. `{0}`, `{1}`, ... are the arguments; `FMA`, `ROOT` and `ABS` are the functions of the
            dtype in which it is computed.
        triton: the expression in Triton, if it is computed in float32; empty if it is not printed.
        derivative: from the cotangent of the result, the result and the arguments, to the cotangent of each argument;
            `None` for an argument that has none. `None` if the operation is constant nearly everywhere.
        triton_wide: the expression in Triton in float64, if it is another one.
        torch: the function on tensors, if torch has another name for it.
    """

    c: str
    triton: str
    derivative: Callable[..., Sequence[Any]] | None = None
    triton_wide: str | None = None
    torch: Callable[..., Any] | None = None


def _exact_root(x: Tensor) -> Tensor:
    """The correctly rounded root; that of float64 in the precision of torch's."""
    return x.double().sqrt().to(x.dtype) if x.is_cpu else x.sqrt()


# Comparisons with NaN are false, so a clamp keeps NaN. `-x` is `0 - x` in Triton 3.6: 0.0 for 0.0, not -0.0.
OPERATIONS: dict[str, Operation] = {
    "add": Operation("{0} + {1}", "{0} + {1}", lambda d, y, a, b: (d, d)),
    "sub": Operation("{0} - {1}", "{0} - {1}", lambda d, y, a, b: (d, -d)),
    "mul": Operation("{0} * {1}", "{0} * {1}", lambda d, y, a, b: (d * b, d * a)),
    "div": Operation(
        "{0} / {1}", "tl.div_rn({0}, {1})", lambda d, y, a, b: (d / b, -(d * y / b)), triton_wide="{0} / {1}"
    ),
    # x + alpha * y, with one rounding
    "plus": Operation(
        "FMA({2}, {1}, {0})",
        "tl.fma({2}, {1}, {0})",
        lambda d, y, x, a, alpha: (d, d * alpha, None),
        torch=lambda x, y, alpha: torch.add(x, y, alpha=alpha),
    ),
    "addcmul": Operation(
        "FMA({3} * {1}, {2}, {0})",
        "tl.fma({3} * {1}, {2}, {0})",
        lambda d, y, x, a, b, value: (d, d * b * value, d * a * value, None),
        torch=lambda x, a, b, value: torch.addcmul(x, a, b, value=value),
    ),
    "addcdiv": Operation(
        "{0} + {3} * {1} / {2}",
        "{0} + tl.div_rn({3} * {1}, {2})",
        lambda d, y, x, a, b, value: (d, d / b * value, -(d * a / b / b * value), None),
        triton_wide="{0} + {3} * {1} / {2}",
        torch=lambda x, a, b, value: torch.addcdiv(x, a, b, value=value),
    ),
    "lerp": Operation(
        "FMA({2}, {1} - {0}, {0})",
        "tl.fma({2}, {1} - {0}, {0})",
        lambda d, y, x, end, weight: (d - d * weight, d * weight, None),
    ),
    # with weight - 1: torch.lerp starts from the nearer end
    "lerp_back": Operation(
        "FMA({2}, {1} - {0}, {1})",
        "tl.fma({2}, {1} - {0}, {1})",
        lambda d, y, x, end, less: (-(d * less), d + d * less, None),
        torch=lambda x, end, less: torch.lerp(x, end, less + 1),
    ),
    "clamp_min": Operation(
        "{0} < {1} ? {1} : {0}",
        "tl.where({0} < {1}, {1}, {0})",
        lambda d, y, x, least: (torch.where(x < least, 0.0, d), None),
    ),
    "clamp_max": Operation(
        "{0} > {1} ? {1} : {0}",
        "tl.where({0} > {1}, {1}, {0})",
        lambda d, y, x, most: (torch.where(x > most, 0.0, d), None),
    ),
    "sqrt": Operation(
        "ROOT({0})",
        "tl.sqrt_rn({0})",
        # The derivative of `formulas.moment_root`: 0 below the smallest normal number, where it would be infinite.
        lambda d, y, x: (torch.where(x < torch.finfo(x.dtype).tiny, 0.0, d / (y + y)),),
        triton_wide="tl.sqrt({0})",
        torch=_exact_root,
    ),
    "reciprocal": Operation("1 / {0}", "tl.div_rn(1.0, {0})", lambda d, y, x: (-(d * y * y),), triton_wide="1.0 / {0}"),
    "sign": Operation(
        "({0} > 0) - ({0} < 0)",
        "({0} > 0).to(tl.float32) - ({0} < 0).to(tl.float32)",
        triton_wide="({0} > 0).to(tl.float64) - ({0} < 0).to(tl.float64)",
    ),
    "neg": Operation("-{0}", "{0} * -1.0", lambda d, y, x: (-d,)),
    "abs": Operation("ABS({0})", "tl.abs({0})", lambda d, y, x: (d * x.sign(),)),
    "lt": Operation("{0} < {1}", "{0} < {1}"),
    "le": Operation("{0} <= {1}", "{0} <= {1}"),
    "gt": Operation("{0} > {1}", "{0} > {1}"),
    "ge": Operation("{0} >= {1}", "{0} >= {1}"),
    "eq": Operation("{0} == {1}", "{0} == {1}"),
    "ne": Operation("{0} != {1}", "{0} != {1}"),
    "isfinite": Operation("{0} - {0} == 0", "{0} - {0} == 0"),
    "where": Operation(
        "{0} ? {1} : {2}",
        "tl.where({0}, {1}, {2})",
        lambda d, y, chosen, a, b: (None, torch.where(chosen, d, 0.0), torch.where(chosen, 0.0, d)),
    ),
    # Masters of 24 bits: a bf16 number, in fp32, and an int8 residual (`zerofn.kernels.masters`).
    "joined": Operation("joined({0}, {1})", "joined({0}, {1})", torch=lambda p, r: master_of(p.to(torch.bfloat16), r)),
    "upper_half": Operation("upper_half({0})", "upper_half({0})", torch=lambda x: bf16_of_master(x, x)),
    "residual": Operation("residual({0})", "residual({0})", torch=lambda x: residual_of_master(x, x)),
    "logical_and": Operation("{0} & {1}", "{0} & {1}"),
    "logical_or": Operation("{0} | {1}", "{0} | {1}"),
    "logical_not": Operation("!{0}", "{0} == 0"),
}

# The operations whose results are bools; but for the logical ones they are computed in the dtype of their arguments.
COMPARED = {"lt", "le", "gt", "ge", "eq", "ne", "isfinite"}
