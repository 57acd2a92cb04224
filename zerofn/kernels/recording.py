"""Whether a computation is recorded, and by whom; branches and operators that a graph can have."""

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

# ----------------------------------------------------------------------------------------------------------------------
# These functions tell whether autograd, torch.func or torch.compile records a computation, which decides between
# formula and kernel.
#
# An update is a formula. A fused, in-place or C kernel gives the same numbers faster, but cannot be recorded: torch's
# fused Adam under `torch.func.grad` has a derivative of zero without an error, a write in place has no batching rule
# under `vmap`, and a C function cannot be traced. So a kernel runs if nothing records, or if it has a hand-written
# derivative or batching rule.


def recorded(values: Iterable[Any] = ()) -> bool:
    """Whether torch.func, the compiler or autograd records what is computed from `values`.

    Under forward-mode AD always true: asking each tensor for its tangent would cost too much.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> recorded([w]), recorded([w.detach(), 0.1]), torch.func.grad(lambda x: x * recorded())(torch.ones(()))
        (True, False, tensor(1.))
    """
    if torch.compiler.is_compiling() or innermost_transform() is not None or forward_level() != NO_LEVEL:
        return True
    return torch.is_grad_enabled() and _requires_grad(values)


def differentiated(*values: Any) -> bool:
    """Whether a derivative by `values` may be asked for: as `recorded`, but false for a `vmap` or a graph alone.

    Examples:
        >>> differentiated(torch.ones(2)), differentiated(torch.ones(2, requires_grad=True))
        (False, True)
    """
    if torch.compiler.is_compiling() or innermost_transform() is not None or forward_level() != NO_LEVEL:
        return differentiating() or (torch.is_grad_enabled() and _requires_grad(values))
    return torch.is_grad_enabled() and _requires_grad(values)


def without_derivative(values: Iterable[Any], error: str) -> None:
    """Raise for a computation that has no derivative, where one by `values` may be asked for.

    Raises:
        RuntimeError: with these words.

    Examples:
        >>> without_derivative([torch.ones(2)], "a derivative through eigenvectors")
    """
    if differentiated(*values):
        raise RuntimeError(error)


def _requires_grad(values: Iterable[Any]) -> bool:
    # A loop is faster than `any` of a generator, which is entered for each value.
    for x in values:  # noqa: SIM110
        if isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def only_compiled(values: Iterable[Any]) -> bool:
    """Whether the compiler traces and nothing else records: then a kernel may be called as a custom operator."""
    if not torch.compiler.is_compiling() or functorch_active():
        return False
    return not torch.is_grad_enabled() or not _requires_grad(values)


def numbers_alone(values: Iterable[Any] = ()) -> bool:
    """Whether what is computed from `values` is neither differentiated nor batched; the compiler may trace it.

    Then collectives without a derivative can be used, with many leaves in one bucket.

    Examples:
        >>> numbers_alone(), numbers_alone([torch.ones(2, requires_grad=True)])
        (True, False)
    """
    if torch.compiler.is_compiling():
        active = functorch_active()
    else:
        active = innermost_transform() is not None or forward_level() != NO_LEVEL
    return not active and (not torch.is_grad_enabled() or not _requires_grad(values))


def concrete(x: Any) -> bool:
    """Whether Python may read the number in `x`: it is not traced, and not one number per member of a vmap batch.

    Examples:
        >>> concrete(torch.ones(())), torch.vmap(lambda x: x * concrete(x))(torch.ones(1))
        (True, tensor([0.]))
    """
    return not torch.compiler.is_compiling() and not makes_proxies() and not (is_wrapped(x) and levels(x))


def number(x: Tensor) -> Any:
    """The Python number in a 0-d tensor; the tensor itself if Python cannot read it.

    Examples:
        >>> number(torch.tensor(3)), torch.vmap(lambda x: number(x) + 1)(torch.tensor([1, 2]))
        (3, tensor([2, 3]))
    """
    return x.item() if concrete(x) else x


def certain(condition: Tensor) -> bool:
    """Whether a condition is known to hold, for all of a batch. False on a GPU, where reading it would synchronise.

    Examples:
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
    """`a` if the condition holds, else `b`. A bool chooses in Python, a tensor by `torch.where`.

    Args:
        condition: a bool, or a 0-d bool tensor on any device.
        a: a tensor, or a function without arguments that makes it, called only if it may be chosen.
        b: the same as `a`, for a false condition.

    Examples:
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
    """Whether a condition may hold. Only the bool `False` says no; a tensor is not read.

    Examples:
        >>> may(True), may(False), may(torch.tensor(False))
        (True, False, True)
    """
    return condition is not False


def root(x: Tensor) -> Tensor:
    """`x.sqrt()`, with the derivative 0 at 0 instead of infinity.

    If a second moment or a norm is 0 because no gradient has come, the chain rule would multiply an infinite derivative
    by zero, which is NaN. With `root`, the derivative of `m / (root(v) + eps)` at `v = 0` is the derivative of `m`
    times `1 / eps`, which is the right limit.

    Examples:
        >>> torch.func.grad(lambda x: root(x * x))(torch.tensor(0.0))
        tensor(0.)
    """
    if not differentiated(x):
        return x.sqrt()
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, torch.ones_like(x)).sqrt(), x * 0)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The bits of `rounded`, which is `x` rounded in its dtype, with the derivative of the identity.

    Rounding is constant nearly everywhere, so its true derivative would train nothing (Bengio et al., 2013, section 4).
    `straight_through` uses torch's operators and no `autograd.Function`, so that every transform of `torch.func` and
    the compiler can differentiate it. Zeros keep their sign. For an infinite or NaN element of `x` the derivative is 0.

    Examples:
        >>> torch.func.grad(lambda x: straight_through(x, x.round()) ** 2)(torch.tensor(2.7))
        tensor(6.)
    """
    if not differentiated(x):
        return rounded
    return rounded.detach() - torch.where(x.isfinite(), x.detach() - x, torch.zeros_like(x))


# ----------------------------------------------------------------------------------------------------------------------
# `operator` registers a kernel as a custom operator `zerofn::...`, for compiled graphs.


_LIBRARY = torch.library.Library("zerofn", "FRAGMENT")


def operator(schema: str, run: Callable[..., None]) -> Any:
    """Register `run` as an operator that returns nothing; `schema` marks the arguments that it writes.

    It has neither a derivative nor a batching rule: call it only if nothing records.

    `torch.library.custom_op` is not used: for each call it counts every written tensor and looks for arguments that
    share memory, which takes 0.3 ms on 148 small leaves, longer than AdamW itself. Nor is
    `torch.library.register_fake`: it looks for the source of its caller in all modules, which takes a tenth of the time
    of a first attach.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, lambda *_: None, "Meta")
    return getattr(torch.ops.zerofn, name).default
