"""This rank's part of a sharded parameter or of its gradient, which says so where it would be taken for the whole.

Under `shard` `p.data`, `p.detach()`, `p.grad`, what `torch.autograd.grad` returns and what a hook on `p` is given are
flat parts. What treats elements alone is right on them: a decay, a clamp, a difference, an average of parts. What
makes one number of many (`p.grad.norm()`, `isnan(g).any()`, `g1 @ g2`) would be another one on every rank, and beside a
tensor that is no part torch broadcasts where sizes fit by chance. A subclass follows a part through what is made of
it, and refuses both.

To answer with the number of the whole instead would take a collective in the middle of the user's code, and the one
rank that writes a log would wait for the others for ever. It costs some 5 us for an operation; the library itself
works on plain tensors, which `x.as_subclass(torch.Tensor)` gives to anybody.

Where a graph has been made of a gradient (`create_graph=True`) sums are what penalties are made of: a rank's sum over
its part is its share (`Share`), and what is linear in shares has the right derivative.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._compat import SHALLOW, alias_of
from .._errors import explain
from .mixing import check_beside_part, check_slice, in_place, pointwise

# fmt: off
# What looks at a tensor.
LOOKS = frozenset({
    "__delete__", "__dir__", "__format__", "__hash__", "__len__", "__repr__", "__set__", "as_subclass", "backward",
    "dim", "element_size", "get_device", "ndimension", "nelement", "numel", "requires_grad_", "retain_grad", "size",
    "stride", "type",
    SHALLOW,
})
BEGINNINGS = ("is_", "has_", "new_", "register_")
PRIVATE = frozenset(name for name in dir(Tensor) if name.startswith("_") and not name.startswith("__"))
# What gives the same elements in another shape, dtype or place, or those of several parts one behind the other.
SAME = frozenset({
    "__deepcopy__", "alias", "bfloat16", "cat", "chunk", "clone", "concat", "concatenate", "contiguous", "cpu", "cuda",
    "detach", "detach_", "double", "flatten", "float", "half", "hstack", "pin_memory", "ravel", "reshape", "reshape_as",
    "split", "split_with_sizes", "squeeze", "to", "type_as", "unflatten", "unsqueeze", "view", "view_as",
})
# Attributes that are computed.
COMPUTED = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# By which torch.save, safetensors and NumPy come at what a tensor holds.
SAVING = frozenset({"__reduce_ex__", "__array__", "data_ptr", "numpy", "storage", "untyped_storage"})
# What is equal on all parts is equal.
COMPARING = frozenset({"allclose", "equal"})
# Sums of elements of two parts, and what is linear in sums.
PRODUCTS = frozenset({"__matmul__", "dot", "inner", "matmul", "vdot"})
FACTORS = frozenset({"__mul__", "__rmul__", "mul"})
LINEAR = FACTORS | {
    "__add__", "__iadd__", "__neg__", "__radd__", "__rsub__", "__sub__", "__truediv__", "add", "div", "double", "float",
    "neg", "stack", "sub", "sum", "to",
}
SHARED = frozenset({"__get__", "grad"})
# fmt: on
# Whose assertions are about what each rank has.
ASSERTING = torch.testing.__name__
PLAIN = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


class Origin(NamedTuple):
    """What something is a part of, for messages."""

    how: str
    path: str
    gradient: bool

    def __str__(self) -> str:
        return f"{self.how} of the sharded parameter {self.path}" if self.path else self.how


STATE = Origin("a part of the sharded model's state_dict()", "", False)
SEVERAL = Origin("parts of several sharded parameters", "", True)


class Part(Tensor):
    """A part, flat, or what is made of one element by element."""

    of: Origin

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if _knows_better(types):
            return NotImplemented
        name, kwargs = func.__name__.partition(".")[0], kwargs or {}
        with torch.DisableTorchFunctionSubclass():
            if is_dynamo_compiling():
                return func(*args, **kwargs)
            if name == "__deepcopy__":
                return part_of(args[0].as_subclass(Tensor).clone(), args[0].of)
            parts = list(_parts([*args, *kwargs.values()]))
            summed = _check(func, name, parts, args, kwargs)
            out = func(*args, **kwargs)
        if summed:
            return out.as_subclass(Share)
        of = parts[0].of
        return out if name == "as_subclass" else _followed(out, of if all(p.of == of for p in parts) else SEVERAL)


class Share(Tensor):
    """A sum over this rank's part: what it adds to a sum over ranks, and has the right derivative as such."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if _knows_better(types):
            return NotImplemented
        name, kwargs = func.__name__.partition(".")[0], kwargs or {}
        if not (name in LINEAR or name in SHARED or name in LOOKS or name.startswith(BEGINNINGS)) or (
            name in FACTORS and all(isinstance(x, Share) for x in args)
        ):
            raise RuntimeError(
                explain(
                    f"{name} of a sum over this rank's part of a gradient",
                    "under shard the sum over the whole is that of all ranks, and this would be made of one rank's",
                    "a penalty that is a sum over elements, loss + 0.1 * (g * g).sum(), whose derivative is right;\n"
                    "for a norm of gradients zf.make_step with zf.all_reduce, or one process",
                )
            )
        with torch.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        # A loss of this rank's remains one when a share is added to it.
        alone = all(isinstance(x, Share) or not isinstance(x, Tensor) for x in args)
        return out.as_subclass(Share) if alone and name in LINEAR and type(out) is Tensor else out


