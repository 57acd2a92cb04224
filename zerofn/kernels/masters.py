"""A number of 24 bits as a bf16 number and 8 bits more: what bf16 has rounded away, in 256ths of its last place.

The 24 bits are the first ones of an fp32 number: its sign, its exponent and 15 bits of its mantissa. They are an
integer in which the numbers of one sign follow one another. The bf16 number is that integer over 256, to the nearest
(ties away from zero), and the residual is what remains, from -128 to 127. So both are made by shifts and a sum, each
pair is one number, and the bf16 number is the master rounded to nearest. FlashOptim (2026) keeps such a residual, in
127ths of half the distance to the next number.

The last 8 bits of an fp32 number are rounded to nearest, ties to even: the relative error is at most 2 ** -16. A change
of a parameter by less than 2 ** -17 of it is lost, where bf16 alone loses one below 2 ** -9. Random bits would keep it
on average, but then the residual is not needed: `low_precision_adam(rounding="stochastic")` does with 16 bits.

A zero, an infinity or a NaN has no residual, whatever is kept as one: someone may have written it by hand, over another
number whose residual is still there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .._compat.functorch import reinterpret
from .._compat.tensors import is_shape_only
from . import native
from .recording import concrete, differentiated, straight_through

_SIZE, _INFINITE, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC000


@dataclass(frozen=True)
class Master:
    """A master in its two parts, for a kernel that updates it without its fp32 numbers in memory.

    Attributes:
        p: a bf16 tensor.
        residual: an int8 tensor of the same shape.
    """

    p: Tensor
    residual: Tensor

    @staticmethod
    def of(x: Tensor) -> Master:
        """A master, fp32, in two parts."""
        p, residual = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int8)
        return Master(bf16_of_master(p, x), residual_of_master(residual, x))

    def clone(self) -> Master:
        return Master(self.p.clone(), self.residual.clone())


def master_of(p: Tensor, residual: Tensor, room: Room | None = None) -> Tensor:
    """The master, fp32, of a bf16 tensor and its residual, int8. Derivatives pass to `p` as through a cast.

    Args:
        p: the bf16 tensor.
        residual: a tensor of the same shape.
        room: memory for the master, if the caller needs the master only for a while.

    Examples:
        >>> p = torch.tensor([1.0, 1.0, -1.0, 0.0], dtype=torch.bfloat16)
        >>> (master_of(p, torch.tensor([1, -128, 64, 9], dtype=torch.int8)) - p) * 2**15
        tensor([  1., -64., -64.,   0.])
    """
    if kernel := _kernel(p, residual):
        x = torch.empty_like(p, dtype=torch.float32) if room is None else room.of(p.shape)
        kernel(0, x, p, residual)
        return x
    wide = p.to(torch.float32)
    pattern = reinterpret(wide, torch.int32)
    size = pattern & _SIZE
    more = (residual.to(torch.int32) << 8) * ((size > 0) & (size < _INFINITE))
    return straight_through(wide, reinterpret(pattern + more, torch.float32))


def bf16_of_master(p: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The new bf16 tensor of a parameter, from its fp32 master `x`. Derivatives pass as through a cast.

    `p` is the old bf16 tensor of the parameter. The result is a new tensor, or is written into `out`.

    Examples:
        >>> x = torch.tensor([1.0, 1.0 + 2**-15, 1.0 + 3 * 2**-9, torch.inf])
        >>> bf16_of_master(x.bfloat16(), x).tolist()
        [1.0, 1.0, 1.0078125, inf]
    """
    if kernel := _kernel(x, p):
        new = torch.empty_like(x, dtype=torch.bfloat16) if out is None else out
        kernel(1, x, new, None)
        return new
    top = (_first_bits(x) + 0x80) >> 8
    new = reinterpret(top.to(torch.int16), torch.bfloat16)
    if differentiated(x):
        new = straight_through(x, new.to(torch.float32)).to(torch.bfloat16)
    return new if out is None else out.copy_(new)


