"""One parameter of an attached model: its resident form, its stored form, and the dtype of `p.grad`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..core.layout import Leaf, Leaves
from ..core.pipeline import Pipeline
from ..sharded.guarded_parameter import read, write


def to_resident(pipe: Pipeline, leaf: Leaf, p: Tensor) -> Tensor:
    """Give a parameter its resident form, and return its stored one, in the same memory where possible."""
    full = p.detach()
    wide = full.to(pipe.dtypes.stored(leaf))
    resident = pipe.road.kept(wide, leaf)
    if pipe.gathering is not None:
        resident = resident.clone()
    if pipe.road.casts_after_update:
        resident = resident.to(pipe.dtypes.of(leaf).param_dtype or resident.dtype)
    if not dense(resident) or (pipe.road.after_update and not resident.is_contiguous()):
        resident = resident.contiguous()
    put(pipe, p, resident, "zf.attach")
    if leaf.trainable:
        keep_grads_in(p, pipe.road.resident_grad_dtype(leaf))
    if resident.dtype != wide.dtype or pipe.road.renumbers_after_update:
        return pipe.road.store(full, leaf).clone(memory_format=torch.contiguous_format)
    # Of `p` and not of `resident`: what a step writes into the one is counted as written into the other. But a graph
    # gathers shards anew and knows their age otherwise; there writes of `p` are to be the user's alone.
    return pipe.road.own(p.detach() if pipe.gathering is None else resident.detach(), leaf)


def put(pipe: Pipeline, p: Tensor, x: Tensor, since: str | None) -> None:
    """`p.data = x`. Where parameters are cut `x` has another size, and graphs of the old size may be alive.

    torch keeps the AccumulateGrad node of `p` as long as any graph has it, and checks gradients of later graphs against
    the size that it had: an output that a notebook keeps would be enough. It makes a new node for another dtype.

    Args:
        pipe: the pipeline of the model.
        p: the parameter.
        x: what it is to hold.
        since: what has changed it, for who goes backward through such a graph; `None` where its size comes back.
    """
    if pipe.gathering is None:
        p.data = x
        return

    def refuse(grads: Any) -> None:
        raise RuntimeError(
            explain(
                f"backward through a graph from before {since}",
                "its gradients have other sizes than the parameters have now",
                f"all backwards of a graph before {since}, or the forward again after it",
            )
        )

    with torch.DisableTorchFunctionSubclass():
        if p.requires_grad and since is not None:
            with torch.enable_grad():
                use = p.expand_as(p).grad_fn
            end = None if use is None else use.next_functions[0][0]
            if end is not None:
                end.register_prehook(refuse)
        other = torch.float16 if p.dtype != torch.float16 else torch.float32
        Tensor.data.__set__(p, p.new_empty(0, dtype=other))  # type: ignore[attr-defined]
        Tensor.data.__set__(p, x)  # type: ignore[attr-defined]


@torch.no_grad()
def make_whole(pipe: Pipeline, params: Leaves, stored: Leaves, since: str) -> None:
    """Put full parameters in the model for good, in memory of their own. All ranks call it."""
    for path, full in pipe.road.whole(stored).items() if pipe.stages else ():
        if pipe.gathering is not None or full.dtype != params[path].dtype or not pipe.road.exact:
            put(pipe, params[path], full.detach().clone(), since)


def move_out(pipe: Pipeline, params: Leaves, grad_dtypes: Mapping[str, torch.dtype | None]) -> None:
    """Give `p.grad` of full parameters the dtype that it had before `attach`, and drop gradients that are shards.

    Args:
        pipe: the pipeline.
        params: by path.
        grad_dtypes: dtypes of gradients by path, where they are not those of parameters.
    """
    for leaf in pipe.layout.leaves:
        p = params[leaf.path]
        grad = read(p)
        if grad is not None and grad.shape != p.shape:
            # A part of a gradient, to which nothing can be added any more.
            write(p, None)
        if leaf.trainable:
            keep_grads_in(p, grad_dtypes.get(leaf.path, p.dtype))


def keep_grads_in(p: Tensor, dtype: torch.dtype | None) -> None:
    """Set `p.grad_dtype`: the dtype of `p.grad`, any for `None`. A gradient that is there is cast.

    That a gradient's dtype follows the parameter's ends once another has been set: torch has no way back, and a
    detached model that is cast afterwards (`model.float()`) wants `p.grad_dtype` set as well.
    """
    if p.grad_dtype == dtype:
        return
    grad = read(p)
    if grad is None or dtype in (None, grad.dtype):
        p.grad_dtype = dtype
        return
    # torch refuses another dtype than that of a gradient which is there.
    write(p, None)
    p.grad_dtype = dtype
    write(p, grad.to(dtype))


def dense(x: Tensor) -> bool:
    """Whether elements fill memory without gaps or overlap, in whatever order of dimensions."""
    return torch.empty_like(x, device="meta").stride() == x.stride()
