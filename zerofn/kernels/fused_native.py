"""torch's fused Adam in C, for large fp32 leaves on CPU: the same bits, faster, with the norms of the gradients.

Such an update is bound by memory bandwidth. torch's kernel relies on the hardware prefetcher, which stops at each page
of 4 KiB; and the norm of the gradients, which metrics show, is a second pass over them. This kernel computes both in
one pass, with prefetch instructions. Without a C compiler torch's kernel is called, without a warning: it is slower,
and its bits are the same.

Source: Kingma and Ba, "Adam", ICLR 2015, in the order of operations of `torch._fused_adamw_`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerofn._compat.operators import fused_adam_, fused_adamw_
from zerofn.kernels import native
from zerofn.kernels.native_sample import same_bits, sample

Columns = Sequence[list[Tensor]]

# Elements of all leaves together from which on the C kernel is used. Below, all that an update reads and writes fits
# into the cache of one core, and neither the arguments of a call nor the compiler's time at the first pay.
LARGE = 1 << 20
# torch's kernel computes the last elements of a leaf, fewer than one of its vectors, in another way. What is beyond a
# multiple of this, which is at least as long as a vector, is left to it.
LINE = 16

_FILES = [Path(__file__).with_name(name) for name in ("fused.c", "native_sums.h", "native_threads.h")]
# Read of every leaf in every step, and so from C.
_DTYPE, _IS_CPU = attrgetter("dtype"), attrgetter("is_cpu")
_PLAIN = {Tensor, torch.nn.Parameter}


class _Job(ctypes.Structure):
    """``job`` of ``fused.c``."""

    _fields_ = [
        ("entries", ctypes.c_int64),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in "pgmv"),
        ("numel", ctypes.POINTER(ctypes.c_int64)),
        ("scalars", ctypes.c_float * 8),
        ("decoupled", ctypes.c_int),
        ("squares", ctypes.POINTER(ctypes.c_double)),
    ]


def can(columns: Columns, decoupled: bool, beta1: float) -> bool:
    """Whether `run` takes these lists of parameters, gradients and moments."""
    if sum(map(Tensor.numel, columns[0])) < LARGE:
        return False
    for column in columns:
        if set(map(type, column)) - _PLAIN or set(map(_DTYPE, column)) != {torch.float32}:
            return False
        if not all(map(_IS_CPU, column)) or not all(map(Tensor.is_contiguous, column)):
            return False
    return _function(decoupled, beta1 > 0.5) is not None


def run(
    columns: Columns,
    step: int,
    lr: Any,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    norms: bool = False,
) -> list[float]:
    """One update in place, but of `ends`; with `norms` the norms of the whole gradients are returned."""
    function = _function(decoupled, beta1 > 0.5)
    assert function is not None
    # Without a decay there is no product to add, which of an infinite parameter would not be a number.
    no_sum = decoupled or weight_decay == 0
    return _call(function, columns, _scalars(step, float(lr), beta1, beta2, eps, weight_decay), no_sum, norms)


def ends(columns: Columns) -> Columns:
    """Views of the elements beyond a multiple of `LINE`, of the leaves that have some: torch's kernel updates them."""
    chosen = [i for i, x in enumerate(columns[0]) if x.numel() % LINE]
    return [[_end(column[i]) for i in chosen] for column in columns]


def _end(x: Tensor) -> Tensor:
    flat = x.detach().view(-1)
    return flat[len(flat) // LINE * LINE :]


def _scalars(step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float) -> tuple[float, ...]:
    rate, spread = -lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    return beta2, 1 - beta1, 1 - beta2, rate, spread, eps, 1 - lr * decay, decay


def _call(
    function: Any, columns: Columns, scalars: Sequence[float], decoupled: bool, norms: bool = False
) -> list[float]:
    count = len(columns[0])
    pointers = [(ctypes.c_void_p * count)(*map(Tensor.data_ptr, column)) for column in columns]
    lengths = [n // LINE * LINE for n in map(Tensor.numel, columns[0])]
    squares = (ctypes.c_double * count)() if norms else None
    job = _Job(count, *pointers, (ctypes.c_int64 * count)(*lengths), (ctypes.c_float * 8)(*scalars), decoupled, squares)
    # Read before the update: a gradient may share the memory of what is written.
    rests = [float(_end(g).double().square().sum()) if g.numel() % LINE else 0.0 for g in columns[1] if norms]
    if function(ctypes.byref(job), torch.get_num_threads(), native.parallel()):
        raise MemoryError("no memory for the sums of squares of gradients")
    return [(x + rest) ** 0.5 for x, rest in zip(squares or (), rests, strict=True)]


@functools.cache
def _function(decoupled: bool, near: bool) -> Any:
    """The C function, after it has given the bits of torch's kernel on a sample; else ``None``.

    Which products torch's kernel fuses with sums depends on torch's compiler and on the processor.

    Args:
        decoupled: whether weights decay by themselves, and not by way of the gradient.
        near: whether ``1 - beta1`` is below a half: `torch.lerp` has a formula for either case.
    """
    command = native.quiet_compiler()
    if command is None:
        return None
    try:
        function = native.library(command, _FILES, (), _declared).zerofn_fused_adam
    except (OSError, AttributeError):
        return None
    mine, torchs = _sample(), _sample()
    beta1 = 0.9 if near else 0.25
    _call(function, mine, _scalars(3, 0.01, beta1, 0.999, 1e-8, 0.1), decoupled)
    fused: Any = fused_adamw_ if decoupled else fused_adam_
    how = dict(lr=0.01, beta1=beta1, beta2=0.999, eps=1e-8, weight_decay=0.1, amsgrad=False, maximize=False)
    fused(*torchs, [], [torch.tensor(3.0)], **how)
    return function if same_bits(mine, torchs) else None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    function = library.zerofn_fused_adam
    function.argtypes, function.restype = [ctypes.POINTER(_Job), ctypes.c_int, ctypes.c_void_p], ctypes.c_int
    return library


def _sample() -> list[list[Tensor]]:
    """One leaf of whole lines: `sample`, and ordinary numbers behind."""
    i = torch.arange(1, 251 * LINE + 1)
    p, g, m, v = (torch.sin(i * k) for k in (1.0, 2.1, 3.7, 5.3))
    return [[torch.cat([*x, y])] for x, y in zip(sample(251 * LINE), (p, g, m, v.abs()), strict=True)]
