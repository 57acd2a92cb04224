"""`centralize`: gradients of matrices and filters, less the mean of each row."""

from __future__ import annotations

from typing import Any

from ..extend import Context, Facts, Leaves, Transform, TransformState, transform


@transform
def centralize() -> Transform:
    """Subtract from each row of a gradient its mean (gradient centralization, Yong et al., 2020).

    A row is all that has one index in the first dimension: the weights into one unit, or one filter. Leaves of one
    dimension or none pass by unchanged. It needs whole rows, which ranks have where leaves are cut by rows; a leaf of
    fewer rows than ranks is worked on at one rank, its owner.

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

    return Transform("centralize", needs="row", facts=Facts(keeps=False), update_fn=update)
