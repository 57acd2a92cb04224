"""Whether a gradient on its way through backward is nobody else's, so that it may be overwritten.

Dividing a gradient into another tensor takes several times as long as dividing it in place, since the other tensor's
memory is fresh each time. But autograd hands one tensor to several consumers, hooks of the user's keep what they are
shown, and `loss.backward(g)` hands on what the caller holds. So holders are counted, as autograd itself does
before it makes an arriving gradient `p.grad` without a copy: references to the Python object, to the tensor, to
its storage, and to what it is a view of. Nobody can come by a tensor that nobody holds.

How many a free gradient has depends on the interpreter and on torch, so it is found out on some that are known to
be free. Where that is impossible, no gradient is spare.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ._compat import functorch_active, holders

# Elements below which counting takes longer than dividing into another tensor.
WORTHWHILE = 1 << 12


def is_spare(g: Tensor) -> bool:
    """Whether `g` may be written. For the `backward` of a Function alone, which passes on its own argument."""
    if g.numel() < WORTHWHILE or g.requires_grad or not g.is_contiguous():
        return False
    # Memory that is not torch's own, as that of a numpy array, has holders that torch does not know.
    return _count(g) in free_counts() and g.untyped_storage().resizable()


def _count(g: Tensor) -> tuple:
    base = g._base
    return (sys.getrefcount(g), *holders(g), *(() if base is None else (sys.getrefcount(base), *holders(base))))


class _Probe(Function):
    """Counts the cotangent it is given."""

    @staticmethod
    def forward(x: Tensor, found: Any) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.found = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        ctx.found.append(_through(g))
        return g, None


def _through(g: Tensor) -> tuple:
    # As far from the Function's backward as `is_spare` is.
    return _count(g)


@functools.cache
def free_counts() -> frozenset[tuple]:
    """What free gradients count, one that is no view and one that is; nothing where it cannot be told.

    Called when a model is attached, so that it is known by the time of a backward.
    """
    if functorch_active() or sys.gettrace() is not None or not holders(torch.zeros(1)):
        # A debugger holds what the frames it looks at hold, and its count would allow for one holder more.
        return frozenset()
    with torch.inference_mode(False), torch.enable_grad():
        found: list[tuple] = []
        x = torch.ones(2, 3, device="cpu", requires_grad=True)
        # A cotangent that an operation has just made; and one of a layer's weight, which is a view of what it made.
        (_Probe.apply(x, found) * 2.0).sum().backward()
        torch.nn.functional.linear(torch.ones(4, 3, device="cpu"), _Probe.apply(x, found)).square().sum().backward()
        shared: list[tuple] = []
        kept: list[Tensor] = []
        held = _Probe.apply(x, shared)
        held.register_hook(kept.append)
        (held * 2.0).sum().backward()
    return frozenset() if shared[0] in found else frozenset(found)
