"""Checks of gradients: structure and shapes of the parameters, dense, on their device and with memory."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._compat.functorch import is_wrapped
from .._compat.tensors import is_shape_only
from .._errors import bad_leaves
from .layout import Layout, Leaves
from .tree import Tree

_IS_CPU = attrgetter("is_cpu")

READABLE = "dense gradients with data, of the parameters' shapes and where the parameters lie: g.to(p.device)"


def split_grads(layout: Layout, grads: Tree) -> Leaves:
    """Path to gradient. Gradients at tied places add up; `None` means no gradient for that leaf.

    Raises:
        ValueError: one tensor at several tied places, which may be a sum already (`p.grad` of a tied
            parameter) or two equal parts: nobody can tell, and one of the two would be doubled or halved.
    """
    what, right = "these are not gradients of this state", "gradients in the structure of the parameters"
    found: Leaves = {}
    owner: dict[tuple[int, int], str] = {}
    bad: list[tuple[str, str]] = []
    for i, place, g in layout.match(grads, what, right):
        path = layout.leaves[i].path
        if g is None:
            continue
        if (i, id(g)) in owner:
            bad.append((place, f"is the very tensor that stands at {owner[i, id(g)]}, and both are one parameter"))
        owner[i, id(g)] = place
        if path in found and isinstance(g, Tensor) and isinstance(found[path], Tensor):
            check_readable({place: g}, {place: found[path]})
            check_readable({path: found[path]}, {path: g})
        found[path] = found[path] + g if path in found else g
    if bad:
        right = "the whole gradient at one place and None at the others; zf.vjp and zf.bind give gradients that add up"
        raise ValueError(bad_leaves("one gradient at several places of a tied parameter", bad, right))
    # One whose first place has none would come behind others.
    tied = len(layout.places) > len(layout.leaves)
    return {x.path: found[x.path] for x in layout.leaves if x.path in found} if tied else found


def misshapen(g: Any, shape: Sequence[int]) -> str | None:
    """Why `g` is no gradient of a parameter of this shape, if it is none."""
    if not isinstance(g, Tensor):
        return f"{type(g).__name__} is no tensor"
    if g.layout != torch.strided:
        return f"a gradient of layout {g.layout}; make it dense: nn.Embedding(..., sparse=False), or g.to_dense()"
    if tuple(g.shape) != tuple(shape):
        return f"gradient of shape {tuple(g.shape)}, stored parameter of shape {tuple(shape)}"
    return None


def check_dense(grads: Leaves) -> None:
    """Refuse sparse gradients where they would be packed into a message."""
    bad = [(path, str(misshapen(g, g.shape))) for path, g in grads.items() if g.layout != torch.strided]
    if bad:
        raise ValueError(bad_leaves("gradients do not fit the parameters", bad, "dense gradients"))


def unreadable(g: Tensor, stored: Tensor) -> str | None:
    """Why no kernel could read `g` beside the stored parameter, if none could.

    Fused kernels do not check: given such a gradient they do nothing without an error, or end the process.
    """
    if g.device != stored.device:
        return f"gradient of {g.dtype} on {g.device}, stored parameter of {stored.dtype} on {stored.device}"
    if is_shape_only(g) or is_shape_only(stored):
        return None if is_shape_only(stored) else f"gradient of {g.dtype} on {g.device} without memory: a FakeTensor"
    # Subclasses, those of other devices too, may keep their numbers elsewhere than `data_ptr` says.
    if type(g) not in (Tensor, Parameter) or torch.compiler.is_compiling() or is_wrapped(g) or g.is_meta:
        return None
    return None if g.data_ptr() or not g.numel() else f"gradient of {g.dtype} on {g.device} without memory"


def check_readable(grads: Leaves, stored: Leaves) -> None:
    """Refuse gradients that are sparse, on another device than what is stored, or without memory.

    Raises:
        ValueError: every such gradient is named.
    """
    if not torch.compiler.is_compiling() and _all_readable(grads, stored):
        return
    bad = []
    for path, g in grads.items():
        reason = unreadable(g, stored[path]) if g.layout == torch.strided else misshapen(g, g.shape)
        if reason:
            bad.append((path, reason))
    if bad:
        raise ValueError(bad_leaves("gradients do not fit the parameters", bad, READABLE))


def _all_readable(grads: Leaves, stored: Leaves) -> bool:
    """Whether all are plain CPU tensors with memory, the usual case: checked by `map` over C functions."""
    found = list(grads.values())
    try:
        # Of what has no memory, and of what torch.func has wrapped, the address is 0 or an error.
        return (
            set(map(type, found)) <= {Tensor}
            and all(map(_IS_CPU, found))
            and all(map(_IS_CPU, map(stored.__getitem__, grads)))
            and all(map(Tensor.data_ptr, found))
        )
    except RuntimeError:
        return False
