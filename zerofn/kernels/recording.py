"""Is this computation recorded, and by whom; operators and terms that graphs understand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._compat.functorch import (
    NO_LEVEL,
    beneath_functorch,
    differentiating,
    forward_level,
    functorch_active,
    innermost_transform,
    is_wrapped,
    levels,
    makes_proxies,
    only_vmap,
    stacked,
)
from .._compat.tensors import foreach_mul

# ----------------------------------------------------------------------------------------------------------------------
# These functions ask whether autograd, torch.func or torch.compile records a computation. The answer decides between
# formula and kernel.
#
# An update is a formula. A fused, in-place or C kernel gives the same numbers faster, but cannot be recorded: torch's
# fused Adam under `torch.func.grad` has a derivative of zero without an error, a write in place has no batching rule
# under `vmap`, and a C function cannot be traced. So kernels run where nothing records; where something does, a kernel
# runs only if it has a hand-written derivative or batching rule.


def recorded(values: Iterable[Any] = ()) -> bool:
    """Whether what is computed from `values` is recorded: by torch.func, by the compiler, or by autograd.

    Under forward-mode AD always: to ask each tensor whether it has a tangent would cost too much.

    >>> w = torch.ones(2, requires_grad=True)
    >>> recorded([w]), recorded([w.detach(), 0.1]), torch.func.grad(lambda x: x * recorded())(torch.ones(()))
    (True, False, tensor(1.))
    """
    if torch.compiler.is_compiling() or innermost_transform() is not None or forward_level() != NO_LEVEL:
        return True
    return bool(values) and _requires_grad(values)


def differentiated(*values: Any) -> bool:
    """Whether a derivative by `values` may be asked for: as `recorded`, but for a `vmap` or a graph alone."""
    return differentiating() or _requires_grad(values)


def _requires_grad(values: Iterable[Any]) -> bool:
    if torch.is_grad_enabled():
        for x in values:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def only_compiled(values: Iterable[Any]) -> bool:
    """Whether the compiler traces and nothing else records: then a kernel may be called as a custom operator."""
    return torch.compiler.is_compiling() and not functorch_active() and not _requires_grad(values)


def numbers_alone(values: Iterable[Any] = ()) -> bool:
    """Whether what is computed from `values` is neither differentiated nor batched; the compiler may trace it.

    Then collectives without a derivative can be used, with many leaves in one bucket.

    >>> numbers_alone(), numbers_alone([torch.ones(2, requires_grad=True)])
    (True, False)
    """
    if torch.compiler.is_compiling():
        active = functorch_active()
    else:
        active = innermost_transform() is not None or forward_level() != NO_LEVEL
    return not active and (not torch.is_grad_enabled() or not _requires_grad(values))


def concrete(x: Any) -> bool:
    """Whether Python may read the number in `x`: not one per member of a vmap batch, and not traced.

    >>> concrete(torch.ones(())), torch.vmap(lambda x: x * concrete(x))(torch.ones(1))
    (True, tensor([0.]))
    """
    return not torch.compiler.is_compiling() and not makes_proxies() and not (is_wrapped(x) and levels(x))


def number(x: Tensor) -> Any:
    """The Python number in a 0-d tensor; the tensor itself where Python cannot read it."""
    return x.item() if concrete(x) else x


def certain(condition: Tensor) -> bool:
    """Whether a condition is known to hold, for all members of a batch. On a GPU false: reading it would synchronise.

    >>> certain(torch.tensor(2.0) > 1), torch.vmap(lambda x: x * certain(x > 1))(torch.tensor([2.0, 0.5]))
    (True, tensor([0., 0.]))
    """
    if torch.compiler.is_compiling() or condition.device.type != "cpu":
        return False
    if concrete(condition):
        return bool(condition)
    if only_vmap() is None:
        return False
    with beneath_functorch():
        rows = stacked(condition)
        return rows is not None and bool(rows.all())


def where(condition: bool | Tensor, a: Any, b: Any) -> Any:
    """`a` where the condition holds, else `b`.

    A bool chooses by Python, a tensor by `torch.where`.

    Args:
        condition: a bool, or a 0-d tensor of bools on any device.
        a: a tensor, or a function without arguments that makes it, called only where it may be chosen.
        b: the same.

    >>> where(True, torch.tensor(1), lambda: 1 / 0), where(torch.tensor(False), torch.tensor(1), torch.tensor(2))
    (tensor(1), tensor(2))
    """
    if isinstance(condition, bool):
        chosen = a if condition else b
        return chosen() if callable(chosen) else chosen
    a = a() if callable(a) else a
    b = b() if callable(b) else b
    return torch.where(condition.to(a.device), a, b)


def may(condition: bool | Tensor) -> bool:
    """Whether a condition may hold: false of `False` alone, since nobody has read a tensor.

    >>> may(True), may(False), may(torch.tensor(False))
    (True, False, True)
    """
    return condition is not False


def root(x: Tensor) -> Tensor:
    """`x.sqrt()`, whose derivative at 0 is 0 instead of infinite.

    For a second moment or a norm that is 0 since no gradient has come, the chain rule multiplies that infinity by zero,
    which is NaN. What the root is used for has a limit there, which a derivative of zero gives: that of
    `m / (root(v) + eps)` by a gradient of which both are made is `1 / eps` times that of `m`. The input is masked, and
    not the output alone: what is computed and not chosen must be finite as well.

    >>> torch.func.grad(lambda x: root(x * x))(torch.tensor(0.0))
    tensor(0.)
    """
    if not differentiated(x):
        return x.sqrt()
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, torch.ones_like(x)).sqrt(), x * 0)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The bits of `rounded`, a rounding of `x` in its dtype, with the derivative of the identity.

    Rounding is constant nearly everywhere, and what is trained by its true derivative does not move (Bengio et al.,
    2013, section 4). Written as a sum and no `Function`, so that every transform and the compiler know its rules. The
    zero that is subtracted keeps the sign of a zero; of infinities and NaN it is none, and is left out.

    >>> torch.func.grad(lambda x: straight_through(x, x.round()) ** 2)(torch.tensor(2.7))
    tensor(6.)
    """
    if not differentiated(x):
        return rounded
    return rounded.detach() - torch.where(x.isfinite(), x.detach() - x, torch.zeros_like(x))


