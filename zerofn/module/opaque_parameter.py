"""A parameter under `shard` that lies as no DTensor can say: a wire of one's own cuts it, or it has another form."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._compat.functorch import uncompiled
from ..sharded.guarded_parameter import GuardedParameter, in_memory
from ..sharded.opaque import SIZES, call, handed, opaque, plain, refuse
from ..sharded.torch_functions import first_by_position, looks, pointwise, tensors_in


class OpaqueParameter(GuardedParameter):
    """A parameter of which this rank has a part.

    Attributes:
        in_parts: whether it is a part now, and not whole as inside `opt.gathered()`.
        full: the full shape.
    """

    in_parts: Callable[[], bool]
    full: torch.Size

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        frame = sys._getframe(1)
        with torch.DisableTorchFunctionSubclass():
            name = func.__name__.partition(".")[0]
            args, kwargs = (args, kwargs or {}) if args else first_by_position(kwargs or {})
            p = next((x for x in tensors_in((*args, *kwargs.values())) if isinstance(x, OpaqueParameter)), None)
            if p is None or in_memory(frame) or not p.in_parts():
                return func(*args, **kwargs)
            if name == "register_hook":
                return func(p, handed(args[1], p.described("what a hook is given"), p.full))
            if name == "grad":
                found = func(*args, **kwargs)
                return tuple(map(_gradient_of, args[1] if args[1:] else kwargs["inputs"], found))
            of_graph = (name in ("__get__", "__set__") and func.__self__.__name__ not in SIZES) or looks(name)
            if of_graph and name not in SIZES:
                return func(*args, **kwargs)
            part = opaque(p.detach(), p.described("the values"), p.full)
            if pointwise(name) and torch.is_grad_enabled() and p.requires_grad:
                # Autograd would have to record the operation, which it cannot for a part.
                refuse(name, part)
            out = call(func, name, tuple([part if x is p else x for x in args]), kwargs, part)
            return p if out is part else out

    def described(self, how: str) -> str:
        """What messages call a part that the user got by the expression `how`."""
        return f"{how} of the sharded parameter {self.path}"

    def to_local(self) -> Tensor:
        """This rank's part as a plain tensor on the same memory, in no graph."""
        with torch.DisableTorchFunctionSubclass():
            return Tensor.detach(self).as_subclass(Tensor)

    def _shown(self, x: Tensor, how: str) -> Tensor:
        return opaque(x, self.described(how), self.full) if self.in_parts() else x

    def _own(self, value: Tensor | None, how: str) -> Tensor | None:
        return plain(super()._own(plain(value), how))


def _gradient_of(p: Any, g: Any) -> Any:
    if g is None or not isinstance(p, OpaqueParameter) or not p.in_parts():
        return g
    return opaque(g, p.described("a gradient"), p.full)
