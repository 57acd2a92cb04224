"""`skip_nonfinite`: a step whose gradient is not finite is left out, without a loss scale."""

from __future__ import annotations

from typing import Any

import torch

from .._errors import explain
from ..extend import (
    SKIPPED_STEPS,
    Context,
    Facts,
    Layout,
    Leaves,
    Prepared,
    Scope,
    Transform,
    TransformState,
    check_count,
    counter,
    not_finite,
    transform,
)


@transform
def skip_nonfinite(patience: int = 100) -> Transform:
    """Leave out a step in which any gradient, on any rank, is NaN or infinite: nothing to its right runs or changes.

    For fp32 and bf16, where one bad batch would make all parameters NaN; with fp16 `scale_loss` does it. Before
    `accumulate` one micro-batch is left out and the mean is over the others; behind it a whole window is. Metrics show
    it as `skipped`, and how many were as `skipped_steps`.

    Args:
        patience: steps in a row after which it is no bad batch: the step raises.

    Raises:
        FloatingPointError: at a step, the last `patience` were all left out.

    >>> import torch, zerofn as zf
    >>> tx = zf.chain(zf.skip_nonfinite(), zf.sgd(1.0))
    >>> state = zf.init(tx, {"w": torch.zeros(1)})
    >>> state, metrics = zf.update(tx, {"w": torch.tensor([float("nan")])}, state)
    >>> bool(metrics["skipped"]), state.params["w"]
    (True, tensor([0.]))
    """
    check_count("skip_nonfinite", "patience", patience, "steps")

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        return {SKIPPED_STEPS: counter(), "in_a_row": counter()}

    def prepare(state: TransformState, grads: Leaves, params: Leaves, ctx: Context) -> Prepared:
        finite = torch.isfinite(ctx.reduction.max(not_finite(grads))).cpu()
        ok: Any = ctx.read(finite)
        bad = (~torch.as_tensor(ok)).to(torch.int64)
        new = {SKIPPED_STEPS: state[SKIPPED_STEPS] + bad, "in_a_row": (state["in_a_row"] + bad) * bad}
        ctx.check(new["in_a_row"], lambda steps: steps < patience, lambda: _out_of_patience(patience))
        ctx.report("skipped", ~finite)
        ctx.report(SKIPPED_STEPS, new[SKIPPED_STEPS])
        return Prepared(state=new, emit=ok)

    facts = Facts(reports=frozenset([SKIPPED_STEPS]), keeps=False)
    return Transform("skip_nonfinite", Scope.TREE, needs="number", facts=facts, init_fn=init, prepare_fn=prepare)


def _out_of_patience(patience: int) -> Exception:
    return FloatingPointError(
        explain(
            f"skip_nonfinite(patience={patience}) left out {patience} steps in a row",
            "gradients that are never finite are no bad batch: the loss is not, or the model diverged",
            "a lower learning rate, or clip_by_global_norm(1.0) behind it; parameters are as they were",
        )
    )
