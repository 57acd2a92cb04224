"""The metric `grad_norm`: the norm of the gradients that reach the optimizer, before any clipping."""

from __future__ import annotations

from ..kernels.norms import added, leaf_squares, sum_of_squares
from ..kernels.recording import root
from .facts import Facts
from .layout import Leaves
from .transform import Transform, TransformState
from .update_context import Context, Prepared


def _prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
    found: Leaves = {}

    def close() -> None:
        if ctx.norms is None:
            ctx.report("grad_norm", root(ctx.reduction.total(added, found)))
        else:
            ctx.report("grad_norm", ctx.reduction.total(sum_of_squares, ctx.norms.all()).sqrt())

    return Prepared(found, close=close)


def _update(grads: Leaves, state: TransformState, params: Leaves, found: Leaves, ctx: Context):
    if ctx.norms is None:
        found.update(leaf_squares(grads))
    else:
        ctx.norms.request(grads)
    return grads, state


# Put before the optimizer where no clip stands, which reports the norm itself.
# A user's transform cannot have a name with a dot.
GRAD_NORM = Transform(
    ".grad_norm",
    needs="number",
    facts=Facts(reports=frozenset(["grad_norm"]), copies=False),
    prepare_fn=_prepare,
    update_fn=_update,
)
