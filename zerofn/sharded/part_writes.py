"""Functions that write into a part: elementwise into the shard, others into the gathered whole.

Beside the part may stand a part that is cut alike, a number, or a tensor that broadcasts to the whole, of which this
rank takes its rows: `p.grad.mul_(mask)`, `p.data.copy_(full)`, `p.add_(g / g.norm())`. What writes by index, along a
dimension or at random (`p.grad[0] = 0`, `p.renorm_(2, 0, 1)`, `p.normal_()`) writes into the whole, as in one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from .functions_of_wholes import with_wholes
from .part_origin import Origin, OriginOf, check_sizes, refuse
from .torch_function_arguments import FOREACH, columns_of, tensors_in, wholes
from .torch_function_kinds import RANDOM, from_init, pointwise
from .torch_functions import all_of_it, all_stay, beside, stays


def write(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run a function that writes into its first argument: a part, or a list of parts."""
    if name.startswith(FOREACH):
        if (
            pointwise(name)
            and all(origin_of(x) is not None for x in args[0])
            and all_stay(name, args, kwargs, origin_of)
        ):
            func(*args, **kwargs)
            return args[0]
        for column in columns_of(args):
            if origin_of(column[0][0]) is None:
                func(*wholes(name, origin_of).of(column), **kwargs)
            else:
                _write_one(func, name, column, kwargs, origin_of)
        return args[0]
    return _write_one(func, name, args, kwargs, origin_of)


def into_plain(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run a function that writes into its first argument, a full tensor, and is given parts, which are gathered."""
    target: Tensor = args[0]
    _check_target(name, target, args[1:], origin_of)
    given = wholes(name, origin_of)
    func(target, *given.of(args[1:]), **given.of(kwargs))
    return target


def _check_target(name: str, target: Any, args: tuple, origin_of: OriginOf) -> None:
    for x in tensors_in(args) if isinstance(target, Tensor) and pointwise(name) else ():
        of = origin_of(x)
        if of is not None:
            check_sizes(name, of, x, target)


def into_out(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run a function with `out=`: on shards where it is elementwise and all is cut alike, else on wholes."""
    target = kwargs["out"]
    of = origin_of(target)
    if of is not None and pointwise(name) and stays(name, (target, *args), kwargs, origin_of):
        return func(*args, **kwargs)
    if of is not None and not of.pieces:
        refuse(f"{name} with out=", of)
    if of is None:
        _check_target(name, target, args, origin_of)
        with_wholes(func, name, args, kwargs, origin_of)
        return target
    into = torch.empty(of.shape, dtype=target.dtype, device=target.device)
    given = wholes(name, origin_of)
    func(*given.of(args), **given.of(kwargs | {"out": into}))
    with torch.no_grad():
        target.copy_(of.rows(into))
    return target


def _write_one(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    listed = name.startswith(FOREACH)
    target: Tensor = args[0][0] if listed else args[0]
    of = origin_of(target)
    if of is None:
        raise RuntimeError(
            explain(
                f"{name} into parts",
                "under shard each has this rank's rows of a leaf; what this does to a list of them is not known",
                'a transform in the chain of zf.attach; for torch.amp.GradScaler, zf.scale_loss("dynamic")',
            )
        )
    if pointwise(name) or _of_elements(name, args, target, of, origin_of):
        rest = (_local(x, target, of, name, origin_of) for x in args[1:])
        func(args[0], *rest, **{k: _local(x, target, of, name, origin_of) for k, x in kwargs.items()})
        return args[0]
    if not of.pieces or (target.requires_grad and not target.is_leaf and torch.is_grad_enabled()):
        refuse(name, of)
    drawn = name in RANDOM or from_init(func)
    with torch.no_grad():
        if drawn:
            whole = torch.empty(of.shape, dtype=target.dtype, device=target.device)
        else:
            whole = of.whole(target.detach(), name)
        given = wholes(name, origin_of)
        others = {k: whole if x is target else given.of(x) for k, x in kwargs.items()}
        func(whole, *given.of(args[1:]), **others)
    if whole.shape != of.shape:
        refuse(name, of)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not from_init(func)):
        target.copy_(of.rows(whole))
    return args[0]


def _of_elements(name: str, args: tuple, target: Tensor, of: Origin, origin_of: OriginOf) -> bool:
    """Whether a function is `x[index] = value` and elementwise: of all elements, or of a mask and one number."""
    if name != "__setitem__":
        return False
    index, value = args[1:]
    if all_of_it(index):
        return True
    number = not isinstance(value, Tensor) or (value.dim() == 0 and origin_of(value) is None)
    own = origin_of(index) if isinstance(index, Tensor) and index.dtype == torch.bool else None
    return number and own is not None and of.alike(own)


def _local(x: Any, target: Tensor, of: Origin, name: str, origin_of: OriginOf) -> Any:
    """This rank's shard of an argument beside the part that is written into; numbers as they are."""
    if type(x) in (list, tuple):
        return type(x)(_local(y, target, of, name, origin_of) for y in x)
    if not isinstance(x, Tensor):
        return x
    own = origin_of(x)
    if x.requires_grad and torch.is_grad_enabled():
        if target.requires_grad and not target.is_leaf and own is None:
            # A derivative of this rank's rows alone would be a part of the derivative.
            refuse(name, of)
        # As p.grad keeps no graph.
        x = x if target.requires_grad else x.detach()
    if own is not None and of.alike(own) and x.shape == target.shape:
        return x
    if own is not None:
        return of.rows(own.whole(x, name))
    return x if beside(x, target, of, name) else of.rows(x)
