"""What metrics show of a step that is held back or skipped: the same names as of any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .facts import Scope
from .layout import Leaves
from .transform import Transform, TransformState
from .update_context import Context


def report_held(parts: Sequence[Transform], states: dict[str, Any], params: Leaves, ctx: Context) -> None:
    """Have transforms that a step does not reach report what they would have: rates, and 0 for what they measure.

    A rate is that of the update to come; what a transform counts is as it stands in its state, under the metric's name.
    A step that computes everything and chooses, in a graph or a batch, shows the same: `Context.report` puts it in the
    place of what they then report of gradients of zero.

    Args:
        parts: those behind the hold.
        states: theirs, by name; not changed.
        params: of their leaves.
        ctx: where they report.
    """
    for part in parts:
        for name, value in standing(part, states.get(part.name, {})).items():
            ctx.report(name, value)
        if part.members_fn is not None:
            for prefix, (member, paths) in part.members_fn(ctx.layout).items():
                label = prefix.removeprefix(f"{part.name}.").removesuffix(".")
                inner = {member.name: states[part.name][label]}
                here = {path: x for path, x in params.items() if path in paths}
                report_held([member], inner, here, ctx.inside(f"{part.name}.{label}"))
        elif part.in_turn:
            report_held(part.parts, states[part.name], params, ctx)
        elif part.facts.optimizes and part.scope is not Scope.WHOLE:
            part.prepare_fn(states[part.name], None, params, ctx)


def standing(part: Transform, state: TransformState) -> dict[str, Any]:
    """What a transform shows of a step that does not reach it, by the names of its metrics."""
    return {name: state.get(name, 0.0) for name in part.facts.reports}
