"""`Part`: this rank's shard as a tensor of the global shape. Elementwise functions run on it, others gather.

Under `shard` these are parts: `p.data`, `p.detach()`, `p.grad`, what `torch.autograd.grad` returns, what a hook on `p`
is given and what `model.state_dict()` has. `opt.state[p]` has them behind `reduce_scatter` too. A part holds this
rank's flat shard, and has the sizes and strides of the whole (`global_shape`). Elementwise functions (a decay, a clamp,
a difference, an average of parts) run on the shard
(`torch_functions`). Reductions, products, indices and functions of a part and a full tensor gather it, and all ranks
have the same plain result. What writes keeps this rank's rows of the result (`part_writes`). To gather is a collective
in the middle of the user's code: a rank that calls it alone raises. Within backward, where ranks may come to it in
different orders, it is refused.

Torch's DTensor answers the same need, but `w.norm().item()`, `w.max().item()` and `bool(isnan(g).any())` of one are
silently of this rank alone, `p.data = x` has no effect, `normal_` under one seed gives all ranks the same rows, a full
tensor beside it is an error, and clipping by the largest element hangs where a rank has no rows.

An elementwise function takes some 5 us longer. The library itself works on plain tensors, as `x.to_local()` gives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat.compiler import asked_by_compiler, uncompiled
from .._compat.tensors import alias_of
from .._errors import explain
from ..ranks.dtensor_parameters import is_distributed
from .dtensor_values import as_part, exchanged
from .hook_linearity import check_linear, from_hooks
from .part_origin import Origin, OriginOf, Stay, check_sizes, refuse, refuse_in_hook
from .part_writes import into_out, into_plain, write
from .read_only_views import ReadOnly, check_unwritten, has_other_class
from .torch_function_arguments import tensors_in
from .torch_function_kinds import Kind, in_place, kind_of
from .torch_functions import HANDLERS

WRITTEN = (Kind.ELEMENTS, Kind.WRITES)
# Made of the part's shape and not of its elements.
BESIDE = (Kind.LIKE, Kind.DRAWS)
# What functions of torch call their first argument; those of two of these names have it first that is first here.
FIRST = ("condition", "sorted_sequence", "input", "tensors", "tensor", "self")


class Part(Tensor):
    """This rank's flat shard of a parameter or gradient, or of what was computed of one elementwise.

    Attributes:
        of: which leaf it is a part of, and how it is gathered.
    """

    of: Origin

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Not traced: in a graph a part would be a plain tensor, and the norm of it this rank's alone.
        if has_other_class(types, (Part, ReadOnly)):
            return NotImplemented
        name, kwargs = func.__name__.partition(".")[0], kwargs or {}
        with torch.DisableTorchFunctionSubclass():
            if asked_by_compiler(sys._getframe(1)):
                return func(*args, **kwargs)
            if name == "__deepcopy__":
                return part_of(args[0].as_subclass(Tensor).clone(), args[0].of)
            return kept(_call(func, name, args, kwargs))

    def to_local(self) -> Tensor:
        """This rank's shard as a plain tensor on the same memory: its rows; flat where ranks split rows."""
        with torch.DisableTorchFunctionSubclass():
            return self.of.local(self.as_subclass(Tensor))

    def full_tensor(self) -> Tensor:
        """The whole as a plain tensor, gathered: a collective of every rank. Named as that of DTensor."""
        with torch.DisableTorchFunctionSubclass():
            return self.of.whole(self, "full_tensor")

    @property
    def device_mesh(self) -> Any:
        """The ranks that share it, as that of a DTensor."""
        with torch.DisableTorchFunctionSubclass():
            return self.of.placed(self.device.type)[0]

    @property
    def placements(self) -> tuple[Any, ...]:
        """`(Shard(0),)`, as those of a DTensor; an `AttributeError` where ranks split rows."""
        with torch.DisableTorchFunctionSubclass():
            return self.of.placed(self.device.type)[1]

    def set_(self, *source: Any, **more: Any) -> Tensor:
        # Torch tells no subclass of it. This object would have other memory, and what it stands for would not.
        why = "p.grad and p.data are another object each time, on the same memory"
        raise RuntimeError(explain(f"x.set_(y) of {self.of}", why, "x.copy_(y); p.grad = y; p.data = y"))


