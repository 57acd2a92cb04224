"""Metrics of transforms that a held or skipped step does not reach: the same names as after any other step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .facts import Scope
from .layout import Leaves
from .transform import Transform, TransformState
from .update_context import Context


def report_held(parts: Sequence[Transform], states: dict[str, Any], params: Leaves, ctx: Context) -> None:
    """Report the metrics of transforms that a held step does not reach.

    An optimizer's rate is that of the update to come, where it looks at no gradient. A counter has its value in the
    transform's state, under the name of the metric; any other metric is 0. In a graph or a batch, where every step
    computes everything and chooses afterwards, `Context.report` puts these values in the place of those computed from
    gradients of zero.

    Args:
        parts: the transforms after the one that holds.
        states: theirs, by name; not changed.
        params: their parameters, by path.
        ctx: takes the reports.
    """
    for part in parts:
        for name, value in standing(part, states.get(part.name, {}), params, ctx).items():
            ctx.report(name, value)
        if part.members_fn is not None:
            whole = len(params) == len(ctx.layout.trained)
            asked = ctx.layout if whole else ctx.layout.only(params.keys())
            for prefix, (member, paths) in part.members_fn(asked).items():
                label = prefix.removeprefix(f"{part.name}.").removesuffix(".")
                inner = {member.name: states[part.name][label]}
                here = {path: x for path, x in params.items() if path in paths}
                report_held([member], inner, here, ctx.inside(f"{part.name}.{label}"))
        elif part.in_turn:
            report_held(part.parts, states[part.name], params, ctx)
        elif part.facts.optimizes and part.scope is Scope.LEAF:
            # One that looks at gradients is not run where there are none.
            part.prepare_fn(states[part.name], None, params, ctx)


def standing(part: Transform, state: TransformState, params: Leaves, ctx: Context) -> dict[str, Any]:
    """The metrics of a transform that a step does not reach: by name the counter in its state, else 0."""
    return {name: state.get(name, 0.0) for name in part.facts.reported(ctx.layout, params.keys())}
