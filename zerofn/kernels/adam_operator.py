"""The C kernel of low-precision Adam as a custom operator, `zerofn::adam_`, for compiled graphs.

The compiler cannot trace a call of C and would put the formula into the graph, whose generated code takes two to three
times as long. An operator it does not trace: its schema says which arguments are written, and that nothing is returned.
One call has all leaves, since each call costs some 50 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerofn._compat.compiler import while_traced
from zerofn.kernels.adam import adam_
from zerofn.kernels.adam_formula import Dtypes
from zerofn.kernels.adam_native import native_kernel
from zerofn.kernels.operators import operator
from zerofn.kernels.rounding import FORMAT


def _run(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    compensations: list[Tensor],
    steps: Tensor,
    numbers: Tensor,
    form: Tensor,
    rounding: str,
    seed: int,
    keys: list[int],
    offsets: list[int],
) -> None:
    """`adam_`, of leaves that need not have had equally many updates.

    Args:
        compensations: empty but for `rounding="kahan"`.
        steps: the number of this update, for each leaf; on the CPU.
        numbers: lr, beta1, beta2, eps and weight_decay, in float64.
        form: of the random draws.
        seed: its low 64 bits, as a signed number.
    """
    lr, beta1, beta2, eps, weight_decay = numbers.tolist()
    how: Any = dict(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, rounding=rounding, seed=seed)
    groups: dict[int, list[int]] = {}
    for i, step in enumerate(steps.tolist()):
        groups.setdefault(step, []).append(i)
    for step, entries in groups.items():
        lists: Any = [[xs[i] for i in entries] for xs in (params, grads, exp_avgs, exp_avg_sqs, compensations) if xs]
        where: Any = dict(keys=[keys[i] for i in entries], offsets=[offsets[i] for i in entries])
        adam_(*lists, step=step, form=int(form), **how, **where)


_OPERATOR = operator(
    "adam_(Tensor(a0!)[] params, Tensor[] grads, Tensor(a2!)[] exp_avgs, Tensor(a3!)[] exp_avg_sqs, "
    "Tensor(a4!)[] compensations, Tensor steps, Tensor numbers, Tensor form, str rounding, SymInt seed, "
    "SymInt[] keys, SymInt[] offsets) -> ()",
    _run,
)


def has_kernel(params: Sequence[Tensor], grads: Sequence[Tensor], moments: Sequence[Tensor], rounding: str) -> bool:
    """Whether a graph should call the operator on these leaves: they are on the CPU, and the C kernel can be built.

    >>> x = [torch.ones(2)]
    >>> has_kernel([torch.ones(2, device="meta")], x, x, "stochastic")
    False
    """
    if any(x.device.type != "cpu" for x in (*params, *grads, *moments)):
        return False
    kinds = {(p.dtype, g.dtype, m.dtype, m.dtype) for p, g, m in zip(params, grads, moments, strict=True)}
    return all([_built(*kind, rounding) for kind in kinds])


@while_traced
def _built(p: torch.dtype, g: torch.dtype, m: torch.dtype, v: torch.dtype, rounding: str) -> bool:
    dtypes: Dtypes = p, g, m, v
    return native_kernel(dtypes, rounding, 0.9, FORMAT) is not None


def adam_operator(
    *lists: Sequence[Tensor],
    step: Tensor,
    lr: Any,
    beta1: Any,
    beta2: Any,
    eps: Any,
    weight_decay: Any,
    rounding: str,
    seed: int,
    keys: Sequence[int],
    offsets: Sequence[int],
    form: Any,
) -> None:
    """`adam_` by the operator; `step` is of the shape `(leaves,)`, and numbers may be tensors."""
    params, grads, exp_avgs, exp_avg_sqs, *rest = map(list, lists)
    given = (lr, beta1, beta2, eps, weight_decay)
    numbers = torch.stack([torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in given])
    form = torch.as_tensor(form, dtype=torch.int64)
    seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    moments = exp_avgs, exp_avg_sqs, rest[0] if rounding == "kahan" else []
    _OPERATOR(params, grads, *moments, step, numbers, form, rounding, seed, list(keys), list(offsets))
