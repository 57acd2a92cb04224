"""`precision`: the dtypes in which parameters are stored, seen, differentiated and reduced."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from ._arguments import check_dtype
from ._factory import transform
from ._tree import Layout, Leaf
from ._types import Role, Transform

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Cast:
    """The view of `precision`: a cast to the compute dtype; its transpose casts the cotangent back.

    Attributes:
        param_dtype: what the model sees.
        store_dtype: what the state keeps.
        grad_dtype: what the update half is given.
        reduce_dtype: what gradients are summed over ranks in.
        output_dtype: what floating-point outputs of the model are cast to.
    """

    param_dtype: torch.dtype | None
    store_dtype: torch.dtype | None
    grad_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    only_dtype: ClassVar[bool] = True

    def stored(self, leaf: Leaf) -> torch.dtype:
        """The dtype of the leaf in the state."""
        return self.store_dtype or leaf.dtype

    def gradient(self, leaf: Leaf) -> torch.dtype:
        """The dtype of the leaf's gradient once it is pulled back."""
        stored = self.stored(leaf)
        return self.grad_dtype or (torch.float32 if stored == torch.float16 else stored)

    def view(self, x: Tensor, leaf: Leaf) -> Tensor:
        return x.to(self.param_dtype) if self.param_dtype else x

    def pull(self, g: Tensor, leaf: Leaf) -> Tensor:
        return g.to(self.gradient(leaf))

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        return x.to(self.stored(leaf))

    def changes(self, leaf: Leaf) -> bool:
        return (self.param_dtype or self.stored(leaf)) != self.stored(leaf) or self.gradient(leaf) != self.stored(leaf)


@transform
def precision(
    param_dtype: torch.dtype | None = None,
    store_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
) -> Transform:
    """Choose dtypes. Names follow FSDP2's `MixedPrecisionPolicy`; `None` leaves a dtype as it is.

    With `store_dtype=torch.float32, param_dtype=torch.bfloat16` the state keeps fp32 masters and the
    model computes in bf16. With `store_dtype=torch.bfloat16` the bf16 parameters are their own
    masters: use it with `low_precision_adam`, whose rounding does not lose small updates.

    An attached model also has its floating-point *inputs* cast to the compute dtype, as FSDP2 does; in the
    pure route the loss function is yours, and so are its inputs.

    Args:
        param_dtype: dtype the model sees parameters in.
        store_dtype: dtype the state keeps parameters in.
        grad_dtype: dtype of gradients as the update half gets them; by default that of storage.
            fp32 gradients on bf16 parameters are summed in fp32 over several backwards. Of fp16
            parameters it is fp32 unless you say otherwise, since true gradients often lie below
            fp16's smallest number.
        reduce_dtype: dtype in which gradients are summed over ranks; by default `param_dtype`.
        output_dtype: dtype of the model's floating-point outputs. They are copies then: of `y, h = model(x)`, where `y`
            was computed from `h` inside, a hook on `h`, `h.retain_grad()` and `torch.autograd.grad(y, h)` raise in a
            backward that comes by way of `y`. `y.float()` outside of the model has no such limit.

    Raises:
        ValueError: a dtype that is no floating-point dtype of 16 to 64 bits.

    >>> import torch, zerofn as zf
    >>> tx = zf.chain(zf.precision(param_dtype=torch.bfloat16), zf.sgd(1.0))
    >>> state = zf.init(tx, {"w": torch.ones(1)})
    >>> out, pullback = zf.vjp(lambda p: p["w"] * 3, tx, state)
    >>> out.dtype, pullback(torch.ones(1, dtype=torch.bfloat16))[0]
    (torch.bfloat16, {'w': tensor([3.])})
    """
    cast = Cast(param_dtype, store_dtype, grad_dtype, reduce_dtype, output_dtype)
    for f in fields(cast):
        check_dtype("precision", f.name, getattr(cast, f.name), FLOATS)
    return Transform("precision", Role.CAST, needs="element", linear=True, stage_fn=lambda layout: cast)


def cast_of(parts: tuple[Transform, ...], layout: Layout) -> Cast:
    """The dtypes of a pipeline; all `None` where it has no `precision`."""
    for part in parts:
        if part.role is Role.CAST:
            stage = part.stage_fn(layout)
            assert isinstance(stage, Cast)
            return stage
    return Cast(None, None, None, None, None)
