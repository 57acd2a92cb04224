"""`cautious`: an update without the elements that gradients contradict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..extend import (
    Context,
    Leaves,
    Scope,
    Transform,
    TransformState,
    as_transform,
    no_view,
    of_members,
    transform,
)

# An update is divided by the share of elements that it keeps, or by this if the share is smaller.
LEAST = 1e-3


@transform
def cautious(transform: Transform) -> Transform:
    """Leave out elements of an update that do not go against the gradient (Liang et al., 2024, "Cautious Optimizers").

    `u *= (u * g > 0) / max(mean(u * g > 0), 1e-3)`, where `g` is the gradient that comes to the transform, `u` is its
    direction, or what an optimizer subtracts from the parameter, and the mean is over the whole leaf. Where leaves are
    sharded, ranks send one number for each leaf.

    C-AdamW is `chain(cautious(scale_by_adam()), add_decayed_weights(d), scale_by_lr(lr))`, which decays every element.
    In `cautious(adamw(lr))` the decay is a part of `u`, so an element that is left out is not decayed either.

    Args:
        transform: a transform that gives directions, such as `scale_by_adam` or `trace`; an optimizer; or a `partition`
            of these.

    Raises:
        ValueError: `transform` is a chain, or has a view.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.cautious(zf.trace(0.5)), zf.scale_by_lr(1.0))
        >>> state = zf.init(tx, {"w": torch.zeros(2)})
        >>> for g in ([1.0, 1.0], [1.0, -0.1]):
        ...     state, _ = zf.update(tx, {"w": torch.tensor(g)}, state)
        >>> state.params["w"]  # momenta (1, 1), then (1.5, 0.4), of which the second has another sign than its gradient
        tensor([-4., -1.])
    """
    inner = as_transform(transform)
    if inner.in_turn or inner.view_fn is not no_view or inner.facts.watches or inner.facts.holds:
        why = "it compares the gradient of one transform with its direction"
        raise ValueError(
            explain(f"cautious({inner.name}(...))", why, "chain(cautious(scale_by_adam()), scale_by_lr(lr))")
        )
    if inner.members_fn is not None:
        return of_members(inner, cautious)
    # If `inner` needs whole leaves, this wrapper gets whole leaves too.
    whole = inner.needs not in ("element", "number")

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        # The update must not run in place, since the old parameters are needed below.
        apart = replace(ctx, donate=False, donate_to_kernels=False)
        out, new = inner.update_fn(grads, state, params, carry, apart)
        kept: Leaves = {}
        for path, u in out.items():
            u = params[path] - u if inner.facts.optimizes else u
            kept[path] = (u * grads[path].to(u.dtype) > 0).to(torch.promote_types(u.dtype, torch.float32))
        counts = {path: mask.sum().reshape(1) for path, mask in kept.items()}
        sizes = {leaf.path: max(leaf.numel, 1) for leaf in ctx.layout.leaves}
        for path, count in (counts if whole else ctx.total_each(counts)).items():
            kept[path] = kept[path] / (count[0] / sizes[path]).clamp(min=LEAST)
        return {path: _masked(x, kept[path], params[path], inner.facts.optimizes) for path, x in out.items()}, new

    needs = "number" if not whole else "leaf" if inner.needs == "row" else inner.needs
    # The mask scales an optimizer's stored parameters, which are rounded to nearest here.
    facts = replace(inner.facts, copies=True, rounds=inner.facts.rounds and not inner.facts.optimizes)
    return replace(inner, scope=Scope.WHOLE, needs=needs, facts=facts, update_fn=update, parts=(inner,))


def _masked(x: Tensor, mask: Tensor, p: Tensor, optimizes: bool) -> Tensor:
    if not optimizes:
        return (x * mask).to(x.dtype)
    return (p - (p.to(mask.dtype) - x.to(mask.dtype)) * mask).to(p.dtype)
