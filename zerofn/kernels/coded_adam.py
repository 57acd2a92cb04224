"""Adam on moments that are kept as codes: one pass in C, with the bits of decoding, updating and encoding.

The moments are numbers in the cache of a processor alone, one block after the other. Without this kernel they pass
through memory as codes, as numbers and as codes again.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import native
from .adam import adam_, scalars
from .codes import HEADERS, LARGE, Coded, Codes, Draws, defines_of
from .fused_adam import fused_update
from .rounding import FORMAT

# Elements of the largest block that the kernel has room for.
MOST = 1024
# torch's kernel rounds the last elements of a leaf, fewer than these, in another way: `fused_adam.LINE`.
_LINE = 16
_FILES = [
    Path(__file__).with_name(name)
    for name in ("coded_adam.c", "native_numbers.h", "native_prefetch.h", "native_sums.h")
]
_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_PLAIN = (Tensor, torch.nn.Parameter)


class _Job(ctypes.Structure):
    """``job`` of ``coded_adam.c``."""

    _fields_ = [
        ("entries", ctypes.c_int64),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("p", "g", "m", "v", "m_scales", "v_scales")),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("numel", "row")),
        *(
            (name, ctypes.POINTER(ctypes.c_uint64))
            for name in ("p_key", "m_key", "v_key", "offset", "m_step", "v_step")
        ),
        ("block", ctypes.c_int64),
        *((name, ctypes.c_uint64) for name in ("seed", "codes_seed", "step")),
        *((name, ctypes.c_int) for name in ("random", "decoupled")),
        ("scalars", ctypes.c_float * 8),
        ("squares", ctypes.POINTER(ctypes.c_double)),
    ]


@dataclass(frozen=True)
class CodedAdam:
    """Adam on leaves whose moments are `Coded`: that of torch's fused kernel on fp32, or `adam_` with fp32 moments.

    Attributes:
        fused: whether it is torch's.
        decoupled: whether the weight decay is decoupled from the gradient.
        rounding: of parameters below fp32, `"stochastic"` or `"nearest"`.
    """

    fused: bool
    decoupled: bool = True
    rounding: str = "nearest"

    def takes(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], *slots: Sequence[Any], form: int = FORMAT
    ) -> list[bool]:
        """For each leaf whether the kernel can update it, with the bits of torch. Few elements are not worth a call.

        Args:
            form: of the draws by which parameters are rounded.
        """
        if form != FORMAT or len(slots) != 2 or self.rounding == "kahan":
            return [False] * len(params)
        found = [self._takes(*row) for row in zip(params, grads, zip(*slots, strict=True), strict=True)]
        enough = sum([p.numel() for p, taken in zip(params, found, strict=True) if taken]) >= LARGE
        return found if enough else [False] * len(found)

    def _takes(self, p: Tensor, g: Tensor, moments: Sequence[Any]) -> bool:
        if not all(type(x) is Coded for x in moments):
            return False
        m, v = moments
        how, draws, tensors = m.how, (m.draws, v.draws), (p, g, m.codes, v.codes, m.scales, v.scales)
        if v.how != how or how.signed or how.block > MOST or (how.bits == 4 and how.block % 2):
            return False
        if m.scales.dtype is not torch.float32 or p.dtype not in _NAMES or g.dtype not in _NAMES or g.shape != p.shape:
            return False
        if not all(type(x) in _PLAIN and x.is_cpu and x.is_contiguous() for x in tensors):
            return False
        if self.fused and (p.dtype is not torch.float32 or p.numel() % _LINE):
            return False
        if None not in draws and not all(x.of_one_key(p.numel()) and x.seed == draws[0].seed for x in draws):
            return False
        return p.numel() > 0 and self._function(p.dtype, g.dtype, how) is not None

    def run(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Any],
        exp_avg_sqs: Sequence[Any],
        *,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        seed: int = 0,
        keys: Sequence[int] = (),
        offsets: Sequence[int] = (),
        norms: list[float] | None = None,
    ) -> None:
        """One update in place of leaves that this `takes`; norms of the gradients are appended to `norms`."""
        if self.fused:
            rate, spread = -lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
            given = beta2, 1 - beta1, 1 - beta2, rate, eps, 1 - lr * weight_decay, weight_decay, spread
        else:
            given = (*scalars(step, lr, beta1, beta2, eps, weight_decay), 1.0)
        # With no decay nothing is added: 0 * p would be NaN for an infinite parameter.
        no_sum = self.decoupled or weight_decay == 0
        found = [0.0] * len(params)
        kinds: dict[Any, list[int]] = {}
        for i, (p, g, m) in enumerate(zip(params, grads, exp_avgs, strict=True)):
            kinds.setdefault((p.dtype, g.dtype, m.how, m.draws is not None), []).append(i)
        for (dtype, grad_dtype, how, random), places in kinds.items():
            columns = [[column[i] for i in places] for column in (params, grads, exp_avgs, exp_avg_sqs)]
            named = [[column[i] for i in places] if column else [0] * len(places) for column in (keys, offsets)]
            function = self._function(dtype, grad_dtype, how)
            squares = _call(function, columns, named, given, (seed, step), how.block, random, no_sum, norms is not None)
            for i, x in zip(places, squares, strict=False):
                found[i] = x**0.5
        if norms is not None:
            norms += found
        coded = [x for one in (*exp_avgs, *exp_avg_sqs) for x in (one.codes, one.scales)]
        increment_version([*params, *coded])

    def _function(self, dtype: torch.dtype, grad_dtype: torch.dtype, how: Codes) -> Any:
        random = self.rounding == "stochastic" and dtype is not torch.float32
        return _library(self.fused, random, dtype, grad_dtype, how.bits, how.code)


def _call(
    function: Any,
    columns: Sequence[Sequence[Any]],
    named: Sequence[Sequence[int]],
    given: Sequence[float],
    of_params: tuple[int, int],
    block: int,
    random: bool,
    decoupled: bool,
    norms: bool,
) -> Sequence[float]:
    """Call the C function; the sums of squares of the gradients if `norms`."""
    params, grads, exp_avgs, exp_avg_sqs = columns
    count, moments = len(params), (exp_avgs, exp_avg_sqs)
    lists = params, grads, *([x.codes for x in ms] for ms in moments), *([x.scales for x in ms] for ms in moments)
    pointers = [(ctypes.c_void_p * count)(*map(Tensor.data_ptr, xs)) for xs in lists]
    lengths = list(map(Tensor.numel, params))
    rows = [n // len(p) for n, p in zip(lengths, params, strict=True)]
    draws = [[x.draws for x in ms] if random else [_NONE] * count for ms in moments]
    keys, offsets = named
    offsets = [x.offset for x in draws[0]] if random else offsets
    words = keys, *([x.key for x in one] for one in draws), offsets, *([int(x.step) for x in one] for one in draws)
    squares = (ctypes.c_double * count)() if norms else None
    job = _Job(
        count,
        *pointers,
        *((ctypes.c_int64 * count)(*xs) for xs in (lengths, rows)),
        *((ctypes.c_uint64 * count)(*xs) for xs in words),
        block,
        of_params[0],
        draws[0][0].seed,
        of_params[1],
        random,
        decoupled,
        (ctypes.c_float * 8)(*given),
        squares,
    )
    if function(ctypes.byref(job), torch.get_num_threads(), native.parallel()):
        raise MemoryError("no memory for the sums of squares of gradients")
    return list(squares or ())


_NONE = Draws(0, torch.tensor(0), 0)


@functools.cache
def _library(fused: bool, random: bool, dtype: torch.dtype, grad: torch.dtype, bits: int, code: str) -> Any:
    """The C function, after a check that it gives the bits of torch on a sample; else ``None``."""
    command = native.quiet_compiler()
    if command is None:
        return None
    defines = [f"-DZF_P={_NAMES[dtype]}", f"-DZF_G={_NAMES[grad]}", f"-DZF_FUSED={int(fused)}"]
    defines += [f"-DZF_RANDOM_P={int(random)}", *defines_of(Codes(bits, 128, code))]
    try:
        function = native.library(command, [*_FILES, *HEADERS], defines, _declared).zerofn_coded_adam
    except (OSError, AttributeError):
        return None
    how, rounding = Codes(bits, 100, code), "stochastic" if random else "nearest"
    columns = [[x.reshape(-1, 180).to(kind)] for (x,), kind in zip(native.sample(180 * 4), (dtype, grad), strict=False)]
    moments = [torch.sin(torch.arange(720.0) * k).reshape(4, 180) for k in (1.0, 2.1)]
    moments[1] = moments[1].square()
    for at, beta1 in ((None, 0.9), (2**31, 0.9), (None, 0.4)):
        draws = [None if at is None else Draws(1, torch.tensor(2), key, at) for key in (3, 4)]
        coded = [how.encode(x, one) for x, one in zip(moments, draws, strict=True)]
        numbers: Any = dict(step=3, lr=0.01, beta1=beta1, beta2=0.999, eps=1e-8, weight_decay=0.1)
        mine = columns[0][0].clone(), [Coded(how, *x, one).clone() for x, one in zip(coded, draws, strict=True)]
        theirs = columns[0][0].clone(), [how.decode(*x, (4, 180)) for x in coded]
        lists = [[mine[0]], columns[1], *([x] for x in mine[1])]
        wide = [[theirs[0]], columns[1], *([x] for x in theirs[1])]
        seeds = (1, 3)
        if fused:
            rate, spread = -0.01 / (1 - beta1**3), (1 - 0.999**3) ** 0.5
            given = 0.999, 1 - beta1, 1 - 0.999, rate, 1e-8, 1 - 0.01 * 0.1, 0.1, spread
            fused_update(*wide, decoupled=at is None, **numbers)
        else:
            given = (*scalars(3, 0.01, beta1, 0.999, 1e-8, 0.1), 1.0)
            adam_(*wide, **numbers, rounding=rounding, seed=1, keys=[7], offsets=[at or 0], implementation="eager")
        _call(
            function, lists, [[7], [at or 0]], given, seeds, how.block, at is not None, not fused or at is None, False
        )
        again = [how.encode(x, one) for x, one in zip(theirs[1], draws, strict=True)]
        same = [native.same_bits([[mine[0]]], [[theirs[0]]])]
        same += [torch.equal(x.codes, codes) for x, (codes, _) in zip(mine[1], again, strict=True)]
        same += [native.same_bits([[x.scales]], [[scales]]) for x, (_, scales) in zip(mine[1], again, strict=True)]
        if not all(same):
            return None
    return function


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    function = library.zerofn_coded_adam
    function.argtypes, function.restype = [ctypes.POINTER(_Job), ctypes.c_int, ctypes.c_void_p], ctypes.c_int
    return library
