"""Sizes, strides and `print` of a part: those of the whole, without a gather, so one rank may ask alone.

Strides are those of the gathered whole: contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .part_origin import Origin

# What is asked most often, answered without a meta tensor.
BY_SHAPE: dict[str, Callable[[torch.Size], Any]] = {
    "shape": torch.Size, "size": torch.Size, "dim": len, "ndim": len, "numel": math.prod, "nelement": math.prod,
}  # fmt: skip


def sizes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: Callable[[Any], Origin | None]) -> Any:
    """The result of a function on meta tensors of the whole's shape in the place of parts."""
    of = origin_of(args[0])
    answer = BY_SHAPE.get(func.__self__.__name__ if name == "__get__" else name)
    if answer is not None and of is not None and len(args) == 1 and not kwargs:
        return answer(of.shape)

    def on_meta(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        of = origin_of(x)
        return torch.empty_like(x, device="meta") if of is None else torch.empty(of.shape, dtype=x.dtype, device="meta")

    return func(*map(on_meta, args), **{k: on_meta(x) for k, x in kwargs.items()})


def printed(x: Tensor, of: Origin) -> str:
    """What `print` shows of a part."""
    has = f"{x.numel()}" if len(of.pieces) != 1 else f"elements {of.pieces[0].low} to {of.pieces[0].high}"
    local = x.detach().as_subclass(Tensor)
    return f"Part({of}, shape={tuple(of.shape)}, of which this rank has {has}:\n{local!r})"
