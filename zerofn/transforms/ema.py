"""`ema`: a running mean of the parameters, kept where they are kept."""

from __future__ import annotations

from typing import Any

import torch

from ..extend import (
    AVERAGE,
    Context,
    Facts,
    Layout,
    Leaves,
    Transform,
    TransformState,
    check_number,
    towards,
    transform,
)


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
        return {AVERAGE: {p: x.to(wide[p], copy=True) for p, x in leaves.items()}}

    def update(params: Leaves, state: TransformState, old: Leaves, carry: Any, ctx: Context):
        averages, weight = state[AVERAGE], 1 - ctx.number(ctx.replicated(decay))
        return params, {AVERAGE: {p: ctx.put(towards, averages[p], x, weight) for p, x in params.items()}}

    facts = Facts(watches=True, sees_old=False, keeps=False)
    return Transform("ema", needs="element", facts=facts, init_fn=init, update_fn=update)
