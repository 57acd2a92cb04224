"""`centralize`: gradient centralization, each row of a gradient minus its mean."""

from __future__ import annotations

from typing import Any

from ..extend import Context, Facts, Leaves, Transform, TransformState, transform


@transform
def centralize() -> Transform:
    """Subtract its mean from each row of a gradient (gradient centralization, Yong et al., 2020).

    `g[i] -= mean(g[i])` for each index `i` of the first dimension: the weights into one unit, or one filter. Leaves of
    at most one dimension are unchanged. It needs whole rows (`needs="row"`), which shards have.

    Examples:
        >>> import torch, zerofn as zf
        >>> zf.centralize().update({"w": torch.tensor([[1.0, 3.0], [5.0, 5.0]])}, {}, {"w": torch.zeros(2, 2)})[0]
        {'w': tensor([[-1.,  1.],
                [ 0.,  0.]])}
    """

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        return {
            path: g - g.mean(tuple(range(1, g.ndim)), keepdim=True) if g.ndim > 1 and g.numel() else g
            for path, g in grads.items()
        }, state

    return Transform("centralize", needs="row", facts=Facts(keeps=False, capturable=True), update_fn=update)
