"""The boundary of a model: linear maps on inputs, parameters and outputs, in pairs of transposes.

Seen from outside, a model is a function with true gradients of any order, whatever loss scale or dtype is used inside.
On outputs (`leave`): identity forward, cotangent times S backward. On inputs (`enter`) and parameters (`LeafView`):
identity (or cast, or gather) forward, cotangent over S backward. The backward of each map is its partner, whose
backward is the first map again: if both had the same factor, second derivatives would carry S or 1/S.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from .._compat.autograd import applied
from .._compat.compiler import makes_proxies
from .._compat.functorch import NO_LEVEL, forward_level, innermost_transform, is_wrapped, unwrapped_if_dead
from .._errors import explain
from .composed_view import pull, see
from .layout import Leaf
from .views import View

# (tensor with any leading batch dimensions, loss scale or None) -> tensor
Map = Callable[[Tensor, Tensor | None], Tensor]

# Dtypes that `wide` leaves as they are, found without a call into torch.
WIDE = frozenset((torch.float32, torch.float64))


class LinearMap(Function):
    """`forth(x)`, whose derivative is `back`, whose derivative is `forth`; applied by `linear_map`.

    The scale is an argument and not part of the maps, because under `vmap` each member of an ensemble
    has its own. It has no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, forth: Map, back: Map) -> Tensor:  # type: ignore[override]
        _keep(ctx, scale, forth, back)
        return forth(x, scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        scale = ctx.saved_tensors[0] if ctx.has_scale else None
        pulled = ctx.back(g, scale) if untracked() else linear_map(g, scale, ctx.back, ctx.forth)
        return pulled, None, None, None

    @staticmethod
    def jvp(ctx: Any, x: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        return linear_map(x, ctx.saved_tensors[0] if ctx.has_scale else None, ctx.forth, ctx.back)


class LinearMapInFunc(Function):
    """`LinearMap` for torch.func and torch.compile: `forward` without `ctx`, and a rule for `vmap`.

    This class would do for eager code too, but torch then reads the signature of `forward` at each call: 20 us.
    """

    backward = LinearMap.backward  # type: ignore[assignment]
    jvp = LinearMap.jvp  # type: ignore[assignment]

    @staticmethod
    def forward(x: Tensor, scale: Tensor | None, forth: Map, back: Map) -> Tensor:
        return forth(x, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _keep(ctx, *inputs[1:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, scale: Tensor | None, forth: Map, back: Map) -> tuple:  # type: ignore[override]
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        if scale is not None and in_dims[1] is not None:
            scale = scale.movedim(in_dims[1], 0).to(x.device)
            scale = scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim))
        return linear_map(x, scale, forth, back), 0


_apply = applied(LinearMap)


def _keep(ctx: Any, scale: Tensor | None, forth: Map, back: Map) -> None:
    ctx.forth, ctx.back, ctx.has_scale = forth, back, scale is not None
    if scale is not None:
        ctx.save_for_backward(scale)
        ctx.save_for_forward(scale)


def linear_map(x: Tensor, scale: Tensor | None, forth: Map, back: Map) -> Tensor:
    """`forth(x, scale)`, whose derivative is `back`."""
    if torch.compiler.is_compiling() or innermost_transform() is not None:
        return LinearMapInFunc.apply(x, scale, forth, back)  # type: ignore[return-value]
    if scale is not None:
        return LinearMap.apply(x, scale, forth, back)  # type: ignore[return-value]
    return _apply(unwrapped_if_dead(x), None, forth, back)


def is_linear_map(node: Any) -> bool:
    """Whether an autograd node is that of a linear map."""
    return callable(getattr(node, "forth", None))


def untracked() -> bool:
    """Whether no one differentiates what a backward computes now, so that it needs no node: 10 us for each."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return innermost_transform() is None and forward_level() == NO_LEVEL


def wide(x: Tensor) -> Tensor:
    """`x` in fp32 at least: a 16-bit cotangent is multiplied in fp32, and rounded once afterwards."""
    return x if x.dtype in WIDE else x.to(torch.promote_types(x.dtype, torch.float32))


def times(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`x * scale` in `dtype`: multiplied in fp32 and rounded once."""
    return _by_parts(times, x, scale, dtype) if x.is_complex() else (wide(x) * scale).to(dtype)


def over(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`x / scale` in `dtype`: divided in fp32 and rounded once; after a cast to fp16 small gradients would be zero."""
    if x.is_complex():
        return _by_parts(over, x, scale, dtype)
    if x.dtype == dtype and _is_number(scale):
        # By a Python number torch divides 16-bit tensors in fp32, without the two copies in fp32 that would show in the
        # peak of memory. Not by a tensor: some kernels cast it to fp16 first, where 65536 is infinite. The scale lives
        # on the CPU, so that reading it waits for no device.
        return x / float(scale)
    return (wide(x) / scale).to(dtype)


def _by_parts(fn: Callable[..., Tensor], x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`fn` on the real and the imaginary part: torch takes a scale for `scale + 0i`, and the zero times inf is NaN."""
    part, x = dtype.to_real(), x.resolve_conj()  # the imaginary part of a lazy conjugate has no rule for vmap
    return torch.complex(fn(x.real, scale, part), fn(x.imag, scale, part))


def _is_number(scale: Tensor) -> bool:
    """Whether Python can read its value: under vmap it has several, and while it is traced none yet."""
    if scale.ndim or torch.compiler.is_compiling() or makes_proxies() or type(scale) is not Tensor:
        return False
    return innermost_transform() is None or not is_wrapped(scale)


def identity(x: Tensor) -> Tensor:
    """A view of `x`: a Function must not return its input."""
    return x.view_as(x)


@dataclass(frozen=True)
class LeafView:
    """The views of one leaf, from the model to storage, and the dtype of its stored gradient."""

    leaf: Leaf
    stages: tuple[View, ...]
    grad_dtype: torch.dtype

    def forth(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """From the stored parameter to what the model sees."""
        seen = see(self.stages, x, self.leaf) if self.stages else x
        if seen is not x:
            return seen
        # Not a view of `x`: torch refuses to use a view after a write into its memory, as by layers that clamp their
        # weights. The version counter is one for both all the same.
        return identity(seen) if torch.compiler.is_compiling() or innermost_transform() is not None else seen.detach()

    def back(self, g: Tensor, scale: Tensor | None) -> Tensor:
        """From a cotangent of what the model sees to the true gradient of the stored parameter."""
        narrow = g
        if self.stages:
            stages = self.stages if scale is None else [stage for stage in self.stages if stage.dtypes is None]
            narrow = pull(stages, g, self.leaf)
        narrow = narrow.to(self.grad_dtype) if scale is None else over(narrow, scale, self.grad_dtype)
        return identity(narrow) if narrow is g else narrow

    def __call__(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """What the model sees, differentiably; `x` itself where no view changes it."""
        if scale is None and not self.stages:
            return x
        return linear_map(x, scale, self.forth, self.back)

    def transposed(self, g: Tensor, scale: Tensor | None) -> Tensor:
        """`back` as recorded operations, for a gradient that is differentiated in turn.

        The scale is a plain division here and no `linear_map`: that is for what lies behind the boundary alone, and the
        loss may be computed from other tensors as well, those of its closure too.
        """
        for stage in self.stages:
            if stage.wire is not None:
                g = linear_map(g, None, _of_leaf(stage.pull, self.leaf), _of_leaf(stage.view, self.leaf))
            elif scale is None or stage.dtypes is None:
                g = stage.pull(g, self.leaf)
        return g.to(self.grad_dtype) if scale is None else over(g, scale.detach(), self.grad_dtype)


def stored_by(stages: Sequence[View], x: Tensor, leaf: Leaf) -> Tensor:
    """What is stored of a parameter that all ranks hold, differentiably: its gradient is then on all ranks too."""
    for stage in stages:
        if stage.wire is None:
            x = stage.store(x, leaf)
        else:
            x = linear_map(x, None, _of_leaf(stage.store, leaf), _of_leaf(stage.view, leaf))
    return x


def _of_leaf(fn: Callable[[Tensor, Leaf], Tensor], leaf: Leaf) -> Map:
    def run(x: Tensor, scale: Tensor | None) -> Tensor:
        out = fn(x, leaf)
        return identity(out) if out is x else out

    return run


class ForwardOnlyView(LeafView):
    """A view that refuses a backward, which would average gradients over ranks without their weights."""

    def back(self, g: Tensor, scale: Tensor | None) -> NoReturn:
        raise ValueError(
            explain(
                "a derivative of zf.bind(fn, tx, state) where accumulate(weighted=True) comes before the reduction",
                "it would be averaged over ranks in this backward, before any weight is known to it",
                "out, pullback = zf.vjp(fn, tx, state, *inputs); grads, *_ = pullback(torch.ones_like(out)); "
                "zf.update(tx, grads, state, weight=...)",
            )
        )


@dataclass(frozen=True)
class EdgeMap:
    """One input or output: cast to `dtype`, if one is asked for; its cotangent scaled in fp32, and cast back.

    Attributes:
        by: `times` for an output, `over` for an input.
        dtype: to cast to, or `None`.
        own: the dtype of the tensor, and of its cotangent.
    """

    by: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    dtype: torch.dtype | None
    own: torch.dtype

    def forth(self, x: Tensor, scale: Tensor | None) -> Tensor:
        # A new tensor even without a cast: writes of the caller into a view would be an error under a Function, and
        # silently wrong under a tensor hook.
        return x.to(self.dtype) if self.dtype not in (None, x.dtype) else x.clone()

    def back(self, g: Tensor, scale: Tensor | None) -> Tensor:
        out = g.to(self.own) if scale is None else self.by(g, scale, self.own)
        return identity(out) if out is g else out


def crosses(x: Tensor) -> bool:
    """Whether tensors of its dtype have derivatives, so that they pass through the boundary."""
    return x.is_floating_point() or x.is_complex()


def cast_to(x: Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype to cast `x` to; none for a complex tensor, which a real dtype would rob of its imaginary part."""
    return None if x.is_complex() else dtype


def differentiable(x: Tensor) -> bool:
    """Whether a cotangent may come to `x`. A tensor wrapped by `vmap` does not say so even where its inside does."""
    return x.requires_grad or is_wrapped(x)


def leave(y: Tensor, scale: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """One output of a model on its way out."""
    return y if scale is None and dtype is None else _crossed(times, y, scale, dtype)


def enter(x: Tensor, scale: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """One input of a model on its way in."""
    return x if scale is None and dtype is None else _crossed(over, x, scale, dtype)


def _crossed(by: Callable[..., Tensor], x: Tensor, scale: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    dtype = cast_to(x, dtype)
    if not crosses(x) or (dtype in (None, x.dtype) and (scale is None or not differentiable(x))):
        return x
    edge = EdgeMap(by, dtype, x.dtype)
    return linear_map(x, scale, edge.forth, edge.back)
