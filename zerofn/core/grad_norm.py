"""The norm of what the optimizer is given, for metrics: of each leaf by whoever goes over the gradients anyway."""

from __future__ import annotations

from ..kernels.norms import added, leaf_squares, sum_of_squares
from ..kernels.recording import root
from .facts import Facts
from .layout import Leaves
from .transform import Transform, TransformState
from .update_context import Context, Prepared


def _look_at_norm(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
    found: Leaves = {}

    def close() -> None:
        if ctx.norms is None:
            ctx.report("grad_norm", root(ctx.reduction.total(added, found)))
        else:
            ctx.report("grad_norm", ctx.reduction.total(sum_of_squares, ctx.norms.all()).sqrt())

    return Prepared(found, close=close)


def _note_norms(grads: Leaves, state: TransformState, params: Leaves, found: Leaves, ctx: Context):
    if ctx.norms is None:
        found.update(leaf_squares(grads))
    else:
        ctx.norms.ask(grads)
    return grads, state


# Metrics show the norm of what the optimizer is given; a clip shows it before clipping, in its place.
# A name with a dot is one that no transform of a user's can have.
GRAD_NORM = Transform(
    ".grad_norm",
    needs="number",
    facts=Facts(reports=frozenset(["grad_norm"]), copies=False),
    prepare_fn=_look_at_norm,
    update_fn=_note_norms,
)
