"""Tensors: their memory, their versions, and those that have no memory or are of another class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .functorch import functorch, innermost

# The `__torch_function__` of a subclass that works below autograd alone.
no_torch_function = nn.Parameter.__torch_function__
without_memory = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]

# The function by which `p.data = x` asks whether the two are alike; it computes nothing.
SHALLOW = "_has_compatible_shallow_copy_type"

# How often a tensor's memory was written into, as autograd counts it.
version: Callable[[Tensor], int] = attrgetter("_version")


def base_of(x: Tensor) -> Tensor:
    """What autograd knows `x` to be a view of; itself for no view."""
    return x if x._base is None else x._base


_CDATA = attrgetter("_cdata")


def memory(x: Tensor) -> int:
    """A number for the memory that a tensor is a view of; 0 for one that has none of its own."""
    other = type(x) is not Tensor and is_wrapper(x)
    if other or functorch.maybe_get_level(x) != -1 or x.layout is not torch.strided:
        return 0
    return x.untyped_storage()._cdata


def memories(tensors: Iterable[Tensor]) -> set[int]:
    """What `memory` says of these, but 0."""
    tensors = list(tensors)
    if set(map(type, tensors)) <= {Tensor} and functorch.peek_interpreter_stack() is None:
        try:
            # Without a call in Python for each tensor.
            return set(map(_CDATA, map(Tensor.untyped_storage, tensors)))
        except NotImplementedError:  # one is sparse
            pass
    return {memory(innermost(x)) for x in tensors} - {0}


def all_plain(tensors: Sequence[object]) -> bool:
    """Whether all are tensors of no subclass that have memory: neither `None`, nor sparse, nor a batch of any kind.

    Asked from C and of all together, for code that asks often.
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
    """Whether `x` holds other tensors and no memory of its own, as torch's distributed and quantized ones."""
    return type(x) is not Tensor and hasattr(x, "__tensor_flatten__")


def local_of(x: Any) -> Tensor:
    """What one of torch's distributed tensors has on this rank, itself and no view of it."""
    return x._local_tensor


def set_local(x: Any, local: Tensor) -> None:
    """Exchange what a distributed tensor has on this rank, of whatever device."""
    x._local_tensor = local


def alias_of(x: Tensor, cls: type[Any]) -> Any:
    """The same memory and version count, of another class; outside of autograd."""
    return Tensor._make_subclass(cls, x)  # type: ignore[attr-defined]


@contextmanager
def shape_only() -> Iterator[Callable[[Tensor], Tensor]]:
    """Tensors made inside have shape, dtype and device and no memory; what is given turns a tensor into such.

    Meta tensors would do but for the device, which they forget.
    """
    with FakeTensorMode() as mode:
        yield mode.from_tensor


def is_shape_only(x: Tensor) -> bool:
    """Whether a tensor was made inside `shape_only`."""
    return isinstance(x, FakeTensor)
