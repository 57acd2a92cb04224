"""`adaptive_clip`: clip the gradient of each unit by the norm of the unit's weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..extend import (
    TINY,
    Context,
    Facts,
    Leaves,
    Prepared,
    Scope,
    Transform,
    TransformState,
    check_number,
    root,
    squared_norm,
    transform,
)


@transform
def adaptive_clip(clipping: float, eps: float = 1e-3) -> Transform:
    """Adaptive gradient clipping (Brock et al., 2021, "High-Performance Large-Scale Image Recognition", equation 3).

    `g[i] *= min(1, clipping * max(norm(p[i]), eps) / norm(g[i]))` for each index `i` of the first dimension: the
    weights into one unit, or one filter. A leaf of at most one dimension is one unit. Leaves are cut by rows
    (`needs="row"`), so only the norms of biases and gains are summed over ranks.

    Args:
        clipping: norm of a unit's gradient as a part of the norm of its weights, positive.
        eps: least norm of weights that counts, so that weights that start at zero get a gradient.

    Raises:
        ValueError: an argument is out of range.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.adaptive_clip(0.5), zf.sgd(1.0))
        >>> state = zf.init(tx, {"w": torch.tensor([[3.0, 4.0], [3.0, 4.0]])})
        >>> zf.update(tx, {"w": torch.tensor([[0.0, 10.0], [1.0, 0.0]])}, state)[0].params["w"]
        tensor([[3.0000, 1.5000],
                [2.0000, 4.0000]])

    Notes:
        The paper leaves the last layer out: `zf.masked(zf.adaptive_clip(0.01), lambda path: "head" not in path)`.
    """
    check_number("adaptive_clip", "clipping", clipping, low=TINY)
    check_number("adaptive_clip", "eps", eps)

    def prepare(state: TransformState, grads: Leaves, params: Leaves, ctx: Context) -> Prepared:
        units = {leaf.path for leaf in ctx.layout.leaves if len(leaf.shape) < 2}
        both = {path: (params[path], g) for path, g in grads.items() if path in units}
        squares = {path: torch.stack([squared_norm({"": x}) for x in pair]) for path, pair in both.items()}
        return Prepared(carry={path: root(total).unbind() for path, total in ctx.total_each(squares).items()})

    def update(grads: Leaves, state: TransformState, params: Leaves, of_units: dict[str, Any], ctx: Context):
        limit, least, out = ctx.replicated(clipping), ctx.replicated(eps), {}
        for path, g in grads.items():
            weights, norm = of_units[path] if path in of_units else map(_row_norms, (params[path], g))
            most = limit * weights.clamp(min=least)
            # The inner `where` keeps a gradient whose norm is zero from being divided by it.
            out[path] = g * torch.where(norm > most, most / torch.where(norm > most, norm, 1.0), 1.0).to(g.dtype)
        return out, state

    return Transform(
        "adaptive_clip", Scope.TREE, "row", Facts(keeps=False, capturable=True), prepare_fn=prepare, update_fn=update
    )


def _row_norms(x: Tensor) -> Tensor:
    """The norm of each row of the first dimension, in fp32 or wider, to be multiplied with the rows."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return root((wide * wide).sum(tuple(range(1, x.ndim)), keepdim=True))
