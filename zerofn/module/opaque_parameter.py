"""A parameter under `shard` that lies as no DTensor can say: a wire of one's own cuts it, or it has another form."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .._compat.functorch import uncompiled
from .._errors import explain
from ..sharded.guarded_parameter import GuardedParameter, in_memory
from ..sharded.opaque import SIZES, call, handed, opaque, plain, printed, sizes
from ..sharded.torch_functions import first_by_position, in_place, looks, tensors_in


class OpaqueParameter(GuardedParameter):
    """A parameter of which this rank has a part.

    Attributes:
        whole: gathers the full parameter, differentiable.
        in_parts: whether it is a part now, and not whole as inside `opt.gathered()`.
        full: the full shape.
    """

    whole: Callable[[], Tensor]
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
            attribute = func.__self__.__name__ if name in ("__get__", "__set__") else ""
            if name in SIZES or attribute in SIZES:
                return sizes(func, args, kwargs, p.full)
            if name in ("__repr__", "__format__"):
                return printed(p, p.told("the values"), p.full)
            if name == "detach":
                return opaque(func(p), p.told("p.detach()"), p.full)
            if name == "register_hook":
                return func(p, handed(args[1], p.told("what a hook is given"), p.full))
            if name == "grad":
                found = func(*args, **kwargs)
                return tuple(map(_gradient_of, args[1] if args[1:] else kwargs["inputs"], found))
            if attribute or looks(name):
                return func(*args, **kwargs)
            if in_place(name) and isinstance(args[0], OpaqueParameter):
                part = lambda x: opaque(x.detach(), x.told("the values"), x.full) if _is_part(x) else x  # noqa: E731
                if torch.is_grad_enabled() and p.requires_grad:
                    why, right = "it is a leaf that requires grad", f"with torch.no_grad(): p.{name}(...)"
                    raise RuntimeError(explain(f"p.{name}(...) of the parameter {p.path}", why, right))
                call(func, name, tuple(map(part, args)), {k: part(x) for k, x in kwargs.items()})
                return args[0]
            return func(*map(_whole, args), **{k: _whole(x) for k, x in kwargs.items()})

    def told(self, how: str) -> str:
        """What a part of it is called in messages."""
        return f"{how} of the sharded parameter {self.path}"

    def to_local(self) -> Tensor:
        """This rank's part as a plain tensor on the same memory, in no graph."""
        with torch.DisableTorchFunctionSubclass():
            return Tensor.detach(self).as_subclass(Tensor)

    def full_tensor(self) -> Tensor:
        """The full parameter, gathered: a plain tensor of its own, differentiable."""
        return self.clone()

    def _shown(self, x: Tensor, how: str, frame: FrameType) -> Tensor:
        return x if in_memory(frame) or not self.in_parts() else opaque(x, self.told(how), self.full)

    def _own(self, value: Tensor | None, how: str, frame: FrameType) -> Tensor | None:
        return plain(super()._own(plain(value), how, frame))


def _is_part(x: Any) -> bool:
    return isinstance(x, OpaqueParameter) and x.in_parts()


def _gradient_of(p: Any, g: Any) -> Any:
    return opaque(g, p.told("a gradient"), p.full) if _is_part(p) and g is not None else g


def _whole(x: Any) -> Any:
    if type(x) in (list, tuple):
        return type(x)(map(_whole, x))
    return x.whole().clone() if _is_part(x) else x
