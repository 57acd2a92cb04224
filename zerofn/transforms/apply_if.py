"""`apply_if`: a transform that is applied in some updates only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._errors import explain, kind_of
from ..extend import (
    SKIPPED_STEPS,
    Context,
    Layout,
    Leaves,
    Prepared,
    Transform,
    TransformState,
    as_transform,
    counter,
    may,
    no_view,
    transform,
    where,
    wrapped,
)

COUNT_OF_CALLS = "apply_if_count"


@transform
def apply_if(transform: Transform, fn: Callable[[Any], Any]) -> Transform:
    """Apply a transform in the updates in which `fn(step)` is true.

    In the other updates gradients pass unchanged, an optimizer does not change parameters, and the state of the
    transform does not change. The metrics of the transform are reported in every update.

    Args:
        transform: a transform of gradients, or an optimizer. It must not be a chain, hold gradients back, or have a
            view.
        fn: gets the number of updates before this one (0 at first), and returns a bool. In a compiled graph and under
            `torch.func.vmap` the number and the result are 0-d tensors.

    Raises:
        TypeError: `fn` cannot be called; at an update, it returned no bool.
        ValueError: the transform is a chain, holds gradients back, or has a view.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.apply_if(zf.clip_by_value(0.5), lambda step: step < 1), zf.sgd(1.0))
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> for _ in range(2):
        ...     state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
        >>> state.params["w"]
        tensor([-1.5000])
    """
    inner = as_transform(transform)
    if not callable(fn):
        why = f"fn is a function of the number of updates, and {fn!r} is {kind_of(fn)}"
        raise TypeError(explain(f"apply_if({inner.name}(...), {fn!r})", why, "apply_if(..., lambda step: step < 1000)"))
    reports = inner.facts.reports
    skips = inner.facts.holds or (not callable(reports) and SKIPPED_STEPS in reports)
    if inner.parts or inner.view_fn is not no_view or skips or inner.facts.adds:
        why = "it takes one transform: no chain, no group, and none that holds or skips steps"
        raise ValueError(explain(f"apply_if({inner.name}(...), fn)", why, "apply_if(clip_by_value(1.0), fn) for each"))

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        return {COUNT_OF_CALLS: counter()}

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        due = _checked(fn(ctx.read(state[COUNT_OF_CALLS])), inner.name)
        made = inner.prepare_fn(state, grads, params, ctx)
        own = {key: where(due, x, state[key]) for key, x in made.state.items()}
        return replace(made, carry=(due, made.carry), state={**own, COUNT_OF_CALLS: state[COUNT_OF_CALLS] + 1})

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: tuple[Any, Any], ctx: Context):
        due, own = carry
        before = {path: params[path] for path in grads} if inner.facts.optimizes else grads
        if not may(due):
            return before, {}
        # `due ^ True` negates a bool and a bool tensor alike.
        if not may(due ^ True):
            return inner.update_fn(grads, state, params, own, ctx)
        out, new = inner.update_fn(grads, state, params, own, replace(ctx, donate=False, donate_to_kernels=False))
        chosen = {key: _chosen(due, x, state[key]) for key, x in new.items() if key in state}
        return {path: where(due, x, before[path].to(x.dtype)) for path, x in out.items()}, {**new, **chosen}

    return wrapped(inner, init, update, prepare, keeps=True, capturable=False)


def _checked(answer: Any, name: str) -> bool | Tensor:
    if isinstance(answer, bool) or (isinstance(answer, Tensor) and not answer.ndim and answer.dtype is torch.bool):
        return answer
    why = f"fn returns a bool, and {answer!r} is {kind_of(answer)}"
    raise TypeError(explain(f"apply_if({name}(...), fn)", why, "fn=lambda step: step < 1000"))


def _chosen(due: Tensor, new: Any, old: Any) -> Any:
    """The entries of a state; entries of a leaf only if `new` has it."""
    if isinstance(new, dict):
        return {key: _chosen(due, x, old[key]) for key, x in new.items()}
    return where(due, new, old)
