"""`Dtypes`: in which dtypes parameters are stored and seen, and gradients reduced and accumulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .layout import Leaf


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of parameters and gradients; `None` leaves one as it is.

    Attributes:
        param_dtype: what the model sees.
        store_dtype: what the state keeps.
        grad_dtype: what update halves are given.
        reduce_dtype: in which gradients are summed over ranks.
        output_dtype: what floating-point outputs of the model are cast to.
        buffers: from the names of an attached model's floating-point buffers to what each is cast to.
        by_path: the dtypes of leaves that have their own.
    """

    param_dtype: torch.dtype | None = None
    store_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffers: Callable[[Sequence[str]], Mapping[str, torch.dtype | None]] | None = None
    by_path: Mapping[str, Dtypes] = field(default_factory=dict)

    def of(self, leaf: Leaf) -> Dtypes:
        """The dtypes of one leaf."""
        return self.by_path.get(leaf.path, self)

    def stored(self, leaf: Leaf) -> torch.dtype:
        """The dtype of the leaf in the state."""
        return self.of(leaf).store_dtype or leaf.dtype

    def seen(self, leaf: Leaf) -> torch.dtype:
        """The dtype of the leaf in the model."""
        own = self.of(leaf)
        return own.param_dtype or own.store_dtype or leaf.dtype

    def gradient(self, leaf: Leaf) -> torch.dtype:
        """The dtype of the leaf's gradient once it is pulled back."""
        own = self.of(leaf)
        stored = own.store_dtype or leaf.dtype
        return own.grad_dtype or (torch.float32 if stored == torch.float16 else stored)

    def summed(self, leaf: Leaf) -> torch.dtype:
        """The dtype in which gradients of the leaf are summed over ranks."""
        return self.reduce_dtype or summable(self.seen(leaf))

    @property
    def inputs(self) -> torch.dtype | None:
        """What floating-point inputs of a model are cast to: the one dtype that all of its parameters were given."""
        given = {d.param_dtype or d.store_dtype for d in (self.by_path.values() or (self,))}
        return given.pop() if len(given) == 1 else None

    @property
    def seen_otherwise(self) -> bool:
        """Whether a model may compute in other dtypes than it was made in."""
        every = (self, *self.by_path.values())
        given = [x for d in every for x in (d.param_dtype, d.store_dtype, d.output_dtype, d.buffers)]
        return any(x is not None for x in given)


def summable(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are summed by default: their own; of fp16 fp32, since fp16 overflows at 65504."""
    return torch.float32 if dtype == torch.float16 else dtype
