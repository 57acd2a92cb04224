"""`low_precision_adam` on lists of tensors, in place: for tests that name places, formats and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import zerofn as zf
from zerofn.core.context import Context, Norms  # inside: an update half by itself
from zerofn.core.layout import make_layout  # inside: as above
from zerofn.core.state import counter  # inside: as above
from zerofn.extend import FORMAT
from zerofn.kernels.program import printed_by  # inside: which kernel is taken


# A formula is traced anew for each transform, and some tests make thousands of steps.
@lru_cache(maxsize=64)
def built(*given: Any) -> Any:
    *adam, rounding, seed = given
    return zf.low_precision_adam(*adam, rounding=rounding, seed=seed)


def update(
    lists: Sequence[Sequence[Tensor]],
    implementation: str = "auto",
    *,
    step: Any = 1,
    lr: Any = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    rounding: str = "stochastic",
    seed: int = 0,
    paths: Sequence[str] | None = None,
    offsets: Sequence[int] | None = None,
    form: int = FORMAT,
    norms: Norms | None = None,
) -> None:
    """One update of parameters, gradients, both moments and compensations, in place.

    Args:
        lists: one tensor for each leaf in each; compensations are read under `"kahan"` alone.
        implementation: `"native"`, `"triton"` or `"torch"` computes leaves of any size by a program, `"eager"` by the
            formula; by default the optimizer decides.
        step: the number of the update; a number, or one for each leaf.
        norms: asks for those of the gradients.
    """
    paths = [str(i) for i in range(len(lists[0]))] if paths is None else paths
    steps = [step] * len(paths) if isinstance(step, int) else step
    params, grads, *slots = ({path: x.detach() for path, x in zip(paths, column, strict=True)} for column in lists)
    tx = built(lr, (beta1, beta2), eps, weight_decay, rounding, seed)
    names = ("exp_avg", "exp_avg_sq", *(["compensation"] if rounding == "kahan" else []))
    state: dict[str, Any] = {
        "step": counter(),
        "count": {path: counter(n - 1) for path, n in zip(paths, steps, strict=True)},
        "rounding_format": counter(form),
        **dict(zip(names, slots, strict=False)),
    }
    where = dict(zip(paths, [0] * len(paths) if offsets is None else offsets, strict=True))
    ctx = Context(make_layout(params), donate=True, offsets=where, norms=norms)
    if norms is not None:
        norms.requests.update(grads)
    with torch.no_grad(), nullcontext() if implementation == "auto" else printed_by(implementation, _device(lists)):
        found = tx.prepare_fn(state, grads, params, ctx)
        tx.update_fn(grads, state, params, found.carry, ctx)


def _device(lists: Sequence[Sequence[Tensor]]) -> torch.device:
    return lists[0][0].device
