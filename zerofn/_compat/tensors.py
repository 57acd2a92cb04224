"""Tensors: their memory, their versions, and subclasses with or without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import gcd
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


def sharing_memory(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Tensors that have an element in memory of an earlier one: by name, the name of that one.

    Views of one storage that have no element in common, as columns of one matrix, are not among them.

    >>> x = torch.zeros(2, 4)
    >>> sharing_memory({"a": x[0], "b": x[1], "left": x[:, :2], "right": x[:, 2:], "empty": x[:0]})
    {'left': 'a', 'right': 'a'}
    """
    storages: dict[int, list[tuple[str, Tensor]]] = {}
    for name, x in named.items():
        x = innermost(x)
        if x.numel() and (key := memory(x)):
            storages.setdefault(key, []).append((name, x))
    found: dict[str, str] = {}
    for views in storages.values():
        # By where they begin, so that a view is compared with those alone that reach into it.
        reach: list[tuple[int, int, str, Tensor]] = []
        for i, (name, x) in sorted(enumerate(views), key=lambda item: _bytes_of(item[1][1])[0]):
            low, high = _bytes_of(x)
            reach = [item for item in reach if item[0] > low]
            for _, j, other, y in reach:
                if _common(x, y):
                    first, second = (other, name) if j < i else (name, other)
                    found.setdefault(second, first)
            reach.append((high, i, name, x))
    return {name: found[name] for name in named if name in found}


def _bytes_of(x: Tensor) -> tuple[int, int]:
    """The range of its storage in which the elements of a tensor lie."""
    last = sum(int(stride) * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    first = int(x.storage_offset())
    return first * x.itemsize, (first + last + 1) * x.itemsize


def _common(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors over one storage, whose ranges overlap, have a byte in common."""
    if x.is_contiguous() and y.is_contiguous():
        return True
    unit = gcd(x.itemsize, y.itemsize)
    (low, high), (other_low, other_high) = _bytes_of(x), _bytes_of(y)
    begin = min(low, other_low)
    taken = torch.zeros((max(high, other_high) - begin) // unit, dtype=torch.bool)

    def places(t: Tensor) -> Tensor:
        n = t.itemsize // unit
        strides = [stride * n for stride in t.stride()]
        return taken.as_strided((*t.shape, n), (*strides, 1), (t.storage_offset() * t.itemsize - begin) // unit)

    places(x).fill_(True)
    return bool(places(y).any())


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
