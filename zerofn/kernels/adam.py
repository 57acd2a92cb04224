"""Adam on low-precision storage, in place: fp32 arithmetic, and one rounding for each stored number.

One formula (`zerofn.kernels.adam_formula`) is run in three ways: by eager torch, in chunks that stay in the cache;
by a C kernel with the same bits (`zerofn.kernels.native`), 10 to 20 times faster; by ``torch.compile`` on a GPU.

How parameters and moments below float32 are stored, by ``rounding``:

* ``"stochastic"``: parameters and second moments up or down at random, unbiased;
* ``"kahan"``: parameters to nearest, with what is lost carried in ``compensations``; second moments stochastically;
* ``"nearest"``: all to nearest. In bfloat16 that loses every update of the parameter below 1/512 of it, and with
  ``beta2 >= 0.996`` the second moment never shrinks.

First moments are rounded to nearest, which has a third of the error variance and, with ``beta1`` up to 0.98, no trap;
above it, stochastically, except under ``"nearest"``.

Why the second moment is never rounded to nearest by default. With ``beta2 = 0.999`` a decay step takes away
a thousandth, and bfloat16 values are 1/256 to 1/128 apart: rounded to nearest, a bfloat16 second moment
never shrinks, and grows only by gradients large enough to reach the next value. It is stuck at its
maximum and the effective learning rate with it.

Sources: Kingma and Ba, "Adam", ICLR 2015 (section 2, the reordered form); Loshchilov and Hutter, "Decoupled
Weight Decay Regularization", ICLR 2019; Kahan, "Further remarks on reducing truncation errors", CACM 1965;
Zamirai et al., "Revisiting BFloat16 Training", 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from zerofn._compat.operators import has_triton
from zerofn.kernels import native as _native
from zerofn.kernels.adam_formula import (
    Leaves,
    Settings,
    run_chunked,
    run_compiled,
    run_whole,
    scalars,
    whole,
)
from zerofn.kernels.rounding import FORMAT, known_formats
from zerofn.kernels.steps import check_step
from zerofn.kernels.tensor_lists import not_wrapped

from .adam_native import run_native

_PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOMENT_DTYPES = (torch.float32, torch.bfloat16)
# Read of every leaf in every step, and so from C.
_IS_CPU, _IS_META = attrgetter("is_cpu"), attrgetter("is_meta")


def _contiguous(leaves: Leaves) -> tuple[Leaves, list[tuple[Tensor, Tensor]]]:
    """Contiguous tensors, and pairs of (tensor to write back to, its contiguous copy)."""
    if all(all(map(Tensor.is_contiguous, tensors)) for tensors in leaves.tensors):
        return leaves, []
    lists: list[Any] = [[t.contiguous() for t in tensors] for tensors in leaves.tensors]
    copies = [
        (t, copy)
        for k, (tensors, new) in enumerate(zip(leaves.tensors, lists, strict=True))
        for t, copy in zip(tensors, new, strict=True)
        if k != 1 and copy is not t
    ]
    lists += [None] * (5 - len(lists))
    return Leaves(*lists, keys=leaves.keys, offsets=leaves.offsets), copies


def _have_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor is batched by vmap or without an address: of those only `run_whole` computes the formula."""
    # Fake and functional tensors are subclasses; functorch's wrappers look like plain tensors from Python.
    plain = set(map(type, tensors)) <= {Tensor, torch.nn.Parameter} and not any(map(_IS_META, tensors))
    return plain and not_wrapped(tensors)


def implementation_for(params: Sequence[Tensor]) -> str:
    """What `adam_` runs for these parameters: ``"native"``, ``"compiled"`` or ``"eager"``.

    ``"native"``: CPU tensors, and a C compiler was found (`zerofn.kernels.native`; the first call with a new
    combination of dtypes builds it, in about half a second, kept on disk). ``"compiled"``: GPU tensors with
    triton. ``"eager"``: all else, among it tensors under `torch.func.vmap`, where draws do not depend on the position
    in the mapped dimension.

    ``"native"`` and ``"eager"`` give the same bits on the CPU (of a NaN, only that it is one). ``"compiled"`` gives the
    same draws and the same formula, but its compiler may fuse products with sums: equal within a few float32 roundings
    *before* the value is stored.

    >>> implementation_for([torch.ones(2, device="meta")])
    'eager'
    """
    if not params or not _have_memory(params):
        return "eager"
    if all(map(_IS_CPU, params)):
        return "native" if _native.compiler() else "eager"
    return "compiled" if all(p.is_cuda for p in params) and has_triton() else "eager"