# ----------------------------------------------------------------------------------------------------------------------
# `operator` registers a kernel as a custom operator, `zerofn::...`, for compiled graphs. Its schema says which
# arguments it writes.


_LIBRARY = torch.library.Library("zerofn", "FRAGMENT")


def operator(schema: str, run: Callable[..., None]) -> Any:
    """`run` as an operator that returns nothing; `schema` marks the arguments that it writes.

    It has neither a derivative nor a batching rule: to be called only where nothing records (`kernels.recording`).

    Not by `torch.library.custom_op`: what that puts around a call, a count for each tensor that is written and a search
    for memory that two arguments have in common, takes on 148 small leaves longer than AdamW itself, some 0.3 ms.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zerofn::{name}", lambda *_: None, lib=_LIBRARY)
    return getattr(torch.ops.zerofn, name).default


# ----------------------------------------------------------------------------------------------------------------------
# These functions compute terms of optimizers' formulas, such as `x + factor * a * b`, as one operation where the
# factor is a number.
#
# One operation instead of three reads memory once, and autograd saves its inputs, not the intermediate products. No
# such operation exists for a factor that is a tensor: a learned rate, or one that differs along a batch.


def once(*numbers: Any) -> tuple[Any, ...]:
    """The same numbers; in a graph as tensors that are materialised in memory, computed once.

    Otherwise the compiler inlines the computation of a small tensor into the loop over elements that uses it: with the
    two powers of a bias correction in the loop AdamW takes three times as long. It does not inline through a stack.
    """
    if not torch.compiler.is_compiling():
        return numbers
    found, kinds = list(numbers), {}
    for i, x in enumerate(numbers):
        if isinstance(x, Tensor):
            kinds.setdefault((x.dtype, x.device, x.shape), []).append(i)
    for places in kinds.values():
        # Never one alone, whose stack is a view of it.
        for i, x in zip(places, torch.stack([found[i] for i in (*places, places[0])]).unbind(), strict=False):
            found[i] = x
    return tuple(found)


def times(x: Tensor, factor: Any) -> Tensor:
    """`factor * x` in the dtype of `x`; the factor is a number, or a 0-d tensor on any device."""
    return (x * factor.to(x.device)).to(x.dtype) if isinstance(factor, Tensor) else x * factor


def plus(x: Tensor, factor: Any, y: Tensor) -> Tensor:
    """`x + factor * y`."""
    return x + factor * y if isinstance(factor, Tensor) else x.add(y, alpha=factor)


def plus_product(x: Tensor, factor: Any, a: Tensor, b: Tensor) -> Tensor:
    """`x + factor * a * b`."""
    return x + factor * a * b if isinstance(factor, Tensor) else x.addcmul(a, b, value=factor)


def plus_quotient(x: Tensor, factor: Any, a: Tensor, b: Tensor) -> Tensor:
    """`x + factor * a / b`."""
    return x + factor * a / b if isinstance(factor, Tensor) else x.addcdiv(a, b, value=factor)


def at_most(norm: Tensor, most: Any) -> Tensor | None:
    """The factor `min(1, most / (norm + 1e-6))` by which what has this norm gets one of `most`; `None` where it is 1.

    A factor of one changes no bit of a gradient, and none of a derivative. Where nothing records and the norm is on
    the CPU it is read once, and nothing is computed in most steps. On a GPU to read it would synchronise.
    """
    read = norm.is_cpu and not recorded((norm, most))
    if read and norm.item() * 1.001 + 1e-5 < most:
        return None
    ratio = (norm + 1e-6).reciprocal().mul(most)
    if read:
        # The minimum of one and a factor that is no larger, or NaN, is that factor.
        return None if ratio.item() > 1 else ratio
    return None if certain(ratio > 1) else once(ratio.clamp(max=1.0))[0]


def scaled(tensors: dict[str, Tensor], factor: Tensor | None) -> dict[str, Tensor]:
    """Each of them times a 0-d factor, which is rounded to its dtype first; one call for all where nothing records.

    `None` is a factor of one.
    """
    if factor is None:
        return tensors
    factors = {dtype: factor.to(dtype) for dtype in {x.dtype for x in tensors.values()}}
    if len(factors) == 1 and not recorded((factor, *tensors.values())):
        return dict(zip(tensors, foreach_mul(list(tensors.values()), *factors.values()), strict=True))
    return {path: x * factors[x.dtype] for path, x in tensors.items()}


def towards(x: Tensor, y: Tensor, weight: Any, out: Tensor | None = None) -> Tensor:
    """`x + weight * (y - x)` in the dtype of `x`; with `out`, of a weight that is a number, written there."""
    y = y.to(x.dtype)
    return x + (y - x) * weight.to(x) if isinstance(weight, Tensor) else torch.lerp(x, y, weight, out=out)


def moment_root(x: Tensor) -> Tensor:
    """`x.sqrt()` of a second moment, to be added to an epsilon: where derivatives may be asked for at least 1e-19.

    As `root`, with a third of the operations: what is below the smallest normal number, 1.2e-38, counts as that number
    and has no derivative. An epsilon from 1e-10 on does not change where the root of that is added, and in float64,
    where the root is 1.5e-154, no epsilon does.

    >>> torch.func.grad(lambda x: moment_root(x * x) + 1e-8)(torch.tensor(0.0))
    tensor(0.)
    """
    if not differentiated(x):
        return x.sqrt()
    least = torch.finfo(x.dtype).tiny
    # A comparison that a NaN fails, so that it stays.
    return torch.where(x < least, least, x).sqrt()
