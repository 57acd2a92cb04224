"""`offload`: keep a transform's state on another device, such as the CPU, or update parameters there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..extend import (
    MASTERS,
    Context,
    Conveyor,
    Layout,
    Leaves,
    Prepared,
    Scope,
    Transform,
    TransformState,
    as_transform,
    chain,
    check_dtype,
    no_view,
    of_members,
    transform,
    tree_map,
    update_on_host,
)


@transform
def offload(
    transform: Transform,
    device: str | torch.device = "cpu",
    compute: str = "device",
    master_dtype: torch.dtype | None = None,
) -> Transform:
    """Keep a transform's state on another device, and bring it to the parameters bucket by bucket.

    The arithmetic still runs on the device of the parameters, so the numbers do not change. If the parameters are on a
    GPU, host memory is pinned. While the GPU updates one bucket, the next bucket is copied to the GPU and the last
    bucket is copied back; with `attach(..., in_backward=True)` this happens during backward. A step does not wait until
    these copies have ended. Reading `opt.state` or `state.transforms` waits, and so does a save. After each step read
    the states again: tensors that you kept from before the step may be in the middle of a copy. If the parameters are
    already on `device`, nothing is moved and nothing allocated. The state of another library's optimizer (`zf.guest`)
    is copied all at once.

    With `compute="host"` optimizers run on the host, as in ZeRO-Offload (Ren et al., 2021): gradients and parameters go
    to the host bucket by bucket, and new parameters come back. The host waits for each bucket. For each bf16 parameter
    with a bf16 gradient 6 bytes are copied, whatever the size of the optimizer's state. A clip before `offload` in the
    chain still runs on the device.

    Args:
        transform: an optimizer, an `accumulate`, an `ema`, or a chain of these.
        device: where the state lives; `"cuda"` is any GPU that a parameter is on, `"cuda:1"` is that one.
        compute: where optimizers run: `"device"`, that of the parameters, or `"host"`.
        master_dtype: with `compute="host"`, the dtype of the copies of the parameters (masters) that are kept and
            updated on the host, such as `torch.float32` for bf16 parameters. The device then has no fp32 numbers; its
            parameters are those that `precision(param_dtype=torch.bfloat16)` gives to a model. If you write into a
            parameter, the written number replaces the master.

    Raises:
        ValueError: `transform` has a view, as `precision` has; or torch has no device `device`; or, with
            `compute="host"`, `transform` is no optimizer, or an optimizer that must see all leaves at once.

    Examples:
        >>> import torch, zerofn as zf
        >>> zf.chain(zf.offload(zf.adamw(lr=0.1, weight_decay=0.0)))
        chain(
            offload(transform=adamw(lr=0.1, weight_decay=0.0)),
        )
    """
    inner = as_transform(transform)
    _check_host(inner, device, compute, master_dtype)
    if inner.in_turn:

        def over(part: Transform) -> Transform:
            """Members of a chain that are no optimizers keep their state on the host, and run on the device."""
            hosted = compute == "host" and (part.facts.optimizes or part.members_fn is not None)
            return offload(part, device, compute, master_dtype) if hosted else offload(part, device)

        return chain(*map(over, inner.parts))
    if inner.members_fn is not None:
        # Offload each member by itself: it runs over its own leaves, so the states of all need not fit at once.
        return of_members(inner, lambda member: offload(member, device, compute, master_dtype))
    if inner.view_fn is not no_view:
        why = f"{inner.name} changes what the model sees; offload takes optimizers and transforms of gradients"
        raise ValueError(explain(f"offload({inner.name}(...))", why, f"chain({inner.name}(...), offload(adamw(...)))"))
    if compute == "host":
        return _on_host(inner, master_dtype)
    where, plain = _device(device), inner
    inner = Conveyor.guarded(plain)

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        on_gpu = any(x.device.type == "cuda" for x in leaves.values())
        # The state is made where it will live: before a move it would have to fit beside the parameters.
        state = inner.init_fn({p: _place(x, where) for p, x in leaves.items()}, layout)
        placed = tree_map(lambda x: _place(x, where), state)
        return Conveyor.laid_out(placed, leaves, on_gpu and where.type == "cpu")

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        prepared = inner.prepare_fn(state, grads, params, ctx)
        return replace(prepared, carry=(prepared.carry, Conveyor(state, params, ctx)))

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: tuple[Any, Conveyor], ctx: Context):
        own, conveyor = carry
        out, new = inner.update_fn(grads, conveyor.bring(state, params), params, own, ctx)
        return out, conveyor.take_back(new, state, ctx)

    # With `copies` the executor runs bucket by bucket, so that one bucket is updated while another is copied. It is not
    # capturable: its counters are on the host with the rest of its state, where no device can choose them.
    facts = replace(inner.facts, copies=True, keeps=False, capturable=False)
    return replace(plain, facts=facts, init_fn=init, prepare_fn=prepare, update_fn=update, parts=(plain,))


def _on_host(plain: Transform, master_dtype: torch.dtype | None) -> Transform:
    """An optimizer that runs on the host."""
    inner, cpu = Conveyor.guarded(plain), torch.device("cpu")

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        on_host = {p: x if x.is_meta else x.to(cpu) for p, x in leaves.items()}
        if master_dtype is None:
            return inner.init_fn(on_host, layout)
        wide = {p: x.to(master_dtype, copy=True) for p, x in on_host.items()}
        return {**inner.init_fn(wide, layout), MASTERS: wide}

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        return update_on_host(inner, grads, state, params, carry, ctx)

    facts = replace(plain.facts, copies=True, keeps=False, capturable=False)
    return replace(plain, facts=facts, init_fn=init, prepare_fn=inner.prepare_fn, update_fn=update, parts=(plain,))


def _check_host(inner: Transform, device: Any, compute: str, master_dtype: torch.dtype | None) -> None:
    """Refuse what cannot run on the host, and settings without effect."""
    call = f"offload({inner.name}(...), compute={compute!r})"
    if compute not in ("device", "host"):
        raise ValueError(explain(call, "optimizers run on the parameters' device or on the host", "compute='host'"))
    if compute == "device":
        if master_dtype is not None:
            why = "on the device parameters are updated in the dtype in which they are stored there"
            right = "offload(..., compute='host', master_dtype=torch.float32); or zf.precision(param_dtype=...)"
            raise ValueError(explain(f"offload({inner.name}(...), master_dtype={master_dtype})", why, right))
        return
    if _device(device).type != "cpu":
        why = "what runs on the host has its state there"
        raise ValueError(explain(f"{call} with device={device!r}", why, "offload(..., compute='host')"))
    if master_dtype is not None:
        check_dtype("offload", "master_dtype", master_dtype, (torch.float32, torch.float64))
    if inner.in_turn or inner.members_fn is not None:
        return
    if not inner.facts.optimizes:
        why = f"{inner.name} makes no new parameters, and only new parameters come back from the host"
        raise ValueError(explain(call, why, f"offload({inner.name}(...)), whose state alone is on the host"))
    if inner.scope is not Scope.LEAF:
        why = "gradients go to the host bucket by bucket, and this optimizer must see all leaves at once"
        raise ValueError(explain(call, why, f"offload({inner.name}(...)), which runs on the device"))


def _device(given: Any) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        why = f"torch knows no such device: {str(error).splitlines()[0]}"
        raise ValueError(explain(f"offload(device={given!r})", why, "offload(transform, device='cpu')")) from error


def _place(x: Tensor, device: torch.device) -> Tensor:
    return x if x.ndim == 0 or x.is_meta or _is_on(x.device, device) else x.to(device)


def _is_on(here: torch.device, device: torch.device) -> bool:
    """Whether `here` is the device that was asked for; without a number any device of its kind is.

    There is one CPU, with or without a number.

    Examples:
        >>> [_is_on(torch.device("cuda:0"), torch.device(asked)) for asked in ("cuda:0", "cuda:1", "cuda", "cpu")]
        [True, False, True, False]
    """
    one = device.index is None or device.type == "cpu"
    return here.type == device.type and (one or here.index == device.index)
