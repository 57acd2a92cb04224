"""Functions of wholes: parts are gathered, and what is written into a whole is stored in the part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import version
from .part_origin import Origin, OriginOf, refuse
from .read_only_views import read_only
from .torch_function_arguments import FOREACH, columns_of, tensors_in, wholes

# The module of all-reduces, broadcasts and the like.
COLLECTIVES = "torch.distributed.distributed_c10d"


def computes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """A function that needs wholes, which are gathered."""
    if name.startswith(FOREACH) and any(type(x) in (list, tuple) for x in args[:1]):
        found = [_of_wholes(func, name, column, kwargs, origin_of) for column in columns_of(args)]
        return None if found and found[0] is None else tuple(x[0] for x in found)
    return _of_wholes(func, name, args, kwargs, origin_of)


def _of_wholes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    out, found = with_wholes(func, name, args, kwargs, origin_of)
    return read_only(out, found)


def with_wholes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> tuple[Any, list[Tensor]]:
    """Run a function on wholes in the place of parts; its result, and the wholes.

    What it has written into one is stored, as functions of torch.distributed, custom operators and those with several
    tensors as `out` do: of that their names say nothing.
    """
    given = wholes(name, origin_of)
    taken, named = given.of(args), given.of(kwargs)
    before = {key: version(x) for key, x in given.found.items()}
    out = func(*taken, **named)
    # Collectives write without being counted, and into what is given first or second.
    sends = getattr(func, "__module__", None) == COLLECTIVES
    if sends and callable(wait := getattr(out, "wait", None)):
        wait()
    for x in tensors_in((*args, *kwargs.values())):
        of, whole = origin_of(x), given.found.get(id(x))
        if of is not None and whole is not None and (sends or version(whole) != before[id(x)]):
            _store(x, whole.detach(), of, name)
    return out, list(given.found.values())


def _store(part: Tensor, whole: Tensor, of: Origin, name: str) -> None:
    """Keep this rank's rows of a whole into which a function has written."""
    if whole.shape != of.shape:
        refuse(name, of)
    with torch.no_grad():
        rows = of.rows(whole)
        if torch.equal(rows, part.as_subclass(Tensor)):
            return
    if part.requires_grad and torch.is_grad_enabled():
        refuse(name, of)
    with torch.no_grad():
        part.copy_(rows)
