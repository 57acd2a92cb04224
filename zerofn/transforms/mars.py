"""`mars`: gradients corrected by those before them, for any optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..extend import LeafStep, Transform, check_number, direction, like, plus, transform, where


@transform
def mars(gamma: float = 0.025, beta1: float = 0.95) -> Transform:
    """Variance reduction as in MARS (Yuan et al., 2024), by the previous gradient instead of a second gradient.

    `c = g + gamma * beta1 / (1 - beta1) * (g - g_before)`, where `g_before` is the gradient of the previous update (in
    the first update `g`); `c /= max(1, norm(c))`, by the norm of the whole leaf. MARS-AdamW is `chain(mars(),
    adamw(3e-3, betas=(0.95, 0.99)))`. Where leaves are sharded, ranks send one number for each leaf. The previous
    gradient is kept in the stored dtype of the parameters; the result is in fp32 at least.

    Args:
        gamma: how much of the change is added.
        beta1: decay of the first moment of the optimizer that follows, in [0, 1).

    Raises:
        ValueError: an argument is out of range.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.mars(gamma=0.5, beta1=0.5), zf.sgd(1.0))
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> for size in (0.1, 0.3):
        ...     state, _ = zf.update(tx, {"w": torch.full((1,), size)}, state)
        >>> state.params["w"]  # -(0.1) - (0.3 + 0.5 * 0.2)
        tensor([-0.5000])

    Notes:
        The authors use it for matrices, and plain AdamW for the rest: `zf.masked(zf.mars(), mask)`.
    """
    check_number("mars", "gamma", gamma)
    check_number("mars", "beta1", beta1, high=1.0)

    def share(count: Any, rate: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
        return {"share": numbers["gamma"] * numbers["beta1"] / (1 - numbers["beta1"])}

    def formula(p: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep):
        c = where(at.count == 1, lambda: g, lambda: plus(g, at.derived["share"], g - slots["previous_grad"]))
        return (c,), lambda norm: (c / norm.clamp(min=1.0), {"previous_grad": g})

    numbers = {"gamma": gamma, "beta1": beta1}
    return direction("mars", {"previous_grad": like}, formula, numbers, share, of_norms=True, in_fp32=True)
