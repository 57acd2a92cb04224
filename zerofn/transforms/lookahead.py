"""`lookahead`: slow weights, towards which an optimizer's weights are taken back every few updates."""

from __future__ import annotations

from typing import Any

from ..extend import (
    AVERAGE,
    TINY,
    Context,
    Layout,
    Leaves,
    Shadow,
    Transform,
    check_count,
    check_number,
    counter,
    towards,
    transform,
    where,
    wide_copy,
    wrapped,
    wrapped_optimizer,
)

COUNT_OF_UPDATES = "lookahead_count"


@transform
def lookahead(transform: Transform, sync_period: int = 5, slow_step_size: float = 0.5) -> Transform:
    """Wrap an optimizer in Lookahead (Zhang et al., 2019, "k steps forward, 1 step back", algorithm 1).

    After every `sync_period` updates of a leaf `slow += slow_step_size * (p - slow)`, and `p = slow`. The slow weights
    start as the parameters and are kept in fp32 or wider. Evaluate them by `opt.averaged()`, or
    `zf.full_params(tx, state, of="adamw")` with the optimizer's name. When `p` is set to `slow`, the optimizer's own
    state, such as its moments, stays as it is.

    Args:
        transform: an optimizer, or a `partition` of optimizers.
        sync_period: the number of updates of the optimizer for one update of the slow weights.
        slow_step_size: the part of the difference `p - slow` that an update adds to the slow weights, in (0, 1].

    Raises:
        ValueError: an argument is out of range, or `transform` is no optimizer, or (when the state is made) `transform`
            keeps an average itself.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.lookahead(zf.sgd(1.0), sync_period=2)
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> for _ in range(2):
        ...     state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
        >>> state.params["w"]  # two steps forward, half the way back
        tensor([-1.])

    Notes:
        If you write into parameters of an attached model (`load_state_dict`, `opt.gathered()`, `p.copy_`), the slow
        weights become what you wrote: the first time all of this leaf, from then on the elements that differ.
    """
    check_count("lookahead", "sync_period", sync_period, "updates")
    check_number("lookahead", "slow_step_size", slow_step_size, TINY, 1.0 + 1e-12)

    def wrap(inner: Transform) -> Transform:
        def init(leaves: Leaves, layout: Layout):
            slow = {path: wide_copy(x) for path, x in leaves.items()}
            return {AVERAGE: slow, COUNT_OF_UPDATES: {path: counter() for path in leaves}}

        def update(grads: Leaves, state: Any, params: Leaves, carry: Any, ctx: Context):
            out, new = inner.update_fn(grads, state, params, carry, ctx)
            counts = {path: state[COUNT_OF_UPDATES][path] + 1 for path in out}
            read, part = ctx.read_each(counts), ctx.replicated(slow_step_size)
            back, slow = {}, {}
            for path, x in out.items():
                old, due = state[AVERAGE][path], read[path] % sync_period == 0
                # The result is chosen before anything is written: if Python cannot read the count, both are computed.
                now = where(due, lambda old=old, x=x: towards(old, x, part), old)
                cast = where(due, lambda now=now, x=x: now.to(x.dtype), x)
                back[path] = x if cast is x else ctx.into(x, cast.to(x.dtype, copy=cast is now))
                slow[path] = old if now is old else ctx.into(old, now)
            return back, {**new, AVERAGE: slow, COUNT_OF_UPDATES: counts}

        return wrapped(inner, init, update, shadows=(*inner.facts.shadows, Shadow(AVERAGE)))

    return wrapped_optimizer("lookahead", transform, wrap)
