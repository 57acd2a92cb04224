"""Tensors: their memory, their versions, and subclasses with or without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from .functorch import functorch, innermost

# The `__torch_function__` of a subclass that only has a `__torch_dispatch__`.
no_torch_function = nn.Parameter.__torch_function__
without_memory = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]

# The function by which `p.data = x` checks that the two are of compatible types; it computes nothing.
SHALLOW_COPY_CHECK = "_has_compatible_shallow_copy_type"

# Autograd's count of writes into a tensor's memory.
version: Callable[[Tensor], int] = attrgetter("_version")


def base_of(x: Tensor) -> Tensor:
    """The tensor that `x` is a view of; `x` itself if it is none."""
    return x if x._base is None else x._base


_CDATA = attrgetter("_cdata")


def memory(x: Tensor) -> int:
    """A number that identifies the storage of a tensor; 0 for one without storage of its own."""
    other = type(x) is not Tensor and is_wrapper(x)
    if other or functorch.maybe_get_level(x) != -1 or x.layout is not torch.strided:
        return 0
    return x.untyped_storage()._cdata


def memories(tensors: Iterable[Tensor]) -> set[int]:
    """The numbers of the storages of these tensors, without 0."""
    tensors = list(tensors)
    if set(map(type, tensors)) <= {Tensor} and functorch.peek_interpreter_stack() is None:
        try:
            # Without a call in Python for each tensor.
            return set(map(_CDATA, map(Tensor.untyped_storage, tensors)))
        except NotImplementedError:  # one is sparse
            pass
    return {memory(innermost(x)) for x in tensors} - {0}


def self_overlapping(x: Tensor) -> bool:
    """Whether two of its elements are at one place, as of what `expand` gives.

    >>> self_overlapping(torch.ones(2).expand(3, 2)), self_overlapping(torch.ones(3, 2).T)
    (True, False)
    """
    span, doubtful = 0, False
    for stride, size in sorted([(s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]):
        if not stride:
            return True
        doubtful |= stride <= span
        span += stride * (size - 1)
    if not doubtful:
        return False
    # Dimensions may interleave without an overlap: rare, and so counted.
    places = torch.arange(span + 1).as_strided(x.shape, x.stride())
    return places.unique().numel() < x.numel()


def all_plain(tensors: Sequence[object]) -> bool:
    """Whether all are of class `Tensor` and have storage: neither `None`, nor sparse, nor batched in any way.

    Asked from C for all together, for hot paths.
    """
    if not set(map(type, tensors)) <= {Tensor} or functorch.peek_interpreter_stack() is not None:
        return False
    try:
        for _ in map(Tensor.untyped_storage, tensors):  # type: ignore[arg-type]
            pass
    except NotImplementedError:
        return False
    return True


def is_wrapper(x: Tensor) -> bool:
    """Whether `x` is of a subclass that holds other tensors and no memory, as DTensor and torchao's quantized ones."""
    return type(x) is not Tensor and hasattr(x, "__tensor_flatten__")


def local_of(x: Any) -> Tensor:
    """The local tensor of a DTensor itself, no view of it."""
    return x._local_tensor


def set_local(x: Any, local: Tensor) -> None:
    """Replace the local tensor of a DTensor, also by one on another device."""
    x._local_tensor = local


def alias_of(x: Tensor, cls: type[Any]) -> Any:
    """The same memory and version counter in a tensor of another class, detached."""
    return Tensor._make_subclass(cls, x)  # type: ignore[attr-defined]


# What tensors raise that are `shape_only`, when their numbers are asked for.
NoNumbers = (DataDependentOutputException, DynamicOutputShapeException)


@contextmanager
def shape_only() -> Iterator[Callable[[Tensor], Tensor]]:
    """Tensors made inside have shape, dtype and device but no memory; yields a function that makes such of a tensor.

    Meta tensors would lose the device.
    """
    with FakeTensorMode() as mode:
        yield mode.from_tensor


def is_shape_only(x: Tensor) -> bool:
    """Whether a tensor was made inside `shape_only`."""
    return isinstance(x, FakeTensor)