def _knows_better(types: Any) -> bool:
    """Whether there is a sharded parameter among what a function is given, or a class of the user's."""
    ours = (Part, Share)
    return any(t not in ours and getattr(t.__torch_function__, "__func__", None) is not PLAIN for t in types)


def part_of(x: Tensor, of: Origin) -> Part:
    """The same memory as a part of something."""
    # Not a view in the eyes of torch, of which `p.grad.detach_()` would be refused.
    part = x.as_subclass(Part) if x.requires_grad else alias_of(x, Part)
    part.of = of
    return part


def plain(x: Any) -> Any:
    """The tensor by itself."""
    return x.as_subclass(Tensor) if isinstance(x, Part) else x


def handed(hook: Callable[[Tensor], Any], of: Origin) -> Callable[[Tensor], Any]:
    """A hook of the user's, which is given parts."""
    return lambda g: plain(hook(part_of(g, of)))


def _followed(out: Any, of: Origin) -> Any:
    if type(out) is Tensor:
        return part_of(out, of)
    return type(out)(_followed(x, of) for x in out) if type(out) in (list, tuple) else out


def _parts(args: Any) -> Iterator[Part]:
    for x in args:
        if isinstance(x, Part):
            yield x
        elif type(x) in (list, tuple):
            yield from _parts(x)


def _check(func: Any, name: str, parts: list[Part], args: tuple, kwargs: dict) -> bool:
    """Refuse what is wrong on parts; whether it is a sum of what has a graph."""
    of = parts[0].of
    if name in SAVING:
        _refuse_saving(of)
    elif name in ("__getitem__", "__setitem__"):
        # One behind the other they are cut apart again.
        if not isinstance(args[1], Part) and not (of == SEVERAL and isinstance(args[1], slice)):
            check_slice("x[index]" if name == "__getitem__" else "x[index] = y", args[1], str(of))
    elif pointwise(name) or name in COMPARING:
        for each in _side_by_side([*args, *kwargs.values()]):
            part = next((x for x in each if isinstance(x, Part)), None)
            if part is not None:
                written = each[0] if in_place(name) else None
                check_beside_part(name, [x for x in each if x is not part], part, str(part.of), written)
    elif _sums(name, parts, args) and any(p.requires_grad for p in parts):
        return True
    elif not _harmless(func, name) and not _asserting(sys._getframe(2)):
        _refuse(name, of)
    return False


def _asserting(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").startswith(ASSERTING)


def _harmless(func: Any, name: str) -> bool:
    if name == "__get__":
        return func.__self__.__name__ not in COMPUTED
    if name.endswith("_like"):
        # Noise would be the same on all ranks that have one seed.
        return not name.startswith("rand")
    return name in LOOKS or name in SAME or name in PRIVATE or name.startswith(BEGINNINGS)


def _sums(name: str, parts: list[Part], args: tuple) -> bool:
    if name == "sum":
        return len(args) == 1
    return name in PRODUCTS and len(args) == 2 and all(x.dim() == 1 and x.shape == parts[0].shape for x in args)


def _side_by_side(args: list[Any]) -> Iterator[list[Any]]:
    """What meets: the arguments, or of a `foreach` function the first elements of its lists, the second ones, ..."""
    lists = [x for x in args if type(x) in (list, tuple)]
    if not lists:
        yield args
    for i in range(max(map(len, lists), default=0)):
        yield [x[i] for x in lists if i < len(x)]


def _refuse_saving(of: Origin) -> None:
    raise RuntimeError(
        explain(
            f"saving {of}",
            "under shard its tensors are this rank's flat parts",
            "with opt.gathered(): torch.save(model.state_dict(), file), on every rank\n"
            "zf.export_safetensors(path, opt.state), or zf.save(directory, opt) to go on from\n"
            "x.as_subclass(torch.Tensor) for the part by itself",
        )
    )


def _refuse(name: str, of: Origin) -> None:
    of_gradients = (
        'opt.metrics["grad_norm"] after opt.step(), which is that of the whole;\n'
        "zf.clip_by_global_norm(max_norm), or a zf.leafwise function of whole gradients, in the chain"
    )
    of_values = f"p.{name}(...) of the parameter itself, on every rank, which gathers it\nwith opt.gathered(): the same"
    raise RuntimeError(
        explain(
            f"{name} of {of}",
            "under shard it is this rank's flat part, and every rank would have another result",
            f"{of_gradients if of.gradient else of_values}\nx.as_subclass(torch.Tensor) for the part by itself",
        )
    )
