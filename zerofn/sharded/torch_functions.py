"""Torch functions of parts, by kind: elementwise ones give a part; others gather and give a plain tensor.

An elementwise function runs on this rank's shard where all parts among its arguments are cut alike. Beside a tensor of
the whole's shape, and for all other functions (`g.norm()`, `g1 @ g2`, `g.view(-1)[i]`), parts are gathered first, and
the result is a plain tensor, the same on all ranks. `foreach` functions that gather go through their lists one by one,
so that two wholes are in memory at a time and not a model.

A handler takes the function, its name, its arguments, and what gives the origin of a part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat.autograd import in_backward
from .functions_of_wholes import computes
from .global_shape import printed, sizes
from .part_origin import Origin, OriginOf, Stay, check_sizes, refuse, refuse_saving
from .torch_function_arguments import FOREACH, Wholes, columns_of, side_by_side, tensors_in
from .torch_function_kinds import Kind, dtype_in

# Memory formats that a flat shard cannot have.
OF_IMAGES = (torch.channels_last, torch.channels_last_3d)


def elements(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """An elementwise function that writes into none of its arguments."""
    if name.startswith(FOREACH):
        if all_stay(name, args, kwargs, origin_of):
            return _each(func(*args, **kwargs), [first_of(column, origin_of) for column in side_by_side(args)])
        return tuple(elements_of_one(func, name, column, kwargs, origin_of)[0] for column in columns_of(args))
    return elements_of_one(func, name, args, kwargs, origin_of)


def elements_of_one(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """The same of single tensors, or of one column of the lists of a `foreach` function."""
    if not stays(name, args, kwargs, origin_of):
        local = _rows_beside(args, kwargs, origin_of)
        if local is None:
            return computes(func, name, args, kwargs, origin_of)
        args, kwargs = local
    out = func(*args, **kwargs)
    of = first_of((*args, *kwargs.values()), origin_of)
    return Stay(out, of) if isinstance(out, Tensor) else _each(out, [of] * len(out))


def _rows_beside(args: tuple, kwargs: dict, origin_of: OriginOf) -> tuple[tuple, dict] | None:
    """In a hook, and of what it kept: the arguments with this rank's rows of plain tensors beside parts, a mask.

    Nothing is gathered there. `None` elsewhere, and where it takes more than rows of what broadcasts to the whole.
    """
    tensors = [*tensors_in((*args, *kwargs.values()))]
    parts = [of for of in map(origin_of, tensors) if of is not None]
    of = parts[0]
    if not (in_backward() or any(part.in_hook for part in parts)) or not all(map(of.alike, parts)):
        return None
    beside = [x for x in tensors if origin_of(x) is None]
    if any((x.requires_grad and torch.is_grad_enabled()) or not _expands(x.shape, of.shape) for x in beside):
        return None
    cut = Wholes(lambda x: of.rows(x) if isinstance(x, Tensor) and x.dim() and origin_of(x) is None else None)
    return cut.of(args), cut.of(kwargs)


def _expands(shape: torch.Size, whole: torch.Size) -> bool:
    """Whether `x.expand(whole)` is right for an `x` of this shape."""
    aligned = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(own in (1, size) for own, size in aligned)


def reshapes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """`view`, `reshape` and the like: the whole has another shape, the shard stays flat."""
    x, of = args[0], origin_of(args[0])
    if of is None or dtype_in(args, kwargs):
        return computes(func, name, args, kwargs, origin_of)
    if len(args) == 2 and type(args[1]) is int and args[1] == -1:
        # The most frequent one, without a meta tensor, which takes longer than the rest.
        return Stay(x.view(-1), of._replace(shape=torch.Size((of.shape.numel(),))))
    shape = sizes(func, name, args, kwargs, origin_of).shape
    return Stay(x.view(x.shape), of._replace(shape=shape))


def joins(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """`torch.cat` of flat parts: a part of several concatenated leaves; of others a gather."""
    tensors = args[0]
    origins = [origin_of(x) for x in tensors] if type(tensors) in (list, tuple) else []
    along = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    known = [of for of in origins if of is not None and len(of.shape) == 1 and of.pieces]
    pieces = tuple(piece for of in known for piece in of.pieces)
    if along not in (0, -1) or len(known) < len(origins) or len({id(piece.by) for piece in pieces}) != 1:
        return computes(func, name, args, kwargs, origin_of)
    shape = torch.Size((sum(of.shape.numel() for of in known),))
    several = Origin("parts of several sharded parameters", "", all(of.gradient for of in known), pieces, shape)
    return Stay(func(*args, **kwargs), several)


def splits(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """`torch.split` of a flat part where leaves end: parts; elsewhere a gather."""
    x, of = args[0], origin_of(args[0])
    wanted: list[int] = [*args[1]] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    ends = list(itertools.accumulate(wanted, initial=0))
    if of is None or len(of.shape) != 1 or not wanted or ends[-1] != of.shape.numel():
        return computes(func, name, args, kwargs, origin_of)
    found = [y for low, high in itertools.pairwise(ends) if (y := _leaves(of, low, high)) is not None]
    if len(found) < len(wanted):
        return computes(func, name, args, kwargs, origin_of)
    return tuple(_some(x, of, first, last) for first, last in found)


def indexes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """`x[:]`, or a slice of a flat part that begins and ends where leaves do: a part; other indices gather."""
    of, index = origin_of(args[0]), args[1]
    if of is None or all_of_it(index):
        return Stay(func(*args, **kwargs), of) if of else computes(func, name, args, kwargs, origin_of)
    if len(of.shape) == 1 and isinstance(index, slice) and index.step in (None, 1):
        low, high, _ = index.indices(of.shape.numel())
        found = _leaves(of, low, high)
        if found is not None:
            return _some(args[0], of, *found)
    return computes(func, name, args, kwargs, origin_of)


def _leaves(of: Origin, low: int, high: int) -> tuple[int, int] | None:
    """The leaves between two elements of a flat whole, from the first to behind the last; `None` if none end there."""
    ends = list(itertools.accumulate((piece.leaf.numel for piece in of.pieces), initial=0))
    if low == high:
        # A leaf without elements.
        return next(((i, i + 1) for i, pair in enumerate(itertools.pairwise(ends)) if pair == (low, high)), None)
    if low > high or low not in ends or high not in ends:
        return None
    return len(ends) - 1 - ends[::-1].index(low), ends.index(high)


def _some(part: Tensor, of: Origin, first: int, last: int) -> Stay:
    """The part of some of the leaves of a flat part of several."""
    begin, length = (sum(piece.numel for piece in x) for x in (of.pieces[:first], of.pieces[first:last]))
    pieces = of.pieces[first:last]
    shape = torch.Size((sum(piece.leaf.numel for piece in pieces),))
    path = pieces[0].leaf.path if len(pieces) == 1 else ""
    return Stay(part[begin : begin + length], Origin("a part" if path else of.how, path, of.gradient, pieces, shape))


def likes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """`zeros_like` and the like: a part."""
    of = origin_of(args[0])
    out = func(*args, **kwargs)
    return out if of is None or out.shape != args[0].shape else Stay(out, of._replace(how=f"{name}(...)"))


def draws(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """`randn_like` and the like: drawn for the whole, as in one process, of which this rank keeps its rows."""
    x, of = args[0], origin_of(args[0])
    if of is None or not of.pieces:
        return refuse(name, of) if of else func(*args, **kwargs)
    whole = func(torch.empty(of.shape, dtype=x.dtype, device=x.device), *args[1:], **kwargs)
    return Stay(of.rows(whole.detach()).clone().requires_grad_(whole.requires_grad), of._replace(how=f"{name}(...)"))


def compares(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """`equal` and `allclose` of wholes."""
    x0, x1 = args[0], kwargs["other"] if "other" in kwargs else args[1]
    for x, y in ((x0, x1), (x1, x0)):
        of = origin_of(x)
        if of is not None and origin_of(y) is None:
            check_sizes(name, of, x, y)
    return computes(func, name, args, kwargs, origin_of)


def prints(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """`print(x)`; `f"{x:.3f}"` of a number, which is gathered."""
    of = origin_of(args[0])
    return computes(func, name, args, kwargs, origin_of) if of is None or any(args[1:]) else printed(args[0], of)


def looks(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """What asks about a tensor, or gives the same elements."""
    if kwargs.get("memory_format") in OF_IMAGES:
        return computes(func, name, args, kwargs, origin_of)
    out, of = func(*args, **kwargs), origin_of(args[0])
    same = name != "as_subclass" and of is not None and type(out) is Tensor and out.shape == args[0].shape
    return Stay(out, of) if same and of else out


def makes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """`new_zeros` and the like: a plain tensor."""
    return func(*args, **kwargs)


def saves(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """What gives out memory, which would be taken for that of the whole."""
    return refuse_saving(first_of(args, origin_of))


HANDLERS: dict[Kind, Callable[[Any, str, tuple, dict, OriginOf], Any]] = {
    Kind.ELEMENTS: elements,
    Kind.LOOKS: looks,
    Kind.SIZES: sizes,
    Kind.PRINTS: prints,
    Kind.RESHAPES: reshapes,
    Kind.JOINS: joins,
    Kind.SPLITS: splits,
    Kind.INDEXES: indexes,
    Kind.LIKE: likes,
    Kind.MAKES: makes,
    Kind.DRAWS: draws,
    Kind.SAVES: saves,
    Kind.COMPARES: compares,
    Kind.COMPUTES: computes,
}


def all_of_it(index: Any) -> bool:
    """Whether an index takes everything."""
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def first_of(args: Sequence[Any], origin_of: OriginOf) -> Origin:
    """The origin of the first part among the arguments."""
    return next(of for of in map(origin_of, tensors_in(args)) if of is not None)


def all_stay(name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> bool:
    """Whether a `foreach` function may run on shards: each column of its lists has a part, and all is cut alike."""
    columns = list(side_by_side(args))
    if any(all(origin_of(x) is None for x in tensors_in(column)) for column in columns):
        return False
    return all(stays(name, column, kwargs, origin_of) for column in columns)


def _each(out: Any, origins: list[Origin]) -> Any:
    return type(out)(Stay(x, of) for x, of in zip(out, origins, strict=True)) if type(out) in (list, tuple) else out


def stays(name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> bool:
    """Whether an elementwise function may run on shards: parts are cut alike, and all else is numbers."""
    part, of = None, None
    for x in tensors_in((*args, *kwargs.values()) if kwargs else args):
        own = origin_of(x)
        if own is not None and of is None:
            part, of = x, own
        elif own is not None and of is not None and not (of.alike(own) and x.shape == part.shape):  # type: ignore[union-attr]
            return _unknown(name, own, of)
    assert part is not None and of is not None
    return all(beside(x, part, of, name) for x in tensors_in((*args, *kwargs.values())) if origin_of(x) is None)


def beside(x: Tensor, part: Tensor, of: Origin, name: str) -> bool:
    """Whether a plain tensor is one number, so that a function of it and a part may run on the shard."""
    if len(x.shape) < 2 and x.numel() == 1 and x.requires_grad and torch.is_grad_enabled():
        # Its derivative is a sum over all elements, not only over this rank's.
        return _unknown(name, of)
    if x.dim() == 0:
        return True
    if x.dim() == 1 and len(x) == 1:
        # Beside a whole without dimensions the result would have one.
        return len(of.shape) > 0
    check_sizes(name, of, part, x)
    return _unknown(name, of)


def _unknown(name: str, *origins: Origin) -> bool:
    for of in origins:
        if not of.pieces:
            refuse(name, of)
    return False
