"""The C kernel of low-precision Adam over lists of leaves, once it has given the bits of eager torch."""

from __future__ import annotations

import functools
from typing import Any

import torch

from zerofn._compat.autograd import increment_versions
from zerofn.kernels import native as _native
from zerofn.kernels.adam_formula import (
    Dtypes,
    Leaves,
    Settings,
    run_chunked,
    scalars,
)
from zerofn.kernels.native_sample import same_bits, sample

_EXACT = (torch.float32,) * 4


def run_native(leaves: Leaves, settings: Settings, norms: list[float] | None = None) -> None:
    """The C kernel, once for each combination of dtypes; eager torch where it cannot be built.

    Where `norms` is a list, that of each gradient is appended, if the kernel was called on all of them.
    """
    found: dict[int, float] = {}
    kinds = leaves.all_dtypes()
    for kind in dict.fromkeys(kinds):
        entries, part = range(len(kinds)), leaves
        if kinds.count(kind) < len(kinds):
            entries = [i for i, other in enumerate(kinds) if other == kind]
            columns: Any = [None if column is None else [column[i] for i in entries] for column in leaves]
            part = Leaves(*columns)
        dtypes: Any = kind[:4]
        function = native_kernel(dtypes, settings.rounding, settings.beta1, settings.form)
        if function is None:
            run_chunked(part, settings)
            continue
        found |= zip(entries, _call(function, part, settings, norms is not None), strict=False)
        increment_versions([*part.params, *part.exp_avgs, *part.exp_avg_sqs, *(part.compensations or ())])
    if norms is not None and len(found) == len(leaves.grads):
        norms += [found[i] for i in range(len(leaves.grads))]


def _call(function: Any, leaves: Leaves, settings: Settings, norms: bool = False) -> list[float]:
    return _native.run(
        function,
        leaves.tensors,
        keys=leaves.keys,
        offsets=leaves.offsets,
        seed=settings.seed,
        step=settings.step,
        scalars=settings.scalars,
        norms=norms,
    )


@functools.cache
def native_kernel(dtypes: Dtypes, rounding: str, beta1: float, form: int) -> Any:
    """The C function, after it has given the bits of eager torch on a sample; else ``None`` and a warning.

    Whether an unknown compiler keeps the order of roundings is not a matter of trust: the check takes a
    millisecond, once in a process. The arithmetic is checked in float32, where one rounding too few shows;
    in bfloat16 it would show in one number of thousands.
    """
    if dtypes != _EXACT and native_kernel(_EXACT, rounding, beta1, form) is None:
        return None
    settings = Settings(3, scalars(3, 0.01, beta1, 0.999, 1e-8, 0.1), rounding, beta1, seed=1, form=form)
    function = _native.load(dtypes, sum(on << bit for bit, on in enumerate(settings.mode(dtypes))), form)
    if function is None:
        return None
    native, eager = (_sample(dtypes, rounding == "kahan") for _ in range(2))
    _call(function, native, settings)
    run_chunked(eager, settings)
    if same_bits(native.tensors, eager.tensors):
        return function
    _native.give_up("the C kernel, as this compiler builds it, gives other bits than eager torch")
    return None


def _sample(dtypes: Dtypes, kahan: bool) -> Leaves:
    p, g, m, v = [[x.to(dtype)] for (x,), dtype in zip(sample(1001), dtypes, strict=True)]
    return Leaves(p, g, m, v, [torch.zeros_like(p[0])] if kahan else None, keys=[7], offsets=[3])
