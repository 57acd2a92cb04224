"""This rank's part of a tensor that lies as no DTensor of torch's can say, and is not gathered.

So are the parameters that tensor parallelism has cut before `shard` did, leaves that a wire of one's own cuts, states
that are cut twice, and what an owner keeps. Elementwise functions run on the part. Sizes are those of the whole. All
else is refused, since of the part alone it would be another number.
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
    "p.mul_(2.0), g * 0.5: what is elementwise runs on every rank's part\n"
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
            return call(func, func.__name__.partition(".")[0], args, kwargs)

    def to_local(self) -> Tensor:
        """This rank's part as a plain tensor on the same memory."""
        return plain(self)

    def full_tensor(self) -> NoReturn:
        _refuse("full_tensor", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse("saving", self)


def opaque(x: Tensor, how: str, full: torch.Size, right: str = OF_PARAMETERS) -> Any:
    """A part on the memory of `x`."""
    made = x.as_subclass(Opaque) if x.requires_grad else alias_of(x, Opaque)
    made.how, made.full, made.right = how, full, right
    return made


def plain(x: Any) -> Any:
    """A part as a plain tensor; anything else as it is."""
    with torch.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor) if isinstance(x, Opaque) else x


def sizes(func: Any, args: tuple, kwargs: dict, full: torch.Size) -> Any:
    """What a function of sizes gives of a whole of that shape, which is its first argument."""
    on_meta = lambda x: torch.empty(_shape(x), device="meta") if isinstance(x, Tensor) else x  # noqa: E731
    first = torch.empty(full, device="meta", dtype=args[0].dtype)
    return func(first, *map(on_meta, args[1:]), **{k: on_meta(x) for k, x in kwargs.items()})


def _shape(x: Tensor) -> torch.Size:
    return x.full if isinstance(x, Opaque) else x.shape


def printed(x: Tensor, how: str, full: torch.Size) -> str:
    """The text that `print` shows for a part."""
    return f"Part({how}, shape={tuple(full)}, of which this rank has {x.numel()}:\n{plain(x.detach())!r})"


def call(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Run a torch function that is given parts."""
    x = next(y for y in tensors_in((*args, *kwargs.values())) if isinstance(y, Opaque))
    attribute = func.__self__.__name__ if name in ("__get__", "__set__") else ""
    if name in SIZES or attribute in SIZES:
        return sizes(func, args, kwargs, x.full)
    if name in ("__repr__", "__format__"):
        return printed(x, x.how, x.full)
    if name == "__set__" or (name == "__get__" and attribute != "data") or looks(name):
        return func(*args, **kwargs)
    if name == "__deepcopy__":
        return opaque(plain(x).clone(), x.how, x.full, x.right)
    if name in ("__get__", "detach") or name in CONVERSIONS or (name.endswith("_like") and name[:4] != "rand"):
        return _shown(func(*args, **kwargs), x)
    tensors = [*tensors_in((*args, *kwargs.values()))]
    if not pointwise(name) or not all(_stays(y, x, name) for y in tensors):
        _refuse(name, x)
    out = func(*args, **kwargs)
    if in_place(name):
        return args[0]
    if isinstance(out, Tensor):
        return _shown(out, x)
    return type(out)(_shown(y, z) for y, z in zip(out, args[0], strict=True)) if type(out) in (list, tuple) else out


def _stays(y: Tensor, x: Any, name: str) -> bool:
    """Whether an operand is a part of the same rows, or a number."""
    if name.startswith((FOREACH, "_fused_")):
        return isinstance(y, Opaque) or not y.dim()
    return (isinstance(y, Opaque) and y.full == x.full and y.shape == x.shape) or not y.dim()


def _shown(y: Any, like: Any) -> Any:
    same = isinstance(y, Tensor) and y.shape == like.shape
    return opaque(plain(y), like.how, like.full, like.right) if same else y


def _refuse(name: str, x: Any) -> NoReturn:
    why = "it is not gathered here, and what this rank has of it alone would give another result"
    raise RuntimeError(explain(f"{name} of {x.how}", why, f"{x.right}\nx.to_local() for this rank's part by itself"))


def handed(hook: Callable[[Tensor], Any], how: str, full: torch.Size) -> Callable[[Tensor | None], Any]:
    """A gradient hook of the user's, which is given this rank's part."""

    def run(g: Tensor | None) -> Any:
        return None if g is None else plain(hook(opaque(g, how, full)))

    return run