def _check(leaves: Leaves, step: Any, rounding: str, form: Any, implementation: str, function: str) -> None:
    if rounding not in ("nearest", "stochastic", "kahan"):
        raise ValueError(f"adam_(rounding={rounding!r}): not a rounding. Write 'stochastic', 'kahan' or 'nearest'.")
    if implementation not in ("auto", "native", "compiled", "eager"):
        raise ValueError(f"adam_(implementation={implementation!r}): write 'auto', 'native', 'compiled' or 'eager'.")
    if not isinstance(form, Tensor) and form not in known_formats():
        raise ValueError(f"adam_(form={form!r}): there are the formats {known_formats()} of random draws.")
    if rounding == "kahan" and leaves.compensations is None:
        raise ValueError(
            "adam_(rounding='kahan', compensations=None): what rounding withholds must be kept. Write "
            "compensations=[torch.zeros_like(p) for p in params], and give the same tensors at every step."
        )
    check_step(function, step)
    count = len(leaves.params)
    lengths = [len(column) for column in leaves if column is not None]
    if lengths != [count] * len(lengths):
        raise ValueError(f"adam_: the lists have lengths {lengths}; give one entry of each for each parameter.")
    _check_entries(leaves)


def _check_entries(leaves: Leaves) -> None:
    """Each combination of dtypes is checked once, and shapes by comparing lists: this runs in every step."""
    dtypes = leaves.all_dtypes()
    for kind in dict.fromkeys(dtypes):
        i, (p, g, m, v, *c) = dtypes.index(kind), kind
        if p not in _PARAM_DTYPES or g not in _PARAM_DTYPES:
            raise ValueError(
                f"adam_(params[{i}]: {p}, grads[{i}]: {g}): the update computes in "
                "float32, which holds float32, bfloat16 and float16. Convert, or use torch.optim.AdamW."
            )
        if m not in _MOMENT_DTYPES or v not in _MOMENT_DTYPES:
            raise ValueError(
                f"adam_(exp_avgs[{i}]: {m}, exp_avg_sqs[{i}]: {v}): moments are float32 or "
                "bfloat16. float16 ends at 6e-8, so that squares of gradients below 2.4e-4 would be zero. "
                "Write state_dtype=torch.bfloat16: the same bytes."
            )
        if c and c[0] != p:
            raise ValueError(
                f"adam_(compensations[{i}]: {c[0]}): must have the parameter's dtype, {p}. "
                f"Write torch.zeros_like(params[{i}])."
            )
    shapes = [[t.shape for t in tensors] for tensors in leaves.tensors]  # no attrgetter: a compiler traces this
    if any(column != shapes[0] for column in shapes):
        i, row = next((i, row) for i, row in enumerate(zip(*shapes, strict=True)) if len(set(row)) > 1)
        raise ValueError(
            f"adam_: the tensors of entry {i} have shapes {list(map(tuple, row))} "
            "(parameter, gradient, moments); elements are updated one by one. Cut all of them alike."
        )


