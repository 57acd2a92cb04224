"""This rank's part of a sharded parameter or of its gradient: elements alone stay a part, all else has the whole.

A part is a flat piece, and says of itself what the whole would: sizes, strides, `print` (`whole_sizes`).
Under `shard` `p.data`, `p.detach()`, `p.grad`, what `torch.autograd.grad` returns, what a hook on `p` is given and what
`model.state_dict()` has are parts. A decay, a clamp, a difference, an average of parts runs on them
(`part_functions`); for what makes one number of many, products, indices, and beside full tensors they are gathered, as
parameters are outside of the model's calls, and all ranks have the same plain result; what writes keeps this rank's
rows (`writes_into_parts`). That is a collective in the middle of the user's code: a rank that asks alone is told, and
within backward, where ranks may come to it in different orders, it is refused.

It is not torch's DTensor, though it answers the same need: of that `w.norm().item()`, `w.max().item()` and
`bool(isnan(g).any())` are this rank's alone, without a word; `p.data = x` has no effect; `normal_` under one seed gives
all ranks the same rows; a full tensor beside it is an error; and clipping by the largest element hangs where a rank has
no rows.

It costs some 5 us for an operation on elements; the library itself works on plain tensors, which `x.to_local()` gives
to anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._compat.tensors import alias_of
from .._errors import explain
from .hook_linearity import check_linear, from_hooks
from .part_origin import Origin, OriginOf, Stay, check_sizes, refuse, refuse_in_hook
from .part_writes import into_out, into_plain, write
from .read_only_views import PLAIN, ReadOnly, check_unwritten
from .torch_function_arguments import tensors_in
from .torch_function_kinds import Kind, in_place, kind_of
from .torch_functions import HANDLERS

WRITTEN = (Kind.ELEMENTS, Kind.WRITES)
# Made beside a part, and of nothing that is in it.
BESIDE = (Kind.LIKE, Kind.DRAWS)
# What functions of torch call their first argument.
FIRST = ("input", "tensors", "tensor", "self")


class Part(Tensor):
    """A part, or what is made of one element by element: this rank's piece, flat, with the sizes of the whole."""

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
            return kept(function(func, name, args, kwargs))

    def to_local(self) -> Tensor:
        """This rank's piece, flat, as a plain tensor over the same memory."""
        with torch.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def full_tensor(self) -> Tensor:
        """The whole, gathered, as of one of torch's distributed tensors: a call of every rank."""
        with torch.DisableTorchFunctionSubclass():
            return self.of.whole(self, "full_tensor")


def function(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """A function that is given parts, by what it does."""
    if not args:
        args, kwargs = named_first(kwargs)
    attribute = func.__self__.__name__ if name in ("__get__", "__set__") else ""
    if attribute == "data" and name == "__set__":
        return set_data(*args)
    kind = kind_of(name, attribute)
    if (kind in WRITTEN and in_place(name)) or kwargs.get("out") is not None:
        return written(func, name, args, kwargs, origin_of)
    hooked = from_hooks(args, kwargs, origin_of)
    if hooked:
        check_linear(name, kwargs, hooked)
    # Of one argument it gives indices.
    handler = HANDLERS[Kind.COMPUTES if name == "where" and len(args) == 1 else kind]
    out = handler(func, name, args, kwargs, origin_of)
    return in_hook(out, name) if hooked and kind not in BESIDE else out


def named_first(kwargs: dict) -> tuple[tuple, dict]:
    """The first argument of a function that was given it by name."""
    first = next((k for k in FIRST if k in kwargs), "")
    return ((kwargs[first],), {k: x for k, x in kwargs.items() if k != first}) if first else ((), kwargs)


def written(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """A function that writes into its first argument, or into `out`."""
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
    """What a function gave, as made from what a hook is given."""
    if type(out) is not Stay:
        return type(out)(in_hook(x, name) for x in out) if type(out) in (list, tuple) else out
    if not (out.part.is_floating_point() or out.part.is_complex()):
        refuse_in_hook(name, out.of)
    return Stay(out.part, out.of._replace(in_hook=True))


def origin_of(x: Any) -> Origin | None:
    """Of what something is a part; nothing, if it is none."""
    return x.of if isinstance(x, Part) else None


def _knows_better(types: Any) -> bool:
    """Whether there is a sharded parameter among what a function is given, or a class of the user's."""
    ours = (Part, ReadOnly)
    return any(t not in ours and getattr(t.__torch_function__, "__func__", None) is not PLAIN for t in types)


def part_of(x: Tensor, of: Origin) -> Part:
    """The same memory as a part of something."""
    # Not a view in the eyes of torch, of which `p.grad.detach_()` would be refused.
    part = x.as_subclass(Part) if x.requires_grad else alias_of(x, Part)
    part.of = of
    return part


def plain(x: Any) -> Any:
    """The tensor by itself."""
    return x.as_subclass(Tensor) if isinstance(x, Part | ReadOnly) else x


def own_rows(mine: Tensor, of: Origin, value: Any, how: str) -> Any:
    """What is to stand in the place of a part: one that is cut alike, or this rank's rows of a whole.

    Args:
        mine: the part, as a plain tensor.
        of: of what.
        value: what is to stand there.
        how: how it was given, for a message.
    """
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
    """`p.grad.data = x`: into the memory that there is, for whoever asks for `p.grad` has another object each time."""
    mine = part.to_local()
    value = own_rows(mine, part.of, value, "x.data = y")
    if value.dtype != mine.dtype or value.device != mine.device:
        got, has = (f"{x.dtype} on {x.device}" for x in (value, mine))
        right = "p.grad = x, of the dtype of p.grad"
        raise RuntimeError(explain(f"other data for {part.of}: {got}", f"it is {has}", right))
    with torch.no_grad():
        mine.copy_(value)


class Handed(NamedTuple):
    """A hook of the user's, which is given parts.

    Attributes:
        hook: the user's.
        of: of what it is given.
    """

    hook: Callable[[Tensor], Any]
    of: Origin

    def __call__(self, g: Tensor) -> Any:
        return own_rows(g, self.of, self.hook(part_of(g, self.of)), "what a hook returns")


def handed(hook: Callable[[Tensor], Any], of: Origin) -> Handed:
    """A hook of the user's, which is given parts."""
    return Handed(hook, of._replace(in_hook=True))


def kept(out: Any) -> Any:
    """What a function gave, with what stays a part as one."""
    if type(out) is Stay:
        return part_of(out.part, out.of) if type(out.part) is Tensor else out.part
    return type(out)(map(kept, out)) if type(out) in (list, tuple) else out
