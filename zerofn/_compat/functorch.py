"""Transforms of torch.func: which are under way, and the tensors that they have wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Function

from .compiler import while_traced

# Wrapped tensors, and the levels of transforms.
functorch = torch._C._functorch  # type: ignore[attr-defined]

# The innermost transform under way, `None` outside of any: a function of C, which the compiler cannot trace.
innermost_transform = functorch.peek_interpreter_stack

# The level of the transform that has wrapped a tensor, of one that has ended too; `NOT_WRAPPED` of a plain one.
level_of: Callable[[Tensor], int] = functorch.maybe_get_level
NOT_WRAPPED = -1

# A tensor that a transform has wrapped without the wrapper, once that transform has ended; another tensor as it is.
unwrapped_if_dead: Callable[[Tensor], Tensor] = functorch.unwrap_if_dead


# The level of forward-mode AD under way, from 0 on: of `torch.autograd.forward_ad`, torch.func.jvp or linearize.
forward_level: Callable[[], int] = functools.partial(attrgetter("_current_level"), torch.autograd.forward_ad)
NO_LEVEL = -1


@while_traced
def functorch_active() -> bool:
    """Whether torch.func.grad, vjp, jvp or vmap is under way."""
    return functorch.peek_interpreter_stack() is not None


@while_traced
def differentiating() -> bool:
    """Whether torch.func.grad, vjp or jvp is under way, at any level, or plain forward mode."""
    if forward_level() != NO_LEVEL:
        return True
    if functorch.peek_interpreter_stack() is None:
        return False
    return any(level.key().name in ("Grad", "Jvp") for level in functorch.get_interpreter_stack())


def forward_levels() -> tuple[int, bool]:
    """How many transforms of torch.func are in forward mode, and whether any is in reverse mode."""
    names = [level.key().name for level in functorch.get_interpreter_stack() or ()]
    return names.count("Jvp"), "Grad" in names


def only_reverse() -> bool:
    """Whether only reverse mode is under way: plain autograd, torch.func.grad and vjp, at any level."""
    if torch.compiler.is_compiling() or forward_level() != NO_LEVEL:
        return False
    stack = functorch.get_interpreter_stack() if functorch_active() else ()
    return all(level.key().name == "Grad" for level in stack)


def only_vmap() -> int | None:
    """The level of the vmap under way, if it is the only transform of torch.func and the compiler does not trace."""
    return None if torch.compiler.is_compiling() else vmap_level()


@while_traced
def vmap_level() -> int | None:
    """As `only_vmap`, also while the compiler traces."""
    if not functorch_active() or forward_level() != NO_LEVEL:
        return None
    levels = functorch.get_interpreter_stack()
    return levels[0].level() if len(levels) == 1 and levels[0].key().name == "Vmap" else None


def behind(x: Tensor, level: int) -> Tensor | None:
    """The batched tensor of that level of vmap with its batch axis; `None` if `x` is not batched. Can be traced."""
    return functorch._unwrap_batched(x, level)[0] if functorch.is_batchedtensor(x) else None


def stacked(x: Tensor) -> Tensor | None:
    """A batched tensor of vmap with its batch axis first; `None` if `x` is not batched."""
    return functorch.get_unwrapped(x).movedim(functorch.maybe_get_bdim(x), 0) if is_wrapped(x) else None


def as_batch(x: Tensor, level: int) -> Tensor:
    """`x` as a batched tensor in the vmap of that level: its rows are the members."""
    return functorch._add_batch_dim(x, 0, level)


# A context in which no transform of torch.func is under way: tensors that are made inside are constants to it.
beneath_functorch = temporarily_clear_interpreter_stack


def innermost(x: Tensor) -> Tensor:
    """The plain tensor that transforms of torch.func have wrapped."""
    while functorch.maybe_get_level(x) != -1:
        x = functorch.get_unwrapped(x)
    return x


def is_wrapped(x: object) -> bool:
    """Whether `x` is wrapped by a transform of torch.func, so that no Python branch may read its value."""
    return isinstance(x, Tensor) and functorch.maybe_get_level(x) != -1


def constant(x: Tensor) -> Tensor:
    """`x` detached at every level of torch.func; a batched tensor stays batched."""
    if not is_wrapped(x):
        with beneath_functorch():
            return x.detach()
    inner = constant(functorch.get_unwrapped(x))
    if functorch.is_batchedtensor(x):
        return functorch._add_batch_dim(inner, functorch.maybe_get_bdim(x), functorch.maybe_get_level(x))
    return inner


def is_function(x: Tensor) -> bool:
    """Whether `x` has a gradient or a tangent, at any level of torch.func."""
    while True:
        # A batch has neither, but what it is a batch of.
        alone = not functorch.is_batchedtensor(x)
        if alone and (x.requires_grad or torch.autograd.forward_ad.unpack_dual(x, level=0).tangent is not None):
            return True
        if not is_wrapped(x):
            return False
        x = functorch.get_unwrapped(x)


def is_batch(x: Tensor) -> bool:
    """Whether `x` is wrapped by torch.func, or is a batched cotangent of `is_grads_batched`.

    The latter is of an older vmap, and can be recognised only by having no storage.
    """
    if functorch.maybe_get_level(x) != -1:
        return True
    if x.layout is not torch.strided:  # sparse tensors have no storage either
        return False
    try:
        x.untyped_storage()
    except NotImplementedError:
        return True
    return False


def levels(x: Tensor) -> frozenset[int]:
    """The levels of the vmaps in which a tensor is batched."""
    found = set()
    while is_wrapped(x):
        if functorch.is_batchedtensor(x):
            found.add(functorch.maybe_get_level(x))
        x = functorch.get_unwrapped(x)
    return frozenset(found)


class _Reinterpret(Function):
    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:  # type: ignore[override]
        return _Reinterpret.apply(x, dtype), in_dims[0]


def reinterpret(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of `x` as a dtype of the same size. In torch 2.11 `Tensor.view(dtype)` has no rule for vmap."""
    wrapped = not torch.compiler.is_compiling() and is_wrapped(x)
    return _Reinterpret.apply(x, dtype) if wrapped else x.view(dtype)