def residual_of_master(residual: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The new int8 residual of a parameter, from its fp32 master `x`.

    `residual` is the old residual of the parameter. The result is a new tensor, or is written into `out`.

    Examples:
        >>> x = torch.tensor([1.0, 1.0 + 2**-15, 1.0 + 3 * 2**-9, torch.inf])
        >>> residual_of_master(torch.zeros(4, dtype=torch.int8), x).tolist()
        [0, 1, -64, 0]
    """
    if kernel := _kernel(x, residual):
        new = torch.empty_like(x, dtype=torch.int8) if out is None else out
        kernel(2, x, None, new)
        return new
    first = _first_bits(x)
    new = (first - (((first + 0x80) >> 8) << 8)).to(torch.int8)
    return new if out is None else out.copy_(new)


def together(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Groups of paths: one call of each operation handles the tensors of a group, laid one behind the other.

    Grouping saves time because a kernel launch on a GPU, or a call of an operation on a CPU, takes longer than the
    arithmetic on many small tensors. A group of its own is each large tensor on a CPU, which one call of C handles, and
    each tensor that is not contiguous.
    """
    found: dict[Any, list[str]] = {}
    for path, x in tensors.items():
        alone = not x.is_contiguous() or (x.is_cpu and x.numel() >= LARGE)
        found.setdefault(path if alone else x.device, []).append(path)
    return list(found.values())


def laid_out(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one behind the other, flat.

    Examples:
        >>> laid_out([torch.zeros(2), torch.ones(1, 2)])
        tensor([0., 0., 1., 1.])
    """
    return torch.cat([x.reshape(-1) for x in tensors])


def taken_apart(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a flat tensor, made by `laid_out`, into views with the shapes of the tensors `like`.

    Examples:
        >>> taken_apart(torch.arange(4), [torch.zeros(2), torch.ones(1, 2)])
        [tensor([0, 1]), tensor([[2, 3]])]
    """
    return [x.view(y.shape) for x, y in zip(flat.split([y.numel() for y in like]), like, strict=True)]


class Room:
    """Memory on the CPU for the fp32 masters of a bucket. The masters of the next bucket use the same memory.

    New memory would cost more time than the update: the system fills each page with zeros when it is first written.
    """

    def __init__(self) -> None:
        self.flat = torch.empty(0, dtype=torch.float32)
        self.elements = self.taken = 0

    def emptied(self, elements: int) -> Room:
        """Begin a bucket whose masters have `elements` numbers in all, and return this room."""
        self.elements, self.taken = elements, 0
        return self

    def of(self, shape: torch.Size) -> Tensor:
        """A tensor of this shape in the memory, behind the tensors that the bucket has there already."""
        if not self.taken and len(self.flat) < self.elements:
            self.flat = torch.empty(self.elements, dtype=torch.float32)
        begin, self.taken = self.taken, self.taken + shape.numel()
        return self.flat[begin : self.taken].view(shape)


def _first_bits(x: Tensor) -> Tensor:
    """The first 24 bits of each number as an int32, rounded. Of a NaN they could become those of another number."""
    pattern = reinterpret(x, torch.int32)
    return torch.where(x.isnan(), _NAN, (pattern + 0x7F + ((pattern >> 8) & 1)) >> 8)


# ----------------------------------------------------------------------------------------------------------------------
# The same in C, for leaves that are large enough for a call of it.


# Elements from which on the kernel is called: fewer take less time than the call.
LARGE = 1 << 13
_FILES = [Path(__file__).with_name(name) for name in ("masters.c", "native_masters.h", "native_threads.h")]
_PLAIN = (Tensor, torch.nn.Parameter)


def _kernel(*tensors: Tensor) -> Callable[..., None] | None:
    """The kernel, if it takes these tensors; what it writes is like one of them."""
    x = tensors[0]
    if x.numel() < LARGE or not concrete(x) or differentiated(x):
        return None
    if not all([type(each) in _PLAIN and each.is_cpu and each.is_contiguous() for each in tensors]):
        return None
    return None if is_shape_only(x) else _checked()


@functools.cache
def _checked() -> Callable[..., None] | None:
    """The kernel, after a check that it gives the bits of the formulas on a sample; else ``None``."""
    command = native.quiet_compiler()
    if command is None:
        return None
    try:
        function = native.library(command, _FILES, (), _declared).zerofn_masters
    except (OSError, AttributeError):
        return None

    def kernel(kind: int, x: Tensor, p: Tensor | None, residual: Tensor | None) -> None:
        places = [None if one is None else one.data_ptr() for one in (x, p, residual)]
        function(kind, *places, x.numel(), torch.get_num_threads(), native.parallel())
        increment_version([one for one in (x, p, residual)[kind : kind + 1] if one is not None])

    # In each tensor fewer elements than the formulas leave to the kernel.
    (x,) = native.sample(LARGE - 1)[0]
    p, residual = bf16_of_master(x.bfloat16(), x), residual_of_master(torch.zeros_like(x, dtype=torch.int8), x)
    mine = torch.empty_like(x), torch.empty_like(p), torch.empty_like(residual)
    kernel(0, mine[0], p, residual)
    kernel(1, x, mine[1], None)
    kernel(2, x, None, mine[2])
    same = native.same_bits([[mine[0]], [mine[1]]], [[master_of(p, residual)], [p]]) and torch.equal(mine[2], residual)
    return kernel if same else None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    function = library.zerofn_masters
    pointers = [ctypes.c_void_p] * 3
    function.argtypes = [ctypes.c_int, *pointers, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    function.restype = None
    return library
