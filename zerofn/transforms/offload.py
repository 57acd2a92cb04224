"""`offload`: a transform's state lives on another device, such as the host."""

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
    flatten,
    no_view,
    of_members,
    transform,
    tree_map,
)


@transform
def offload(transform: Transform, device: str | torch.device = "cpu") -> Transform:
    """Keep a transform's state on another device, and bring it to the parameters one bucket at a time.

    The arithmetic still runs where the parameters are, so the numbers are the same to the last bit.
    Host memory is pinned when the parameters are on a GPU, and one bucket arrives and another leaves while a
    third is updated; with `attach(..., in_backward=True)` all of that runs beside backward. Where the
    parameters already live on `device` nothing is moved and nothing is allocated. The state of another library's
    transformation, which sees the whole tree, is brought as a whole.

    Args:
        transform: an optimizer, an accumulation, an `ema`, or a chain of such.
        device: where the state lives; `"cuda"` is any GPU that a parameter is on, `"cuda:1"` is that one.

    Raises:
        ValueError: a transform without a state worth moving, or no such device.
        MemoryError: when the state is made and does not fit there; the transform and the bytes are named.

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
        # Each member runs over its own leaves, bucket by bucket: the states of all need not fit at once.
        return of_members(inner, lambda member: offload(member, device))
    if inner.view_fn is not no_view:
        why = f"{inner.name} has no state that would be worth moving, or concerns the whole pipeline"
        raise ValueError(explain(f"offload({inner.name}(...))", why, f"chain({inner.name}(...), offload(adamw(...)))"))
    where = _device(device)

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        on_gpu = any(x.device.type == "cuda" for x in leaves.values())
        try:
            # Made on the device where it lives: to be moved there it would first have to fit beside the parameters.
            state = inner.init_fn({p: _place(x, where, False) for p, x in leaves.items()}, layout)
            return tree_map(lambda x: _place(x, where, on_gpu), state)
        except (RuntimeError, MemoryError) as error:
            if not _is_shortage(error):
                raise
            raise MemoryError(_shortage(inner, leaves, layout, where)) from error

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        prepared = inner.prepare_fn(state, grads, params, ctx)
        return replace(prepared, carry=(prepared.carry, Conveyor(state, params, ctx)))

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: tuple[Any, Conveyor], ctx: Context):
        own, conveyor = carry
        out, new = inner.update_fn(grads, conveyor.bring(state, params), params, own, ctx)
        return out, conveyor.take_back(new, state, ctx)

    # Each bucket is copied, and the next one comes meanwhile.
    facts = replace(inner.facts, copies=True)
    return replace(inner, facts=facts, init_fn=init, prepare_fn=prepare, update_fn=update, parts=(inner,))


def _device(given: Any) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        right = "Write offload(transform, device='cpu')."
        raise ValueError(f"offload(device={given!r}): no such device. {right}") from error


def _place(x: Any, device: torch.device, pin: bool) -> Any:
    # Another library's state may have numbers and None in it.
    if not isinstance(x, Tensor) or x.ndim == 0 or x.is_meta:
        return x
    moved = x if _is_on(x.device, device) else x.to(device)
    # A tensor without memory, as `zf.plan` makes them, has none to pin.
    return moved.pin_memory() if pin and device.type == "cpu" and not is_shape_only(x) else moved


def _is_on(here: torch.device, device: torch.device) -> bool:
    """Whether a tensor that is `here` is on the device that was asked for: any of a kind, where no number was given.

    There is one CPU, with and without a number.

    >>> [_is_on(torch.device("cuda:0"), torch.device(asked)) for asked in ("cuda:0", "cuda:1", "cuda", "cpu")]
    [True, False, True, False]
    """
    one = device.index is None or device.type == "cpu"
    return here.type == device.type and (one or here.index == device.index)


def _is_shortage(error: Exception) -> bool:
    """Whether memory ran out. torch's host allocators raise plain RuntimeErrors, which only their text tells apart."""
    text = str(error).lower()
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text or "out of memory" in text
    )


def _shortage(inner: Transform, leaves: Leaves, layout: Layout, device: torch.device) -> str:
    meta = inner.init_fn({p: torch.empty_like(x, device="meta") for p, x in leaves.items()}, layout)
    size = sum(x.nbytes for x in flatten(meta)[0])
    count = sum(x.numel() for x in leaves.values())
    return explain(
        f"offload({inner.name}(...)) found no room on {device} for the {size:,} bytes of its state",
        f"it is {size / max(count, 1):.3g} bytes for each of {count:,} parameters, pinned where they are on a GPU",
        "zf.low_precision_adam(state_dtype=torch.bfloat16), half of fp32 moments; zf.shard() over more ranks; "
        "or a higher limit of (locked) memory",
    )
