"""`offload`: keep a transform's state on another device, such as the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import is_shape_only
from .._errors import explain
from ..extend import (
    Context,
    Conveyor,
    Layout,
    Leaves,
    Prepared,
    Transform,
    TransformState,
    as_transform,
    chain,
    no_view,
    of_members,
    transform,
    tree_map,
)


@transform
def offload(transform: Transform, device: str | torch.device = "cpu") -> Transform:
    """Keep a transform's state on another device, and bring it to the parameters bucket by bucket.

    The arithmetic still runs where the parameters are, so the numbers do not change. If the parameters are on a GPU,
    host memory is pinned, and while one bucket is updated the next arrives and the last one leaves; with `attach(...,
    in_backward=True)` that happens during backward. If the parameters are already on `device`, nothing is moved and
    nothing allocated. The state of an optimizer of another library (`zf.guest`) sees the whole tree, and is brought all
    at once.

    Args:
        transform: an optimizer, an `accumulate`, an `ema`, or a chain of such.
        device: where the state lives; `"cuda"` is any GPU that a parameter is on, `"cuda:1"` is that one.

    Raises:
        ValueError: the transform has a view, such as `precision`, or there is no such device.

    Examples:
        >>> import torch, zerofn as zf
        >>> zf.chain(zf.offload(zf.adamw(lr=0.1, weight_decay=0.0)))
        chain(
            offload(transform=adamw(lr=0.1, weight_decay=0.0)),
        )
    """
    inner = as_transform(transform)
    if inner.in_turn:
        return chain(*(offload(part, device) for part in inner.parts))
    if inner.members_fn is not None:
        # Offload each member by itself: it runs over its own leaves, so the states of all need not fit at once.
        return of_members(inner, lambda member: offload(member, device))
    if inner.view_fn is not no_view:
        why = f"{inner.name} says how the model sees parameters; offload moves the state of an optimizer and its like"
        raise ValueError(explain(f"offload({inner.name}(...))", why, f"chain({inner.name}(...), offload(adamw(...)))"))
    where = _device(device)

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        on_gpu = any(x.device.type == "cuda" for x in leaves.values())
        # Made where it will live: if it were moved there, it would first have to fit beside the parameters.
        state = inner.init_fn({p: _place(x, where, False) for p, x in leaves.items()}, layout)
        return tree_map(lambda x: _place(x, where, on_gpu), state)

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        prepared = inner.prepare_fn(state, grads, params, ctx)
        return replace(prepared, carry=(prepared.carry, Conveyor(state, params, ctx)))

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: tuple[Any, Conveyor], ctx: Context):
        own, conveyor = carry
        out, new = inner.update_fn(grads, conveyor.bring(state, params), params, own, ctx)
        return out, conveyor.take_back(new, state, ctx)

    # `copies`: tell the executor to run bucket by bucket, so that one bucket is updated while another is copied.
    facts = replace(inner.facts, copies=True)
    return replace(inner, facts=facts, init_fn=init, prepare_fn=prepare, update_fn=update, parts=(inner,))


def _device(given: Any) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        why = f"torch knows no such device: {str(error).splitlines()[0]}"
        raise ValueError(explain(f"offload(device={given!r})", why, "offload(transform, device='cpu')")) from error


def _place(x: Tensor, device: torch.device, pin: bool) -> Tensor:
    if x.ndim == 0 or x.is_meta:
        return x
    moved = x if _is_on(x.device, device) else x.to(device)
    # `zf.plan` makes tensors without memory: nothing to pin.
    return moved.pin_memory() if pin and device.type == "cpu" and not is_shape_only(x) else moved


def _is_on(here: torch.device, device: torch.device) -> bool:
    """Whether `here` is the device that was asked for; without a number any device of its kind is.

    There is one CPU, with or without a number.

    Examples:
        >>> [_is_on(torch.device("cuda:0"), torch.device(asked)) for asked in ("cuda:0", "cuda:1", "cuda", "cpu")]
        [True, False, True, False]
    """
    one = device.index is None or device.type == "cpu"
    return here.type == device.type and (one or here.index == device.index)
