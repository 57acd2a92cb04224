"""What a formula is told of one leaf, and a kernel of a list of leaves, besides their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from .._compat import functorch_active, is_wrapped
from .transform import TransformState

Numbers = Mapping[str, Any]

# Asked of every leaf in every step, and so from C.
_DTYPE, _DEVICE, _STRIDE = attrgetter("dtype"), attrgetter("device"), methodcaller("stride")
_IS_CPU = attrgetter("is_cpu")


@dataclass(frozen=True)
class LeafStep:
    """One update of one leaf: what a formula is told besides its tensors.

    Attributes:
        count: updates of the leaf including this one; a 0-d tensor under `vmap` and in a compiled graph.
        lr: learning rate of this update; a number, or a 0-d tensor.
        path: the leaf's name.
        offset: global index of the leaf's first stored element.
        numbers: hyperparameters by name; numbers, or 0-d tensors.
        shared: state that all leaves share, by name; only read.
        derived: what the optimizer's `derived` made of count, rate and hyperparameters; numbers, or 0-d tensors.
    """

    count: Any
    lr: Any
    path: str
    offset: int
    numbers: Numbers = field(default_factory=dict)
    shared: TransformState = field(default_factory=dict)
    derived: Numbers = field(default_factory=dict)

    def scalar(self, value: Any, like: Tensor) -> Any:
        """A number to compute with beside `like`: a tensor in its dtype and on its device, anything else as it is."""
        return value.to(like) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class LeafList:
    """Leaves that have had equally many updates, as lists of tensors; what a kernel works on. In a graph all leaves.

    Attributes:
        params: to be written in place.
        grads: never written.
        slots: state by name, to be written in place.
        count: updates including this one; in a graph a tensor of the shape `(leaves,)`.
        lr: learning rate of this update.
        paths: names of the leaves.
        offsets: global index of each leaf's first stored element.
        numbers: hyperparameters by name.
        shared: state that all leaves share, by name; only read.
    """

    params: list[Tensor]
    grads: list[Tensor]
    slots: dict[str, list[Tensor]]
    count: Any
    lr: Any
    paths: list[str]
    offsets: list[int]
    numbers: Numbers = field(default_factory=dict)
    shared: TransformState = field(default_factory=dict)

    def where(self, chosen: list[bool]) -> LeafList:
        """The leaves for which `chosen` is true."""

        def pick(entries: list) -> list:
            return [x for x, on in zip(entries, chosen, strict=True) if on]

        slots = {name: pick(entries) for name, entries in self.slots.items()}
        lists = pick(self.params), pick(self.grads), slots, self.count, self.lr, pick(self.paths), pick(self.offsets)
        return LeafList(*lists, self.numbers, self.shared)


def plain(tensors: list[Tensor]) -> bool:
    """Whether fused kernels can take the tensors: one dtype and device, and no torch.func wrapper."""
    return not (functorch_active() and any(map(is_wrapped, tensors))) and alike(tensors)


def alike(tensors: list[Tensor]) -> bool:
    """Whether a fused kernel can take the tensors together: of one dtype and device."""
    return len(set(map(_DTYPE, tensors))) == 1 and (all(map(_IS_CPU, tensors)) or len(set(map(_DEVICE, tensors))) == 1)


def typed(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Gradients in their parameters' dtypes and strides; the same tensors where they are already.

    Fused kernels walk memory, so a channels-last parameter needs a channels-last gradient.
    """
    if list(map(_DTYPE, params)) == list(map(_DTYPE, grads)):
        # Without a gap and in the order of rows, nearly all are: to compare strides makes tuples of them.
        rows = all(map(Tensor.is_contiguous, params)) and all(map(Tensor.is_contiguous, grads))
        if rows or list(map(_STRIDE, params)) == list(map(_STRIDE, grads)):
            return grads
    return [
        g if g.dtype == p.dtype and g.stride() == p.stride() else torch.empty_like(p).copy_(g)
        for p, g in zip(params, grads, strict=True)
    ]
