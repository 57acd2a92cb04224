"""`ema`: a running mean of the parameters, kept where they are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._compat import is_wrapped
from ..extend import Context, Facts, Layout, Leaves, Transform, TransformState, check_number, transform


@transform
def ema(decay: float) -> Transform:
    """Exponential moving average of the *parameters*, after each update (Polyak & Juditsky, 1992).

    `average = decay * average + (1 - decay) * params`, from the initial parameters. Kept in fp32 at
    least, since in 16 bits a decay of 0.999 would round to no change. Stands after the optimizer;
    under sharding it averages shards and sends nothing. Read it with
    `zf.full_params(tx, state, of="ema")`.

    Args:
        decay: in [0, 1).

    >>> import torch, zerofn as zf
    >>> tx = zf.chain(zf.sgd(1.0), zf.ema(0.5))
    >>> state = zf.init(tx, {"w": torch.zeros(1)})
    >>> state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
    >>> zf.full_params(tx, state, of="ema")
    {'w': tensor([-0.5000])}
    """
    check_number("ema", "decay", decay, high=1.0)

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        wide = {p: torch.promote_types(x.dtype, torch.float32) for p, x in leaves.items()}
        return {"average": {p: x.to(wide[p], copy=True) for p, x in leaves.items()}}

    def update(params: Leaves, state: TransformState, old: Leaves, carry: Any, ctx: Context):
        averages = {}
        for path, x in params.items():
            average = ctx.own(state["average"][path])
            # In place lerp has no batching rule, and the fallback is a loop.
            lerp = torch.lerp if is_wrapped(average) or is_wrapped(x) else Tensor.lerp_
            averages[path] = lerp(average, x.to(average.dtype), 1 - decay)
        return params, {"average": averages}

    return Transform("ema", needs="element", facts=Facts(watches=True), init_fn=init, update_fn=update)
