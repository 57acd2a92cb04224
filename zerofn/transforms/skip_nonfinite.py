"""`skip_nonfinite`: skip a step whose gradient is not finite, without a loss scale."""

from __future__ import annotations

from typing import Any

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
    at_once,
    check_count,
    counter,
    not_finite,
    transform,
)


@transform
def skip_nonfinite(patience: int = 100) -> Transform:
    """Skip a step in which any gradient, on any rank, is NaN or infinite: transforms after this one do not run.

    It is for fp32 and bf16, where one bad batch would turn all parameters into NaN; in fp16 `scale_loss` does this.
    Before `accumulate`, `skip_nonfinite` drops one micro-batch, and the mean is over the other micro-batches. After
    `accumulate` it drops the whole sum. The metric `skipped` tells whether this step was skipped, and `skipped_steps`
    how many steps were skipped so far.

    Args:
        patience: raise after this many skipped steps in a row. On a GPU zerofn checks this once in every `patience`
            micro-steps, and never in a CUDA graph.

    Raises:
        ValueError: `patience` is not a positive int.
        FloatingPointError: at a step, if the last `patience` steps were all skipped.

    Examples:
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
        found = ctx.reduction.max(not_finite(grads))
        ok, bad, skipped, in_a_row, shown = at_once(
            _after, found if ctx.late else found.cpu(), state[SKIPPED_STEPS], state["in_a_row"]
        )
        ctx.check(in_a_row, lambda steps: steps < patience, lambda: _out_of_patience(patience), every=patience)
        ctx.report("skipped", bad, own=True)
        ctx.report(SKIPPED_STEPS, shown, own=True)
        return Prepared(state={SKIPPED_STEPS: skipped, "in_a_row": in_a_row}, emit=ctx.verdict(ok))

    facts = Facts(reports=frozenset([SKIPPED_STEPS]), keeps=False, capturable=True, skips=True)
    return Transform("skip_nonfinite", Scope.TREE, needs="number", facts=facts, init_fn=init, prepare_fn=prepare)


def _after(found: Any, skipped: Any, in_a_row: Any) -> list[Any]:
    """Whether the step goes on and whether it is skipped, the counters, and a copy of the first of them."""
    # `found` is zero if all gradients are finite, else NaN or infinite.
    ok, bad = found == 0, found != 0
    return [ok, bad, skipped + bad, (in_a_row + 1) * bad, skipped + bad]


def _out_of_patience(patience: int) -> Exception:
    return FloatingPointError(
        explain(
            f"skip_nonfinite(patience={patience}) skipped {patience} steps in a row",
            "so many in a row are more than a few bad batches: the loss itself is not finite, or the model diverged",
            "a lower learning rate, or clip_by_global_norm(1.0) after it; the parameters have not changed",
        )
    )
