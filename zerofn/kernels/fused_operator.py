"""torch's fused Adam over lists of leaves, and as a custom operator, `zerofn::fused_adam_`, for compiled graphs.

The formula puts a dozen operations for each leaf into a graph, and the compiler looks for pairs among all of them that
it can fuse: with many leaves it spends most of its time on AdamW. The operator is one node for all leaves. With few
leaves the formula makes the better graph: scaling of gradients is fused into its loop, while an operator reads scaled
gradients from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerofn._compat.autograd import increment_versions
from zerofn._compat.operators import fused_adam_, fused_adamw_
from zerofn.kernels import fused_native
from zerofn.kernels.fused_native import Columns
from zerofn.kernels.operators import operator
from zerofn.kernels.steps import check_step
from zerofn.kernels.tensor_lists import typed

# Number of leaves from which on the operator is used: it saves time of the compiler for a pass over the gradients.
MANY = 32


def fused_update(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    decoupled: bool,
    lr: Any,
    norms: list[float] | None = None,
    **numbers: Any,
) -> None:
    """One update by torch's kernel, in place, of leaves of one dtype and device that have had equally many.

    Args:
        step: the number of this update.
        decoupled: whether the weights decay by themselves, and not by way of the gradient.
        lr: a number or a 0-d tensor.
        norms: a list, to which the norm of each gradient is appended where the kernel finds them on its way.
        numbers: beta1, beta2, eps and weight_decay.

    Raises:
        TypeError, ValueError: `step` is no whole number from 1.
    """
    check_step("fused_update", step)
    fused: Any = fused_adamw_ if decoupled else fused_adam_
    as_stored = typed(params, grads)
    lists: Columns = params, as_stored, exp_avgs, exp_avg_sqs
    # Metrics show the norms of the gradients as given, not of those that were cast to the dtype of the parameters.
    asked = norms is not None and as_stored is grads
    if fused_native.can(lists, decoupled, numbers["beta1"]):
        found = fused_native.run(lists, step, lr, **numbers, decoupled=decoupled, norms=asked)
        lists = fused_native.ends(lists)
        if norms is not None:
            norms += found
    if lists[0]:
        count = torch.full((), float(step), dtype=torch.float32, device=params[0].device)
        fused(*lists, [], [count] * len(lists[0]), lr=lr, amsgrad=False, maximize=False, **numbers)
    increment_versions([*params, *exp_avgs, *exp_avg_sqs])


def _run(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: Tensor,
    numbers: Tensor,
    decoupled: bool,
) -> None:
    """As `fused_update`, of leaves that need not have had equally many.

    Args:
        steps: the number of this update, for each leaf; on the CPU.
        numbers: lr, beta1, beta2, eps and weight_decay, in float64; on the CPU.
    """
    how: Any = dict(zip(("lr", "beta1", "beta2", "eps", "weight_decay"), numbers.tolist(), strict=True))
    lists, counts = (params, grads, exp_avgs, exp_avg_sqs), steps.tolist()
    for step in set(counts):
        chosen = lists if counts.count(step) == len(counts) else [_chosen(xs, counts, step) for xs in lists]
        fused_update(*chosen, step=step, decoupled=decoupled, **how)


def _chosen(tensors: list[Tensor], counts: list[int], step: int) -> list[Tensor]:
    return [x for x, count in zip(tensors, counts, strict=True) if count == step]


_OPERATOR = operator(
    "fused_adam_(Tensor(a0!)[] params, Tensor[] grads, Tensor(a2!)[] exp_avgs, Tensor(a3!)[] exp_avg_sqs, "
    "Tensor steps, Tensor numbers, bool decoupled) -> ()",
    _run,
)


def many_for_fused(params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether a graph should call the operator on these leaves: many, of one dtype and device, fp32 or fp64.

    >>> x = [torch.ones(2)]
    >>> many_for_fused(x, x), many_for_fused(x * 100, x * 100), many_for_fused(x * 100, [x[0].double()] * 100)
    (False, True, False)
    """
    # Not by `alike`, which the compiler cannot trace.
    dtype, device = params[0].dtype, params[0].device
    same = all(x.dtype is dtype and x.device == device for x in (*params, *grads))
    return len(params) >= MANY and same and dtype in (torch.float32, torch.float64)


def fused_operator(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: Tensor,
    decoupled: bool,
    lr: Any,
    beta1: Any,
    beta2: Any,
    eps: Any,
    weight_decay: Any,
) -> None:
    """The kernel of `adam` and `adamw` by the operator; `step` is of the shape `(leaves,)`, numbers may be tensors."""
    given = (lr, beta1, beta2, eps, weight_decay)
    numbers = torch.stack([torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in given])
    lists = list(params), list(grads), list(exp_avgs), list(exp_avg_sqs)
    _OPERATOR(*lists, step, numbers, decoupled)
