"""This rank's part of a tensor whose placement no DTensor can describe, and which is not gathered.

Such parts are of leaves that a wire of one's own shards, of leaves of which the model sees other numbers, of states
that are sharded twice, and of states that an owner keeps. A part says that it has the sizes of the full tensor.
Elementwise functions of parts and numbers run on the part. All other functions are refused, since of one part they
would compute a different number. `x.to_local()` is the part as a plain tensor on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._compat.functorch import uncompiled
from .._compat.tensors import alias_of
from .._errors import explain
from .torch_functions import CONVERSIONS, FOREACH, first_by_position, in_place, looks, pointwise, tensors_in

# fmt: off
SIZES = frozenset({
    "__len__", "dim", "dim_order", "is_contiguous", "is_same_size", "nbytes", "ndim", "ndimension", "nelement", "numel",
    "shape", "size", "storage_offset", "stride",
})
# fmt: on
OF_STATES = (
    "x.mul_(2.0), x.zero_(): what is elementwise runs on every rank's part\n"
    "zf.save(directory, opt) and zf.load, for the whole of each leaf's state"
)
OF_PARAMETERS = (
    'with opt.gathered(): the same with the parameter; opt.metrics["grad_norm"]; zf.clip_by_global_norm in the chain'
)


class Opaque(Tensor):
    """A part of a tensor.

    Attributes:
        how: the expression by which the user got it, and of what it is, for messages.
        full: the shape of the whole.
        right: what to write in place of what is refused.
    """

    how: str
    full: torch.Size
    right: str

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = (args, kwargs or {}) if args else first_by_position(kwargs or {})
        with torch.DisableTorchFunctionSubclass():
            x = next(y for y in tensors_in((*args, *kwargs.values())) if isinstance(y, Opaque))
            return call(func, func.__name__.partition(".")[0], args, kwargs, x)

    def to_local(self) -> Tensor:
        """This rank's part as a plain tensor on the same memory."""
        return plain(self)

    def full_tensor(self) -> NoReturn:
        refuse("full_tensor", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse("saving", self)


def opaque(x: Tensor, how: str, full: torch.Size, right: str = OF_PARAMETERS) -> Any:
    """A part on the memory of `x`."""
    made = x.as_subclass(Opaque) if x.requires_grad else alias_of(x, Opaque)
    made.how, made.full, made.right = how, full, right
    return made


def plain(x: Any) -> Any:
    """A part as a plain tensor; anything else as it is."""
    with torch.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor) if isinstance(x, Opaque) else x


def call(func: Any, name: str, args: tuple, kwargs: dict, x: Any) -> Any:
    """Run a torch function that is given a part, `x`: one that looks at it, or that is elementwise."""
    attribute = func.__self__.__name__ if name in ("__get__", "__set__") else ""
    if name in SIZES or attribute in SIZES:
        on_meta = lambda y: torch.empty(getattr(y, "full", y.shape), device="meta") if isinstance(y, Tensor) else y  # noqa: E731
        first = torch.empty(x.full, device="meta", dtype=x.dtype)
        return func(first, *map(on_meta, args[1:]), **{k: on_meta(y) for k, y in kwargs.items()})
    if name in ("__repr__", "__format__"):
        return f"Part({x.how}, shape={tuple(x.full)}, of which this rank has {x.numel()}:\n{plain(x.detach())!r})"
    if name == "detach" or (name == "__get__" and attribute == "data"):
        return opaque(func(*args, **kwargs), x.how, x.full, x.right)
    if attribute or looks(name):
        return func(*args, **kwargs)
    if name in CONVERSIONS and func(*args, **kwargs) is x:
        # `model.to(device)` changes nothing if parameters are on that device.
        return x
    tensors = [*tensors_in((*args, *kwargs.values()))]
    if (
        name.startswith(FOREACH)
        or not pointwise(name)
        or not all((isinstance(y, Opaque) and y.full == x.full) or not y.dim() for y in tensors)
    ):
        refuse(name, x)
    out = func(*args, **kwargs)
    return x if in_place(name) else opaque(out, x.how, x.full, x.right) if isinstance(out, Tensor) else out


def refuse(name: str, x: Any) -> NoReturn:
    why = "it cannot be gathered here, and this rank's part would give another result"
    raise RuntimeError(explain(f"{name} of {x.how}", why, f"{x.right}\nx.to_local() for this rank's part by itself"))


def handed(hook: Callable[[Tensor], Any], how: str, full: torch.Size) -> Callable[[Tensor | None], Any]:
    """A gradient hook of the user's, which is given this rank's part."""

    def run(g: Tensor | None) -> Any:
        return None if g is None else plain(hook(opaque(g, how, full)))

    return run
