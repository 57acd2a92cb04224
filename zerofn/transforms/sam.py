"""`sam`: the gradient at the worst point nearby, for minima that are flat."""

from __future__ import annotations

from torch import Tensor

from ..extend import (
    TINY,
    Context,
    Facts,
    Leaves,
    Spec,
    Transform,
    check_number,
    root,
    squared_norm,
    transform,
)

FIRST = "the second gradient is one of the loss, and begins where that one did: at the model"


@transform
def sam(rho: float = 0.05) -> Transform:
    """Take the gradient at `p + rho * g / norm(g)` in the place of `g` (Foret et al., 2021, algorithm 1).

    A step evaluates loss and gradient twice. A step of `zf.make_step` does so by itself. `opt.step(closure)` calls the
    closure twice; the closure evaluates the loss and runs backward. The loss in metrics is the loss at `p`. The norm is
    the norm of the mean gradient over ranks, over all leaves. Put `sam` after the reduction and before transforms that
    change gradients. In `chain(shard(), sam(), accumulate(4), clip_by_global_norm(1.0), sgd(0.1))` each micro-batch has
    its own point.

    Both points are stored as the parameters are: in 16 bits most elements do not move.

    Args:
        rho: the distance of the second point from `p`, in the norm of all parameters.

    Raises:
        ValueError: `rho` is not positive; gradients are accumulated before they are reduced; `opt.step()` without a
            closure, or `zf.update`.

    Examples:
        >>> import torch, zerofn as zf
        >>> step = zf.make_step(lambda p: p["w"].square().sum(), zf.chain(zf.sam(0.5), zf.sgd(0.5)))
        >>> state, _ = step(zf.init(zf.chain(zf.sam(0.5), zf.sgd(0.5)), {"w": torch.ones(1)}))
        >>> state.params["w"]  # 1 - 0.5 * 2 * (1 + 0.5)
        tensor([-0.5000])

    Notes:
        In the second evaluation the model draws new random numbers, such as those of dropout. BatchNorm updates its
        statistics in both evaluations.
    """
    check_number("sam", "rho", rho, low=TINY)

    def worst(grads: Leaves, params: Leaves, ctx: Context) -> Leaves:
        norm = root(ctx.total(squared_norm, grads))
        # 1e-12 makes the step of a zero gradient zero instead of NaN.
        factor = ctx.replicated(rho) / (norm + 1e-12)
        return {path: _moved(params[path], g, factor) for path, g in grads.items()}

    return Transform("sam", needs="number", facts=Facts(evaluates_at=worst, capturable=True), through=_through)


def _moved(p: Tensor, g: Tensor, factor: Tensor) -> Tensor:
    return (p + g.to(p.dtype) * factor.to(p)).to(p.dtype)


def _through(spec: Spec) -> Spec:
    for done in ("changed_by", "summed_by"):
        spec.refuse(done, FIRST)
    return spec
