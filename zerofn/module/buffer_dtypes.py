"""Buffers of a model that are cast to other dtypes for as long as it is attached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.modules import registered
from ..core.dtypes import Dtypes
from ..core.wrapper_names import buffers_in


def dtypes_of_buffers(model: nn.Module, dtypes: Dtypes) -> dict[str, torch.dtype]:
    """By name, the dtype that each floating-point buffer is to have; of one at several places the first name."""
    own = {name: x.dtype for name, x in buffers_in(model) if x.is_floating_point()}
    given = dtypes.buffers(list(own)) if dtypes.buffers is not None else {}
    return {name: given.get(name) or dtype for name, dtype in own.items()}


@torch.no_grad()
def cast_buffers(model: nn.Module, wanted: Mapping[str, torch.dtype], undone: list[Callable[[], object]]) -> None:
    """Exchange buffers for casts of them, as `module.to(dtype)` does; what is put into `undone` undoes it.

    Not cast where they are looked up, since a write of forward into such a copy would be lost.
    """
    casts = [(x, x.to(wanted[name])) for name, x in buffers_in(model) if x.dtype != wanted.get(name, x.dtype)]

    @torch.no_grad()
    def undo() -> None:
        there = {id(x) for x in model.buffers()}
        for old, new in casts:
            if id(new) in there and old.shape == new.shape:
                # An element that was not written has the bits that it had.
                same = old.to(new.dtype) == new
                old.copy_(torch.where(same, old, new.to(old.dtype)))
        _replace(model, {id(new): old for old, new in casts if old.shape == new.shape})

    undone.append(undo)
    _replace(model, {id(old): new for old, new in casts})


def _replace(model: nn.Module, others: Mapping[int, Tensor]) -> None:
    """Exchange buffers, by id, at every place where they stand."""
    for module in model.modules():
        buffers: dict[str, Any] = registered(module)[2]
        for name, x in list(buffers.items()):
            if x is not None and id(x) in others:
                buffers[name] = others[id(x)]
