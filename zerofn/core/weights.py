"""The weights of micro-batches are averaged over ranks, or checked to be equal on all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .._errors import explain
from ..kernels.recording import concrete
from ..ranks.group import Group
from ..ranks.scalar_reduction import RankReduction, mean_over
from .arguments import weight_of
from .pipeline import Pipeline
from .view import cutting_wires


def shared_weight(pipe: Pipeline, weight: Any) -> tuple[Any, Any]:
    """The mean of the weights over ranks, and the factor of this rank's gradient, its weight over that mean.

    The gradient of all rows is `mean over ranks of (w_r / w) g_r`, with `w` the mean of the weights. The factor is
    applied before gradients are reduced: `accumulate` after a reduction sees only their mean.
    """
    groups = pipe.averaged_before_weights
    if not groups or weight is None:
        return weight, None
    own = weight_of(weight)
    mean = mean_over(groups, own)
    # `accumulate` multiplies this rank's shards by the mean, so the derivative by the mean is a sum over shards.
    parts = RankReduction(tuple([wire.group for wire in cutting_wires(pipe.road.pulled)]), groups)
    return parts.replicate(mean), own / torch.where(mean > 0, mean, 1.0)


def equal_weight(pipe: Pipeline, weight: Any) -> Any:
    """The mean of the weights over ranks, where gradients were averaged without them, so that they must be equal.

    Raises:
        ValueError: on every rank where they are not.
    """
    groups = pipe.averaged_before_weights
    if not groups or weight is None:
        return weight
    mean, _ = shared_weight(pipe, weight)
    own, shared = weight_of(weight).detach(), mean.detach()
    if not concrete(own):
        raise weight_in_batch(groups)
    # The mean of equal weights may differ from each of them, since their sum is rounded.
    unequal = ~torch.isclose(own, shared, rtol=1e-9, atol=0.0)
    if float(mean_over(groups, unequal.to(torch.float64))) > 0:
        raise ValueError(
            explain(
                f"a step with weight={float(own):g} here and {float(shared):g} on average over ranks",
                "gradients are averaged over ranks during backward, when the weight was not known",
                "accumulate(k, weighted=True) before reduce_scatter or all_reduce; or zf.make_step, which knows the "
                "weight in time; or (loss * weight / mean_weight).backward() and opt.step(weight=mean_weight)",
            )
        )
    return mean


def weight_in_batch(groups: Sequence[Group]) -> ValueError:
    """The error for weights of the members of a batch over ranks."""
    return ValueError(
        explain(
            f"a step with weight= under torch.func.vmap on {math.prod(group.size for group in groups)} ranks",
            "weights are compared and averaged over ranks, which cannot be done for each member of a batch",
            "one step(state, *batch, weight=...) per member in a loop; or, where all weights are equal, "
            "accumulate(k) and no weight=",
        )
    )