def _call(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """A torch function that is given parts, by its kind."""
    if not args:
        args, kwargs = first_by_position(kwargs)
    args, kwargs = exchanged(name, args, kwargs, origin_of, part_of, lambda x: _whole(x, name))
    attribute = func.__self__.__name__ if name in ("__get__", "__set__") else ""
    if attribute == "data" and name == "__set__":
        return set_data(*args)
    if func is torch.autograd.grad:
        return _derivatives(*args, **kwargs)
    kind = kind_of(name, attribute)
    if (kind in WRITTEN and in_place(name)) or kwargs.get("out") is not None:
        return written(func, name, args, kwargs, origin_of)
    hooked = from_hooks(args, kwargs, origin_of)
    if hooked:
        check_linear(name, kwargs, hooked)
    # `where(condition)` gives indices.
    handler = HANDLERS[Kind.COMPUTES if name == "where" and len(args) == 1 and not kwargs else kind]
    out = handler(func, name, args, kwargs, origin_of)
    return in_hook(out, name) if hooked and kind not in BESIDE else out


def _whole(x: Any, name: str) -> Tensor | None:
    of = origin_of(x)
    return None if of is None else of.whole(x, name)


def _derivatives(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple:
    """`torch.autograd.grad` by parts: of each a part."""
    found = torch.autograd.grad(outputs, inputs, *args, **kwargs)
    by = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    pairs = [(g, origin_of(x)) for g, x in zip(found, by, strict=True)]
    return tuple([g if of is None or g is None else Stay(plain(g), of._replace(gradient=True)) for g, of in pairs])


def first_by_position(kwargs: dict) -> tuple[tuple, dict]:
    """Arguments whose first one is given by position, of a function that was given it by name."""
    first = next((k for k in FIRST if k in kwargs), "")
    return ((kwargs[first],), {k: x for k, x in kwargs.items() if k != first}) if first else ((), kwargs)


def written(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run a function that writes into its first argument, or into `out`."""
    check_unwritten(name, args, kwargs)
    hooked = from_hooks(args, kwargs, origin_of)
    if hooked:
        check_linear(name, kwargs, hooked)
    given = kwargs.get("out")
    target = args[0] if given is None else given
    if given is not None:
        out = into_out(func, name, args, kwargs, origin_of)
    else:
        into = write if type(target) in (list, tuple) or origin_of(target) is not None else into_plain
        out = into(func, name, args, kwargs, origin_of)
    for x in tensors_in([target]) if hooked else ():
        if isinstance(x, Part):
            x.of = x.of._replace(in_hook=True)
    return out


def in_hook(out: Any, name: str) -> Any:
    """The result of a function that was given what a hook was given: marked as such."""
    if type(out) is not Stay:
        return type(out)(in_hook(x, name) for x in out) if type(out) in (list, tuple) else out
    if not (out.part.is_floating_point() or out.part.is_complex()):
        refuse_in_hook(name, out.of)
    return Stay(out.part, out.of._replace(in_hook=True))


def origin_of(x: Any) -> Origin | None:
    """The origin of a part; `None` of what is no part."""
    return x.of if isinstance(x, Part) else None


def part_of(x: Tensor, of: Origin) -> Part:
    """A part on the same memory."""
    # No view for autograd, which would refuse `p.grad.detach_()`.
    part = x.as_subclass(Part) if x.requires_grad else alias_of(x, Part)
    part.of = of
    return part


def plain(x: Any) -> Any:
    """A part or a read-only view as a plain tensor; anything else as it is."""
    return x.as_subclass(Tensor) if isinstance(x, Part | ReadOnly) else x


def own_shard(mine: Tensor, of: Origin, value: Any, how: str) -> Any:
    """This rank's shard of what the user sets in the place of a part, as a plain tensor.

    Args:
        mine: the part, as a plain tensor.
        of: its origin.
        value: a part that is cut alike, or a tensor of the whole's shape.
        how: how the user sets it, for messages.
    """
    if is_distributed(value):
        value = as_part(value, [of], how, part_of)
    own, value = origin_of(value), plain(value)
    if value is None or (own is not None and of.alike(own)):
        return value
    if own is not None and own.shape == of.shape:
        value = own.whole(value, how)
    elif own is not None or value.shape != of.shape:
        check_sizes(how, of, mine, value)
        shape = tuple(value.shape if own is None else own.shape)
        why = f"it is of the whole's shape, {tuple(of.shape)}, as at any other stage"
        raise RuntimeError(explain(f"{how} of shape {shape} for {of}", why, "a tensor of that shape"))
    return of.rows(value.detach()).clone() if of.pieces else refuse(how, of)


def set_data(part: Part, value: Any) -> None:
    """`p.grad.data = x`: writes into the memory of `p.grad`, which is another object each time it is asked for."""
    mine = plain(part)
    value = own_shard(mine, part.of, value, "x.data = y")
    if value.dtype != mine.dtype or value.device != mine.device:
        got, has = (f"{x.dtype} on {x.device}" for x in (value, mine))
        right = "p.grad = x, of the dtype of p.grad"
        raise RuntimeError(explain(f"other data for {part.of}: {got}", f"it is {has}", right))
    with torch.no_grad():
        mine.copy_(value)


class Handed(NamedTuple):
    """A gradient hook of the user's, which is given a part with this origin."""

    hook: Callable[[Tensor], Any]
    of: Origin

    def __call__(self, g: Tensor | None) -> Any:
        if g is None:  # its block is in the graph, and this leaf is not: torch runs no hook of a plain one
            return None
        return own_shard(g, self.of, self.hook(part_of(g, self.of)), "what a hook returns")


class AfterGradients:
    """A hook of the user's that runs once a gradient has been added to `p.grad`, and not where none has come.

    torch runs it for all leaves of a block that is in the graph, those that the loss does not come from too.
    """

    def __init__(self, hook: Callable[[Tensor], Any], p: Tensor):
        self.hook, self.came = hook, False
        self.watch = p.register_hook(self.arrives)

    def arrives(self, g: Tensor | None) -> None:
        self.came = g is not None

    def __call__(self, p: Tensor) -> None:
        if self.came:
            self.hook(p)


def handed(hook: Callable[[Tensor], Any], of: Origin) -> Handed:
    """A gradient hook that gives the user's `hook` a part, and takes a part or a whole from it."""
    return Handed(hook, of._replace(in_hook=True))


def kept(out: Any) -> Any:
    """The result of a handler, with each `Stay` in it as a `Part`."""
    if type(out) is Stay:
        return part_of(out.part, out.of) if type(out.part) is Tensor else out.part
    return type(out)(map(kept, out)) if type(out) in (list, tuple) else out
