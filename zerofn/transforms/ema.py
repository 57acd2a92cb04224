"""`ema`: an exponential moving average of the parameters."""

from __future__ import annotations

from typing import Any

from ..extend import (
    AVERAGE,
    Context,
    Elementwise,
    Facts,
    Joining,
    Layout,
    Leaves,
    Shadow,
    Transform,
    TransformState,
    check_number,
    towards,
    transform,
    wide_copy,
)


@transform
def ema(decay: float) -> Transform:
    """Keep an exponential moving average of the *parameters*, after each update (Polyak & Juditsky, 1992).

    `average = decay * average + (1 - decay) * p`, starting from the initial parameters. Put it after the optimizer. The
    average is kept in fp32 or wider, since in 16 bits a decay of 0.999 would round to no change. Under sharding each
    rank averages its shards and sends nothing. Read the average with `zf.full_params(tx, state, of="ema")`.

    Weights that you load into an attached model before the first update are initial parameters. If you load weights
    later, the average goes on from what it is.

    Args:
        decay: in [0, 1).

    Raises:
        ValueError: `decay` is out of range.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.sgd(1.0), zf.ema(0.5))
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
        >>> zf.full_params(tx, state, of="ema")
        {'w': tensor([-0.5000])}
    """
    check_number("ema", "decay", decay, high=1.0)

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        return {AVERAGE: {path: wide_copy(x) for path, x in leaves.items()}}

    averaged = Elementwise(towards, replaces=1)

    def update(params: Leaves, state: TransformState, old: Leaves, carry: Any, ctx: Context):
        averages, weight = state[AVERAGE], 1 - ctx.number(ctx.replicated(decay))
        (new,) = averaged(ctx, {p: averages[p] for p in params}, params, weight=weight)
        return params, {AVERAGE: new}

    # An average of many updates stays what it is. Before the first update it is the parameters.
    first = Shadow(AVERAGE, due=lambda number, step: step == 0)
    facts = Facts(watches=True, sees_old=False, keeps=False, capturable=True, shadows=(first,))
    return Transform("ema", needs="element", facts=facts, init_fn=init, update_fn=Joining(update))
