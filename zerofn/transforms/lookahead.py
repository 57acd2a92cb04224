"""`lookahead`: slow weights, towards which an optimizer's weights are taken back every few updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .._errors import explain
from ..extend import (
    AVERAGE,
    TINY,
    Context,
    Layout,
    Leaves,
    Transform,
    TransformState,
    as_transform,
    check_count,
    check_number,
    counter,
    of_members,
    towards,
    transform,
    where,
)

COUNT_OF_UPDATES = "lookahead_count"


@transform
def lookahead(transform: Transform, sync_period: int = 5, slow_step_size: float = 0.5) -> Transform:
    """Wrap an optimizer in Lookahead (Zhang et al., 2019, "k steps forward, 1 step back", algorithm 1).

    After every `sync_period` updates of a leaf `slow += slow_step_size * (p - slow)`, and `p = slow`. The slow weights
    start as the parameters and are kept in fp32 or wider. Evaluate them by `opt.averaged()`, or
    `zf.full_params(tx, state, of="adamw")` with the optimizer's name. The optimizer's own state goes on.

    Args:
        transform: an optimizer, or a `partition` of optimizers.
        sync_period: updates of the optimizer for one of the slow weights.
        slow_step_size: the part of the way that these go, in (0, 1].

    Raises:
        ValueError: an argument is out of range, or the transform is no optimizer, or one that keeps an average itself.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.lookahead(zf.sgd(1.0), sync_period=2)
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> for _ in range(2):
        ...     state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
        >>> state.params["w"]  # two steps forward, half the way back
        tensor([-1.])
    """
    check_count("lookahead", "sync_period", sync_period, "updates")
    check_number("lookahead", "slow_step_size", slow_step_size, TINY, 1.0 + 1e-12)
    inner = as_transform(transform)
    if inner.members_fn is not None:
        return of_members(inner, lambda member: lookahead(member, sync_period, slow_step_size))
    if not inner.facts.optimizes:
        why, right = (
            "it takes back what an optimizer has done",
            "chain(clip_by_global_norm(1.0), lookahead(adamw(1e-3)))",
        )
        raise ValueError(explain(f"lookahead({inner.name}(...))", why, right))

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        state = inner.init_fn(leaves, layout)
        if AVERAGE in state:
            why = "the weights to evaluate are its average, so there would be two"
            raise ValueError(
                explain(f"lookahead({inner.name}(...))", why, f"{inner.name}(...), or lookahead(adamw(1e-3))")
            )
        slow = {path: x.to(torch.promote_types(x.dtype, torch.float32), copy=True) for path, x in leaves.items()}
        return {**state, AVERAGE: slow, COUNT_OF_UPDATES: {path: counter() for path in leaves}}

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        out, new = inner.update_fn(grads, state, params, carry, ctx)
        counts = {path: state[COUNT_OF_UPDATES][path] + 1 for path in out}
        read, part = ctx.read_each(counts), ctx.replicated(slow_step_size)
        back, slow = {}, {}
        for path, x in out.items():
            old, due = state[AVERAGE][path], read[path] % sync_period == 0
            # Chosen first and written then: where Python cannot read the count, both are computed.
            now = where(due, lambda old=old, x=x: towards(old, x, part), old)
            there = where(due, lambda now=now, x=x: now.to(x.dtype), x)
            back[path] = x if there is x else ctx.into(x, there.to(x.dtype, copy=there is now))
            slow[path] = old if now is old else ctx.into(old, now)
        return back, {**new, AVERAGE: slow, COUNT_OF_UPDATES: counts}

    facts = replace(inner.facts, counterpart=None, torch_names=())
    return replace(inner, facts=facts, init_fn=init, update_fn=update, parts=(inner,))