def adam_update(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    c: Tensor | None = None,
    *,
    step: int | Tensor,
    lr: float | Tensor,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    rounding: str = "stochastic",
    seed: int = 0,
    key: int,
    offset: int,
    form: int | Tensor = FORMAT,
) -> list[Tensor]:
    """The formula of `adam_` on one entry: the new parameter, moments, and compensation under ``"kahan"``.

    The same bits, and no argument is written. It can be differentiated, by numbers that are 0-d tensors too: straight
    through each rounding.

    >>> p, g, z = torch.ones(2, dtype=torch.bfloat16), torch.ones(2), torch.zeros(2)
    >>> rate = lambda lr: adam_update(p, g, z, z, step=1, lr=lr, key=0, offset=0)[0].float().sum()
    >>> torch.func.grad(rate)(torch.tensor(0.125)).round()
    tensor(-2.)
    """
    leaves = Leaves([p], [g], [m], [v], [c] if rounding == "kahan" and c is not None else None, [key], [offset])
    _check(leaves, step, rounding, form, "auto", "adam_update")
    settings = Settings(step, scalars(step, lr, beta1, beta2, eps, weight_decay), rounding, beta1, seed, form)
    return [x for x in whole(leaves, 0, settings) if x is not None]


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    compensations: Sequence[Tensor] | None = None,
    *,
    step: int | Tensor,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    rounding: str = "stochastic",
    seed: int = 0,
    keys: Sequence[int],
    offsets: Sequence[int],
    form: int | Tensor = FORMAT,
    implementation: str = "auto",
    norms: list[float] | None = None,
) -> None:
    """One AdamW step with decoupled weight decay, in place, on lists of tensors (or of shards of tensors).

    Entry ``i`` is a piece of a leaf: ``params[i]``, ``grads[i]``, ``exp_avgs[i]``, ``exp_avg_sqs[i]`` and
    ``compensations[i]`` have one shape; ``keys[i]`` is the leaf's `leaf_key` and ``offsets[i]`` the index of the
    piece's first element in the flattened leaf. Cutting a leaf in other places changes no bit. The formula is the
    reordered form of section 2 of Kingma and Ba (2015), equal to `torch.optim.AdamW` in exact arithmetic.

    Args:
        params, exp_avgs, exp_avg_sqs, compensations: overwritten. Parameters are float32, bfloat16 or float16, moments
            float32 or bfloat16; compensations, for ``rounding="kahan"``, have the parameters' dtypes and are zero at
            first: ``p.float() + c.float()`` is the better parameter.
        grads: float32, bfloat16 or float16, whatever the parameters are; read only.
        step, lr: number of this step, from 1, and learning rate; numbers, or tensors of shape ``()``, that
            `torch.func.vmap` may batch. New values never recompile.
        rounding: ``"stochastic"``, ``"kahan"`` or ``"nearest"``: see the beginning of this module.
        seed, form: of the random draws, and their format (`zerofn.kernels.rounding`), an int or a 0-d tensor.
        implementation: ``"auto"`` (see `implementation_for`), ``"native"``, ``"compiled"`` or ``"eager"``.
        norms: a list, to which the norm of each gradient is appended where the kernel finds them on its way.

    Raises:
        ValueError, TypeError: a dtype, shape, rounding or step that has no meaning; names the entry.

    >>> p, g = torch.ones(3, dtype=torch.bfloat16), torch.tensor([1.0, -2.0, 0.0])
    >>> m, v = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)
    >>> adam_([p], [g], [m], [v], step=1, lr=0.125, keys=[0], offsets=[0])
    >>> p
    tensor([0.8750, 1.1250, 1.0000], dtype=torch.bfloat16)
    """
    used = compensations if rounding == "kahan" else None
    leaves = Leaves(params, grads, exp_avgs, exp_avg_sqs, used, keys, offsets)
    _check(leaves, step, rounding, form, implementation, "adam_")
    if not params:
        return
    # Only with a plain step on the CPU can its value be read without waiting for a device or breaking vmap.
    given = [x for x in (params[0], step, lr, form) if isinstance(x, Tensor)]
    plain = _have_memory(given) and all(map(_IS_CPU, given))
    step, lr, form = (int(step), float(lr), int(form)) if plain else (step, lr, form)
    settings = Settings(step, scalars(step, lr, beta1, beta2, eps, weight_decay), rounding, beta1, seed, form)
    _run(implementation_for(params) if implementation == "auto" else implementation, leaves, settings, plain, norms)


def _run(implementation: str, leaves: Leaves, settings: Settings, plain: bool, norms: list[float] | None) -> None:
    with torch.no_grad():
        if not plain and implementation == "eager":
            return run_whole(leaves, settings)
        flat, copies = _contiguous(leaves)
        if implementation == "native":
            run_native(flat, settings, norms)
        else:
            {"compiled": run_compiled, "eager": run_chunked}[implementation](flat, settings)
        for tensor, copy in copies:
            tensor.copy_(copy)
