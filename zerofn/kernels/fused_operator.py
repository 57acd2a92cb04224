"""torch's fused Adam as an operator, `zerofn::fused_adam_`, which a compiled graph of many leaves can call.

Of the formula a graph has a dozen operations for each leaf, and the compiler looks for pairs among all of them that it
could run together: of many leaves AdamW is most of what it works on. One call has all leaves in it. Of few leaves the
formula is the better graph: it scales gradients in the same loop, where an operator is given them in memory.

It has no derivative and no rule for batches: who calls it asks before whether anybody records (`kernels.recording`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerofn._compat import fused_adam_, fused_adamw_, tell_autograd

# Leaves from which on the time of the compiler counts for more than a pass over the gradients.
MANY = 32


# Not by `torch.library.custom_op`: what that puts around a call, a count for each tensor that is written and a search
# for memory that two arguments have in common, takes on 148 small leaves longer than the update itself, some 0.3 ms.
_LIBRARY = torch.library.Library("zerofn", "FRAGMENT")
_LIBRARY.define(
    "fused_adam_(Tensor(a0!)[] params, Tensor[] grads, Tensor(a2!)[] exp_avgs, Tensor(a3!)[] exp_avg_sqs, "
    "Tensor steps, Tensor numbers, bool decoupled) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _run(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: Tensor,
    numbers: Tensor,
    decoupled: bool,
) -> None:
    """One update, of leaves that need not have had equally many.

    Args:
        steps: the number of this update, for each leaf; on the CPU.
        numbers: lr, beta1, beta2, eps and weight_decay, in float64; on the CPU.
        decoupled: whether the weights decay by themselves, and not by way of the gradient.
    """
    lr, beta1, beta2, eps, weight_decay = numbers.tolist()
    how: Any = dict(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    fused = fused_adamw_ if decoupled else fused_adam_
    lists, counts = (params, grads, exp_avgs, exp_avg_sqs), steps.tolist()
    for step in set(counts):
        p, g, m, v = lists if counts.count(step) == len(counts) else (_chosen(xs, counts, step) for xs in lists)
        # The kernel walks memory, and a graph lays gradients out as it likes.
        if not (all(map(Tensor.is_contiguous, p)) and all(map(Tensor.is_contiguous, g))):
            g = [x if x.stride() == y.stride() else torch.empty_like(y).copy_(x) for x, y in zip(g, p, strict=True)]
        count = torch.full((), float(step), dtype=torch.float32, device=p[0].device)
        fused(p, g, m, v, [], [count] * len(p), amsgrad=False, maximize=False, **how)
    tell_autograd([*params, *exp_avgs, *exp_avg_sqs])


def _chosen(tensors: list[Tensor], counts: list[int], step: int) -> list[Tensor]:
    return [x for x, count in zip(tensors, counts, strict=True) if count == step]


_LIBRARY.impl("fused_adam_", _run, "CompositeExplicitAutograd")


@torch.library.register_fake("zerofn::fused_adam_", lib=_LIBRARY)
def _(*args: Any, **kwargs: Any) -> None:
    return None


def many_for_fused(params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether a graph should call the operator on these leaves: many, of one dtype and device, fp32 or fp64.

    >>> x = [torch.ones(2)]
    >>> many_for_fused(x, x), many_for_fused(x * 100, x * 100), many_for_fused(x * 100, [x[0].double()] * 100)
    (False, True, False)
    """
    dtype, device = params[0].dtype, params[0].device
    alike = all(x.dtype is dtype and x.device == device for x in (*params, *grads))
    return len(params) >= MANY and alike and dtype in (torch.float32, torch.float64)


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
    torch.ops.zerofn.fused_adam_(*lists, step, numbers, decoupled)
