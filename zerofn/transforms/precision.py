"""`precision`: the dtypes in which parameters are stored, seen, differentiated and reduced."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from ..extend import Dtypes, Leaf, Spec, Transform, View, check_dtype, transform

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _cast(dtypes: Dtypes) -> View:
    """The view: a cast to the compute dtype; its transpose casts the cotangent back."""

    def view(x: Tensor, leaf: Leaf) -> Tensor:
        return x.to(dtypes.param_dtype) if dtypes.param_dtype else x

    def pull(g: Tensor, leaf: Leaf) -> Tensor:
        return g.to(dtypes.gradient(leaf))

    def store(x: Tensor, leaf: Leaf) -> Tensor:
        return x.to(dtypes.stored(leaf))

    def changes(leaf: Leaf) -> bool:
        stored = dtypes.stored(leaf)
        return dtypes.seen(leaf) != stored or dtypes.gradient(leaf) != stored

    return View(view, pull, store, changes, dtypes=dtypes)


def _through(spec: Spec) -> Spec:
    spec.refuse("cast_by", "the dtypes would be set twice", spec.once)
    spec.refuse("changed_by", "it would act on gradients in the compute dtype, before they are cast to their own")
    spec.refuse("summed_by", "gradients would be added up in the compute dtype; cast them first")
    spec.refuse("unscaled_by", "gradients would be unscaled in the compute dtype, where small ones vanish")
    return spec.after("cast_by")


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
    dtypes = Dtypes(param_dtype, store_dtype, grad_dtype, reduce_dtype, output_dtype)
    for f in fields(dtypes):
        check_dtype("precision", f.name, getattr(dtypes, f.name), FLOATS)
    view = _cast(dtypes)
    return Transform("precision", needs="element", view_fn=lambda layout, ranks: view, through=_through)
