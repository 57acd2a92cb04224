"""Tells torch's functions apart: those that are elementwise, that write, or that only look at a tensor."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from .._compat.tensors import SHALLOW_COPY_CHECK, tagged_pointwise

# fmt: off
# Elementwise functions that torch does not tag as such.
POINTWISE = frozenset({
    "copy", "divide", "fill", "floor_divide", "isclose", "masked_fill", "multiply", "not_equal", "square", "subtract",
    "zero",
})
# Functions that torch tags as elementwise, and that also reduce, or have two results.
NOT_ALWAYS = frozenset({"equal", "frexp", "max", "min"})
# Kernels that update whole lists, element by element.
FUSED = frozenset({"_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"})
# Functions that give the same elements, perhaps in another dtype or on another device.
CONVERSIONS = frozenset({
    "alias", "bfloat16", "clone", "contiguous", "cpu", "cuda", "double", "float", "half", "pin_memory", "to", "type_as",
})
# Functions that look at a tensor, or treat it as the leaf of a graph.
LOOKING = frozenset({
    "__delete__", "__dir__", "detach_", "__hash__", "__len__", "backward", "dim", "dim_order", "element_size",
    "get_device", "grad", "is_contiguous", "is_same_size", "ndimension", "nelement", "numel", "requires_grad_",
    "retain_grad", "size", "storage_offset", "stride", "type", SHALLOW_COPY_CHECK,
})
BEGINNINGS = ("is_", "has_", "register_")
PRIVATE = frozenset({name for name in dir(Tensor) if name.startswith("_") and not name.startswith("__")})
# Attributes that are computed from the tensor.
COMPUTED = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# Functions that give out memory: torch.save, safetensors and NumPy read it with these.
GIVING_MEMORY = frozenset({"__array__", "data_ptr", "numpy", "share_memory_", "storage", "untyped_storage"})
NORMS = frozenset({"_foreach_norm", "linalg_matrix_norm", "linalg_norm", "linalg_vector_norm", "norm"})
# Functions that fill a tensor with random numbers, whatever it held.
RANDOM = frozenset({
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "kaiming_uniform_", "log_normal_", "normal_", "random_",
    "trunc_normal_", "uniform_",
})
# Functions whose result has the sizes of another tensor, and the same memory.
SAME_SIZES = frozenset({"expand_as", "view_as"})
# Functions that make a tensor of the same sizes, whatever the other one holds.
LIKE = frozenset({"empty_like", "full_like", "ones_like", "zeros_like"})
# Operators below autograd whose result has elements in the same places, and those that may have.
ALIKE = frozenset({"_to_copy", "alias", "clone", "copy_", "detach", "empty_like", "ones_like", "zeros_like"})
VIEWS = frozenset({"_unsafe_view", "expand", "view"})
# `__radd__`, `__iadd__` and `__add__` are one operation.
DUNDERS = frozenset({
    "abs", "add", "and", "div", "eq", "floordiv", "ge", "gt", "invert", "le", "lshift", "lt", "mod", "mul", "ne", "neg",
    "or", "pow", "rshift", "sub", "truediv", "xor",
})
WRITING = frozenset({
    "__iadd__", "__iand__", "__ifloordiv__", "__ilshift__", "__imatmul__", "__imod__", "__imul__", "__ior__",
    "__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__", "__setitem__",
})
# Names of the first argument of torch's functions. If a function has two of these, the earlier one here is its first.
FIRST = ("condition", "sorted_sequence", "input", "tensors", "tensor", "self")
# fmt: on
FOREACH = "_foreach_"
# The module of all-reduces, broadcasts and the like.
COLLECTIVES = "torch.distributed.distributed_c10d"


@functools.cache
def pointwise(name: str) -> bool:
    """Whether a function is elementwise, and broadcasts its arguments.

    >>> pointwise("_foreach_lerp_"), pointwise("__radd__"), pointwise("isnan"), pointwise("sum")
    (True, True, True, False)
    """
    if name in FUSED:
        return True
    if name.startswith("__") and name.endswith("__"):
        inner = name[2:-2]
        return inner in DUNDERS or inner[1:] in DUNDERS
    base = name.removeprefix(FOREACH).rstrip("_")
    return base in POINTWISE or (base not in NOT_ALWAYS and tagged_pointwise(base))


def in_place(name: str) -> bool:
    """Whether a function writes into its first argument.

    >>> in_place("mul_"), in_place("__iadd__"), in_place("__add__"), in_place("requires_grad_")
    (True, True, False, True)
    """
    return name in WRITING or (name.endswith("_") and not name.endswith("__"))


def looks(name: str) -> bool:
    """Whether a function looks at a tensor, and computes nothing.

    >>> looks("numel"), looks("is_floating_point"), looks("register_hook"), looks("norm")
    (True, True, True, False)
    """
    return name in LOOKING or (name in PRIVATE and name not in FUSED) or name.startswith(BEGINNINGS)


def from_init(func: object) -> bool:
    """Whether a function is one of `torch.nn.init`."""
    return getattr(func, "__module__", None) == nn.init.__name__


def first_by_position(kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with the first one by position, if it was given by name."""
    first = next((k for k in FIRST if k in kwargs), "")
    return ((kwargs[first],), {k: x for k, x in kwargs.items() if k != first}) if first else ((), kwargs)


def tensors_in(args: Any) -> Iterator[Tensor]:
    """Tensors among arguments, and in lists among them: a recurrent module has a class of its own for its weights."""
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif type(x) is tuple or isinstance(x, list):
            yield from tensors_in(x)
