"""Kinds of torch functions on a part: elementwise, asking for sizes, reshaping, writing, computing, ..."""

from __future__ import annotations

import enum
import functools

import torch
from torch import Tensor, nn

from .._compat.operators import tagged_pointwise
from .._compat.tensors import SHALLOW_COPY_CHECK


class Kind(enum.Enum):
    """What a function does."""

    ELEMENTS = enum.auto()  # elementwise
    LOOKS = enum.auto()  # asks about the tensor, or gives the same elements
    SIZES = enum.auto()  # asks for sizes
    PRINTS = enum.auto()
    RESHAPES = enum.auto()  # gives the same elements in another shape
    JOINS = enum.auto()  # concatenates tensors
    SPLITS = enum.auto()  # takes them apart again
    INDEXES = enum.auto()
    LIKE = enum.auto()  # makes a tensor beside it
    MAKES = enum.auto()  # makes a tensor of a given shape
    DRAWS = enum.auto()  # makes a tensor of random numbers beside it
    SAVES = enum.auto()  # gives out the memory
    COMPARES = enum.auto()
    WRITES = enum.auto()  # writes into its first argument, and not elementwise
    COMPUTES = enum.auto()  # all else


# fmt: off
# Elementwise, and not tagged as such by torch.
POINTWISE = frozenset({
    "copy", "divide", "fill", "floor_divide", "isclose", "masked_fill", "multiply", "not_equal", "square", "subtract",
    "zero",
})
# Names of an elementwise function and of a reduction.
REDUCING = frozenset({"max", "min"})
LOOKS = frozenset({
    "__delete__", "__dir__", "__hash__", "__set__", "alias", "as_subclass", "backward", "bfloat16", "clone",
    "contiguous", "cpu", "cuda", "detach", "detach_", "double", "element_size", "float", "get_device", "half",
    "pin_memory", "requires_grad_", "retain_grad", "to", "type", "type_as",
    SHALLOW_COPY_CHECK,
})
# Functions and attributes.
SIZES = frozenset({
    "__len__", "dim", "dim_order", "is_contiguous", "is_same_size", "nbytes", "ndim", "ndimension", "nelement", "numel",
    "shape", "size", "storage_offset", "stride",
})
BEGINNINGS = ("is_", "has_", "register_")
PRIVATE = frozenset({name for name in dir(Tensor) if name.startswith("_") and not name.startswith("__")})
# Attributes that are computed.
COMPUTED = frozenset({"T", "mT", "H", "mH", "real", "imag"})
BY_NAME = {
    Kind.LOOKS: LOOKS | PRIVATE,
    Kind.SIZES: SIZES,
    Kind.PRINTS: frozenset({"__format__", "__repr__"}),
    Kind.RESHAPES: frozenset({
        "flatten", "ravel", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view", "view_as",
    }),
    Kind.JOINS: frozenset({"cat", "concat", "concatenate", "hstack"}),
    Kind.SPLITS: frozenset({"split", "split_with_sizes"}),
    Kind.INDEXES: frozenset({"__getitem__"}),
    # With which torch.save, safetensors and NumPy read memory.
    Kind.SAVES: frozenset({"__reduce_ex__", "__array__", "data_ptr", "numpy", "storage", "untyped_storage"}),
    Kind.COMPARES: frozenset({"allclose", "equal"}),
}
# What fills a tensor with random numbers, whatever it held.
RANDOM = frozenset({
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "kaiming_uniform_", "log_normal_", "normal_", "random_",
    "trunc_normal_", "uniform_",
})
# `__radd__`, `__iadd__` and `__add__` are one operation.
DUNDERS = frozenset({
    "abs", "add", "and", "div", "eq", "floordiv", "ge", "gt", "invert", "le", "lshift", "lt", "mod", "mul", "ne", "neg",
    "or", "pow", "rshift", "sub", "truediv", "xor",
})
WRITING = frozenset({
    "__iadd__", "__iand__", "__ifloordiv__", "__ilshift__", "__imatmul__", "__imod__", "__imul__", "__ior__",
    "__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__", "__setitem__",
})
# fmt: on
INIT = nn.init.__name__


@functools.cache
def pointwise(name: str) -> bool:
    """Whether a function is elementwise, and broadcasts its arguments.

    >>> pointwise("_foreach_lerp_"), pointwise("__radd__"), pointwise("isnan"), pointwise("sum")
    (True, True, True, False)
    """
    if name.startswith("__") and name.endswith("__"):
        inner = name[2:-2]
        return inner in DUNDERS or inner[1:] in DUNDERS
    base = name.removeprefix("_foreach_").rstrip("_")
    return base in POINTWISE or (base not in REDUCING and tagged_pointwise(base))


def in_place(name: str) -> bool:
    """Whether a function writes into its first argument.

    >>> in_place("mul_"), in_place("__iadd__"), in_place("__add__"), in_place("requires_grad_")
    (True, True, False, True)
    """
    return name in WRITING or (name.endswith("_") and not name.endswith("__"))


@functools.cache
def kind_of(name: str, attribute: str = "") -> Kind:
    """The kind of a function.

    Args:
        name: its name.
        attribute: the name of the attribute, if it is `__get__` of one.

    >>> kind_of("mul_"), kind_of("norm"), kind_of("view"), kind_of("__get__", "T"), kind_of("cumsum_")
    (<Kind.ELEMENTS: 1>, <Kind.COMPUTES: 15>, <Kind.RESHAPES: 5>, <Kind.COMPUTES: 15>, <Kind.WRITES: 14>)
    """
    if name == "__get__":
        return Kind.SIZES if attribute in SIZES else Kind.COMPUTES if attribute in COMPUTED else Kind.LOOKS
    for kind, names in BY_NAME.items():
        if name in names:
            return kind
    if name.startswith(BEGINNINGS):
        return Kind.LOOKS
    if name.startswith("new_"):
        return Kind.MAKES
    if name.endswith("_like"):
        return Kind.DRAWS if name.startswith("rand") else Kind.LIKE
    if pointwise(name):
        return Kind.ELEMENTS
    return Kind.WRITES if in_place(name) else Kind.COMPUTES


def from_init(func: object) -> bool:
    """Whether a function is one of `torch.nn.init`."""
    return getattr(func, "__module__", None) == INIT


def dtype_in(args: tuple, kwargs: dict) -> bool:
    """Whether a dtype is among the arguments, as in `x.view(dtype)`."""
    return any(isinstance(x, torch.dtype) for x in (*args, *kwargs.values()))
